"""Two runs side by side: where they first differ, by how much, and the verdict noise or state fault.

The rule. A healthy variation of a run (cached or not, in chunks, batched, another kernel) moves a logit by at most ε, a bound
that is measured for a model, dtype and machine (:func:`noise_bound`), never assumed. Two logits that each move by at most ε can
change places only if they were less than 2ε apart. So a difference beyond ε, or a flip at a margin beyond 2ε, is not noise:
the run read a state that was not its own, or read its own at the wrong place. ε of a 16-bit dtype is large and may hide a
small fault; then the run is replayed in fp32, where the two kinds lie orders of magnitude apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvlab.runtime.decode import Step, Trace, margins

HEADROOM = 2.0  # ε is this many times the largest healthy difference seen in calibration


@dataclass(frozen=True)
class Difference:
    """How `other` differs from a reference run. Steps after the first differing token have another context: not compared.

    first     step of the first differing token, None if there is none
    margin    the reference's top-1/top-2 margin at `first`; None if there is none
    deltas    max |Δlogit| over the vocabulary at each compared step, 0..first
    kl        max over the compared steps of KL(reference ‖ other), nats
    """

    first: int | None
    margin: float | None
    deltas: tuple[float, ...]
    kl: float

    @property
    def delta(self) -> float:
        """The largest |Δlogit| of the compared steps."""
        return max((float("inf") if delta != delta else delta for delta in self.deltas), default=0.0)

    def onset(self, epsilon: float) -> int | None:
        """The first step whose |Δlogit| exceeds `epsilon`."""
        return next((step for step, delta in enumerate(self.deltas) if not delta <= epsilon), None)


@dataclass(frozen=True)
class Verdict:
    """`kind` is "identical", "noise" or "state fault"; `family`, for a fault, what it most likely is (see FAMILIES)."""

    kind: str
    family: str | None
    epsilon: float
    delta: float
    margin: float | None
    step: int | None
    replayed: bool
    sentence: str


FAMILIES = {
    "foreign state": "the request could read keys and values that another request wrote",
    "mask": "the request could read padding, or could not read its own tokens",
    "position": "a token was fed at a position that is not its place in the request",
}


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs; the shorter length if one is a prefix of the other; None if they are equal."""
    for index, (left, right) in enumerate(zip(a, b)):
        if left != right:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def compare(reference: Trace, other: Trace) -> Difference:
    """Compare two runs of the same prompt. Raises ValueError when the prompts or the vocabularies differ."""
    if reference.prompt != other.prompt:
        raise ValueError("compare: the two runs have different prompts; only runs of one prompt can be compared")
    if reference.logits.shape[-1] != other.logits.shape[-1]:
        raise ValueError("compare: the two runs have different vocabularies; they come from different models")
    if not reference.tokens or not other.tokens:
        raise ValueError("compare: a run has no tokens; decode at least one step")
    if len(reference.logits) < len(reference.tokens) or len(other.logits) < len(other.tokens):
        raise ValueError("compare: a run has fewer rows of logits than tokens; give the logits of every step")
    first = first_difference(reference.tokens, other.tokens)
    steps = (
        min(len(reference.tokens), len(other.tokens))
        if first is None
        else min(first + 1, len(reference.tokens), len(other.tokens))
    )
    left, right = reference.logits[:steps].float(), other.logits[:steps].float()
    deltas = (left - right).abs().masked_fill(left == right, 0.0).amax(-1)  # −∞ on both sides is no difference
    deltas = deltas.nan_to_num(nan=float("inf"))
    log_p, log_q = left.log_softmax(-1), right.log_softmax(-1)
    gain = (log_p - log_q).masked_fill(log_p == log_q, 0.0)  # here too
    kl = (log_p.exp() * gain).sum(-1).clamp(min=0).nan_to_num(nan=float("inf")).max()
    has_margin = first is not None and first < steps
    return Difference(first, float(margins(left)[first]) if has_margin else None, tuple(deltas.tolist()), float(kl))


