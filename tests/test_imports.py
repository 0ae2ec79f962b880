"""What importing kvlab loads, and that its layers import downwards only."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvlab

PACKAGE = Path(kvlab.__file__).parent

# A module may import its own layer and those before it. What is not named here is a layer by its first name.
LAYERS = [
    {"kvlab", "errors", "labs"},
    {"core"},
    {"probe"},
    {"compare"},
    {"runtime"},
    {"record"},
    {"engine"},
    {"faults", "twin"},
    {"experiments"},
    {"claims"},
    {"show", "checks"},
    {"classroom"},
    {"cli", "doctor", "inbrowser"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def loaded_by(statement: str) -> set[str]:
    """Top-level names of the modules in a fresh interpreter after the statement."""
    code = f"import sys, json; before = set(sys.modules); {statement}; print(json.dumps(sorted(set(sys.modules) - before)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


def test_core_needs_the_standard_library_alone():
    modules = sorted(path.stem for path in (PACKAGE / "core").glob("*.py"))
    names = ", ".join(f"kvlab.core.{name}" for name in modules if name != "__init__")
    assert loaded_by(f"import kvlab.core, {names}") - sys.stdlib_module_names == {"kvlab"}


@pytest.mark.parametrize("statement", ["import kvlab", "import kvlab.cli", "import kvlab.cli; kvlab.cli.parser()"])
def test_the_package_and_its_command_line_load_nothing_heavy(statement):
    assert loaded_by(statement) - sys.stdlib_module_names == {"kvlab"}


def test_the_probe_sees_a_third_party_import():
    assert "tqdm" in loaded_by("import tqdm")


def layer(module: str) -> int:
    """The level of `kvlab.x.y`."""
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else "kvlab"
    assert name in LEVEL, f"kvlab.{name} has no place in the layers: add it to LAYERS"
    return LEVEL[name]


def imports(source: str, module: str, is_package: bool) -> set[str]:
    """Every kvlab module the source imports, at its top or inside a function; relative imports resolved."""
    found = set()
    here = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*here[: len(here) - node.level + 1], *filter(None, [node.module])]) if node.level else node.module
            if base == "kvlab":
                found |= {f"kvlab.{alias.name}" if alias.name in LEVEL else "kvlab" for alias in node.names}
            else:
                found.add(base)
    return {name for name in found if name.split(".")[0] == "kvlab"}


def upward(source: str, module: str, is_package: bool = False) -> list[str]:
    """What the module imports from a layer above its own."""
    return sorted(name for name in imports(source, module, is_package) if layer(name) > layer(module))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    parts = ["kvlab", *path.relative_to(PACKAGE).with_suffix("").parts]
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    assert upward(path.read_text(encoding="utf-8"), module, is_package) == []


@pytest.mark.parametrize(
    ("source", "module", "found"),
    [
        ("import kvlab.runtime", "kvlab.core.spec", ["kvlab.runtime"]),
        ("from kvlab import faults", "kvlab.runtime.decode", ["kvlab.faults"]),
        ("from ..show import theme", "kvlab.experiments.password", ["kvlab.show"]),
        ("def f():\n    from kvlab.runtime import load", "kvlab.compare", ["kvlab.runtime"]),
        ("from kvlab import __version__; from kvlab.core import ModelSpec", "kvlab.runtime.models", []),
    ],
)
def test_an_import_upwards_is_seen(source, module, found):
    assert upward(source, module) == found


def test_only_show_draws():
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        drawing = {name for name in names if name.split(".")[0] in ("plotly", "ipywidgets")}
        assert not drawing or path.relative_to(PACKAGE).parts[0] == "show", f"{path} imports {drawing}"
