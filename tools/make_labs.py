"""Make the labs from the solutions: `solutions/NN-name.md` → `labs/NN-name.ipynb`. Same source, same bytes.

    python tools/make_labs.py [solutions/03-password.md ...]      (no argument: all of them)
    python tools/make_labs.py --check                             exit 1 if a committed lab is out of date

A solution is a MyST notebook. Cells are marked by tags: `exercise` holds an answer between `### BEGIN SOLUTION` and
`### END SOLUTION`; `check` is graded, its points in the cell's metadata; `solution-only` is left out of the lab;
`model` needs PyTorch in a lab that otherwise does not (book/_ext/shared_state/lite.py).
nbgrader's own preprocessors do the rest: they lock the checks, clear the answers and the outputs.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import jupytext
import nbformat
import yaml
from nbgrader.preprocessors import ClearHiddenTests, ClearOutput, ClearSolutions, LockCells

ROOT = Path(__file__).resolve().parents[1]
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
DIRECTIVE = re.compile(r"^(:::|```\{|\(.*\)=$)|\{(glue|numref|cite|ref|doc)\w*(:\w+)?\}`", re.MULTILINE)


def make(source: Path) -> str:
    """The lab of a solution, as the text of an .ipynb file. Raises ValueError for a source that would make a broken lab."""
    notebook = worked(source)
    for preprocessor in (LockCells(), ClearSolutions(), ClearHiddenTests(), ClearOutput()):
        notebook, _ = preprocessor.preprocess(notebook, {})
    return nbformat.writes(notebook, indent=1) + "\n"


def worked(source: Path) -> nbformat.NotebookNode:
    """The lab with its answers, marked for nbgrader: what an assignment is generated from. Raises ValueError as `make`."""
    notebook = jupytext.read(source, fmt="md:myst")
    notebook.cells = [cell for cell in notebook.cells if "solution-only" not in cell.metadata.get("tags", [])]
    for index, cell in enumerate(notebook.cells):
        _mark(cell, index, source)
    for cell in notebook.cells:
        cell.metadata.pop("tags", None)
        cell.metadata.pop("points", None)
        if cell.cell_type == "markdown" and DIRECTIVE.search(cell.source):
            found = DIRECTIVE.search(cell.source).group(0)
            raise ValueError(f"{source.name}: {found!r} is MyST that plain Jupyter does not show; write Markdown")
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    nbformat.validate(notebook)
    return notebook


def _mark(cell, index: int, source: Path) -> None:
    """nbgrader's metadata and a cell id that is the same each time."""
    tags = cell.metadata.get("tags", [])
    cell.id = f"cell-{index:03d}"
    solution, check = "exercise" in tags, "check" in tags
    if not (solution or check):
        return
    if solution and "### BEGIN SOLUTION" not in cell.source:
        raise ValueError(f"{source.name}: an exercise cell without ### BEGIN SOLUTION: its answer would be in the lab")
    if solution and cell.source.split("### END SOLUTION")[-1].strip():
        raise ValueError(f"{source.name}: code after ### END SOLUTION, or no such line: it would be in the lab")
    if check and type(cell.metadata.get("points")) is not int:
        raise ValueError(f"{source.name}: a check cell needs :points: and a whole number")
    order = sum(1 for other in (solution, check) if other)
    if order != 1:
        raise ValueError(f"{source.name}: a cell is an exercise or a check, not both")
    name = re.search(r"def (\w+)\(" if solution else r"\.([A-Z_]+)\.check\(", cell.source)
    if not name:
        raise ValueError(f"{source.name}: cannot name this cell; an exercise defines a function, a check calls X.check(...)")
    grade_id = f"{name.group(1).lower()}-{'answer' if solution else 'check'}"
    cell.id = grade_id.replace("_", "-")[:64]
    cell.metadata["nbgrader"] = {
        "schema_version": 3,
        "grade_id": grade_id,
        "solution": solution,
        "grade": check,
        "locked": check,
        "task": False,
        **({"points": cell.metadata["points"]} if check else {}),
    }


def main(arguments: list[str] | None = None) -> int:
    """Write the labs, or with --check compare them. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Make the labs from the solutions.")
    parser.add_argument("sources", nargs="*", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a lab is out of date")
    options = parser.parse_args(arguments)
    stale = []
    for source in options.sources or sorted((ROOT / "solutions").glob("[0-9]*.md")):
        try:
            text = make(source)
        except (ValueError, OSError, RuntimeError, yaml.YAMLError) as error:
            print(f"make_labs: {source.name}: {error}", file=sys.stderr)
            return 1
        lab = ROOT / "labs" / f"{source.stem}.ipynb"
        if not lab.exists() or lab.read_text(encoding="utf-8") != text:
            stale.append(lab.name)
            if not options.check:
                lab.parent.mkdir(exist_ok=True)
                lab.write_text(text, encoding="utf-8")
        elif not options.check:
            lab.touch()
    if options.check and stale:
        print(f"out of date: {', '.join(stale)}; run `make labs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
