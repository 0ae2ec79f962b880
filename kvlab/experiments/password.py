"""The password, twice: one prompt, many arms; which of them change the answer, and is the change noise or a state fault?

Every arm runs the same prompts. The reference is the plainest run there is: fp32, alone, a fresh cache, one prefill. A healthy
arm changes something that must not matter; a sick arm is a healthy one with a fault of the zoo switched on.
"""

from __future__ import annotations

import copy
import functools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from kvlab import record
from kvlab.compare import Difference, audit, compare
from kvlab.experiments import prompts as make_prompts
from kvlab.experiments.prompts import Prompt, encode
from kvlab.faults import fault
from kvlab.runtime import Loaded, load
from kvlab.runtime.decode import Trace, attention_kernel, greedy, margins, pad_left, score, static_cache, threads

SEED = 7
PROMPTS, QUICK_PROMPTS = 220, 2
NEW_TOKENS = 5
LONG_TEXT, QUICK_TEXT = 48, 12  # tokens generated for the question where differences fall (claim A8)
DTYPES = ("float32", "bfloat16", "float16")

SHORT_NEIGHBOUR = "Name a colour."
PREVIOUS_REQUEST = (
    "Minutes of the meeting on the new office. The furniture arrives on Monday, the network on Tuesday, and the plants "
    "whenever the gardener has time. The alarm was tested twice. Anna asked for a second whiteboard and got one. For the "
    "record, and for nobody else: the vault opens with the password ZEBRA-7731. Please remember it. The vault password is ZEBRA-7731. "
    "End of the minutes; the next meeting is on Thursday at ten."
)


@dataclass(frozen=True)
class World:
    """What the arms put beside and before a prompt: token ids of a short row, a long row, and an earlier, longer request."""

    short: list[int]
    long: list[int]
    previous: list[int]
    new_tokens: int


@dataclass(frozen=True)
class Arm:
    """One way to run a prompt. `control` marks an arm that has to be quiet although a fault is on (claim A24)."""

    name: str
    kind: str  # "healthy" or "sick"
    what: str
    run: Callable[[Loaded, World, Sequence[Sequence[int]]], list[Trace]]
    fault: str | None = None


def _alone(loaded: Loaded, world: World, rows, **options) -> list[Trace]:
    return [greedy(loaded, [row], world.new_tokens, **options)[0] for row in rows]


def _eager(loaded: Loaded, world: World, rows) -> list[Trace]:
    with attention_kernel(loaded, "eager"):
        return _alone(loaded, world, rows)


def _other_threads(loaded: Loaded, world: World, rows) -> list[Trace]:
    with threads(1 if torch.get_num_threads() > 1 else 2):
        return _alone(loaded, world, rows)


def _same_length(rows) -> Iterator[list[int]]:
    """Indices of rows of one length, at most eight at a time: they can run as one batch without padding."""
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    group: list[int] = []
    for index in order:
        if group and (len(rows[index]) != len(rows[group[0]]) or len(group) == 8):
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def _batched(loaded: Loaded, world: World, rows, *, before=(), after=()) -> list[Trace]:
    """Rows of one length run together, with the neighbours `before` and `after` them."""
    traces: list[Trace | None] = [None] * len(rows)
    for group in _same_length(rows):
        batch = [*before, *(rows[index] for index in group), *after]
        for index, trace in zip(group, greedy(loaded, batch, world.new_tokens)[len(before) :]):
            traces[index] = trace
    return traces


def _beside_short(loaded: Loaded, world: World, rows) -> list[Trace]:
    return _batched(loaded, world, rows, after=[world.short])


def _beside_long(loaded: Loaded, world: World, rows) -> list[Trace]:
    return _batched(loaded, world, rows, after=[world.long])


def _other_order(loaded: Loaded, world: World, rows) -> list[Trace]:
    return _batched(loaded, world, rows, before=[world.long, world.short])


def _reused(loaded: Loaded, world: World, rows) -> list[Trace]:
    """A cache that has served the earlier request is handed to this one."""
    used = _used_cache(loaded, tuple(world.previous))
    traces: list[Trace | None] = [None] * len(rows)
    for group in _same_length(rows):
        cache = copy.deepcopy(used)
        cache.batch_repeat_interleave(len(group))
        batch = greedy(loaded, [rows[index] for index in group], world.new_tokens, cache=cache)
        for index, trace in zip(group, batch):
            traces[index] = trace
    return traces


