"""Checks of lab 13, caught in released software."""

from __future__ import annotations

from kvlab.checks import Exercise, Mistake


def epsilon(healthy: dict[str, float], floor: float, ceiling: float) -> float | None:
    """ε from the largest |Δlogit| of each healthy arm, by name: twice the largest that is no more than `ceiling`, at least `floor`.

    None where no arm can be believed. The rule of `kvlab.compare.bound`, less its comparison of the arms with each other.
    """
    believed = [delta for delta in healthy.values() if delta <= ceiling]
    return max(floor, 2 * max(believed)) if believed else None


def _always(healthy, floor, ceiling, rule):
    believed = [delta for delta in healthy.values() if delta <= ceiling]
    return rule(believed, healthy) if believed else None


EPSILON = Exercise(
    1,
    "epsilon",
    epsilon,
    cases=(
        ({"rows2": 0.0, "behind": 2.1e-5}, 1.0e-5, 1.0e-3),
        ({"rows2": 0.0, "rows7": 0.0}, 1.4e-4, 1.4e-2),
        ({"rows2": 3.0e-6, "behind": 4.78, "float64": 6.0e-6}, 1.0e-6, 5.0e-4),
        ({"behind": 0.167}, 5.0e-6, 5.0e-4),
        ({"rows2": 1.0e-6, "threads": 8.0e-6, "float64": 5.0e-6}, 1.0e-6, 1.0e-4),
        ({"rows2": 1.0e-6, "float64": 4.0e-6}, 7.0e-6, 1.0e-4),
        ({"behind": 0.2, "float64": 3.0e-6}, 8.0e-6, 4.0e-4),
        ({"rows2": 9.0e-5, "float64": 2.0e-5}, 1.0e-5, 1.0e-4),
        ({"behind": 3.0, "rows7": 0.9}, 1.0e-5, 1.0e-3),
    ),
    mistakes=(
        Mistake(
            "The floor is left out. Two healthy runs can be identical to the last bit; then ε would be 0 and the next rounding a fault.",
            lambda h, low, high: _always(h, low, high, lambda ok, _: 2 * max(ok)),
        ),
        Mistake(
            "It believes every arm. One that is sick itself raises ε unseen, and a real fault passes as noise: leave out what lies "
            "above the ceiling.",
            lambda h, low, high: max(low, 2 * max(h.values())),
        ),
        Mistake(
            "A sick arm is to be left out, not cut to the ceiling: the ceiling is no measurement.",
            lambda h, low, high: _always(h, low, high, lambda _, every: max(low, 2 * min(high, max(every.values())))),
        ),
        Mistake(
            "It takes the largest difference itself. Twice the largest: what was measured on a few arms is not yet the worst.",
            lambda h, low, high: _always(h, low, high, lambda ok, _: max(low, max(ok))),
        ),
        Mistake(
            "It takes the mean of the arms. ε bounds the farthest that rounding goes.",
            lambda h, low, high: _always(h, low, high, lambda ok, _: max(low, 2 * sum(ok) / len(ok))),
        ),
        Mistake(
            "Where no arm can be believed it gives the floor. Nothing was measured then: give None.",
            lambda h, low, high: max([low, *(2 * delta for delta in h.values() if delta <= high)]),
        ),
        Mistake(
            "It doubles before it looks at the ceiling. The ceiling is about what an arm differs by.",
            lambda h, low, high: (
                max([low, *(2 * d for d in h.values() if 2 * d <= high)]) if any(2 * d <= high for d in h.values()) else None
            ),
        ),
    ),
)

UNCLEAR = 2.0  # from ε to this many times ε the verdict is unclear


def verdict(delta: float, margin: float | None, epsilon: float) -> str:
    """ "noise", "unclear" or "state fault", by the rule of `kvlab.compare`. `margin` of the first token that flips; None if none does."""
    if delta > UNCLEAR * epsilon or (margin is not None and margin > 2 * UNCLEAR * epsilon):
        return "state fault"
    if delta > epsilon or (margin is not None and margin > 2 * epsilon):
        return "unclear"
    return "noise"


def _two_answers(delta, margin, epsilon):
    said = verdict(delta, margin, epsilon)
    return "state fault" if said == "unclear" else said


def _ruled(delta, margin, epsilon, flip_noise: float, flip_fault: float):
    if delta > UNCLEAR * epsilon or (margin is not None and margin > flip_fault * epsilon):
        return "state fault"
    return "unclear" if delta > epsilon or (margin is not None and margin > flip_noise * epsilon) else "noise"


VERDICT = Exercise(
    2,
    "verdict",
    verdict,
    cases=(
        (6.6, None, 1.0e-4),
        (4.0e-5, None, 1.0e-4),
        (1.5e-4, None, 1.0e-4),
        (1.9, None, 1.0),
        (2.1, None, 1.0),
        (0.9, 1.5, 1.0),
        (0.9, 2.5, 1.0),
        (0.9, 3.9, 1.0),
        (0.9, 4.1, 1.0),
        (1.5, 1.0, 1.0),
        (5.0, 1.0, 1.0),
        (1.5, 9.0, 1.0),
        (0.0, None, 1.0e-6),
        (1.0, None, 1.0),
        (0.5, 1.1, 1.0),
        (0.5, 5.0, 1.0),
    ),
    mistakes=(
        Mistake(
            "There is a third answer. Between ε and 2ε a larger rounding than any you measured is as likely as a small fault: unclear.",
            _two_answers,
        ),
        Mistake(
            "What is unclear is not cleared: between ε and 2ε it says noise.",
            lambda d, m, e: "noise" if verdict(d, m, e) == "unclear" else verdict(d, m, e),
        ),
        Mistake(
            "It looks at the tokens only. Here not one of them changed: the logits decide.",
            lambda d, m, e: "noise" if m is None else verdict(0.0, m, e),
        ),
        Mistake(
            "It does not look at the margin. A flip where the model was sure is no rounding.",
            lambda d, m, e: verdict(d, None, e),
        ),
        Mistake(
            "For a flip the bounds are twice as wide, 2ε and 4ε: two logits move, towards each other.",
            lambda d, m, e: _ruled(d, m, e, 1.0, UNCLEAR),
        ),
        Mistake(
            "A flip beyond 2ε is not at once a fault: up to 4ε it is unclear.",
            lambda d, m, e: _ruled(d, m, e, 2.0, 2.0),
        ),
        Mistake(
            "It fails when margin is None: that is a run in which no token flipped.",
            lambda d, m, e: _ruled(d, m + 0.0, e, 2.0, 2 * UNCLEAR),
        ),
    ),
)


