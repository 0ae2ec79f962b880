"""`kvlab lab`: the labs' notebooks, listed, opened, or run from start to end."""

import argparse
import json
import sys
from pathlib import Path

from kvlab.cli.grammar import command, group
from kvlab.errors import KvlabError, UsageError
from kvlab.labs import labs


def add(commands) -> None:
    """Enter the commands."""
    lab = group(commands, "lab", "list, open or check the labs")
    command(lab, "list", _list, "list the labs")
    for name, function, text in (
        ("open", _open, "open a lab in JupyterLab"),
        ("check", _check, "run a lab from start to end and say where it stops"),
    ):
        command(lab, name, function, text).add_argument("lab", metavar="LAB", help="its number or name, as in `3`")


def _find(wanted: str) -> Path:
    known = labs()
    for name, path in known.items():
        number, _, title = name.partition("-")
        if wanted.removesuffix(".ipynb") in (name, number, number.lstrip("0"), title):
            return path
    there = f"There are: {', '.join(known)}." if known else "No labs folder is here: work in the course's folder."
    raise UsageError(f"there is no lab {wanted!r}.", there)


def _list(arguments: argparse.Namespace) -> None:
    known = labs()
    if not known:
        raise KvlabError("there is no labs folder here.", "Go to the course's folder first.")
    for name, path in known.items():
        print(f"{name:24} {_title(path)}")


def _title(notebook: Path) -> str:
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        for line in "".join(cell["source"]).splitlines():
            if cell["cell_type"] == "markdown" and line.startswith("# "):
                return line.removeprefix("# ").strip()
    return ""


def _open(arguments: argparse.Namespace) -> int:
    import importlib.util
    import subprocess

    path = _find(arguments.lab)
    if importlib.util.find_spec("jupyterlab") is None:
        raise KvlabError("JupyterLab is not installed.", 'Install it: pip install "jupyterlab>=4.2"')
    return subprocess.call([sys.executable, "-m", "jupyterlab", str(path)])


def _check(arguments: argparse.Namespace) -> int:
    path = _find(arguments.lab)
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    try:
        nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    except nbclient.exceptions.CellExecutionError as stop:
        print(f"{path.stem} stops: {stop.evalue or stop.ename}")
        return 1
    print(f"{path.stem} runs from start to end")
    return 0
