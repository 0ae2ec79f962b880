"""Padding and positions: which mistakes with a mask or a position id are harmless, for which kind of model, at which padding?

Two kinds of model. The bundled one has RoPE: attention depends on the distance between two tokens. The parrot has learned
absolute positions: a vector for each place, added to the input. Every arm runs the same prompts, each with so many pads, and
is held against the same prompts alone in fp32. A sick arm is a healthy one with one or two faults of the zoo switched on.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvlab import record
from kvlab.compare import Difference, Verdict, audit, compare, judge, noise_bound
from kvlab.experiments import clients, positions
from kvlab.experiments import prompts as make_prompts
from kvlab.experiments.checkpoint import Checkpoint
from kvlab.experiments.prompts import encode
from kvlab.faults import fault
from kvlab.runtime import Loaded, load, parrot
from kvlab.runtime.decode import Trace, by_generate, greedy, pad_left
from kvlab.runtime.weights import quiet

SEED = 4
KINDS = {"rope": "RoPE", "learned": "learned positions"}
PADS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
FEW_PADS = (0, 1, 8, 64, 512)  # where every step computes all anew
LOW_PADS = (0, 1, 8, 64)  # in 16 bits
QUICK_PADS = (0, 1, 8)
ROWS = {"rope": 3, "learned": 24}
NEW_TOKENS = 4
ANEW = 2  # tokens of a run without a cache
NEIGHBOUR = (
    "The minutes of the meeting on the new office. The furniture arrives on Monday, the network on Tuesday, and the plants "
    "whenever the gardener has time. Anna asked for a second whiteboard and got one. The alarm was tested twice. "
)


@dataclass(frozen=True)
class Bench:
    """A model with prompts of one length, and what stands beside them in a batch.

    rows        token ids of the prompts
    neighbour   ids to cut a longer row from
    answers     for the parrot: the ids that are to follow each prompt
    """

    kind: str
    loaded: Loaded
    rows: list[list[int]]
    neighbour: list[int]
    new_tokens: int
    answers: list[list[int]] | None = None

    @property
    def length(self) -> int:
        return len(self.rows[0])

    def beside(self, pads: int) -> list[int]:
        """A row that is longer than the prompts by so many tokens."""
        return self.neighbour[: self.length + pads]

    def pads(self, wanted: Sequence[int]) -> list[int]:
        """Those paddings with which prompt and answer still have positions in this model."""
        return [p for p in wanted if p + self.length + self.new_tokens <= self.loaded.spec.max_context]


def bench(kind: str, loaded: Loaded, rows: int | None = None) -> Bench:
    """The prompts of a kind of model: the same every time."""
    rows = rows or ROWS[kind]
    if kind == "learned":
        draw = random.Random(SEED)
        asked = [row for row in parrot.prompts(40 * rows, SEED, lengths=(56, 56)) if len(row.password) == 9][:rows]
        ids = [encode(loaded.tokenizer, row.prompt) for row in asked]
        answers = [encode(loaded.tokenizer, row.password + parrot.END) for row in asked]
        neighbour = encode(loaded.tokenizer, parrot.filler(draw, parrot.LONGEST))
        return Bench(kind, loaded, ids, neighbour, len(answers[0]), answers)
    made = make_prompts.make(loaded.tokenizer, 120, SEED)
    made = [prompt for prompt in made if prompt.style == "plain"]
    common = Counter(len(prompt.ids) for prompt in made)
    length = max(common, key=lambda n: (common[n], -n))
    ids = [list(prompt.ids) for prompt in made if len(prompt.ids) == length][:rows]
    neighbour = encode(loaded.tokenizer, 20 * NEIGHBOUR)
    return Bench(kind, loaded, ids, neighbour, NEW_TOKENS)


# --- the arms ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One way to run padded prompts. `play` gives the prompts' traces; `faults` are switched on while it runs."""

    name: str
    what: str
    play: Callable[[Bench, int], list[Trace]]
    faults: tuple[str, ...] = ()
    paddings: Sequence[int] = PADS

    @property
    def healthy(self) -> bool:
        return not self.faults


def _left(bench: Bench, pads: int) -> list[Trace]:
    """The prompts beside a longer row, padded on the left: prefill, then cached steps."""
    return greedy(bench.loaded, [bench.beside(pads), *bench.rows], bench.new_tokens)[1:]


