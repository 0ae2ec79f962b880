"""A notebook is executed again when what it stands on changes, and only then."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from shared_state import rerun
from shared_state.rerun import Library, code_of, dependencies, key
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace

FILES = {
    "kvlab/__init__.py": "",
    "kvlab/core/__init__.py": "",
    "kvlab/core/spec.py": "SIZE = 1\n",
    "kvlab/core/lonely.py": "",
    "kvlab/core/shapes.json": "{}",
    "kvlab/record.py": "def load(name): ...\n",
    "kvlab/compare.py": "from .core import spec\n",
    "kvlab/late.py": "def run():\n    from kvlab.compare import first\n",
    "kvlab/faults/__init__.py": "import importlib\n\ndef get(name):\n    return importlib.import_module(f'kvlab.faults.{name}')\n",
    "kvlab/claims/__init__.py": "import importlib\n\ndef all():\n    return importlib.import_module(f'{__name__}.{lab}')\n",
    "kvlab/claims/lab.py": "BREAKS = 'kvlab.core.lonely:x'\n",
    "kvlab/faults/reset.py": "from kvlab.core.lonely import x\n",
    "results/password-cpu.json": "{}",
    "results/password-cuda.json.gz": "",
    "results/ledger-cpu.json": "{}",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small library and three recorded runs."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf8")
    return tmp_path


def needs(root: Path, source: str) -> set[str]:
    """Return what a notebook's code depends on, by name and without the packages' own files."""
    found = {path.relative_to(root).as_posix() for path in dependencies(source, Library(root))}
    return {name for name in found if not name.endswith("__init__.py")}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import numpy", set()),
        ("import kvlab.core.spec as s", {"kvlab/core/spec.py", "kvlab/core/shapes.json"}),
        ("from kvlab.core import spec", {"kvlab/core/spec.py", "kvlab/core/shapes.json"}),
        ("from kvlab import compare", {"kvlab/compare.py", "kvlab/core/spec.py", "kvlab/core/shapes.json"}),
        ("def f():\n    import kvlab.compare", {"kvlab/compare.py", "kvlab/core/spec.py", "kvlab/core/shapes.json"}),
        ("import kvlab.late", {"kvlab/late.py", "kvlab/compare.py", "kvlab/core/spec.py", "kvlab/core/shapes.json"}),
        ("from kvlab import faults", {"kvlab/faults/reset.py", "kvlab/core/lonely.py", "kvlab/core/shapes.json"}),
        ("from kvlab import claims", {"kvlab/claims/lab.py", "kvlab/core/lonely.py", "kvlab/core/shapes.json"}),
        (
            "from kvlab import record\nrun = record.load('password')",
            {"kvlab/record.py", "results/password-cpu.json", "results/password-cuda.json.gz"},
        ),
        ("from kvlab import record\nrun = record.load(name)", {"kvlab/record.py"} | {n for n in FILES if "results" in n}),
    ],
)
def test_dependencies(root: Path, source: str, expected: set[str]) -> None:
    """Imports in every form, through others, inside functions and by name; recorded runs by experiment."""
    assert needs(root, source) == expected


def test_what_is_no_python_depends_on_everything(root: Path) -> None:
    """A cell in another language might use any of it."""
    assert needs(root, "not python at all") == {name for name in FILES if not name.endswith("__init__.py")}


def test_code_of_a_notebook() -> None:
    """Options, magics and text are no code; both fences count."""
    text = "# T\n```{code-cell} python3\n:tags: [x]\n%matplotlib inline\nimport kvlab\n```\n```python\nimport no\n```\n"
    assert code_of(text + "~~~{code-cell}\n---\ntags: [y]\n---\nx = 1\n~~~\n") == "import kvlab\nx = 1"


def test_key_moves_with_its_files_only(root: Path) -> None:
    """An edit below moves the key; an edit elsewhere does not; undoing it brings the key back."""
    source = "from kvlab import compare, record\nrecord.load('ledger')"
    first = key(source, Library(root))
    for name in ("kvlab/core/lonely.py", "kvlab/faults/reset.py", "results/password-cpu.json"):
        (root / name).write_text("changed = 1\n")
        assert key(source, Library(root)) == first, name
    for name in ("kvlab/core/spec.py", "kvlab/core/shapes.json", "results/ledger-cpu.json", "kvlab/record.py"):
        before = (root / name).read_text()
        (root / name).write_text("changed = 1\n")
        assert key(source, Library(root)) != first, name
        (root / name).write_text(before)
    assert key(source, Library(root)) == first


def test_key_moves_with_a_package(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torch may give other numbers."""
    first = key("import kvlab", Library(root))
    monkeypatch.setattr(rerun.metadata, "version", lambda name: "99")
    assert key("import kvlab", Library(root)) != first


def test_a_build_executes_what_changed(root: Path) -> None:
    """Three builds of two notebooks: both run, none runs, the one whose module changed runs."""
    for name in ("spec", "lonely"):
        cell = f"import kvlab.core.{name} as m; print(f'{{m.__name__}} SIZE is {{getattr(m, \"SIZE\", 0)}}')"
        head = "---\nfile_format: mystnb\nkernelspec: {name: python3}\n---\n"
        (root / f"{name}.md").write_text(f"{head}# {name}\n\n```{{code-cell}}\n{cell}\n```\n", "utf8")
    (root / "index.md").write_text("# Root\n\n```{toctree}\nspec\nlonely\n```\n", "utf8")

    def build() -> list[str]:
        conf = {
            "extensions": ["myst_nb", "shared_state.rerun"],
            "include_patterns": ["*.md"],
            "nb_execution_mode": "cache",
            "nb_execution_raise_on_error": True,
            "html_theme": "basic",
        }
        status = io.StringIO()
        with docutils_namespace():  # one process builds several times
            Sphinx(root, None, root / "out", root / "trees", "html", conf, status=status, warning=io.StringIO()).build()
        return sorted(name for name in ("spec", "lonely") if f"{name}.md: Executing notebook" in status.getvalue())

    assert build() == ["lonely", "spec"]
    assert build() == []
    (root / "kvlab/core/spec.py").write_text("SIZE = 7\n")
    assert build() == ["spec"]
    assert "SIZE is 7" in (root / "out/spec.html").read_text("utf8")
    assert set(json.loads((root / ".jupyter_cache/keys.json").read_text())) == {"spec", "lonely"}