def begins(deltas: list[float], epsilon: float) -> int | None:
    """The first step, from 0, whose |Δlogit| exceeds ε; None if none does."""
    return next((step for step, delta in enumerate(deltas) if delta > epsilon), None)


BEGINS = Exercise(
    3,
    "begins",
    begins,
    cases=(
        ([2.1e-5, 3.7, 6.6, 6.0], 1.4e-4),
        ([1.2, 0.3, 2.0], 1.0e-4),
        ([1.0e-6, 2.0e-6, 1.0e-6], 1.0e-5),
        ([1.0e-6, 1.0e-6, 1.0e-6, 1.0e-6, 0.9, 1.0e-6, 2.5], 1.0e-5),
        ([0.0], 1.0e-6),
        ([3.0e-6, 5.0e-6, 0.5], 4.0e-6),
        ([1.0e-6, 0.2, 0.0, 0.1], 1.0e-5),
    ),
    mistakes=(
        Mistake(
            "It counts from 1. Step 0 is the prefill; which of the two it is decides what remains possible.",
            lambda d, e: None if begins(d, e) is None else begins(d, e) + 1,
        ),
        Mistake(
            "It gives the step with the largest difference. Asked for is where it begins: the fault has been at work before.",
            lambda d, e: max(range(len(d)), key=lambda k: d[k]) if max(d) > e else None,
        ),
        Mistake("It gives the last step beyond ε.", lambda d, e: max((k for k, x in enumerate(d) if x > e), default=None)),
        Mistake("It counts the steps beyond ε. Asked for is where the first one stands.", lambda d, e: sum(x > e for x in d)),
        Mistake(
            "A run that stays within ε begins nowhere: give None. A number such as -1 or the length looks like a step.",
            lambda d, e: -1 if begins(d, e) is None else begins(d, e),
        ),
        Mistake(
            "A run that stays within ε begins nowhere: give None. A number such as -1 or the length looks like a step.",
            lambda d, e: len(d) if begins(d, e) is None else begins(d, e),
        ),
        Mistake("It gives the difference, not its step.", lambda d, e: next((x for x in d if x > e), None)),
    ),
)


def named_number(distances: dict[int, float], epsilon: float) -> int | None:
    """The number whose twin meets the suspect within ε, if it is the only one; else None.

    distances    number of the hypothesis → largest |Δlogit| between that twin and the suspect
    """
    fits = [number for number, delta in distances.items() if delta <= epsilon]
    return fits[0] if len(fits) == 1 else None


NAMED_NUMBER = Exercise(
    4,
    "named_number",
    named_number,
    cases=(
        ({45: 0.54, 46: 0.27, 47: 4.2e-5, 48: 0.27}, 1.4e-4),
        ({1: 3.1, 2: 2.2, 3: 0.9, 4: 1.4}, 1.4e-4),
        ({0: 1.0e-6, 1: 2.0e-6, 2: 0.4}, 1.0e-5),
        ({12: 0.5, 4: 2.0e-6, 8: 0.3}, 1.0e-5),
        ({60: 0.092, 61: 0.046, 62: 4.2e-6, 63: 0.046}, 6.8e-6),
        ({7: 0.02, 8: 0.011}, 1.0e-3),
        ({}, 1.0e-4),
        ({5: 1.0e-6}, 1.0e-5),
        ({9: 3.0e-6, 30: 1.0e-6, 31: 0.5}, 1.0e-5),
    ),
    mistakes=(
        Mistake(
            "The nearest twin is not yet a finding. Under a wrong hypothesis one number is nearest too: it must meet the suspect within ε.",
            lambda d, e: min(d, key=d.get, default=None),
        ),
        Mistake(
            "Where two numbers fit, the suspect does not tell them apart, and neither is a finding: give None.",
            lambda d, e: next((n for n, x in d.items() if x <= e), None),
        ),
        Mistake(
            "Where two numbers fit, the nearer one is still no finding: within ε both are rounding. Give None.",
            lambda d, e: min((n for n, x in d.items() if x <= e), key=d.get, default=None),
        ),
        Mistake(
            "It gives the place in the list, not the number.",
            lambda d, e: None if named_number(d, e) is None else list(d).index(named_number(d, e)),
        ),
        Mistake(
            "It gives the distance, not the number.",
            lambda d, e: None if named_number(d, e) is None else d[named_number(d, e)],
        ),
        Mistake(
            "A number that does not fit is no answer: give None, not 0 or -1, which may be a number that was tried.",
            lambda d, e: 0 if named_number(d, e) is None else named_number(d, e),
        ),
        Mistake(
            "A number that does not fit is no answer: give None, not 0 or -1, which may be a number that was tried.",
            lambda d, e: -1 if named_number(d, e) is None else named_number(d, e),
        ),
    ),
)

EXERCISES = (EPSILON, VERDICT, BEGINS, NAMED_NUMBER)
