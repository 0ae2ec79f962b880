"""One answer: its share of the points, and what to say to who wrote it.

full     right on the notebook's cases and on the hidden ones
half     right on the notebook's cases, and on at least three quarters of the hidden ones: an edge was not thought of
nothing  otherwise. An answer made for the notebook's cases alone fails nearly all hidden ones.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvlab.checks import Exercise, LabStop, Unfinished
from kvlab.classroom import hidden
from kvlab.classroom.remote import DEFAULT, Limits, Remote, Stopped

ENOUGH = 0.75


@dataclass(frozen=True)
class Outcome:
    """`share` of the points (0, ½ or 1); `kind`: right, half, wrong, unfinished or stopped; `says`: a sentence or two."""

    share: float
    kind: str
    says: str


def find(lab: str, grade_id: str) -> Exercise:
    """The exercise of a check cell: ("05-blocks", "allocate-check") → `kvlab.checks.blocks.ALLOCATE`. Raises LookupError."""
    module, name = lab.partition("-")[2], grade_id.removesuffix("-check").upper()
    try:
        exercise = getattr(importlib.import_module(f"kvlab.checks.{module}"), name)
    except (ImportError, AttributeError):
        raise LookupError(f"there is no exercise {name} in kvlab.checks.{module} for the cell {grade_id} of {lab}") from None
    if not isinstance(exercise, Exercise):
        raise LookupError(f"kvlab.checks.{module}.{name} is not an Exercise")
    return exercise


def grade(lab: str, exercise: Exercise, cells: Sequence[tuple[str, bool]], secret: str, limits: Limits = DEFAULT) -> Outcome:
    """Judge the function `exercise.name` of a notebook.

    Args:
        lab: "05-blocks".
        cells: (source, whether it is this exercise's answer cell) of the code cells before the check, in order.
        secret: what the hidden cases are drawn from.
    """
    more = hidden.cases(lab, exercise, secret)
    samples = (*exercise.cases, *more[:1])
    with Remote(cells, exercise.name, samples=samples, lends=hidden.lends(lab), hide=exercise.right, limits=limits) as answer:
        return judge(exercise, more, answer)


def judge(exercise: Exercise, more: Sequence[tuple], answer: Callable) -> Outcome:
    """The outcome for a function: on the exercise's own cases, then on `more`."""
    title = f"Exercise {exercise.number} ({exercise.name})"
    if told := _refused(exercise, answer):
        kind = "unfinished" if isinstance(told, Unfinished) else "stopped" if isinstance(told, Stopped) else "wrong"
        return Outcome(0.0, kind, f"{title}: {told}" if kind == "stopped" else str(told))
    failed = [case for case in more if _refused(replace(exercise, cases=(case,), mistakes=()), answer)]
    if not failed:
        return Outcome(
            1.0, "right", f"{title}: right, on the notebook's {len(exercise.cases)} cases and on {len(more)} others."
        )
    says = f"{title}: right on the notebook's cases, wrong on {len(failed)} of {len(more)} others."
    told = _refused(replace(exercise, cases=tuple(more)), answer)
    named = next((mistake.says for mistake in exercise.mistakes if mistake.says in str(told)), "")
    half = 1 - len(failed) / len(more) >= ENOUGH
    advice = named or "Think of inputs that the notebook does not show." if half else "It does not compute what is asked for."
    return Outcome(0.5 if half else 0.0, "half" if half else "wrong", f"{says} {advice}")


def _refused(exercise: Exercise, answer: Callable) -> LabStop | None:
    """What the check says against the answer."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exercise.check(answer)
    except LabStop as told:
        return told
    except Exception as error:  # a value so strange that it cannot be compared
        return LabStop(
            f"Exercise {exercise.number} ({exercise.name}): what it gives cannot be compared ({type(error).__name__})."
        )
    return None