def _behind(bench: Bench, pads: int) -> list[Trace]:
    """The same with a first row of another length, half as much longer."""
    first, last = bench.beside((pads + 1) // 2), bench.beside(pads)
    return greedy(bench.loaded, [first, *bench.rows, last], bench.new_tokens)[1:-1]


def _anew(bench: Bench, pads: int, side: str) -> list[Trace]:
    """The same without a cache: at each step one bare forward over the whole padded batch."""
    return clients.padded(bench.loaded, [*bench.rows, bench.beside(pads)], ANEW, side=side)[:-1]


_left_anew, _right_anew = (functools.partial(_anew, side=side) for side in ("left", "right"))

ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("left, masked", "padding on the left, a mask, positions from the mask; cached steps", _left),
        Arm("left, anew", "the same without a cache", _left_anew, (), FEW_PADS),
        Arm("right, own column", "padding on the right, each row read at its own last token", _right_anew, (), FEW_PADS),
        Arm(
            "right, last column",
            "padding on the right, read at the last column",
            _right_anew,
            ("right-padding-misread",),
            FEW_PADS,
        ),
        Arm("no positions", "a bare forward without position ids: columns count", _left_anew, ("no-position-ids",), FEW_PADS),
        Arm("mask omitted", "positions right, nothing masked", _left, ("pads-not-masked",)),
        Arm("mask one short", "the mask ends before the newest token", _left, ("mask-one-short",)),
        Arm("prefill counts pads", "pads have positions in the prefill, not in the steps", _left, ("conventions-mixed",)),
        Arm("steps count pads", "pads have positions in the steps, not in the prefill", _left, ("steps-count-pads",)),
        Arm(
            "both count pads",
            "pads have positions throughout",
            _left,
            ("conventions-mixed", "steps-count-pads"),
        ),
        Arm("steps from 0", "each cached step at position 0", _left, ("positions-restarted",)),
        Arm("steps one too far", "each cached step one position too far", _left, ("position-one-too-far",)),
        Arm("prefill from 1", "the prefill counts from 1, the steps go on as if from 0", _left, ("prefill-from-one",)),
        Arm(
            "both from 1",
            "all positions one too far",
            _left,
            ("prefill-from-one", "position-one-too-far"),
        ),
        Arm("one offset for all", "each row's steps at the first row's position", _behind, ("one-offset-for-all",)),
    )
}


@contextlib.contextmanager
def all_on(names: Sequence[str]) -> Iterator[None]:
    """Several faults at once."""
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(fault(name))
        yield


def alone(bench: Bench) -> list[Trace]:
    """The reference: each prompt for itself, no padding, a fresh cache."""
    return [greedy(bench.loaded, [row], bench.new_tokens)[0] for row in bench.rows]


def run_arm(bench: Bench, arm: Arm, pads: int) -> list[Trace]:
    """The prompts in one arm, with so many pads each."""
    with all_on(arm.faults):
        return arm.play(bench, pads)


def row_of(reference: Trace, trace: Trace) -> list:
    """What is recorded of a prompt in an arm: [first flip, margin, |Δlogit| at token 0, largest |Δlogit|, KL, family the log names]."""
    steps = len(trace.tokens)  # a run without a cache is shorter: that is no difference
    d = compare(Trace(reference.prompt, reference.tokens[:steps], [], reference.logits[:steps]), trace)
    margin = None if d.margin is None else record.short(d.margin)
    return [d.first, margin, record.short(d.deltas[0]), record.short(d.delta), record.short(d.kl), audit(trace.steps)]


def difference_of(row: list) -> Difference:
    """The Difference a recorded row came from, its steps after the first drawn together."""
    return Difference(row[0], row[1], (row[2], row[3]), row[4])


def measure(bench: Bench, reference: Sequence[Trace], arm: Arm, paddings: Sequence[int]) -> dict:
    """One arm over paddings: `pads`, `rows` as `row_of` gives them for each, and for the parrot the share of exact answers."""
    pads, rows, exact = bench.pads(paddings), [], []
    for count in pads:
        traces = run_arm(bench, arm, count)
        rows.append([row_of(a, b) for a, b in zip(reference, traces)])
        if bench.answers and len(traces[0].tokens) == len(bench.answers[0]):
            exact.append(sum(t.tokens == answer for t, answer in zip(traces, bench.answers)) / len(traces))
    return {"pads": pads, "rows": rows, "exact": exact}


# --- what the library does by itself -------------------------------------------------------------------------------------


