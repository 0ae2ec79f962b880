"""Checks of lab 3, the password, twice."""

from __future__ import annotations

import torch

from kvlab import compare
from kvlab.checks import Exercise, Mistake
from kvlab.runtime.decode import margins


def _logits(seed: int, steps: int = 4, vocab: int = 7) -> torch.Tensor:
    return torch.randn(steps, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def _last_difference(a, b):
    different = [i for i, (x, y) in enumerate(zip(a, b)) if x != y]
    return different[-1] if different else None


def _plus_one(a, b):
    first = compare.first_difference(a, b)
    return None if first is None else first + 1


FIRST_DIFFERENCE = Exercise(
    1,
    "first_difference",
    compare.first_difference,
    cases=(
        ([5, 6, 7], [5, 6, 7]),
        ([5, 6, 7], [5, 9, 8]),
        ([1, 6, 7], [2, 6, 7]),
        ([5, 6, 7], [5, 6]),
        ([5, 6], [5, 6, 7]),
        ([], [4]),
        ([], []),
        ([5, 6, 7, 8], [5, 6, 9, 8]),
        ([5, 5, 7], [5, 6, 7]),
        ([5, 6], [5, 6, 0]),
        ([9, 6, 7], [5, 6, 7]),
        ([5, 6, 7], [5, 7, 6]),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 9]),
        ([49000, 300], [int("49000"), 301]),  # equal ids that are not the same object
    ),
    mistakes=(
        Mistake("It counts from 1. Token positions in this course count from 0.", _plus_one),
        Mistake(
            "Runs that are equal should give None. A number such as -1 or the length looks like a position to whoever uses it.",
            lambda a, b: -1 if a == b else compare.first_difference(a, b),
        ),
        Mistake(
            "Runs that are equal should give None. A number such as -1 or the length looks like a position to whoever uses it.",
            lambda a, b: len(a) if a == b else compare.first_difference(a, b),
        ),
        Mistake(
            "One run may simply end earlier. zip() stops at the shorter one, so the difference in length goes unseen.",
            lambda a, b: next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None),
        ),
        Mistake("It gives the last difference. After the first one the two runs read different texts.", _last_difference),
        Mistake(
            "It counts how many tokens differ. Asked for is where the first one stands.",
            lambda a, b: sum(x != y for x, y in zip(a, b)),
        ),
        Mistake(
            "It gives the token, not its position.",
            lambda a, b: next((x for x, y in zip(a, b) if x != y), None),
        ),
    ),
)

MARGIN = Exercise(
    2,
    "margin",
    margins,
    cases=(
        (torch.tensor([[1.0, 4.0, 2.5]]),),
        (torch.tensor([[9.0, 1.0, 3.0], [0.0, -2.0, -1.0], [2.0, 2.0, 1.0]]),),
        (_logits(1),),
        (_logits(2, steps=1, vocab=50),),
    ),
    mistakes=(
        Mistake(
            "It compares probabilities. The rule of 2ε is about logits: softmax squeezes differences together.",
            lambda x: margins(x.softmax(-1)),
        ),
        Mistake("The sign is turned: top 1 minus top 2 is never negative.", lambda x: -margins(x)),
        Mistake(
            "It takes the first two columns. The two largest logits may stand anywhere in the vocabulary: sort or topk first.",
            lambda x: x[:, 0] - x[:, 1],
        ),
        Mistake(
            "It takes the distance to the mean. What can overtake the first choice is the second.",
            lambda x: x.max(-1).values - x.mean(-1),
        ),
        Mistake(
            "It works along the steps. The vocabulary is the last axis.",
            lambda x: x.sort(0, descending=True).values[0] - x.sort(0, descending=True).values[1],
        ),
        Mistake("It gives one number, the smallest. Asked for is the margin at every step.", lambda x: margins(x).min()),
        Mistake("It gives only the first step. Asked for is the margin at every step.", lambda x: margins(x)[0]),
        Mistake(
            "It takes top 1 minus the smallest logit. What can overtake the first choice is the second.",
            lambda x: x.amax(-1) - x.amin(-1),
        ),
    ),
)


def largest_delta(a: torch.Tensor, b: torch.Tensor, first: int | None) -> float:
    """Largest |Δlogit| over the steps both runs took in the same context: all up to and including `first`."""
    steps = min(len(a), len(b)) if first is None else min(first + 1, len(a), len(b))
    return float((a[:steps] - b[:steps]).abs().max())


def _pair(seed: int, first: int | None, wild: float = 40.0):
    """Two runs that differ a little up to `first`, wildly after it; the largest difference before it is negative."""
    a = _logits(seed)
    b = a + 0.01 * _logits(seed + 100)
    b[0, 3] = a[0, 3] + 0.4
    if first is not None:
        b[first, 2] = a[first, 2] + 0.9
        b[first + 1 :] += wild
    return a, b, first


