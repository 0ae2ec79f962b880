"""Figures leave the page's colours to the template: the site swaps those in dark mode, an axis' own it cannot."""

import ast
from pathlib import Path

import pytest

import kvlab.show

MODULES = sorted(p for p in Path(kvlab.show.__file__).parent.glob("*.py") if p.name not in ("__init__.py", "theme.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_figure_does_not_pin_the_colours_of_the_page(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "kvlab.show.theme"]
    imported = {name.name for node in imports for name in node.names}
    assert not imported & {"GRID", "INK", "PAPER"}