def _generate(loaded: Loaded, rows: list[list[int]], new: int, *, side: str, mask: bool) -> Trace:
    """Transformers' `generate` on a padded batch. Returns the first row."""
    longest, pad = max(map(len, rows)), loaded.tokenizer.pad_token_id
    lacking = [[pad] * (longest - len(row)) for row in rows]
    ids = torch.tensor([p + r if side == "left" else r + p for p, r in zip(lacking, rows)], device=loaded.model.device)
    own = [[0] * len(p) + [1] * len(r) if side == "left" else [1] * len(r) + [0] * len(p) for p, r in zip(lacking, rows)]
    with quiet():
        out = by_generate(loaded, ids, new, torch.tensor(own, device=ids.device) if mask else None)
    logits = torch.stack([step[0] for step in out.logits]).float().cpu()
    return Trace(list(rows[0]), logits.argmax(-1).tolist(), [], logits)


@torch.inference_mode()
def _by_hand(loaded: Loaded, rows: list[list[int]], new: int, *, mask: bool, prefill: bool, steps: bool) -> Trace:
    """A loop as people write it: `prefill`, `steps`: whether position ids are passed there. Returns the first row."""
    from transformers import DynamicCache

    ids, is_token = (t.to(loaded.model.device) for t in pad_left(rows, loaded.tokenizer.pad_token_id))
    seen, cache, logits = is_token.long(), DynamicCache(config=loaded.model.config), []
    for step in range(new):
        given = {"attention_mask": seen} if mask else {}
        if steps if step else prefill:
            given["position_ids"] = (seen.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = loaded.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1, **given)
        logits.append(out.logits[:, -1].float())
        ids = logits[-1].argmax(-1, keepdim=True)
        seen = torch.cat([seen, torch.ones_like(ids)], dim=1)
    own = torch.stack([step[0] for step in logits]).cpu()
    return Trace(list(rows[0]), own.argmax(-1).tolist(), [], own)


LIBRARY: dict[str, Callable[[Loaded, list[list[int]], int], Trace]] = {
    "`generate`, left, mask given": functools.partial(_generate, side="left", mask=True),
    "`generate`, left, no mask": functools.partial(_generate, side="left", mask=False),
    "`generate`, right, mask given": functools.partial(_generate, side="right", mask=True),
    "forward by forward, mask and positions": functools.partial(_by_hand, mask=True, prefill=True, steps=True),
    "forward by forward, mask, no positions": functools.partial(_by_hand, mask=True, prefill=False, steps=False),
    "forward by forward, mask, positions in the prefill only": functools.partial(
        _by_hand, mask=True, prefill=True, steps=False
    ),
    "forward by forward, mask, positions in the steps only": functools.partial(_by_hand, mask=True, prefill=False, steps=True),
    "forward by forward, neither": functools.partial(_by_hand, mask=False, prefill=False, steps=False),
}


def library(bench: Bench, pads: int = 8, new: int = 4) -> dict[str, list]:
    """What Transformers does with a padded row in each way of calling it, against the row alone: `row_of` by name.

    `generate, right` continues behind the pads: what it generates stands there, and the row's own mask says so.
    """
    row = bench.rows[0]
    reference = greedy(bench.loaded, [row], new)[0]
    return {name: row_of(reference, call(bench.loaded, [row, bench.beside(pads)], new)) for name, call in LIBRARY.items()}


# --- with the reader's own functions -------------------------------------------------------------------------------------


@torch.inference_mode()
def written(
    loaded: Loaded,
    rows: Sequence[Sequence[int]],
    new: int,
    *,
    side: str,
    position_ids: Callable,
    may_see: Callable,
    last_column: Callable,
    next_positions: Callable,
) -> list[Trace]:
    """Rows padded on the `side`, prefilled and decoded with a cache, all bookkeeping by the four functions of lab 4.

    New tokens get a column at the end, also behind pads on the right. See `kvlab.checks.padding` for what each function gives.
    """
    from transformers import DynamicCache

    device, longest = loaded.model.device, max(map(len, rows))
    pad = [[loaded.tokenizer.pad_token_id] * (longest - len(row)) for row in rows]
    ids = torch.tensor([p + list(r) if side == "left" else list(r) + p for p, r in zip(pad, rows)])
    mask = torch.tensor(
        [[0] * len(p) + [1] * len(r) if side == "left" else [1] * len(r) + [0] * len(p) for p, r in zip(pad, rows)]
    )
    prompt, at, cache, cached, logits = mask, position_ids(mask), DynamicCache(config=loaded.model.config), 0, []
    for step in range(new):
        seen = may_see(mask, cached)
        fed = {"input_ids": ids.to(device), "position_ids": torch.as_tensor(at).to(device)}
        out = loaded.model(**fed, attention_mask=seen.to(device), cache=cache, use_cache=True).logits.float().cpu()
        read = torch.as_tensor(last_column(prompt)) if step == 0 else torch.zeros(len(rows), dtype=torch.long)
        logits.append(out[torch.arange(len(rows)), read])
        cached, ids = mask.shape[1], logits[-1].argmax(-1, keepdim=True)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        at = torch.as_tensor(next_positions(prompt, step)).reshape(-1, 1)
    together = torch.stack(logits, dim=1)
    return [Trace(list(row), own.argmax(-1).tolist(), [], own) for row, own in zip(rows, together)]


