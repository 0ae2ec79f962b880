"""Checks: one module per lab, one :class:`Exercise` per exercise. A check says in words what an answer must do.

An exercise holds a right answer, cases, and the classic mistakes written out as code. When an answer is wrong, the mistake
that gives the same values on every case is named; if none does, the first case that fails is shown.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


class LabStop(Exception):
    """Stops a lab with one sentence. In a notebook it is shown without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class Unfinished(LabStop):
    """An exercise that has not been written yet."""


class Wrong(LabStop):
    """An answer that does not do what it must; the message says what and, where it can, which mistake it looks like."""


@dataclass(frozen=True)
class Mistake:
    """A classic wrong answer, as code, and what to tell somebody who wrote it."""

    says: str
    code: Callable


@dataclass(frozen=True)
class Exercise:
    """One exercise. `cases` are argument tuples; `mistakes` are tried in order."""

    number: int
    name: str
    right: Callable
    cases: Sequence[tuple]
    mistakes: Sequence[Mistake] = ()

    def check(self, answer: Callable) -> None:
        """Print a line if `answer` is right. Raises Unfinished or Wrong otherwise; the arguments it was given are copies."""
        if not callable(answer):
            raise Wrong(f"{self._title}: the name {self.name} should be a function, it is {type(answer).__name__}.")
        for case in self.cases:
            wanted = self.right(*copy.deepcopy(case))
            given = copy.deepcopy(case)
            try:
                got = answer(*given)
            except NotImplementedError:
                raise Unfinished(
                    f"{self._title} is not finished yet: write the body of {self.name}, then run this cell again."
                ) from None
            except LabStop:
                raise
            except Exception as error:
                raised = f"For {_call(self.name, case)} it raised {type(error).__name__}: {error}"
                raise Wrong(f"{self._title}: not yet. {self._named(answer) or raised}") from error
            if not same(given, case):
                raise Wrong(f"{self._title}: {self.name} changed its arguments; leave them as they are and return a new value.")
            if not same(got, wanted):
                raise Wrong(self._explain(answer, case, got, wanted))
        print(f"{self._title}: right, on {len(self.cases)} cases.")

    @property
    def _title(self) -> str:
        return f"Exercise {self.number} ({self.name})"

    def _named(self, answer: Callable) -> str | None:
        """What to say about the first mistake that does as the answer does on every case."""
        for mistake in self.mistakes:
            if all(same(outcome(answer, case), outcome(mistake.code, case)) for case in self.cases):
                return mistake.says
        return None

    def _explain(self, answer: Callable, case: tuple, got: Any, wanted: Any) -> str:
        if says := self._named(answer):
            return f"{self._title}: not yet. {says}"
        hint = " Nothing was returned: is there a return?" if got is None and wanted is not None else ""
        return (
            f"{self._title}: not yet. For {_call(self.name, case)} it gave {_show(got)}, and should give {_show(wanted)}.{hint}"
        )


def outcome(function: Callable, case: tuple) -> Any:
    """What a function gives for a case: its value, or the type of what it raises."""
    try:
        return function(*copy.deepcopy(case))
    except Exception as error:
        return type(error)


def same(a: Any, b: Any) -> bool:
    """Equal in value: numbers within 1e-6 relative, tensors of one shape, containers item by item, None only with None."""
    if a is None or b is None or isinstance(a, str | type) or isinstance(b, str | type):
        return type(a) is type(b) and a == b
    if hasattr(a, "shape") or hasattr(b, "shape"):
        return _same_arrays(a, b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, bool) or isinstance(b, bool):
        return bool(a) == bool(b) and isinstance(a, bool) == isinstance(b, bool)
    try:
        return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
    except TypeError:
        return a == b


def _same_arrays(a: Any, b: Any) -> bool:
    import torch

    try:
        a, b = torch.as_tensor(a), torch.as_tensor(b)
    except (TypeError, ValueError, RuntimeError):
        return False
    if a.numel() == b.numel() == 1:  # a number and a one-element tensor may stand for each other
        a, b = a.reshape(()), b.reshape(())
    if a.shape != b.shape or (a.dtype == torch.bool) != (b.dtype == torch.bool):
        return False
    return bool(torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-6, equal_nan=True))


def _call(name: str, case: tuple) -> str:
    return f"{name}({', '.join(_show(argument) for argument in case)})"


def _show(value: Any) -> str:
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        value = f"tensor {tuple(value.shape)} {_rounded(value.tolist())}"
        return value if len(value) < 160 else value[:150] + " …"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = repr(value)
    return text if len(text) < 160 else text[:150] + " …"


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
