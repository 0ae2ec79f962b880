"""`kvlab zoo`: the faults, listed, told, or played on the model."""

import argparse
import sys

from kvlab.cli.grammar import command, group
from kvlab.errors import UsageError


def add(commands) -> None:
    """Enter the commands."""
    zoo = group(commands, "zoo", "list the faults, show one, or run them on the model")
    command(zoo, "list", _list, "list the faults by what a user sees")
    command(zoo, "show", _show, "all there is to say of a fault").add_argument("fault", metavar="NAME")
    made = command(zoo, "run", _run, "play a fault, off and on, and say what the detectors say")
    made.add_argument("fault", metavar="NAME|all")
    made.add_argument("--model", metavar="NAME", help="bundled name, Hugging Face id or folder (default: KVLAB_MODEL)")
    made.add_argument("--device", help="cuda, mps or cpu (default: KVLAB_DEVICE, else the best there is)")


def _fault(name: str):
    from kvlab.faults import ZOO

    if name not in ZOO:
        raise UsageError(f"there is no fault {name!r}.", f"There are: {', '.join(sorted(ZOO))}.")
    return ZOO[name]


def _list(arguments: argparse.Namespace) -> None:
    from kvlab.faults import ZOO

    for entry in ZOO.values():
        print(f"{entry.name:27} {entry.family:14} {entry.symptom}")


def _show(arguments: argparse.Namespace) -> None:
    from kvlab.show import zoo

    print(zoo.text(_fault(arguments.fault)))


def _run(arguments: argparse.Namespace) -> int:
    from kvlab.experiments import zoo
    from kvlab.faults import ZOO
    from kvlab.runtime import load
    from kvlab.show.zoo import outcome_table

    names = list(ZOO) if arguments.fault == "all" else [_fault(arguments.fault).name]
    loaded = load(arguments.model, device=arguments.device, dtype="float32")
    outcomes = zoo.play_all(loaded, [name for name in names if name in zoo.SCENES])
    print(outcome_table(outcomes))
    wrong = zoo.failures(outcomes, names)
    for sentence in wrong:
        print(f"kvlab: {sentence}", file=sys.stderr)
    return 1 if wrong else 0
