"""Execute a notebook again when the library code or the recorded runs it stands on have changed.

jupyter-cache keys a notebook by its cells alone, so an edited `kvlab` module would leave stale output. Here every
notebook also gets a key over

- each `kvlab` module it imports, directly or through others (found in the syntax tree, imports inside functions too),
  with the data files beside it;
- each file of `results/` whose experiment it names, or all of them when it reads recorded runs and names none;
- the versions of the packages that can move its output.

A notebook whose key has moved loses its cached run and is read again; the others are left alone.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

PACKAGE = "kvlab"
PACKAGES = ("ipywidgets", "myst-nb", "numpy", "plotly", "safetensors", "tokenizers", "torch", "transformers")
CELL = re.compile(r"^(?P<fence>`{3,}|~{3,})\{code-cell\}.*?\n(?P<body>.*?)^(?P=fence)\s*$", re.DOTALL | re.MULTILINE)
ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")  # "module:attribute", which is imported by whoever reads it
MODULE = re.compile(r"\.*[A-Za-z_][\w.]*$")
DYNAMIC = {"import_module", "__import__", "iter_modules", "walk_packages"}

logger = logging.getLogger(__name__)


def code_of(text: str) -> str:
    """Return the Python of a MyST notebook's code cells, without cell options and magics."""
    lines = []
    for cell in CELL.finditer(text):
        body = re.sub(r"\A---\n.*?^---\n", "", cell["body"], flags=re.DOTALL | re.MULTILINE)
        lines += [line for line in body.splitlines() if not line.lstrip().startswith((":", "%", "!"))]
    return "\n".join(lines)


class Library:
    """The modules of a package on disk and what each imports; one is made for each build, so nothing is stale."""

    def __init__(self, root: Path, package: str = PACKAGE) -> None:
        self.root, self.package = root, package
        self.files: dict[str, Path] = {}
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            self.files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self.imports = lru_cache(maxsize=None)(self._imports)

    def _imports(self, module: str) -> frozenset[str]:
        path = self.files[module]
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        return frozenset(self.named_in(ast.parse(path.read_text("utf8")), package))

    def named_in(self, tree: ast.AST, package: str = "") -> Iterator[str]:
        """Yield the package's modules that a syntax tree imports; `package` is where relative imports start."""
        dynamic = False
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (name for alias in node.names for name in self._with_parents(alias.name))
            elif isinstance(node, ast.ImportFrom):
                base = _absolute(node.module or "", node.level, package)
                yield from self._with_parents(base)
                yield from (name for alias in node.names if (name := f"{base}.{alias.name}") in self.files)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and ENTRY.match(node.value):
                yield from self._with_parents(node.value.partition(":")[0])
            elif isinstance(node, ast.Attribute | ast.Name):
                dynamic |= (node.attr if isinstance(node, ast.Attribute) else node.id) in DYNAMIC
        if dynamic:
            yield from self._dynamic(tree, package)

    def _dynamic(self, tree: ast.AST, package: str) -> Iterator[str]:
        """Yield what a module that imports by name may import: those its strings name, else its neighbours."""
        found = False
        for text in filter(MODULE.match, strings_in(tree)):
            name = _absolute(text.lstrip("."), len(text) - len(text.lstrip(".")), package)
            under = [known for known in self.files if name.endswith(".") and known.startswith(name)]
            for known in [name] if name in self.files else under:
                found = True
                yield from self._with_parents(known)
        if not found:
            yield from (name for name in self.files if name.startswith(f"{package}."))

    def _with_parents(self, name: str) -> Iterator[str]:
        """Yield a module and the packages that importing it runs, those of them that are ours."""
        parts = name.split(".")
        yield from (known for i in range(len(parts)) if (known := ".".join(parts[: i + 1])) in self.files)

    def closure(self, modules: Iterable[str]) -> set[str]:
        """Return the modules and everything they import, and so on down."""
        seen: set[str] = set()
        queue = list(modules)
        while queue:
            if (module := queue.pop()) not in seen:
                seen.add(module)
                queue.extend(self.imports(module))
        return seen

    def data_beside(self, module: str) -> Iterator[Path]:
        """Yield the files that are no modules in a module's folder and its folders that are no packages."""
        queue = [self.files[module].parent]
        while queue:
            for path in sorted(queue.pop().iterdir()):
                if path.is_dir():
                    if path.name != "__pycache__" and not (path / "__init__.py").exists():
                        queue.append(path)
                elif path.suffix not in {".py", ".pyc"}:
                    yield path


