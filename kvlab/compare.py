"""Two runs side by side: where they first differ, by how much, and the verdict: noise, unclear, or state fault.

The rule. A healthy variation of a run (cached or not, in chunks, batched, another kernel) moves a logit by at most ε, a bound
that is measured for a model, dtype and machine (:func:`bound`), never assumed. Two logits that each move by at most ε can
change places only if they were less than 2ε apart. So a difference within ε, with no flip at a wider margin, is noise. A difference
beyond `BEYOND` · ε, or a flip at a margin beyond twice that, is not: the run read a state that was not its own, or read its own at the
wrong place. What lies between is **unclear**, and the verdict says what to measure next. ε of a 16-bit dtype is large and may hide a
small fault; then the run is replayed in fp32, where the two kinds lie orders of magnitude apart.

It needs numpy and no engine: a run is anything with `prompt`, `tokens` and `logits`, or a run file (`kvlab.probe`) that another
process has written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

HEADROOM = 2.0  # ε is this many times the largest healthy difference seen in calibration
BEYOND = 2.0  # from ε to this many times ε the verdict is unclear

# Rounding unit, how many of them healthy runs may differ by at most at the least and at the most, in units of the logits' size and
# the square root of the depth. fp32 sums have many terms, each rounded; 16-bit products are summed in fp32 and rounded once.
_DTYPES = {
    "float64": (2.0**-52, 8.0, 800.0),
    "float32": (2.0**-23, 8.0, 800.0),
    "bfloat16": (2.0**-7, 1.0, 8.0),
    "float16": (2.0**-10, 1.0, 8.0),
}
APART = 30.0  # a healthy arm that differs this many times more than the others is no healthy arm


@dataclass(frozen=True)
class Step:
    """What one row was really given at one step: the bookkeeping a server should log.

    own        tokens of this request up to and including the last one fed
    position   position id of that last token
    visible    cache slots its query may attend to, before any layer's sliding window
    beyond     those of them that lie past the write cursor: slots this request has not written
    held       tokens the cache held before this request began
    """

    own: int
    position: int
    visible: int
    beyond: int
    held: int

    def log(self) -> tuple[int, int, int, int, int]:
        """The row of a run file's log."""
        return self.own, self.position, self.visible, self.beyond, self.held


@dataclass(frozen=True)
class Difference:
    """How `other` differs from a reference run. Steps after the first differing token have another context: not compared.

    first     step of the first differing token, None if there is none
    margin    the reference's top-1/top-2 margin at `first`; None if there is none, or it is not known
    deltas    max |Δscore| over the vocabulary at each compared step, 0..first; empty if a run has tokens only
    kl        max over the compared steps of KL(reference ‖ other), nats; 0 where only the best few are known
    kind      what was compared: "logits", "logprobs", "top logits", "top logprobs" or "tokens"
    size      the largest |score| of the reference: rounding is relative to it
    """

    first: int | None
    margin: float | None
    deltas: tuple[float, ...]
    kl: float
    kind: str = "logits"
    size: float = 0.0

    @property
    def delta(self) -> float:
        """The largest |Δscore| of the compared steps."""
        return max((float("inf") if delta != delta else delta for delta in self.deltas), default=0.0)

    def onset(self, epsilon: float) -> int | None:
        """The first step whose |Δscore| exceeds `epsilon`."""
        return next((step for step, delta in enumerate(self.deltas) if not delta <= epsilon), None)


@dataclass(frozen=True)
class Verdict:
    """`kind` is "identical", "noise", "unclear" or "state fault".

    `family`, for a fault, is what it is where the run's log says so, else the first of those that remain `possible`: a place to
    begin, no finding. A twin (`kvlab.twin`) names one. `epsilon` is the bound it was judged by, `step` where the fault begins.
    """

    kind: str
    family: str | None
    epsilon: float
    delta: float
    margin: float | None
    step: int | None
    replayed: bool
    sentence: str
    possible: tuple[str, ...] = ()


