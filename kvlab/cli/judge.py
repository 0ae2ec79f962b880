"""`kvlab judge`: the verdict on run files, whoever wrote them. It needs numpy and no engine."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict

from kvlab.cli.grammar import command
from kvlab.errors import UsageError

EXIT = {"identical": 0, "noise": 0, "state fault": 3, "unclear": 4}


def add(commands) -> None:
    """Enter the command."""
    made = command(commands, "judge", _judge, "judge a run that another process has written: noise, unclear, or state fault")
    made.add_argument(
        "reference", metavar="REFERENCE", help="the plainest run: no cache, alone (kvlab/probe.py writes the files)"
    )
    made.add_argument(
        "healthy", metavar="HEALTHY", nargs="*", help="runs that must not matter: in pieces, in a batch; they measure ε"
    )
    made.add_argument("suspect", metavar="SUSPECT", help="the run on trial")
    made.add_argument("--json", action="store_true", help="print all that was found as JSON")


def _judge(arguments: argparse.Namespace) -> int:
    return main(arguments.reference, arguments.healthy, arguments.suspect, as_json=arguments.json)


def main(reference: str, healthy: Sequence[str], suspect: str, *, as_json: bool = False) -> int:
    """Print the verdict on `suspect`. Returns the exit code: 0 noise, 3 state fault, 4 unclear.

    Raises UsageError for files that are missing, damaged, or cannot be compared.
    """
    from kvlab import compare, probe

    remedy = "`kvlab/probe.py` says what a run file holds."
    if not healthy:
        raise UsageError("judge needs a reference, at least one healthy run, and the suspect.", remedy)
    real = [os.path.realpath(path) for path in (reference, *healthy, suspect)]
    twice = next((path for n, path in enumerate(real) if path in real[:n]), None)
    if twice is not None:
        raise UsageError(f"{twice} is named twice; a run has one role.", remedy)
    try:
        first, last = probe.load(reference), probe.load(suspect)
        arms = {name: probe.load(path) for name, path in zip(_names(healthy), healthy, strict=True)}
        found = compare.judge_runs(first, arms, last)
    except ValueError as error:
        raise UsageError(f"{str(error).rstrip('.')}.", remedy) from None
    if as_json:
        told = {"verdict": asdict(found.verdict), "bound": asdict(found.bound), "difference": asdict(found.difference)}
        print(json.dumps(_plain(told), ensure_ascii=False, indent=1))
    else:
        print(found.verdict.sentence)
        print(found.bound.sentence())
    return EXIT[found.verdict.kind]


def _names(paths: Sequence[str]) -> list[str]:
    """The files' names where they differ, else the paths."""
    names = [os.path.basename(path) for path in paths]
    return names if len(set(names)) == len(names) else list(paths)


def _plain(value):
    """JSON has no infinity: where a number is none it is said in words."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return str(value)
    return value
