"""What importing kvlab loads, that its layers import downwards only, and that no modules import each other in a circle."""

import ast
import json
import subprocess
import sys
from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter
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


def modules(package: Path) -> dict[str, Path]:
    """The package's modules by name, as in `kvlab.core.spec`; a package goes by its folder's name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules(PACKAGE)


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


def imports(source: str, module: str, is_package: bool = False, known: Collection[str] = MODULES) -> set[str]:
    """Every kvlab module the source imports, at its top or inside a function; relative imports resolved.

    `from kvlab.x import y` is `kvlab.x.y` where that is one of the `known` modules, else `kvlab.x`.
    """
    found = set()
    here = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*here[: len(here) - node.level + 1], *filter(None, [node.module])]) if node.level else node.module
            found |= {name if (name := f"{base}.{alias.name}") in known else base for alias in node.names}
    return {name for name in found if name.split(".")[0] == "kvlab"}


def upward(source: str, module: str, is_package: bool = False) -> list[str]:
    """What the module imports from a layer above its own."""
    return sorted(name for name in imports(source, module, is_package) if layer(name) > layer(module))


@pytest.mark.parametrize("module", MODULES, ids=lambda name: name.removeprefix("kvlab."))
def test_imports_point_down(module):
    path = MODULES[module]
    assert upward(path.read_text(encoding="utf-8"), module, path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("source", "module", "found"),
    [
        ("import kvlab.runtime", "kvlab.core.spec", ["kvlab.runtime"]),
        ("from kvlab import faults", "kvlab.runtime.decode", ["kvlab.faults"]),
        ("from ..show import theme", "kvlab.experiments.password", ["kvlab.show.theme"]),
        ("def f():\n    from kvlab.runtime import load", "kvlab.compare", ["kvlab.runtime"]),
        ("from kvlab import __version__; from kvlab.core import ModelSpec", "kvlab.runtime.models", []),
    ],
)
def test_an_import_upwards_is_seen(source, module, found):
    assert upward(source, module) == found


def circle(package: Path) -> str:
    """Modules that import each other in a circle, as in `a → b → a`; "" where there are none."""
    known = modules(package)
    graph = {}
    for module, path in known.items():
        wanted = imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py", known)
        # An import from outside runs the packages above first: it counts for them too. From inside they are running already: an
        # __init__ may gather its parts, and makes a circle only with a part that imports from the package itself.
        above = {name.rsplit(".", n)[0] for name in wanted for n in range(1, name.count(".") + 1)}
        graph[module] = (wanted | {name for name in above if not f"{module}.".startswith(f"{name}.")}) - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " → ".join(reversed(error.args[1]))
    return ""


def test_no_modules_import_each_other():
    assert circle(PACKAGE) == ""


GATHERS = {"p/__init__": "from kvlab.p.x import y", "p/z": ""}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"a": "import kvlab.b", "b": "def f():\n    from kvlab import a"}, "a → b → a"),
        ({"a": "from kvlab.b import x", "b": "from .c import y", "c": "from . import a"}, "a → b → c → a"),
        ({"a": "from kvlab.p.x import y", "p/__init__": "import kvlab.a", "p/x": ""}, "a → p → a"),
        (GATHERS | {"p/x": "from kvlab.p import y"}, "p → p.x → p"),
        (GATHERS | {"p/x": "from kvlab.p import z", "a": "from kvlab.p.x import y"}, ""),
        ({"a": "import kvlab.b", "b": "import kvlab.c", "c": "import json"}, ""),
    ],
)
def test_a_circle_is_seen_and_named(tmp_path, files, found):
    for name, source in {"__init__": "", **files}.items():
        path = tmp_path / "kvlab" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    assert circle(tmp_path / "kvlab").replace("kvlab.", "") == found


def test_only_show_draws():
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        drawing = {name for name in names if name.split(".")[0] in ("plotly", "ipywidgets")}
        assert not drawing or path.relative_to(PACKAGE).parts[0] == "show", f"{path} imports {drawing}"
