"""A lone notebook: a fresh environment, the package from an archive of the last commit, one lab, and nothing else of the course.

    python tools/versions.py [oldest] [newest] [--lab 05-blocks] [--keep FOLDER]

`oldest` takes the lower bounds of torch and transformers in pyproject.toml, `newest` whatever pip finds. The lab as it is
downloaded has to stop at its first exercise; worked, it has to run through. The weights are those that are there already.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import make_labs
import nbformat

from kvlab.runtime import weights

ROOT = make_labs.ROOT
HEAVY = ("torch", "transformers")
EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
try:
    nbclient.NotebookClient(notebook, timeout=600).execute()
except nbclient.exceptions.CellExecutionError:
    pass  # it is in the cell's output
nbformat.write(notebook, sys.argv[1])
"""


def lower_bounds() -> list[str]:
    """`torch==…`, `transformers==…`: the oldest versions that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = (re.fullmatch(r"([\w-]+)>=([\d.]+)", line) for line in project["dependencies"])
    return [f"{match[1]}=={match[2]}" for match in found if match and match[1] in HEAVY]


def run(*command: object, **named) -> str:
    """The command's output. Raises SystemExit with its last lines where it fails."""
    done = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **named
    )
    if done.returncode:
        raise SystemExit(f"versions: {' '.join(map(str, command))}\n{done.stdout[-3000:]}")
    return done.stdout


def errors(notebook: Path) -> list[tuple[str, str]]:
    """(kind, words) of each error in an executed notebook."""
    cells = nbformat.read(notebook, as_version=4).cells
    return [(o.ename, o.evalue) for c in cells if c.cell_type == "code" for o in c.outputs if o.output_type == "error"]


def try_out(which: str, lab: str, place: Path) -> str:
    """Install and run; returns the versions that ran. Raises SystemExit with what went wrong."""
    place.mkdir(parents=True)
    archive = place / "shared-state.zip"
    run("git", "archive", "--format=zip", "--prefix=shared-state/", "-o", archive, "HEAD", cwd=ROOT)
    run(sys.executable, "-m", "venv", place / "venv")
    python = place / "venv" / "bin" / "python"
    pinned = lower_bounds() if which == "oldest" else []
    run(python, "-m", "pip", "install", "--quiet", *pinned, f"kvlab[show] @ {archive.as_uri()}", "ipykernel", "nbclient")
    desk = place / "desk"  # where the student works: one notebook, no course
    desk.mkdir()
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("KVLAB_", "PYTHON"))}
    environment |= {"KVLAB_HOME": str(weights.home()), "HF_HUB_OFFLINE": "1"}
    for name, notebook in (
        ("given", nbformat.read(ROOT / "labs" / f"{lab}.ipynb", 4)),
        ("worked", make_labs.worked(ROOT / "solutions" / f"{lab}.md")),
    ):
        nbformat.write(notebook, desk / f"{name}.ipynb")
        run(python, "-c", EXECUTE, f"{name}.ipynb", cwd=desk, env=environment)
        found = errors(desk / f"{name}.ipynb")
        expected = ["Unfinished"] if name == "given" else []
        if [kind for kind, _ in found] != expected:
            raise SystemExit(f"versions: {which}, {lab} {name}: {found or 'it did not stop at an exercise'}")
    where = run(python, "-c", "import kvlab; print(kvlab.__file__)", cwd=desk, env=environment)
    if str(ROOT) in where:
        raise SystemExit(f"versions: the checkout was used, not the archive: {where}")
    versions = "import torch, transformers as t, sys; print('Python', sys.version.split()[0], 'torch', torch.__version__, 'transformers', t.__version__)"
    return run(python, "-c", versions, cwd=desk, env=environment).strip().splitlines()[-1]


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Run a lone notebook with the oldest and the newest packages allowed.")
    parser.add_argument("which", nargs="*", help="oldest, newest; by default both")
    parser.add_argument("--lab", default="05-blocks")
    parser.add_argument("--keep", type=Path, help="work here and leave it")
    options = parser.parse_args(arguments)
    if unknown := [which for which in options.which if which not in ("oldest", "newest")]:
        parser.error(f"{unknown[0]!r} is neither oldest nor newest")
    with tempfile.TemporaryDirectory() as temporary:
        for which in options.which or ("oldest", "newest"):
            print(
                f"{which}: {options.lab} ran with {try_out(which, options.lab, (options.keep or Path(temporary)) / which)}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
