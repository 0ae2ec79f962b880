"""Make nbgrader's assignments from the solutions, one for each lab, and release them into the exchange.

    python tools/release.py [--course FOLDER] [--exchange FOLDER] [--no-exchange] [05-blocks ...]      (no lab: all of them)

The course's folder gets classroom/nbgrader_config.py, source/ (with the answers: keep it to yourself), release/ (what students
get) and gradebook.db. Run again after a solution has changed: a release is replaced, what was submitted stays.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import make_labs
import nbformat

ROOT = make_labs.ROOT
CONFIG = ROOT / "classroom" / "nbgrader_config.py"


def api(course: Path, exchange: Path | None = None):
    """nbgrader's API with the course's configuration. Sets KVLAB_COURSE and, if given, KVLAB_EXCHANGE, and PATH."""
    from nbgrader.apps import NbGraderAPI
    from traitlets.config.loader import PyFileConfigLoader

    os.environ["PATH"] = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"  # nbgrader calls alembic by name
    os.environ["KVLAB_COURSE"] = str(course)
    if exchange is not None:
        os.environ["KVLAB_EXCHANGE"] = str(exchange)
    config = PyFileConfigLoader("nbgrader_config.py", path=str(course)).load_config()
    made = NbGraderAPI(config=config)
    made.log_level = logging.WARNING
    return made


def prepare(course: Path, source: Path) -> str:
    """Write the assignment of a solution into the course's source folder. Returns its name."""
    name = source.stem
    folder = course / "source" / name
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(make_labs.worked(source), folder / f"{name}.ipynb")
    return name


def release(course: Path, sources: list[Path], exchange: Path | None = None, *, publish: bool = True) -> list[str]:
    """Generate and release the assignments of these solutions. Returns their names. Raises RuntimeError with nbgrader's words."""
    course.mkdir(parents=True, exist_ok=True, mode=0o700)
    shutil.copyfile(CONFIG, course / CONFIG.name)
    nbgrader = api(course, exchange)
    names = []
    for source in sources:
        name = prepare(course, source)
        _done(name, nbgrader.generate_assignment(name, force=True, create=True))
        if publish:
            if name in nbgrader.get_released_assignments():
                nbgrader.unrelease(name)
            _done(name, nbgrader.release_assignment(name))
        names.append(name)
    return names


def _done(name: str, told: dict) -> None:
    if not told["success"]:
        raise RuntimeError(f"{name}: {told.get('error')}\n{told.get('log')}")


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Make nbgrader's assignments from the solutions and release them.")
    parser.add_argument("labs", nargs="*", help="names such as 05-blocks; by default all")
    parser.add_argument("--course", type=Path, default=ROOT / "_build" / "course", help="the course's folder")
    parser.add_argument("--exchange", type=Path, help="the exchange; by default KVLAB_EXCHANGE or /srv/nbgrader/exchange")
    parser.add_argument("--no-exchange", action="store_true", help="only generate: release/ can be handed out by other means")
    options = parser.parse_args(arguments)
    sources = sorted((ROOT / "solutions").glob("[0-9]*.md"))
    known = {source.stem: source for source in sources}
    if unknown := [name for name in options.labs if name not in known]:
        print(f"release: no lab {unknown[0]}; there are {', '.join(known)}", file=sys.stderr)
        return 1
    exchange = options.exchange or Path(os.environ.get("KVLAB_EXCHANGE", "/srv/nbgrader/exchange"))
    if not options.no_exchange and not os.access(exchange, os.W_OK):
        print(f"release: there is no exchange {exchange} one may write to; make it (chmod 777), name one with --exchange, "
              "or leave it out with --no-exchange", file=sys.stderr)  # fmt: skip
        return 1
    try:
        names = release(
            options.course.expanduser().absolute(),
            [known[name] for name in options.labs or known],
            exchange,
            publish=not options.no_exchange,
        )
    except (RuntimeError, ValueError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    where = options.course / "release" if options.no_exchange else exchange
    print(f"released into {where}: {', '.join(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
