"""`kvlab twin`: name a state fault by a healthy run with one hypothesis applied. It needs the model, and run files of any engine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from kvlab.cli.grammar import command
from kvlab.cli.judge import _names, _plain
from kvlab.errors import UsageError

EXIT = {"named": 0, "nothing to explain": 0, "none": 3, "several": 4, "unclear": 4, "no number": 4}


def add(commands) -> None:
    """Enter the command."""
    made = command(commands, "twin", _twin, "name a state fault: the hypothesis whose healthy run meets the suspect's logits")
    made.add_argument("reference", metavar="REFERENCE", help="a healthy run of the prompt (kvlab/probe.py writes the files)")
    made.add_argument("suspect", metavar="SUSPECT", help="the run to explain")
    made.add_argument("healthy", metavar="HEALTHY", nargs="*", help="runs that measure ε (default: the model's own, in pieces)")
    made.add_argument(
        "--others", metavar="FILE", nargs="+", default=[], help="runs of other requests, where foreign state may come from"
    )
    made.add_argument("--model", metavar="NAME", help="bundled name, Hugging Face id or folder (default: KVLAB_MODEL)")
    made.add_argument("--device", help="cuda, mps or cpu (default: KVLAB_DEVICE, else the best there is)")
    made.add_argument("--first", action="store_true", help="stop at the first that meets; a second one is then not seen")
    made.add_argument("--json", action="store_true", help="print all that was found as JSON")


def _twin(arguments: argparse.Namespace) -> int:
    options = {name: getattr(arguments, name) for name in ("others", "model", "device", "first")}
    return main(arguments.reference, arguments.suspect, arguments.healthy, **options, as_json=arguments.json)


def main(
    reference: str,
    suspect: str,
    healthy: Sequence[str] = (),
    *,
    others: Sequence[str] = (),
    model: str | None = None,
    device: str | None = None,
    first: bool = False,
    as_json: bool = False,
) -> int:
    """Print what the search found. Returns the exit code: 0 named, or nothing to explain; 3 none of mine; 4 it stays open.

    Without `healthy` runs the model's own, in pieces, measure ε against the reference.
    Raises UsageError for files that are missing, damaged, or of another prompt or model.
    """
    from kvlab import compare, probe, twin
    from kvlab.runtime import load

    try:
        right, wrong = probe.load(reference), probe.load(suspect)
        arms = {name: probe.load(path) for name, path in zip(_names(healthy), healthy, strict=True)}
        beside = [probe.load(path) for path in others]
        for name, run in (("REFERENCE", right), ("SUSPECT", wrong)):
            if run.kind == "tokens":
                raise ValueError(f"{name}: it has tokens only; a twin is compared by logits: record them (kvlab.probe.Tap)")
        if right.prompt != wrong.prompt:
            raise ValueError("SUSPECT: its prompt is not REFERENCE's; only runs of one prompt can be compared")
    except ValueError as error:
        raise UsageError(f"{str(error).rstrip('.')}.", "`kvlab/probe.py` says what a run file holds.") from None
    loaded = load(model, device=device, dtype="float32")
    try:
        differences = {name: compare.compare(right, run) for name, run in arms.items()} or twin.own_arms(loaded, right)
        limits = compare.bound(differences, dtype="float32", layers=loaded.spec.layers)
        found = twin.search(
            loaded,
            right,
            wrong,
            limits.epsilon,
            others=[run.prompt + run.tokens for run in beside],
            first=first,
        )
    except ValueError as error:
        remedy = "--model NAME names the model that made the runs; `kvlab twin --help` says the rest."
        raise UsageError(f"{str(error).rstrip('.')}.", remedy) from None
    if as_json:
        told = {field: value for field, value in vars(found).items() if field not in ("met", "tried", "neighbours")}
        told |= {"met": [asdict(one) for one in found.met], "tried": [asdict(one) for one in found.tried]}
        told["neighbours"] = [[name, number, miss] for (name, number), miss in found.neighbours.items()]
        print(json.dumps(_plain(told | {"bound": asdict(limits)}), ensure_ascii=False, indent=1))
        return EXIT[found.kind]
    print(found.sentence)
    print(limits.sentence())
    for one in found.tried:
        print(f"  {one.hypothesis:24} {'meets' if one in found.met else 'misses':6} {one.miss:9.2g}  {one.sentence}")
    for name, why in found.left_out.items():
        print(f"  {name:24} {'-':>16}  {why}")
    print(f"{found.runs} forwards, {found.seconds:.0f} s")
    return EXIT[found.kind]