def noise_bound(healthy: Iterable[Difference], headroom: float = HEADROOM) -> float:
    """ε: `headroom` times the largest |Δlogit| of healthy runs against their reference. Raises ValueError without any."""
    largest = [difference.delta for difference in healthy]
    if not largest:
        raise ValueError("noise_bound: no healthy run to measure; run at least one healthy arm first")
    if not max(largest) < float("inf"):
        raise ValueError("noise_bound: a healthy run has a logit that is no finite number; find out why first")
    return headroom * max(largest)


def audit(steps: Sequence[Step]) -> str | None:
    """The family a run's own log points to, None if the log is in order.

    The log says what was really passed to the model (:class:`~kvlab.runtime.decode.Step`), so it can be held against what
    a request of its length must be given: nothing held before it, its own tokens and no others visible, position own − 1.
    """
    for step in steps:
        if step.held or step.beyond:
            return "foreign state"
        if step.visible != step.own:
            return "mask"
        if step.position != step.own - 1:
            return "position"
    return None


def family_by_onset(onset: int) -> tuple[str, ...]:
    """Without a log: a fault from the first token on was there at prefill; one that begins later came with a cached step."""
    return ("foreign state", "mask") if onset == 0 else ("position", "foreign state")


def judge(
    difference: Difference,
    epsilon: float,
    *,
    steps: Sequence[Step] = (),
    replay: tuple[Difference, float] | None = None,
) -> Verdict:
    """The verdict on a run, from its difference to a reference and ε.

    steps    the run's log: names the family
    replay   (difference, ε) of the same run replayed in fp32: asked only when the first pass says noise
    """
    for bound in (epsilon, *(replay[1:] if replay else ())):
        if not 0 <= bound < float("inf"):
            raise ValueError(f"judge: epsilon is {bound}; measure it with noise_bound on healthy runs")
    replayed = False
    seen, bound = difference, epsilon
    if not _is_fault(seen, bound) and replay is not None:
        (seen, bound), replayed = replay, True
    if not _is_fault(seen, bound):
        kind = "identical" if difference.delta == 0 and difference.first is None else "noise"
        return Verdict(
            kind,
            None,
            epsilon,
            difference.delta,
            difference.margin,
            difference.first,
            replayed,
            _quiet(kind, difference, epsilon, replayed),
        )
    onset = seen.onset(bound)
    onset = seen.first if onset is None else onset
    family = audit(steps) if steps else None
    likely = [family] if family else list(family_by_onset(onset))
    return Verdict(
        "state fault",
        likely[0],
        bound,
        seen.delta,
        seen.margin,
        onset,
        replayed,
        _fault(seen, bound, onset, likely, replayed),
    )


def _is_fault(difference: Difference, epsilon: float) -> bool:
    wide_flip = difference.margin is not None and not difference.margin <= 2 * epsilon
    return not difference.delta <= epsilon or wide_flip


def _quiet(kind: str, difference: Difference, epsilon: float, replayed: bool) -> str:
    if kind == "identical":
        return "Identical: every logit is the same to the last bit."
    flip = "no token differs"
    if difference.first is not None and difference.margin is not None:
        flip = f"token {difference.first} differs, at a margin of {difference.margin:.3g} (within 2ε)"
    elif difference.first is not None:
        flip = f"one run ends at token {difference.first}"
    return f"Noise: the largest |Δlogit| is {difference.delta:.3g}, within ε = {epsilon:.3g}; {flip}{'; replayed in fp32, it is noise there too' if replayed else ''}."


def _fault(difference: Difference, epsilon: float, onset: int, likely: list[str], replayed: bool) -> str:
    where = " when replayed in fp32" if replayed else ""
    margin = "" if difference.margin is None else f", and token {difference.first} flips at a margin of {difference.margin:.3g}"
    reasons = "; or ".join(f"{name}: {FAMILIES[name]}" for name in likely)
    reach = f"|Δlogit| reaches {difference.delta:.3g}, ε is {epsilon:.3g}"
    return f"State fault from token {onset} on{where}: {reach}{margin}. Most likely {reasons}."
