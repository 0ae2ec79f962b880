"""Python in the page: the site gets Pyodide's files (see `vendor`) and the library's bookkeeping, copied from the checkout.

What goes along is what runs on the standard library alone: `kvlab.core`, and of the faults those that break it. The other
modules of `kvlab.faults` need PyTorch and are empty in the page. A code cell with the tag `live` gets its buttons from
`assets/js/live.js`; a page loads nothing of Python before the first click.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

FILE = "live/kvlab.json"


def light(path: Path) -> bool:
    """Whether a module imports nothing but the standard library, the bookkeeping and the registry of faults."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(f"{'.' * node.level}{node.module or ''}")
    return all(
        name.split(".")[0] in sys.stdlib_module_names or name in ("kvlab", "kvlab.faults.zoo") or name.startswith("kvlab.core")
        for name in names
    )


def library_files(root: Path) -> dict[str, str]:
    """Return the library for the page: path and text of each file."""
    package = root / "kvlab"
    whole = [package / "__init__.py", *(package / "core").glob("*.py"), package / "faults" / "__init__.py"]
    files = {path: path.read_text("utf8") for path in whole}
    for path in (package / "faults").glob("[!_]*.py"):
        # `kvlab.faults` imports its parts by name: one that cannot run here is there, and enters nothing
        files[path] = path.read_text("utf8") if light(path) else ""
    return {path.relative_to(root).as_posix(): text for path, text in sorted(files.items())}


def copy_library(app: Sphinx, exception: Exception | None) -> None:
    """Write the library beside the site's scripts, at every build: it may change when no page does."""
    if exception is None and app.builder.format == "html":
        path = Path(app.outdir, "_static", FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(library_files(Path(app.confdir)), ensure_ascii=False, indent=0) + "\n", "utf8")


def load_buttons(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Have a page with live cells load the buttons."""
    if "tag_live" in context.get("body", ""):
        app.add_css_file("css/live.css")
        app.add_js_file("js/kernel.js", defer="defer")
        app.add_js_file("js/live.js", defer="defer")


def setup(app: Sphinx) -> None:
    """Connect to the pages and the end of the build."""
    app.connect("html-page-context", load_buttons)
    app.connect("build-finished", copy_library)