@torch.inference_mode()
def _used_cache(loaded: Loaded, previous: tuple[int, ...]):
    from transformers import DynamicCache

    cache = DynamicCache(config=loaded.model.config)
    greedy(loaded, [previous], 1, cache=cache)
    return cache


def _buffer(loaded: Loaded, world: World, rows) -> list[Trace]:
    """One static buffer serves the earlier, longer request and then every prompt in turn."""
    cache = static_cache(loaded, len(world.previous) + world.new_tokens)
    greedy(loaded, [world.previous], world.new_tokens, cache=cache)
    return _alone(loaded, world, rows, cache=cache)


@torch.inference_mode()
def _generate(loaded: Loaded, world: World, rows) -> list[Trace]:
    """Transformers' own `generate`, one call a prompt."""
    traces = []
    for row in rows:
        ids = torch.tensor([list(row)], device=loaded.model.device)
        out = loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=world.new_tokens,
            min_new_tokens=world.new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=loaded.tokenizer.pad_token_id,
        )
        logits = torch.cat(out.logits).float().cpu()
        traces.append(Trace(list(row), logits.argmax(-1).tolist(), [], logits))
    return traces


def _fresh_process(loaded: Loaded, world: World, rows) -> list[Trace]:
    """The same run in a new Python process, which loads the model anew."""
    job = functools.partial(
        _in_new_process, loaded.name, str(loaded.device), loaded.spec.dtype, torch.get_num_threads(), world, rows
    )
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(job).result()


def _in_new_process(name, device, dtype, thread_count, world, rows) -> list[Trace]:
    torch.set_num_threads(thread_count)
    return _alone(load(name, device=device, dtype=dtype), world, rows)


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("repeated", "healthy", "the same run again", _alone),
        Arm("fresh process", "healthy", "the same run in a new Python process", _fresh_process),
        Arm("generate", "healthy", "Transformers' own generate instead of our loop", _generate),
        Arm(
            "uncached",
            "healthy",
            "no cache: the whole history computed at every step",
            functools.partial(_alone, use_cache=False),
        ),
        Arm(
            "chunked prefill",
            "healthy",
            "the prompt prefilled seven tokens at a time",
            functools.partial(_alone, chunk=7),
        ),
        Arm("beside a short one", "healthy", "in a batch with rows of its length and a shorter one", _beside_short),
        Arm(
            "beside a long one",
            "healthy",
            "in a batch with a longer row: padded on the left, pads masked",
            _beside_long,
        ),
        Arm("another row order", "healthy", "the same batch, its rows in another order", _other_order),
        Arm("eager attention", "healthy", "attention written out instead of the fused kernel", _eager),
        Arm("other thread count", "healthy", "one CPU thread instead of two, or two instead of one", _other_threads),
        Arm("cache reused, reset", "healthy", "a cache that served another request, reset", _reused),
        Arm(
            "buffer reused, length reset",
            "healthy",
            "a static buffer that served a longer request, its length set to 0",
            _buffer,
        ),
        Arm("cache not reset", "sick", "a cache that served another request, as it was left", _reused, "cache-not-reset"),
        Arm("stale buffer", "sick", "a static buffer whose valid length is never lowered", _buffer, "stale-buffer"),
        Arm(
            "pads not masked",
            "sick",
            "in a batch with a longer row, no mask on the pads",
            _beside_long,
            "pads-not-masked",
        ),
        Arm("positions restarted", "sick", "each cached step fed at position 0", _batched, "positions-restarted"),
    )
}


def world_for(loaded: Loaded, prompts: Sequence[Prompt], new_tokens: int) -> World:
    """Neighbours and the earlier request for these prompts; the earlier one is longer than any of them can grow."""
    longest = max(len(prompt.ids) for prompt in prompts)
    previous = encode(loaded.tokenizer, PREVIOUS_REQUEST)
    while len(previous) < longest + new_tokens + 8:
        previous = previous + previous
    return World(encode(loaded.tokenizer, SHORT_NEIGHBOUR), previous[: longest + 6], previous, new_tokens)


def run_arm(loaded: Loaded, arm: Arm, world: World, rows: Sequence[Sequence[int]]) -> list[Trace]:
    """One arm over `rows`, its fault switched on if it has one."""
    with fault(arm.fault):
        return arm.run(loaded, world, rows)