# --- by token and layer --------------------------------------------------------------------------------------------------

LAYER_ARMS = ("both count pads", "prefill counts pads", "steps count pads", "steps from 0", "both from 1", "mask omitted")
LAYER_PADS = 16


@contextlib.contextmanager
def watched(loaded: Loaded) -> Iterator[list[list[torch.Tensor]]]:
    """Collects what goes into the first layer and comes out of each: a list a place, of `[batch, fed, hidden]` a forward."""
    base = loaded.model.base_model
    layers = base.layers if hasattr(base, "layers") else base.h
    kept: list[list[torch.Tensor]] = [[] for _ in range(len(layers) + 1)]

    def before(module, args, kwargs):
        kept[0].append((args[0] if args else kwargs["hidden_states"]).detach())

    def after(place):
        return lambda module, args, out: kept[place].append((out[0] if isinstance(out, tuple) else out).detach())

    hooks = [layers[0].register_forward_pre_hook(before, with_kwargs=True)]
    hooks += [layer.register_forward_hook(after(place + 1)) for place, layer in enumerate(layers)]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def lens(loaded: Loaded, states: torch.Tensor) -> torch.Tensor:
    """Logits read off hidden states `[..., hidden]` of any layer, as the last layer's are: norm, then the output head."""
    base = loaded.model.base_model
    norm = base.norm if hasattr(base, "norm") else base.ln_f
    return loaded.model.get_output_embeddings()(norm(states)).float()


def by_layer(bench: Bench, arm: Arm, pads: int = LAYER_PADS, tokens: int = 24) -> dict:
    """Largest |Δlogit| by layer and token of the first prompt, in one arm: `delta[layer][token]`, layer 0 the embedding.

    The last `tokens` tokens that both runs were fed: to the prompt's end, and on while the texts agree.
    """
    one = replace(bench, rows=bench.rows[:1], answers=None)

    def states(play: Callable[[], list[Trace]], row: int) -> tuple[Trace, list[torch.Tensor]]:
        with watched(bench.loaded) as kept:
            trace = play()[0]
        return trace, [torch.cat([part[row] for part in place]) for place in kept]

    reference, right = states(lambda: alone(one), 0)
    trace, other = states(lambda: run_arm(one, arm, pads), 1)
    first = compare(reference, trace).first
    end = bench.length + (bench.new_tokens - 1 if first is None else first)
    begin = max(0, end - tokens)
    other = [place[place.shape[0] - right[0].shape[0] :] for place in other]  # the pads' columns come first
    deltas = [
        (lens(bench.loaded, a[begin:end]) - lens(bench.loaded, b[begin:end])).abs().amax(-1).tolist()
        for a, b in zip(right, other)
    ]
    fed = [*reference.prompt, *reference.tokens][begin:end]
    return {
        "delta": [[record.short(value, 3) for value in row] for row in deltas],
        "tokens": [bench.loaded.tokenizer.decode([token]) for token in fed],
        "prompt": bench.length - begin,
        "pads": pads,
    }


# --- the run -------------------------------------------------------------------------------------------------------------


