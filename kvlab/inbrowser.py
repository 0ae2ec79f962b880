"""A lab in the reader's browser: cells that need the model show what was recorded, all others run.

A browser runs Python, and no PyTorch. The copy of this package that goes with the course's site calls `start` when it is
imported; nothing else does. What the worked labs gave when the site was built lies beside this module, found by the cell's
own text: a cell that is changed runs as it stands, and says what it lacks.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.resources import files
from typing import Any, NoReturn

NEEDS = ("torch", "transformers", "safetensors", "tokenizers")
NOTE = "Recorded with the worked lab; the model does not run in this browser."
REFUSED = (
    "{name} {needs}, which does not run in a browser. Cells that need the model show what was recorded as long as they are left as "
    "they were, in the site's present copy of the lab. To change one, take the notebook to a kernel of its own (the page “Set up”)."
)


class NeedsModel(RuntimeError):
    """Something was asked of the model. In a notebook it is shown without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class NotHere:
    """Stands for what a recorded cell would have made: whatever is asked of it raises NeedsModel."""

    def __init__(self, name: str) -> None:
        self._says = REFUSED.format(name=f"`{name}`", needs="comes from a cell that needs the model")

    def __repr__(self) -> str:
        return self._says

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise NeedsModel(self._says)

    __call__ = __getitem__ = __iter__ = __len__ = __contains__ = __enter__ = __bool__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse()


def key(source: str) -> str:
    """What a cell is found by: a digest of its text without the blanks at its ends."""
    return hashlib.sha256(source.strip().encode()).hexdigest()[:16]


class Recorded:
    """The recorded outputs of the labs, key of a cell → list of MIME bundles; `names` is what the notebook's code sees."""

    def __init__(self, outputs: dict[str, list[dict]], show: Callable[[dict], None], names: dict[str, Any]) -> None:
        self.outputs, self._show, self._names = outputs, show, names

    def transform(self, lines: list[str]) -> list[str]:
        """The lines of a cell as they are or, where outputs are recorded, one that shows these."""
        source = "".join(lines)
        if key(source) not in self.outputs:
            return lines
        return [f"__import__('kvlab.inbrowser').inbrowser.recorded.show({source!r})\n"]

    def show(self, source: str) -> None:
        """Display the outputs of a cell, say what they are, and put something under each name it would have given."""
        self._show({"text/markdown": f"*{NOTE}*", "text/plain": NOTE})
        bundles = self.outputs[key(source)]
        for bundle in bundles:
            self._show(bundle)
        self._name(ast.parse(source), bundles)

    def _name(self, tree: ast.Module, bundles: list[dict]) -> None:
        """What can be imported is; a value that a cell only shows is what was shown; all else is NotHere."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                with contextlib.suppress(ImportError):
                    exec(compile(ast.Module([node], []), "<recorded>", "exec"), self._names)
        for name in stored(tree):
            self._names.setdefault(name, NotHere(name))
        match tree.body:
            case [ast.Expr(ast.Name(name))] if len(bundles) == 1:
                with contextlib.suppress(ValueError, SyntaxError):  # what is shown is no literal
                    self._names[name] = ast.literal_eval(bundles[0]["text/plain"])


def stored(tree: ast.AST) -> Iterator[str]:
    """The names that running a cell would give something to, at its top level."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif not isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            yield from stored(node)


class NoModel(MetaPathFinder):
    """Says why there is no PyTorch, in place of "No module named"."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: object = None) -> None:
        """Raises ModuleNotFoundError for what NEEDS names; finds nothing."""
        name = fullname.partition(".")[0]
        if name in NEEDS:
            raise ModuleNotFoundError(REFUSED.format(name="This", needs=f"needs {name}"), name=fullname)


recorded: Recorded | None = None


def start() -> None:
    """From the next cell on, the labs' cells that need the model show what was recorded. Does nothing outside a notebook."""
    global recorded
    from IPython import get_ipython
    from IPython.display import display

    shell = get_ipython()
    if shell is None or recorded is not None:
        return
    texts = (path.read_text("utf8") for path in files("kvlab").joinpath("recorded").iterdir())
    outputs = {key: bundles for text in texts for key, bundles in json.loads(text).items()}
    recorded = Recorded(outputs, lambda bundle: display(bundle, raw=True), shell.user_ns)
    shell.input_transformers_post.append(recorded.transform)
    os.environ["PLOTLY_RENDERER"] = "plotly_mimetype"  # JupyterLab draws; the other renderers send the library along
    sys.meta_path.append(NoModel())
    print("In the browser: cells that need the model show what was recorded; all others run here, on what you write.")