def _absolute(name: str, level: int, package: str) -> str:
    if not level:
        return name
    base = package.split(".")[: len(package.split(".")) - (level - 1)]
    return ".".join([*base, name] if name else base)


def strings_in(tree: ast.AST) -> set[str]:
    """Return every string constant of a syntax tree."""
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def dependencies(source: str, library: Library) -> set[Path]:
    """Return the files of the project that running a notebook's code reads: modules, their data, recorded runs."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a cell that is no plain Python: take everything
        modules, strings = set(library.files), set()
    else:
        modules = library.closure(library.named_in(tree))
        strings = strings_in(tree)
    files = {library.files[module] for module in modules}
    files |= {path for module in modules for path in library.data_beside(module)}
    if f"{library.package}.record" in modules:
        for module in modules:
            strings |= strings_in(ast.parse(library.files[module].read_text("utf8")))
        recorded = [path for path in sorted((library.root / "results").glob("*")) if path.is_file()]
        named = {path for path in recorded if any(path.name.startswith(f"{name}-") for name in strings if name)}
        files |= named or set(recorded)
    return files


def key(source: str, library: Library) -> str:
    """Return the key of a notebook: a hash over what its output depends on besides its own cells."""
    digest = hashlib.sha256()
    for path in sorted(dependencies(source, library)):
        digest.update(f"{path.relative_to(library.root).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    for name in PACKAGES:
        try:
            digest.update(f"{name}=={metadata.version(name)}\0".encode())
        except metadata.PackageNotFoundError:
            continue
    return digest.hexdigest()


def _keys_file(env: BuildEnvironment) -> Path:
    return Path(env.mystnb_config.execution_cache_path) / "keys.json"


def outdated(app: Sphinx, env: BuildEnvironment, added: set[str], changed: set[str], removed: set[str]) -> list[str]:
    """Drop the cached runs of the notebooks whose key has moved, and have Sphinx read these again."""
    from jupyter_cache import get_cache

    library = Library(Path(app.srcdir))
    keys: dict[str, str] = {}
    for docname in sorted(env.found_docs):
        path = Path(env.doc2path(docname))
        if path.suffix == ".md" and (source := code_of(path.read_text("utf8"))):
            keys[docname] = key(source, library)
    store = _keys_file(env)
    known = json.loads(store.read_text("utf8")) if store.exists() else {}
    moved = {docname for docname, value in keys.items() if known.get(docname) != value}
    if moved:
        # by the end of their path: a checkout that was moved, with its cache, holds runs under its old one
        ends = tuple(f"/{docname}{Path(env.doc2path(docname)).suffix}" for docname in moved)
        cache = get_cache(str(store.parent))
        for record in cache.list_cache_records():
            if Path(record.uri).as_posix().endswith(ends):
                cache.remove_cache(record.pk)
        logger.info("executing again, what it uses has changed: %s", ", ".join(sorted(moved)))
    env.shared_state_keys = keys
    return sorted(moved)


def remember(app: Sphinx, exception: Exception | None) -> None:
    """Keep the keys of a build that went through; after a failed one the same notebooks run again."""
    keys = getattr(app.env, "shared_state_keys", None)
    if exception is None and keys is not None:
        store = _keys_file(app.env)
        store.parent.mkdir(parents=True, exist_ok=True)
        store.write_text(json.dumps(keys, indent=1, sort_keys=True) + "\n", "utf8")


def setup(app: Sphinx) -> None:
    """Connect to Sphinx's question which documents are out of date, and to the end of the build."""
    app.connect("env-get-outdated", outdated)
    app.connect("build-finished", remember)
