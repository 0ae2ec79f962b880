"""The `kvlab` command, a module for each of its commands: `add` enters its options, and its function gets what was typed.

A command imports what it needs when it runs, so that `kvlab --help` is quick.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted; of `judge` also 3 state fault, 4 unclear; of `twin` also
3 none of its hypotheses, 4 not decided.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import kvlab
from kvlab.cli import doctor, judge, lab, ledger, model, run, share, twin, zoo
from kvlab.cli.grammar import COMMON
from kvlab.errors import KvlabError, UsageError

COMMANDS = (run, model, lab, ledger, share, judge, twin, zoo, doctor)  # as --help lists them
USAGE, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line. Returns the exit code; argparse itself leaves by SystemExit for --help and wrong usage."""
    arguments = parser().parse_args(argv)
    try:
        return arguments.command(arguments) or 0
    except KeyboardInterrupt:
        _complain("interrupted.", "Nothing is half-done: the same command starts again or goes on.")
        return INTERRUPTED
    except BrokenPipeError:  # `kvlab … | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if getattr(arguments, "debug", False):
            raise
        _complain(*_in_words(error))
        return USAGE if isinstance(error, UsageError) else 1


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    top = _Parser(
        prog="kvlab",
        description="Run a real model, share its KV cache well or badly, and tell noise, a wrong position or mask, and somebody else's state apart.",
        parents=[COMMON],
    )
    top.add_argument("--version", action="version", version=f"kvlab {kvlab.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.add(commands)
    return top


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        _complain(f"{message.rstrip('.')}.", f"`{self.prog} --help` lists what there is.")
        raise SystemExit(USAGE)


def _complain(message: str, remedy: str) -> None:
    print(f"kvlab: {message}\n       {remedy}", file=sys.stderr)


def _in_words(error: Exception) -> tuple[str, str]:
    if isinstance(error, KvlabError):
        return error.message, error.remedy
    if isinstance(error, ModuleNotFoundError):
        return f"the package {error.name} is not installed.", "Install the course's packages, or see `kvlab doctor`."
    message = (str(error).strip().splitlines() or [""])[0]
    if type(error).__module__.startswith("kvlab."):  # our own errors say all in their message
        return message, "--debug shows where."
    return f"{type(error).__name__}: {message}", "This was not foreseen; --debug shows where it happened."
