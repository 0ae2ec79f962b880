"""What the commands' options are made with. Every command takes --debug, in front or behind."""

import argparse
from collections.abc import Callable

COMMON = argparse.ArgumentParser(add_help=False)
COMMON.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")


def command(commands, name: str, function: Callable[[argparse.Namespace], int | None], text: str) -> argparse.ArgumentParser:
    """A new command among `commands`: `function` gets what was typed and returns the exit code, or None for 0."""
    made = commands.add_parser(name, help=text, description=text, parents=[COMMON])
    made.set_defaults(command=function)
    return made


def group(commands, name: str, text: str):
    """A new command that has commands of its own, as in `kvlab lab open`: what to enter them in."""
    made = commands.add_parser(name, help=text, parents=[COMMON])
    return made.add_subparsers(title="commands", metavar="COMMAND", required=True)