def _planted(seed: int, first: int | None, row: int, column: int, size: float):
    """Two runs that differ most at one place."""
    a = _logits(seed)
    b = a + 0.01 * _logits(seed + 100)
    b[row, column] = a[row, column] + size
    if first is not None:
        b[first + 1 :] += 40.0
    return a, b, first


LARGEST_DELTA = Exercise(
    3,
    "largest_delta",
    largest_delta,
    cases=(
        _pair(11, None),
        _pair(12, 2),
        _pair(13, 0),
        _pair(14, 1),
        (_logits(5), _logits(5), None),
        _planted(21, None, 3, 6, -1.5),
        _planted(22, None, 2, 5, 1.5),
        _planted(23, 2, 1, 6, -1.3),
        _planted(24, 2, 0, 5, 1.3),
    ),
    mistakes=(
        Mistake(
            "It goes past the first differing token. From there on the runs continue different texts.",
            lambda a, b, first: float((a - b).abs().max()),
        ),
        Mistake(
            "It stops one step early. The step that chose the differing token still had the same context.",
            lambda a, b, first: float((a[:first] - b[:first]).abs().max()) if first != 0 else 0.0,
        ),
        Mistake(
            "It lets differences of opposite sign count as small: take the absolute value before the maximum.",
            lambda a, b, first: float((a - b)[: None if first is None else first + 1].max()),
        ),
        Mistake(
            "It takes the mean. A fault may move few logits far: ε bounds the largest.",
            lambda a, b, first: float((a - b)[: None if first is None else first + 1].abs().mean()),
        ),
        Mistake(
            "It looks only at the chosen token's logit. The runner-up moves too, and any token may.",
            lambda a, b, first: float((a.amax(-1) - b.amax(-1))[: None if first is None else first + 1].abs().max()),
        ),
    ),
)


def verdict(delta: float | None, margin: float | None, epsilon: float) -> str:
    """ "state fault" or "noise", by the rule of `kvlab.compare`. `delta` None: only tokens are known; `margin` None: no flip."""
    beyond = delta is not None and not delta <= epsilon  # so that a delta that is no number is a fault
    wide_flip = margin is not None and margin > 2 * epsilon
    return "state fault" if beyond or wide_flip else "noise"


def _says(fault: bool) -> str:
    return "state fault" if fault else "noise"


VERDICT = Exercise(
    4,
    "verdict",
    verdict,
    cases=(
        (0.00003, None, 0.0001),
        (5.0, None, 0.0001),
        (5.0, 2.0, 0.0001),
        (0.6, 0.9, 1.0),
        (0.6, 1.5, 1.0),
        (None, 1.5, 1.0),
        (None, 2.5, 1.0),
        (None, None, 1.0),
        (1.4, 1.2, 1.0),
        (0.0, None, 0.0),
        (3.0, None, 2.0),
        (1.5, 7.0, 2.0),
        (0.00005, 0.0003, 0.0001),
        (0.5, 1.9, 1.0),
        (0.5, 2.1, 1.0),
        (0.5, 2.0, 1.0),
        (1.05, None, 1.0),
        (0.95, None, 1.0),
        (1.1, 1.5, 1.0),
    ),
    mistakes=(
        Mistake(
            "A flip at a margin between ε and 2ε is still noise: each of the two logits may move by ε, towards each other.",
            lambda d, m, e: _says((d is not None and d > e) or (m is not None and m > e)),
        ),
        Mistake(
            "It waits for a token to flip. A foreign block can move logits far and leave the first choice where it was.",
            lambda d, m, e: _says(m is not None and m > 2 * e),
        ),
        Mistake(
            "It looks at no margin. A server that gives tokens only still betrays a fault, by a flip at a wide margin.",
            lambda d, m, e: _says(d is not None and d > e),
        ),
        Mistake(
            "It calls every flip a fault. Where two tokens are nearly tied, honest rounding may choose the other one.",
            lambda d, m, e: _says((d is not None and d > e) or m is not None),
        ),
        Mistake(
            "It asks for both signs at once. One is enough: a large difference, or a flip at a wide margin.",
            lambda d, m, e: _says(d is not None and d > e and m is not None and m > 2 * e),
        ),
        Mistake(
            "It fails when delta is None: that is a server which gives tokens and no logits. Then the margin alone decides.",
            lambda d, m, e: _says(d > e or (m is not None and m > 2 * e)),
        ),
        Mistake(
            "It fails when margin is None: that is a run in which no token flipped.",
            lambda d, m, e: _says((d is not None and d > e) or m > 2 * e),
        ),
    ),
)

EXERCISES = (FIRST_DIFFERENCE, MARGIN, LARGEST_DELTA, VERDICT)