def run(
    name: str | None = None,
    *,
    device: str | None = None,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    quick: bool = False,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> record.Run:
    """The grid for both kinds of model, what the library does by itself, logits by layer, position precision, and beyond the trained length.

    `name`: of the model with RoPE. `checkpoint`, a file, keeps finished parts: a cut run goes on there.
    """
    from tqdm.auto import tqdm

    models = {"rope": load(name, device=device, dtype="float32"), "learned": load("parrot", device=device, dtype="float32")}
    dtypes = ["float32", *(d for d in dtypes if d != "float32")]  # fp32 is the reference
    rows = {kind: 2 if quick else ROWS[kind] for kind in KINDS}
    limits = positions.QUICK if quick else positions.Limits()
    manifest = record.manifest(
        "padding",
        models["rope"],
        dtypes=dtypes,
        seed=SEED,
        settings={"rows": rows, "new_tokens": NEW_TOKENS, "pads": list(QUICK_PADS if quick else PADS), "most": limits.text},
        flags="--quick" if quick else "",
    )
    manifest = replace(manifest, model={loaded.name: loaded.sha256 for loaded in models.values()})
    kept = Checkpoint(checkpoint, manifest)
    benches = {kind: bench(kind, loaded, rows[kind]) for kind, loaded in models.items()}
    reference = {kind: alone(benches[kind]) for kind in KINDS}
    bar = tqdm(total=len(KINDS) * (len(dtypes) * len(ARMS) + len(LAYER_ARMS) + 1) + len(positions.PARTS), disable=not progress)

    def part(key: list, compute: Callable[[], object]) -> object:
        bar.set_description(" ".join(key))
        value = kept.get(key, compute)
        bar.update()
        return value

    grid: dict = {}
    for kind, one in benches.items():
        grid[kind] = {}
        for dtype in dtypes:
            here = one if dtype == "float32" else replace(one, loaded=load(one.loaded.name, device=device, dtype=dtype))
            grid[kind][dtype] = {}
            for arm in ARMS.values():
                wanted = (
                    QUICK_PADS if quick else PADS if kind == "learned" else LOW_PADS if dtype != "float32" else arm.paddings
                )
                compute = functools.partial(measure, here, reference[kind], arm, wanted)
                grid[kind][dtype][arm.name] = part(["grid", kind, dtype, arm.name], compute)
    data = {
        "shape": {
            kind: {"model": one.loaded.name, "length": one.length, "rows": len(one.rows), "most": one.loaded.spec.max_context}
            for kind, one in benches.items()
        },
        "grid": grid,
        "library": {kind: part(["library", kind], functools.partial(library, one)) for kind, one in benches.items()},
        "layers": {
            kind: {arm: part(["layers", kind, arm], functools.partial(by_layer, one, ARMS[arm])) for arm in LAYER_ARMS}
            for kind, one in benches.items()
        },
        "positions": {
            name: part(["positions", name], functools.partial(study, models["rope"], limits))
            for name, study in positions.PARTS.items()
        },
        "parrot": {key: parrot.manifest()[key] for key in ("settings", "parameters", "loss", "held_out", "seconds", "threads")},
    }
    bar.close()
    return record.Run(replace(manifest, seconds=kept.took()), data)


# --- what is concluded ---------------------------------------------------------------------------------------------------


def epsilon(run: record.Run, kind: str, dtype: str = "float32") -> float:
    """ε of a kind of model and a dtype: twice the largest |Δlogit| of the healthy arms, over every other prompt."""
    arms = run.data["grid"][kind][dtype]
    calibration = (row for name, arm in ARMS.items() if arm.healthy for rows in arms[name]["rows"] for row in rows[0::2])
    return noise_bound(difference_of(row) for row in calibration)


def verdicts(run: record.Run, kind: str, arm: str, dtype: str = "float32") -> list[list[Verdict]]:
    """The verdict on each prompt at each padding, before any replay."""
    bound = epsilon(run, kind, dtype)
    return [[judge(difference_of(row), bound) for row in rows] for rows in run.data["grid"][kind][dtype][arm]["rows"]]


def outcome(run: record.Run, kind: str, arm: str, dtype: str = "float32") -> str:
    """ "harmless": noise for every prompt at every padding; "always": a fault at every padding, 0 pads too; "with pads": from 1 pad on;
    else "mixed"."""
    pads = run.data["grid"][kind][dtype][arm]["pads"]
    sick = [[v.kind == "state fault" for v in row] for row in verdicts(run, kind, arm, dtype)]
    if not any(any(row) for row in sick):
        return "harmless"
    if all(all(row) for row in sick):
        return "always"
    padded = [row for count, row in zip(pads, sick) if count]
    unpadded = [row for count, row in zip(pads, sick) if not count]
    return "with pads" if all(map(all, padded)) and not any(map(any, unpadded)) else "mixed"


def largest(run: record.Run, kind: str, arm: str, dtype: str = "float32") -> float:
    """The largest |Δlogit| of an arm, over prompts and paddings."""
    return max(row[3] for rows in run.data["grid"][kind][dtype][arm]["rows"] for row in rows)
