"""The zoo as such: what a fault is, the list of all, and the switch."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One fault.

    name        how it is switched on
    breaks      the mechanism it replaces, `module:function`
    broken      the replacement
    symptom     what a user sees
    mechanism   what is wrong, in one sentence
    family      what the verdict should call it: "foreign state", "mask", "position" or "own state altered"; or, where no verdict
                on logits can see it, "accounting", "token ids" or "sampling"
    detector    what catches it, and stays quiet without it
    fix         what the right code does
    cases       public reports of its kind, `owner/repository#number`
    claims      ids of the claims it bears on
    """

    name: str
    breaks: str
    broken: Callable
    symptom: str
    mechanism: str
    family: str
    detector: str
    fix: str
    cases: tuple[str, ...]
    claims: tuple[str, ...]


ZOO: dict[str, Fault] = {}


def add(entry: Fault) -> None:
    """Enter a fault into the zoo. Raises ValueError for a name that is taken."""
    if entry.name in ZOO:
        raise ValueError(f"fault {entry.name!r} is in the zoo already")
    ZOO[entry.name] = entry


@contextlib.contextmanager
def fault(name: str | None) -> Iterator[Fault | None]:
    """Run with a fault switched on. `None` switches nothing on. Raises KeyError for a name that is not in the zoo."""
    if name is None:
        yield None
        return
    if name not in ZOO:
        raise KeyError(f"no fault named {name!r}; the zoo has: {', '.join(sorted(ZOO))}")
    entry = ZOO[name]
    module_name, attribute = entry.breaks.split(":")
    owner = importlib.import_module(module_name)
    *path, attribute = attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    right = owner.__dict__[attribute]
    setattr(owner, attribute, entry.broken)
    try:
        yield entry
    finally:
        setattr(owner, attribute, right)
