"""A lab in the browser: what is recorded is shown in place of the cell, and what needs PyTorch says so."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import jupytext
import pytest
from IPython.core.interactiveshell import InteractiveShell

import kvlab
from kvlab import inbrowser
from kvlab.inbrowser import NoModel, Recorded, key


@pytest.fixture
def shown() -> list[dict]:
    return []


@pytest.fixture
def recorded(shown: list[dict], monkeypatch: pytest.MonkeyPatch) -> Recorded:
    made = Recorded({key("loaded = load()\nloaded"): [{"text/plain": "a model"}, {"text/plain": "and more"}]}, shown.append)
    monkeypatch.setattr(inbrowser, "recorded", made)
    return made


def test_a_recorded_cell_shows_its_outputs_and_says_what_they_are(recorded: Recorded, shown: list[dict]) -> None:
    lines = recorded.transform(["loaded = load()\n", "loaded\n"])
    assert len(lines) == 1
    exec(lines[0])
    assert "Recorded" in shown[0]["text/plain"]
    assert [bundle["text/plain"] for bundle in shown[1:]] == ["a model", "and more"]


@pytest.mark.parametrize("cell", ["loaded = load()\nloaded.spec\n", "1 + 1\n", ""])
def test_any_other_cell_is_left_as_it_is(recorded: Recorded, cell: str) -> None:
    lines = cell.splitlines(keepends=True)
    assert recorded.transform(lines) == lines


def test_blanks_at_the_ends_do_not_count() -> None:
    assert key("\nloaded\n\n") == key("loaded") != key("loaded2")


def test_a_missing_model_says_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [NoModel()])
    for name in [name for name in sys.modules if name.partition(".")[0] == "tokenizers"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModuleNotFoundError, match="tokenizers does not run in a browser.*kernel of its own"):
        import tokenizers  # noqa: F401
    assert NoModel().find_spec("torchlike") is None and NoModel().find_spec("json") is None


def test_start_takes_over_the_cells_of_the_lab_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    package = tmp_path / "recorded"
    package.mkdir()
    (package / "99-none.json").write_text(json.dumps({key("model"): [{"text/plain": "it said this"}]}), "utf8")
    shell = InteractiveShell()
    monkeypatch.setattr(inbrowser, "files", lambda name: tmp_path)
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(inbrowser, "recorded", None)
    monkeypatch.setenv("PLOTLY_RENDERER", "")
    for _ in range(2):
        inbrowser.start("99-none")
    assert len(shell.input_transformers_post) == 1 and sum(isinstance(f, NoModel) for f in sys.meta_path) == 1
    capsys.readouterr()
    shell.run_cell("model")
    assert "it said this" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError):
        inbrowser.start("98-none")


@pytest.mark.parametrize("lab", ["02-ledger", "05-blocks", "06-prefix"])
def test_cells_that_are_not_marked_use_no_name_of_those_that_are(lab: str) -> None:
    """What a marked cell imports or defines is not there in the browser."""
    missing: set[str] = set()
    problems = []
    solution = jupytext.read(Path(kvlab.__file__).parents[1] / "solutions" / f"{lab}.md", fmt="md:myst")
    known: set[str] = set()
    for cell in solution.cells:
        if cell.cell_type != "code":
            continue
        tree = ast.parse(cell.source)
        defined = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        defined |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        defined |= {
            (alias.asname or alias.name).split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        if "model" in cell.metadata.get("tags", []):
            missing |= defined - known
        else:
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
            problems += [f"{name!r} in: {cell.source.splitlines()[0]}" for name in sorted(used & missing - defined)]
            known |= defined
            missing -= defined
    assert not problems