FAMILIES = {
    "foreign state": "the request could read keys and values that another request wrote",
    "mask": "the request could read padding or slots that nobody wrote, or could not read its own tokens",
    "position": "a token was fed at a position that is not its place in the request",
    "own state altered": "the request read its own keys, values or state changed: fewer bits, dropped tokens, a wrong update",
}


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs; the shorter length if one is a prefix of the other; None if they are equal."""
    for index, (left, right) in enumerate(zip(a, b)):
        if left != right:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


# ---- scores: logits, log-probabilities, or the best few of either ---------------------------------------------------------------


def scores(run: Any) -> tuple[str, np.ndarray | None, np.ndarray | None]:
    """(kind, scores `[steps, …]`, ids) of a run, whatever it keeps them in: a run file, or an object with `logits`."""
    if hasattr(run, "scores"):
        return run.kind, run.scores, run.ids
    if run.logits is None:
        return "tokens", None, None
    return "logits", np.asarray(run.logits, np.float32), None


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural log-probabilities along the last axis, in float64."""
    logits = np.asarray(logits, np.float64)
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def margins(values: np.ndarray) -> np.ndarray:
    """Top-1 minus top-2 score along the last axis, `[..., vocab]` → `[...]`; infinite where there is only one."""
    if values.shape[-1] < 2:
        return np.full(values.shape[:-1], np.inf)
    top = np.partition(values, -2, axis=-1)[..., -2:]
    return top[..., 1] - top[..., 0]


def _alike(reference: Any, other: Any, steps: int) -> tuple[str, np.ndarray, np.ndarray] | None:
    """The first `steps` rows of both in one kind. Exact conversions only; anything else is refused by name. None: tokens only."""
    (left_kind, left, left_ids), (right_kind, right, right_ids) = scores(reference), scores(other)
    if "tokens" in (left_kind, right_kind):
        return None
    for name, run, rows in (("reference", reference, left), ("other run", other, right)):
        if len(rows) < len(run.tokens):
            raise ValueError(
                f"compare: the {name} is a run that has fewer rows of scores than tokens; give the {left_kind} of every step"
            )
    left, right = left[:steps], right[:steps]
    if "logprobs" in left_kind or "logprobs" in right_kind:
        if left_kind == "logits":
            left, left_kind = log_softmax(left), "logprobs"
        if right_kind == "logits":
            right, right_kind = log_softmax(right), "logprobs"
    for one, two in ((left_kind, right_kind), (right_kind, left_kind)):
        if one == "top logits" and "logprobs" in two:
            raise ValueError(
                "compare: one run has the top logits, the other log-probabilities; a few logits do not tell their sum: "
                "write the log-probabilities, or all logits, of both"
            )
    if not left_kind.startswith("top") and not right_kind.startswith("top"):
        if left.shape[-1] != right.shape[-1]:
            raise ValueError(
                f"compare: the two runs have different vocabularies ({left.shape[-1]} and {right.shape[-1]} tokens); they come from "
                "different models"
            )
        return left_kind, left, right
    if left_kind.startswith("top") and right_kind.startswith("top"):
        left, right = _same_ids(left, left_ids[:steps], right, right_ids[:steps])
    elif left_kind.startswith("top"):
        right = _pick(right, left_ids[:steps])
    else:
        left = _pick(left, right_ids[:steps])
    return (left_kind if left_kind.startswith("top") else right_kind), left, right


