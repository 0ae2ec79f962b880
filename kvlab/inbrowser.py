"""A lab in the reader's browser: cells that need the model show what was recorded, all others run.

A browser runs Python, and no PyTorch. The copy of a lab that the course's site opens in JupyterLite begins with

    from kvlab import inbrowser
    inbrowser.start("05-blocks")

and is the lab itself from there on. What the worked lab gave when the site was built lies beside this module, found by the
cell's own text: a cell that is changed runs as it stands.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.resources import files

NEEDS = ("torch", "transformers", "safetensors", "tokenizers")
REFUSED = (
    "{name} does not run in a browser, and this cell needs it. Cells of the lab that need the model show what was recorded if they "
    "are left as they were; to change one, open the lab with a kernel of its own (the course's page “Set up”)."
)


def key(source: str) -> str:
    """What a cell is found by: a digest of its text without the blanks at its ends."""
    return hashlib.sha256(source.strip().encode()).hexdigest()[:16]


class Recorded:
    """The recorded outputs of a lab: key of a cell → list of MIME bundles."""

    def __init__(self, outputs: dict[str, list[dict]], show: Callable[[dict], None]) -> None:
        self.outputs, self._show = outputs, show

    def transform(self, lines: list[str]) -> list[str]:
        """The lines of a cell as they are or, where outputs are recorded, one that shows these."""
        found = key("".join(lines))
        return [f"__import__('kvlab.inbrowser').inbrowser.recorded.show({found!r})\n"] if found in self.outputs else lines

    def show(self, found: str) -> None:
        """Display the outputs of a cell, and say what they are."""
        note = "Recorded with the worked lab; the model does not run in this browser."
        self._show({"text/markdown": f"*{note}*", "text/plain": note})
        for bundle in self.outputs[found]:
            self._show(bundle)


class NoModel(MetaPathFinder):
    """Says why there is no PyTorch, in place of "No module named"."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: object = None) -> None:
        """Raises ModuleNotFoundError for what NEEDS names; finds nothing."""
        if fullname.partition(".")[0] in NEEDS:
            raise ModuleNotFoundError(REFUSED.format(name=fullname.partition(".")[0]), name=fullname)


recorded: Recorded | None = None


def start(lab: str) -> None:
    """Begin a lab: from the next cell on, the lab's cells that need the model show what was recorded.

    Raises FileNotFoundError where nothing is recorded, as in any kernel that the site did not start, which needs no such thing.
    """
    global recorded
    text = files("kvlab").joinpath("recorded", f"{lab}.json").read_text("utf8")
    from IPython import get_ipython
    from IPython.display import display

    shell = get_ipython()
    if recorded is not None:
        shell.input_transformers_post.remove(recorded.transform)
    recorded = Recorded(json.loads(text), lambda bundle: display(bundle, raw=True))
    shell.input_transformers_post.append(recorded.transform)
    os.environ["PLOTLY_RENDERER"] = "plotly_mimetype"  # JupyterLab draws; the other renderers send the library along
    if not any(isinstance(finder, NoModel) for finder in sys.meta_path):
        sys.meta_path.append(NoModel())
    print(f"Ready. {len(recorded.outputs)} cells of this lab need the model and show what was recorded; the rest runs here.")
