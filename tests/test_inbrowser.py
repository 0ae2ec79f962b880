"""A lab in the browser: what is recorded is shown in place of the cell, and what needs PyTorch says so."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from pathlib import Path

import jupytext
import pytest
from IPython.core.interactiveshell import InteractiveShell
from shared_state import lite

from kvlab import inbrowser
from kvlab.inbrowser import NeedsModel, NoModel, Recorded, key, stored

ROOT = Path(__file__).parents[1]
MODEL_CELL = "import torchless_thing as thing\nfrom math import pi\nloaded = thing.load()\nrows = [1]\nloaded"


@pytest.fixture
def shown() -> list[dict]:
    return []


@pytest.fixture
def recorded(shown: list[dict], monkeypatch: pytest.MonkeyPatch) -> Recorded:
    outputs = {
        key(MODEL_CELL): [{"text/plain": "a model"}, {"text/plain": "and more"}],
        key("measured"): [{"text/plain": "{'a': 1.5}"}],
    }
    made = Recorded(outputs, shown.append, {"rows": "the reader's own"})
    monkeypatch.setattr(inbrowser, "recorded", made)
    return made


def run(recorded: Recorded, cell: str) -> dict:
    """Run a cell as the notebook would; return the names it sees."""
    exec("".join(recorded.transform(cell.splitlines(keepends=True))), recorded._names)
    return recorded._names


def test_a_recorded_cell_shows_its_outputs_and_says_what_they_are(recorded: Recorded, shown: list[dict]) -> None:
    run(recorded, MODEL_CELL + "\n")
    assert [bundle["text/plain"] for bundle in shown] == [inbrowser.NOTE, "a model", "and more"]


def test_names_of_a_recorded_cell_import_or_say_why_not(recorded: Recorded) -> None:
    """What needs no model is there; a name of the reader's stays his; all else says one sentence, whatever is asked of it."""
    names = run(recorded, MODEL_CELL)
    assert names["pi"] == 3.141592653589793 and names["rows"] == "the reader's own"
    for ask in ("loaded.spec", "loaded()", "loaded[0]", "for _ in loaded: pass", "thing.load", "bool(loaded)"):
        with pytest.raises(NeedsModel, match="does not run in a browser"):
            exec(ask, names)
    assert "`loaded`" in repr(names["loaded"])
    assert NeedsModel("one sentence")._render_traceback_() == ["one sentence"]


def test_a_value_that_is_shown_can_be_used(recorded: Recorded) -> None:
    assert run(recorded, "measured")["measured"] == {"a": 1.5}


@pytest.mark.parametrize("cell", ["loaded = load()\nloaded.spec\n", "1 + 1\n", ""])
def test_any_other_cell_is_left_as_it_is(recorded: Recorded, cell: str) -> None:
    lines = cell.splitlines(keepends=True)
    assert recorded.transform(lines) == lines


def test_blanks_at_the_ends_do_not_count() -> None:
    assert key("\nloaded\n\n") == key("loaded") != key("loaded2")


@pytest.mark.parametrize("name", ["torch", "transformers", "safetensors", "tokenizers"])
def test_a_missing_model_says_where_it_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [NoModel()])
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, loaded)
    with pytest.raises(ModuleNotFoundError, match=f"needs {name}, which does not run in a browser.*kernel of its own"):
        importlib.import_module(name)
    assert NoModel().find_spec("torchlike") is None and NoModel().find_spec("json") is None


def test_start_takes_over_the_cells_of_the_labs_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    package = tmp_path / "recorded"
    package.mkdir()
    for lab, cell in (("98-one", "model"), ("99-two", "other")):
        (package / f"{lab}.json").write_text(json.dumps({key(cell): [{"text/plain": f"{cell} said this"}]}), "utf8")
    shell = InteractiveShell()
    monkeypatch.setattr(inbrowser, "files", lambda name: tmp_path)
    monkeypatch.setattr(inbrowser, "recorded", None)
    monkeypatch.setattr("IPython.get_ipython", lambda: None)
    inbrowser.start()  # no notebook: nothing happens
    assert inbrowser.recorded is None
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setenv("PLOTLY_RENDERER", "")
    for _ in range(2):
        inbrowser.start()
    assert len(shell.input_transformers_post) == 1 and sum(isinstance(f, NoModel) for f in sys.meta_path) == 1
    capsys.readouterr()
    shell.run_cell("model")
    shell.run_cell("other")
    told = capsys.readouterr().out
    assert "model said this" in told and "other said this" in told


@pytest.mark.parametrize("lab", lite.labs(ROOT))
def test_cells_that_are_not_marked_use_no_name_of_those_that_are(lab: str) -> None:
    """What a marked cell imports or defines is not there in the browser."""
    missing: set[str] = set()
    problems = []
    solution = jupytext.read(ROOT / "solutions" / f"{lab}.md", fmt="md:myst")
    known: set[str] = set()
    for cell in solution.cells:
        if cell.cell_type != "code":
            continue
        tree = ast.parse(cell.source)
        defined = set(stored(tree))
        if "model" in cell.metadata.get("tags", []):
            missing |= defined - known
            match tree.body:
                case [ast.Expr(ast.Name(shown))]:  # a value that was recorded
                    missing.discard(shown)
        else:
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
            problems += [f"{name!r} in: {cell.source.splitlines()[0]}" for name in sorted(used & missing - defined)]
            known |= defined
            missing -= defined
    assert not problems
