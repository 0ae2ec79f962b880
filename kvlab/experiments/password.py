"""The password, twice: one prompt, many arms; which of them change the answer, and is the change noise or a state fault?

Every arm runs the same prompts. The reference is the plainest run there is: fp32, alone, a fresh cache, one prefill. A healthy
arm changes something that must not matter; a sick arm is a healthy one with a fault of the zoo switched on.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from kvlab import record
from kvlab.compare import Difference, audit, compare
from kvlab.experiments import places
from kvlab.experiments import prompts as make_prompts
from kvlab.experiments.checkpoint import Checkpoint
from kvlab.experiments.prompts import Prompt, encode
from kvlab.faults import fault
from kvlab.runtime import Loaded, load
from kvlab.runtime.decode import Trace, attention_kernel, by_generate, greedy, static_cache, threads

SEED = 7
PROMPTS, QUICK_PROMPTS = 200, 2
NEW_TOKENS = 4
LONG_TEXT, QUICK_TEXT = 48, 12  # tokens generated for the question where differences fall (claim A8)
DTYPES = ("float32", "bfloat16", "float16")
MOST_PROCESSES, PROMPTS_A_PROCESS = 4, 25  # each holds a model, and starting one takes seconds
WITHOUT_CACHE = 40  # prompts of the control experiment (claim A24)

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


def _grouped(rows, run_group: Callable[[list], list[Trace]]) -> list[Trace]:
    """`run_group` over the rows of one length at a time; the traces in the order of `rows`."""
    traces: list[Trace | None] = [None] * len(rows)
    for group in _same_length(rows):
        for index, trace in zip(group, run_group([rows[index] for index in group])):
            traces[index] = trace
    return traces


def _batched(loaded: Loaded, world: World, rows, *, before=(), after=()) -> list[Trace]:
    """Rows of one length run together, with the neighbours `before` and `after` them."""

    def run_group(group):
        return greedy(loaded, [*before, *group, *after], world.new_tokens)[len(before) :]

    return _grouped(rows, run_group)


def _beside_short(loaded: Loaded, world: World, rows) -> list[Trace]:
    return _batched(loaded, world, rows, after=[world.short])


def _beside_long(loaded: Loaded, world: World, rows) -> list[Trace]:
    return _batched(loaded, world, rows, after=[world.long])


def _other_order(loaded: Loaded, world: World, rows) -> list[Trace]:
    return _batched(loaded, world, rows, before=[world.long, world.short])


def _reused(loaded: Loaded, world: World, rows) -> list[Trace]:
    """A cache that has served the earlier request is handed to this one."""
    used = _used_cache(loaded, tuple(world.previous))

    def run_group(group):
        cache = copy.deepcopy(used)
        cache.batch_repeat_interleave(len(group))
        return greedy(loaded, group, world.new_tokens, cache=cache)

    return _grouped(rows, run_group)


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


def _generate(loaded: Loaded, world: World, rows) -> list[Trace]:
    """Transformers' own `generate`, one call a prompt."""
    traces = []
    for row in rows:
        ids = torch.tensor([list(row)], device=loaded.model.device)
        out = by_generate(loaded, ids, world.new_tokens, torch.ones_like(ids))
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
            "the prompt prefilled sixteen tokens at a time",
            functools.partial(_alone, chunk=16),
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
        Arm(
            "cache reused, reset",
            "healthy",
            "a cache that served another request, reset; prompts of one length run as a batch",
            _reused,
        ),
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
    """Every arm over every prompt in every dtype. `checkpoint`, a file, keeps finished parts: a cut run goes on there.

    On a CPU the prompts are shared out to as many processes as there are cores, up to four: a model of this size gains next to
    nothing from a second thread, and all from a second process.
    """
    from tqdm.auto import tqdm

    count = prompts or (QUICK_PROMPTS if quick else PROMPTS)
    length = QUICK_TEXT if quick else LONG_TEXT
    dtypes = list(dtypes if not quick else [d for d in dtypes if d != "float16"])
    loaded = load(name, device=device, dtype="float32")
    cores = torch.get_num_threads()
    processes = min(cores, MOST_PROCESSES, max(1, count // PROMPTS_A_PROCESS)) if loaded.device.startswith("cpu") else 1
    with threads(max(1, cores // processes)):
        manifest = record.manifest(
            "password",
            loaded,
            dtypes=dtypes,
            seed=SEED,
            settings={"prompts": count, "new_tokens": NEW_TOKENS, "long_text": length, "processes": processes},
            flags="--quick" if quick else "",
        )
    kept = Checkpoint(checkpoint, manifest)
    chosen = make_prompts.make(loaded.tokenizer, count, SEED)
    world = world_for(loaded, chosen, NEW_TOKENS)
    shares = share_out([prompt.ids for prompt in chosen], processes)
    bar = tqdm(total=(len(dtypes) * len(ARMS) + 3) * count, unit="run", disable=not progress, smoothing=0.05)
    with contextlib.ExitStack() as stack:
        pools = [
            stack.enter_context(
                ProcessPoolExecutor(
                    1,
                    mp_context=multiprocessing.get_context("spawn"),
                    initializer=_take,
                    initargs=(
                        Share(
                            loaded.name,
                            loaded.device,
                            manifest.device["threads"],
                            world,
                            [list(chosen[index].ids) for index in share],
                            [chosen[index].password for index in share],
                            [at for at, index in enumerate(share) if index < WITHOUT_CACHE],
                            dtypes,
                            length,
                        ),
                    ),
                )
            )
            for share in shares
        ]
        del loaded
        _work_off(pools, shares, dtypes, kept, bar)
    bar.close()

    def together(part: str, *of: str) -> list:
        """What all shares gave for a part, in the order of the prompts."""
        rows: list = [None] * count
        for number, share in enumerate(shares):
            for index, row in zip(share, kept.get([part, *of, number])):
                rows[index] = row
        return rows

    controls = [kept.get(["without cache", number]) for number in range(len(shares))]
    reference = together("reference")
    texts = together("places")
    data = {
        "prompts": [{k: v for k, v in asdict(p).items() if k not in ("ids", "text")} | {"tokens": len(p.ids)} for p in chosen],
        "reference": {"tokens": [row["tokens"] for row in reference], "margins": [row["margins"] for row in reference]},
        "world": {"short": len(world.short), "long": len(world.long), "previous": len(world.previous)},
        "arms": {dtype: {arm: together("arm", dtype, arm) for arm in ARMS} for dtype in dtypes},
        "places": {
            "texts": [{k: v for k, v in text.items() if k != "flips"} for text in texts],
            "flips": {dtype: [text["flips"][dtype] for text in texts] for dtype in dtypes if dtype != "float32"},
        },
        "without_cache": {arm: [row for control in controls for row in control[arm]] for arm in controls[0]},
    }
    return record.Run(replace(manifest, seconds=kept.took()), data)


def share_out(rows: Sequence[Sequence[int]], shares: int) -> list[list[int]]:
    """Indices of the rows, shared out so that rows which run as one batch stay together; every share about as large."""
    out: list[list[int]] = [[] for _ in range(shares)]
    for group in sorted(_same_length(rows), key=lambda group: -len(group) * len(rows[group[0]])):
        min(out, key=lambda share: sum(len(rows[index]) for index in share)).extend(group)
    return [sorted(share) for share in out if share]


def _work_off(pools, shares, dtypes, kept: Checkpoint, bar) -> None:
    """Every part of every share; each process is given its next part when it has finished one, so that a stop is a stop."""
    parts = [["reference"], *(["arm", dtype, arm] for dtype in dtypes for arm in ARMS), ["places"], ["without cache"]]
    to_do = [iter(parts) for _ in pools]
    running: dict = {}

    def next_part(number: int) -> None:
        for part in to_do[number]:
            if [*part, number] not in kept:
                running[pools[number].submit(_part, *part)] = (number, part)
                bar.set_description(", ".join(part[1:]) or part[0])
                return
            bar.update(len(shares[number]))

    for number in range(len(pools)):
        next_part(number)
    while running:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            number, part = running.pop(future)
            kept.keep([*part, number], future.result())
            bar.update(len(shares[number]))
            next_part(number)


# --- in the processes: each keeps its share of the prompts, what they give in the plainest run, and one model at a time ---


@dataclass(frozen=True)
class Share:
    """What one process works on. `control`: which of its rows the control experiment takes."""

    name: str
    device: str
    threads: int
    world: World
    rows: list[list[int]]
    passwords: list[str]
    control: list[int]
    dtypes: list[str]
    long_text: int


_mine: Share


def _take(share: Share) -> None:
    global _mine
    _mine = share
    torch.set_num_threads(share.threads)


@functools.lru_cache(maxsize=1)
def _model(dtype: str) -> Loaded:
    return load(_mine.name, device=_mine.device, dtype=dtype)


@functools.lru_cache(maxsize=1)
def _reference() -> list[Trace]:
    return _alone(_model("float32"), _mine.world, _mine.rows)


def _part(part: str, *of: str) -> object:
    """One part over this process's share, as plain JSON values."""
    reference = _reference()
    if part == "reference":
        return [{"tokens": t.tokens, "margins": [record.short(m) for m in t.margins().tolist()]} for t in reference]
    if part == "arm":
        dtype, arm = of
        return _rows(_model(dtype), ARMS[arm], _mine.world, _mine.rows, reference)
    if part == "places":
        return _places()
    return _without_cache(_model("float32"), [_mine.rows[at] for at in _mine.control], [reference[at] for at in _mine.control])


def _places() -> list[dict]:
    """The longer texts in fp32, and which of their tokens each other dtype would have chosen differently (claim A8)."""
    texts = places.write(_model("float32"), _mine.rows, _mine.passwords, _mine.long_text)
    flips = {dtype: places.flips(_model(dtype), texts) for dtype in _mine.dtypes if dtype != "float32"}
    kept = ("margins", "punctuation", "repetition", "repeats_password")
    return [
        {key: text[key] for key in kept} | {"flips": {dtype: flips[dtype][at] for dtype in flips}}
        for at, text in enumerate(texts)
    ]


def _without_cache(loaded: Loaded, rows, reference) -> dict[str, list]:
    """Each sick arm again with the cache off, where that is possible: does the difference go away? (claim A24)"""
    world = _mine.world
    off = functools.partial(_alone, use_cache=False)

    def padded(loaded, world, rows):
        return [greedy(loaded, [row, world.long], world.new_tokens, use_cache=False)[0] for row in rows]

    out = {}
    for arm in ARMS.values():
        if arm.kind == "sick":
            uncached = replace(arm, run=padded if arm.run is _beside_long else off)
            out[arm.name] = _rows(loaded, uncached, world, rows, reference)
    return out