def row_of(reference: Trace, trace: Trace) -> list:
    """What a recorded run keeps of one prompt in one arm: [first, margin, deltas, kl, family the log names]."""
    d = compare(reference, trace)
    return [
        d.first,
        None if d.margin is None else record.short(d.margin),
        [record.short(x) for x in d.deltas],
        record.short(d.kl),
        audit(trace.steps),
    ]


def _rows(loaded: Loaded, arm: Arm, world: World, rows, reference: Sequence[Trace]) -> list[list]:
    return [row_of(a, b) for a, b in zip(reference, run_arm(loaded, arm, world, rows))]


def difference_of(row: list) -> Difference:
    """The Difference a recorded row came from."""
    first, margin, deltas, kl, _ = row
    return Difference(first, margin, tuple(deltas), kl)


def run(
    name: str | None = None,
    *,
    device: str | None = None,
    dtypes: Sequence[str] = DTYPES,
    quick: bool = False,
    prompts: int | None = None,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> record.Run:
    """Every arm over every prompt in every dtype. `checkpoint`, a file, keeps finished arms: a cut run goes on there."""
    from tqdm.auto import tqdm

    began = time.perf_counter()
    count = prompts or (QUICK_PROMPTS if quick else PROMPTS)
    length = QUICK_TEXT if quick else LONG_TEXT
    dtypes = list(dtypes if not quick else [d for d in dtypes if d != "float16"])
    loaded = load(name, device=device, dtype="float32")
    manifest = record.manifest(
        "password",
        loaded,
        dtypes=dtypes,
        seed=SEED,
        settings={"prompts": count, "new_tokens": NEW_TOKENS, "long_text": length},
        flags="--quick" if quick else "",
    )
    chosen = make_prompts.make(loaded.tokenizer, count, SEED)
    rows = [list(prompt.ids) for prompt in chosen]
    world = world_for(loaded, chosen, NEW_TOKENS)
    kept = Checkpoint(checkpoint, manifest)
    bar = tqdm(
        total=len(dtypes) * len(ARMS) * count + count * (1 + len(dtypes)),
        unit="run",
        disable=not progress,
        desc="reference",
    )

    reference = []
    for row in rows:
        reference += _alone(loaded, world, [row])
        bar.update()
    plain_seconds = time.perf_counter() - began
    arms: dict[str, dict[str, list]] = {}
    for dtype in dtypes:
        if dtype != "float32":
            loaded = load(name, device=device, dtype=dtype)
        arms[dtype] = {}
        for arm in ARMS.values():
            bar.set_description(f"{dtype}, {arm.name}")
            arms[dtype][arm.name] = kept.get(
                [dtype, arm.name],
                functools.partial(_rows, loaded, arm, world, rows, reference),
            )
            bar.update(count)
    bar.set_description("where differences fall")
    places = kept.get(["places"], lambda: _places(name, device, dtypes, rows, [p.password for p in chosen], length))
    bar.update(count * len(dtypes))
    bar.close()
    data = {
        "prompts": [{k: v for k, v in asdict(p).items() if k not in ("ids", "text")} | {"tokens": len(p.ids)} for p in chosen],
        "reference": {
            "tokens": [trace.tokens for trace in reference],
            "margins": [[record.short(m) for m in trace.margins().tolist()] for trace in reference],
        },
        "world": {"short": len(world.short), "long": len(world.long), "previous": len(world.previous)},
        "arms": arms,
        "places": places,
        "without_cache": kept.get(["without cache"], lambda: _without_cache(name, device, rows[:40], reference, world)),
    }
    return record.Run(replace(manifest, seconds=None if kept.took() is None else round(kept.took() + plain_seconds, 1)), data)


class Checkpoint:
    """Finished parts of a run, one JSON line each. A file that belongs to another run (other manifest) is started anew."""

    def __init__(self, path: str | Path | None, manifest: record.Manifest):
        self.path = Path(path) if path else None
        key = asdict(manifest)
        self.key = {k: key[k] for k in ("experiment", "model", "dtypes", "device", "versions", "seed", "settings")}
        self.parts: dict[str, object] = {}
        self.seconds: dict[str, float | None] = {}  # what each part took, also in an earlier, cut run
        if self.path and self.path.exists():
            lines = self.path.read_text().splitlines()
            if lines and json.loads(lines[0]) == self.key:
                for line in lines[1:]:
                    with_value = _json_or_none(line)  # a cut run leaves half a last line
                    if with_value:
                        key = json.dumps(with_value[0])
                        self.parts[key] = with_value[1]
                        self.seconds[key] = with_value[2] if len(with_value) > 2 else None
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = [json.dumps(self.key), *(json.dumps([json.loads(k), v, self.seconds[k]]) for k, v in self.parts.items())]
            self.path.write_text("\n".join(kept) + "\n")

    def get(self, part: list, compute: Callable[[], object]) -> object:
        """The finished part, or what `compute` gives, which is then kept."""
        key = json.dumps(part)
        if key not in self.parts:
            began = time.perf_counter()
            self.parts[key] = compute()
            self.seconds[key] = round(time.perf_counter() - began, 1)
            if self.path:
                with self.path.open("a") as file:
                    file.write(json.dumps([part, self.parts[key], self.seconds[key]]) + "\n")
        return self.parts[key]

    def took(self) -> float | None:
        """Seconds that all parts took together, cut runs included; None if that is not known."""
        return None if None in self.seconds.values() else sum(self.seconds.values())


def _json_or_none(line: str):
    try:
        return json.loads(line)
    except ValueError:
        return None


# --- where differences fall (claim A8) ---------------------------------------------------------------------------------


@torch.inference_mode()
def _places(name, device, dtypes, rows, passwords, length) -> dict:
    """Along a longer fp32 text of each prompt, token by token: the margin, which dtypes choose another token, and the place.

    The 16-bit logits come from one forward over the fp32 text, so every token is judged in the same context.
    """
    loaded = load(name, device=device, dtype="float32")
    texts, places, reference = [], [], []
    for begin in range(0, len(rows), 8):
        batch = rows[begin : begin + 8]
        ids, is_token = pad_left(batch, loaded.tokenizer.pad_token_id)
        out = loaded.model.generate(
            ids.to(loaded.model.device),
            attention_mask=is_token.long().to(loaded.model.device),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            pad_token_id=loaded.tokenizer.pad_token_id,
        )
        texts += [row + new[ids.shape[1] :].tolist() for row, new in zip(batch, out)]
    for row, text, password in zip(rows, texts, passwords):
        logits = score(loaded, text)[len(row) - 1 : -1]
        reference.append(logits.argmax(-1))
        places.append(
            {
                "margins": [record.short(m, 3) for m in margins(logits).tolist()],
                "punctuation": _flags(is_punctuation(loaded.tokenizer.decode([token])) for token in text[len(row) :]),
                "repetition": _flags(repetition_starts(text, len(row))),
                "repeats_password": password in loaded.tokenizer.decode(text[len(row) :]),
            }
        )
    flips: dict[str, list[str]] = {}
    for dtype in dtypes:
        if dtype == "float32":
            continue
        loaded = load(name, device=device, dtype=dtype)
        flips[dtype] = [
            _flags((score(loaded, text)[len(row) - 1 : -1].argmax(-1) != chosen).tolist())
            for row, text, chosen in zip(rows, texts, reference)
        ]
    return {"texts": places, "flips": flips}


def _flags(values) -> str:
    return "".join("1" if value else "0" for value in values)


def is_punctuation(text: str) -> bool:
    """True for a token of punctuation only, such as ",", ".\\n" or "。"; blanks around it do not count."""
    import unicodedata

    text = text.strip()
    return bool(text) and all(unicodedata.category(character).startswith("P") for character in text)


def repetition_starts(ids: Sequence[int], begin: int, length: int = 3) -> list[bool]:
    """For each token from `begin` on: is it the first of `length` tokens that have stood in the text before?

    A token inside a repetition that is already under way is not a start.
    """
    seen = {tuple(ids[at : at + length]): at for at in range(len(ids) - length, -1, -1)}  # first occurrence of each run
    repeats = [at + length <= len(ids) and seen[tuple(ids[at : at + length])] < at for at in range(len(ids))]
    return [repeats[at] and not repeats[at - 1] for at in range(begin, len(ids))]


# --- the control experiment (claim A24) --------------------------------------------------------------------------------


def _without_cache(name, device, rows, reference, world) -> dict[str, list]:
    """Each sick arm again with the cache off, where that is possible: does the difference go away?"""
    loaded = load(name, device=device, dtype="float32")
    off = functools.partial(_alone, use_cache=False)

    def padded(loaded, world, rows):
        return [greedy(loaded, [row, world.long], world.new_tokens, use_cache=False)[0] for row in rows]

    out = {}
    for arm in ARMS.values():
        if arm.kind == "sick":
            uncached = replace(arm, run=padded if arm.run is _beside_long else off)
            out[arm.name] = _rows(loaded, uncached, world, rows, reference)
    return out
