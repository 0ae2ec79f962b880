"""Checks: one module per lab, one :class:`Exercise` per exercise. A check says in words what an answer must do.

An exercise holds a right answer, cases, and the classic mistakes written out as code. When an answer is wrong, the mistake
that gives the same values on every case is named; if none does, the first case that fails is shown.
"""

from __future__ import annotations

import copy
import math
import os
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
            wanted = self._play(self.right, copy.deepcopy(case))
            given = copy.deepcopy(case)
            try:
                got = self._play(answer, given)
            except NotImplementedError:
                raise Unfinished(
                    f"{self._title} is not finished yet: write the body of {self.name} in the cell above, run that cell, "
                    "then run this one again."
                ) from None
            except LabStop:
                raise
            except Exception as error:
                raise self._wrong(answer, self._raised(error, case, wanted)) from error
            if not same(given, case):
                raise Wrong(f"{self._title}: {self.name} changed its arguments; leave them as they are and return a new value.")
            if not same(got, wanted):
                raise self._wrong(answer, self._differs(case, got, wanted))
            if isinstance(got, float) and isinstance(wanted, int):
                raise self._wrong(
                    answer,
                    f"For {_call(self.name, case)} it gave {got!r}. The value is right, but it is a float, and a whole number is "
                    f"asked for: {wanted}. / always gives a float, and so does // when one side is a float: use // on whole "
                    "numbers, or int(...) at the end.",
                )
        print(f"{self._title}: right, on {len(self.cases)} cases.")

    @property
    def _title(self) -> str:
        return f"Exercise {self.number} ({self.name})"

    def _play(self, function: Callable, case: tuple) -> Any:
        """What is judged: here, what the function returns."""
        return function(*case)

    def _outcome(self, function: Callable, case: tuple) -> Any:
        """What is judged of a function for a case, or the type of what it raises."""
        try:
            return self._play(function, copy.deepcopy(case))
        except Exception as error:
            return type(error)

    def _wrong(self, answer: Callable, otherwise: str) -> Wrong:
        """Says the first mistake that does as the answer does on every case, or else `otherwise`."""
        done = [self._outcome(answer, case) for case in self.cases]
        for mistake in self.mistakes:
            if all(same(got, self._outcome(mistake.code, case)) for got, case in zip(done, self.cases)):
                return Wrong(f"{self._title}: not yet. {mistake.says}")
        return Wrong(f"{self._title}: not yet. {otherwise}")

    def _raised(self, error: Exception, case: tuple, wanted: Any) -> str:
        return f"For {_call(self.name, case)} it raised {type(error).__name__}: {error}"

    def _differs(self, case: tuple, got: Any, wanted: Any) -> str:
        call = _call(self.name, case)
        if isinstance(got, dict) and isinstance(wanted, dict):  # only what differs, a line each
            keys = [key for key in {**wanted, **got} if not (key in got and key in wanted and same(got[key], wanted[key]))]
            lines = ("{}: got {}, should be {}".format(key, *_both(got.get(key), wanted.get(key))) for key in keys)
            return "\n  ".join((f"For {call}:", *lines))
        hint = " Nothing was returned: is there a return?" if got is None and wanted is not None else ""
        return "For {} it gave {}, and should give {}.{}".format(call, *_both(got, wanted), hint)


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
    return f"{name}({', '.join(_part(_text(argument)) for argument in case)})"


def _both(got: Any, wanted: Any) -> tuple[str, str]:
    """Two values that differ, as text; of a long one, the part where the difference begins."""
    a, b = _text(got), _text(wanted)
    if a == b:  # the difference is further behind than the digits shown
        a, b = _text(got, 9), _text(wanted, 9)
    at = len(os.path.commonprefix((a, b)))
    return _part(a, at), _part(b, at)


def _part(text: str, at: int = 0, longest: int = 320) -> str:
    """All of a text or, if it is long, half of `longest` characters, those around place `at` among them."""
    if len(text) <= longest:
        return text
    begin = max(0, at - longest // 4)
    end = begin + longest // 2
    return ("… " if begin else "") + text[begin:end] + (" …" if end < len(text) else "")


def _text(value: Any, digits: int = 4) -> str:
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        return f"tensor {tuple(value.shape)} {_rounded(value.tolist(), digits)}"
    if isinstance(value, type):
        return value.__name__
    return f"{value:.{digits}g}" if isinstance(value, float) else repr(value)


def _rounded(value: Any, digits: int) -> Any:
    if isinstance(value, list):
        return [_rounded(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value