def _pick(values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    if ids.max() >= values.shape[-1]:
        raise ValueError(f"compare: token {int(ids.max())} is in one run's top list, the other has {values.shape[-1]} tokens")
    return np.take_along_axis(values, ids, -1)


def _same_ids(left, left_ids, right, right_ids):
    out = []
    for values, ids in ((left, left_ids), (right, right_ids)):
        order = np.argsort(ids, axis=-1)
        out.append((np.take_along_axis(values, order, -1), np.take_along_axis(ids, order, -1)))
    (left, left_ids), (right, right_ids) = out
    if left_ids.shape != right_ids.shape or (left_ids != right_ids).any():
        width = min(left_ids.shape[-1], right_ids.shape[-1])
        step = next(
            (n for n in range(len(left_ids)) if set(left_ids[n].tolist()) != set(right_ids[n].tolist())), 0
        )  # fmt: skip
        raise ValueError(
            f"compare: at step {step} the two runs' top {width} lists name different tokens; what is missing in one cannot be "
            "compared: record the scores of given tokens, or of the whole vocabulary"
        )
    return left, right


def compare(reference: Any, other: Any) -> Difference:
    """Compare two runs of the same prompt.

    A run is a `kvlab.runtime.decode.Trace`, a `kvlab.probe.RunFile`, or anything with `prompt`, `tokens` and `logits`
    `[steps, vocab]`. Log-probabilities against logits, and the best few against all, are compared as what both have.

    Raises ValueError when the prompts or the vocabularies differ, or the two cannot be brought to one kind exactly.
    """
    if list(map(int, reference.prompt)) != list(map(int, other.prompt)):
        raise ValueError("compare: the two runs have different prompts; only runs of one prompt can be compared")
    left_tokens, right_tokens = list(map(int, reference.tokens)), list(map(int, other.tokens))
    if not left_tokens or not right_tokens:
        raise ValueError("compare: a run has no tokens; decode at least one step")
    first = first_difference(left_tokens, right_tokens)
    shorter = min(len(left_tokens), len(right_tokens))
    steps = shorter if first is None else min(first + 1, shorter)
    alike = _alike(reference, other, steps)
    has_margin = first is not None and first < shorter
    margin = _margin(reference, first) if has_margin else None
    if alike is None:
        return Difference(first, margin, (), 0.0, "tokens", _size(reference, steps))
    kind, left, right = alike
    with np.errstate(invalid="ignore"):
        gap = np.abs(np.subtract(left, right, dtype=np.float64))
    gap[left == right] = 0.0  # −∞ on both sides is no difference
    deltas = np.nan_to_num(gap.max(-1), nan=np.inf, posinf=np.inf)
    return Difference(first, margin, tuple(map(float, deltas)), _kl(kind, left, right), kind, _size(reference, steps))


def _kl(kind: str, left: np.ndarray, right: np.ndarray) -> float:
    if kind.startswith("top"):
        return 0.0
    with np.errstate(invalid="ignore", divide="ignore"):
        log_p, log_q = (values if kind == "logprobs" else log_softmax(values) for values in (left, right))
        gain = log_p - log_q
        gain[log_p == log_q] = 0.0
        kl = np.where(np.exp(log_p) == 0, 0.0, np.exp(log_p) * gain).sum(-1)
    return float(np.nan_to_num(np.maximum(kl, 0), nan=np.inf, posinf=np.inf).max())


def _margin(reference: Any, step: int) -> float | None:
    _, values, _ = scores(reference)
    return None if values is None or len(values) <= step else float(margins(values[step]))


def _size(reference: Any, steps: int) -> float:
    _, values, _ = scores(reference)
    if values is None:
        return 0.0
    finite = np.abs(values[:steps][np.isfinite(values[:steps])])
    return float(finite.max()) if finite.size else 0.0


# ---- ε --------------------------------------------------------------------------------------------------------------------------


def floor(size: float, dtype: str = "float32", layers: int = 1) -> float:
    """The least ε to believe in: rounding of `dtype` at logits of `size` behind `layers` layers. Below it two healthy runs may lie.

    Sound runs may be bit-identical, and then measure an ε of 0; the next one rounds otherwise.
    """
    unit, least, _ = _dtype(dtype)
    return least * unit * size * math.sqrt(layers)


def ceiling(size: float, dtype: str = "float32", layers: int = 1) -> float:
    """The largest difference that can pass for rounding in `dtype`: an arm above it is sick itself."""
    unit, _, most = _dtype(dtype)
    return most * unit * size * math.sqrt(layers)


def _dtype(dtype: str) -> tuple[float, float, float]:
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"dtype {dtype!r}: what its rounding may do is not known; use one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


@dataclass(frozen=True)
class Bound:
    """ε, and where it comes from.

    epsilon   noise ends here
    beyond    from here on a difference is a state fault; between the two it is unclear
    floor     the least ε that was allowed: rounding of the dtype at this depth and size of the logits
    ceiling   what no healthy arm may exceed
    arms      the healthy arms that measured it, and the largest |Δ| of each
    left_out  arms that are not healthy, and why
    """

    epsilon: float
    beyond: float
    floor: float
    ceiling: float
    arms: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def sentence(self) -> str:
        """Where ε comes from, in words."""
        by = f"{len(self.arms)} healthy {'arm' if len(self.arms) == 1 else 'arms'}" + (" alone" * (len(self.arms) == 1))
        source = "the floor of rounding" if self.epsilon == self.floor else f"{HEADROOM:g} times the largest |Δ| of {by}"
        said = f"ε = {self.epsilon:.3g}, {source} (floor {self.floor:.2g}, ceiling {self.ceiling:.2g})."
        return said + "".join(f" Left out: {name}, {why}." for name, why in self.left_out.items())


def bound(healthy: Mapping[str, Difference], *, dtype: str = "float32", layers: int = 1) -> Bound:
    """ε from healthy arms by name, each held against the reference, the arms checked against each other.

    An arm above the :func:`ceiling`, or `APART` times further off than the others, is sick itself: it is named and left out.

    Raises ValueError without a healthy arm that can be believed, or when arms were compared in different kinds.
    """
    if not healthy:
        raise ValueError("bound: no healthy run to measure; run at least one healthy arm first")
    kinds = {difference.kind for difference in healthy.values()}
    if len(kinds) > 1 or "tokens" in kinds:
        raise ValueError(f"bound: the healthy arms are of kind {' and '.join(sorted(kinds))}; ε needs scores of one kind")
    size = max(difference.size for difference in healthy.values())
    least, most = floor(size, dtype, layers), ceiling(size, dtype, layers)
    arms, left_out = {}, {}
    for name, difference in healthy.items():
        others = sorted(d.delta for n, d in healthy.items() if n != name)
        usual = max(least, others[(len(others) - 1) // 2] if others else 0.0)
        if difference.first is not None and difference.margin is not None and difference.margin > 2 * most:
            left_out[name] = f"it chooses another token at a margin of {difference.margin:.3g}"
        elif not difference.delta <= most:
            left_out[name] = f"it differs by {difference.delta:.3g}, and rounding in {dtype} stays under {most:.2g}"
        elif difference.delta > APART * usual:
            left_out[name] = f"it differs by {difference.delta:.3g}, {difference.delta / usual:.0f} times the others"
        else:
            arms[name] = difference.delta
    if not arms:
        raise ValueError(
            "bound: no healthy arm can be believed: "
            + "; ".join(f"{name}: {why}" for name, why in left_out.items())
            + ". Is the reference sound, and of the same weights?"
        )
    epsilon = max(least, HEADROOM * max(arms.values()))
    return Bound(epsilon, BEYOND * epsilon, least, most, arms, left_out)


def noise_bound(healthy: Iterable[Difference], headroom: float = HEADROOM) -> float:
    """ε of fp32 runs of one model that are known to be healthy: `headroom` times the largest |Δlogit|, or the floor of rounding.

    Raises ValueError without any. Where one of them may be sick itself, use :func:`bound`.
    """
    healthy = list(healthy)
    if not healthy:
        raise ValueError("noise_bound: no healthy run to measure; run at least one healthy arm first")
    largest = max(difference.delta for difference in healthy)
    if not largest < float("inf"):
        raise ValueError("noise_bound: a healthy run has a logit that is no finite number; find out why first")
    return max(headroom * largest, floor(max(difference.size for difference in healthy)))


# ---- the family -------------------------------------------------------------------------------------------------------------------


def audit(steps: Sequence[Step]) -> str | None:
    """The family a run's own log points to, None if the log is in order.

    The log says what was really passed to the model (:class:`Step`), so it can be held against what a request of its length must
    be given: nothing held before it, its own tokens and no others visible, position own − 1.
    """
    for step in steps:
        if step.held or step.beyond:
            return "foreign state"
        if step.visible != step.own:
            return "mask"
        if step.position != step.own - 1:
            return "position"
    return None


def possible(onset: int, steps: Sequence[Step] = ()) -> tuple[str, ...]:
    """The families that remain, likeliest first.

    A log that is out of order names one. A log in order rules out what it records: what is left is in the K/V itself. Without a log
    the onset alone decides little: a fault from the first token on was there at prefill; one that begins later came with a cached step,
    and may be any, for a window fills and a buffer is read past its end only then.
    """
    named = audit(steps) if steps else None
    if named:
        return (named,)
    if steps:
        return ("foreign state", "own state altered", "mask", "position")
    if onset == 0:
        return ("foreign state", "mask", "position", "own state altered")
    return ("position", "foreign state", "mask", "own state altered")


# ---- the verdict ------------------------------------------------------------------------------------------------------------------


def judge(
    difference: Difference,
    epsilon: float,
    *,
    steps: Sequence[Step] = (),
    replay: tuple[Difference, float] | None = None,
) -> Verdict:
    """The verdict on a run, from its difference to a reference and ε.

    steps    the run's log: names the family
    replay   (difference, ε) of the same run replayed in fp32: asked only when the first pass finds no fault

    Noise: every |Δ| within ε and no flip at a margin beyond 2ε. State fault: a |Δ| beyond `BEYOND` ε, or a flip at a margin beyond
    twice that. Unclear: what lies between, and runs of tokens only in which nothing flips wide.
    """
    for limit in (epsilon, *(replay[1:] if replay else ())):
        if not 0 <= limit < float("inf"):
            raise ValueError(f"judge: epsilon is {limit}; measure it with noise_bound on healthy runs")
    replayed, seen, limit = False, difference, epsilon
    kind = _kind(seen, limit)
    if kind != "state fault" and replay is not None:
        (seen, limit), replayed = replay, True
        kind = _kind(seen, limit)
    if kind == "noise":
        kind = "identical" if difference.delta == 0 and difference.first is None else "noise"
        sentence = _quiet(kind, difference, epsilon, replayed)
        return Verdict(kind, None, epsilon, difference.delta, difference.margin, difference.first, replayed, sentence)
    if kind == "unclear":
        sentence = _unclear(seen, limit, replayed)
        return Verdict(kind, None, limit, seen.delta, seen.margin, seen.first, replayed, sentence)
    onset = seen.onset(BEYOND * limit)
    onset = seen.first if onset is None else min(onset, seen.onset(limit))
    likely = possible(onset, steps)
    sentence = _fault(seen, limit, onset, likely, replayed)
    return Verdict(kind, likely[0], limit, seen.delta, seen.margin, onset, replayed, sentence, likely)


def _kind(difference: Difference, epsilon: float) -> str:
    def exceeds(limit: float) -> bool:
        wide_flip = difference.margin is not None and not difference.margin <= 2 * limit
        return not difference.delta <= limit or wide_flip

    if exceeds(BEYOND * epsilon):
        return "state fault"
    return "unclear" if exceeds(epsilon) or difference.kind == "tokens" else "noise"


def _quiet(kind: str, difference: Difference, epsilon: float, replayed: bool) -> str:
    if kind == "identical":
        return "Identical: every logit is the same to the last bit."
    flip = "no token differs"
    if difference.first is not None and difference.margin is not None:
        flip = f"token {difference.first} differs, at a margin of {difference.margin:.3g} (within 2ε)"
    elif difference.first is not None:
        flip = f"one run ends at token {difference.first}"
    again = "; replayed in fp32, it is noise there too" if replayed else ""
    return f"Noise: the largest |Δlogit| is {difference.delta:.3g}, within ε = {epsilon:.3g}; {flip}{again}."


def _unclear(difference: Difference, epsilon: float, replayed: bool) -> str:
    if difference.kind == "tokens":
        text = "no token differs" if difference.first is None else f"token {difference.first} differs"
        return (
            f"Unclear: there are tokens only, and {text}. A fault that flips no token cannot be seen so: "
            "record what the tokens were chosen from (kvlab.probe.Tap), or the log-probabilities."
        )
    flip = "" if difference.margin is None else f", token {difference.first} flips at a margin of {difference.margin:.3g}"
    remedy = (
        "measure more healthy arms (another batch, chunk, kernel, thread count), and a longer run"
        if replayed or epsilon < 0.01
        else "replay it in fp32, where noise and fault lie apart"
    )
    where = " when replayed in fp32" if replayed else ""
    return (
        f"Unclear{where}: |Δlogit| reaches {difference.delta:.3g}{flip}, between ε = {epsilon:.3g} and "
        f"{BEYOND:g}ε = {BEYOND * epsilon:.3g}. To know, {remedy}."
    )


def _fault(difference: Difference, epsilon: float, onset: int, likely: Sequence[str], replayed: bool) -> str:
    where = " when replayed in fp32" if replayed else ""
    margin = "" if difference.margin is None else f", and token {difference.first} flips at a margin of {difference.margin:.3g}"
    reach = f"|Δlogit| reaches {difference.delta:.3g}, ε is {epsilon:.3g}"
    if len(likely) == 1:
        family = f"By its log it is {likely[0]}: {FAMILIES[likely[0]]}."
    else:
        family = f"Several families are possible: {', '.join(likely)}. A log or a twin tells which."
    return f"State fault from token {onset} on{where}: {reach}{margin}. {family}"


# ---- many runs at once --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """A suspect's verdict, with the bound it was judged by and its difference from the reference."""

    verdict: Verdict
    bound: Bound
    difference: Difference

    def sentence(self) -> str:
        """The verdict and where ε comes from."""
        return f"{self.verdict.sentence} {self.bound.sentence()}"


def judge_runs(
    reference: Any,
    healthy: Mapping[str, Any],
    suspect: Any,
    *,
    dtype: str | None = None,
    layers: int | None = None,
    steps: Sequence[Step] = (),
) -> Judged:
    """Judge `suspect` against `reference`, with ε from the `healthy` runs: of run files, or of anything :func:`compare` takes.

    dtype, layers    by default what the reference's manifest says, else float32 and 1
    steps            the suspect's log; by default its own

    Raises ValueError, naming the run, for runs that cannot be compared.
    """
    manifest = getattr(reference, "manifest", None) or {}
    dtype, layers = dtype or manifest.get("dtype") or "float32", layers or manifest.get("layers") or 1
    if not steps:
        steps = [step if isinstance(step, Step) else Step(*step) for step in getattr(suspect, "steps", ())]
    found = compare(reference, suspect)
    arms = {}
    for name, run in healthy.items():
        try:
            arms[name] = _as_kind(compare(reference, run), reference, run, found.kind)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    limits = bound(arms, dtype=dtype, layers=layers)
    return Judged(judge(found, limits.epsilon, steps=steps), limits, found)


def _as_kind(difference: Difference, reference: Any, run: Any, kind: str) -> Difference:
    """The healthy difference in the kind the suspect is judged in: an ε of logits says nothing of log-probabilities.

    Of a suspect with the best few only, the whole vocabulary's ε is the bound.
    """
    if difference.kind == kind or kind == "tokens":
        return difference
    whole = kind.removeprefix("top ")
    if whole == "logprobs" and difference.kind == "logits":
        difference = compare(_LogProbs(reference), _LogProbs(run))
    if difference.kind == whole:
        return replace(difference, kind=kind)
    raise ValueError(f"it is compared in {difference.kind}, the suspect in {kind}: ε of one says nothing of the other")


class _LogProbs:
    """A run of logits, as log-probabilities."""

    def __init__(self, run: Any) -> None:
        self.prompt, self.tokens, self.kind, self.ids = run.prompt, run.tokens, "logprobs", None
        self.scores = log_softmax(scores(run)[1]).astype(np.float32)
