"""Copy into the site what its pages load from other projects, and keep every page to that.

The npm packages are pinned by package-lock.json and installed by `npm ci`; plotly.js comes from the Python package, so
that the figures and the library that draws them are of one version. Its small bundle comes from npm and must be of that version too.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

WIDGETS = "@jupyter-widgets/html-manager/dist"  # where embed-amd.js looks for its icons, under the folder it is given
# pattern under node_modules, folder under _static/vendor
NPM = (
    ("requirejs/require.js", "."),
    (f"{WIDGETS}/embed-amd.js", WIDGETS),
    (f"{WIDGETS}/*.woff2", WIDGETS),
    (f"{WIDGETS}/*.woff2", "@jupyter-widgets"),  # where it looks when its own address is not known, as from the disk
    ("plotly.js-cartesian-dist-min/plotly-cartesian.min.js", "."),
    ("katex/dist/katex.min.css", "katex"),
    ("katex/dist/fonts/*.woff2", "katex/fonts"),
    ("pyodide/pyodide.mjs", "pyodide"),
    ("pyodide/pyodide.asm.*", "pyodide"),
    ("pyodide/pyodide-lock.json", "pyodide"),
    ("pyodide/python_stdlib.zip", "pyodide"),
    ("@wllama/wllama/esm/index.min.js", "wllama"),
    ("@wllama/wllama/esm/wasm/wllama.wasm", "wllama"),
    ("@fontsource-variable/literata/files/literata-latin-wght-*.woff2", "fonts"),
    ("@fontsource-variable/ibm-plex-sans/files/ibm-plex-sans-latin-wght-normal.woff2", "fonts"),
    ("@fontsource/ibm-plex-mono/files/ibm-plex-mono-latin-[46]00-normal.woff2", "fonts"),
)


def vendored(root: Path) -> dict[str, Path]:
    """Return every place under _static/vendor and the file to copy there; raise where a package is missing."""
    files: dict[str, Path] = {}
    for pattern, folder in NPM:
        found = sorted((root / "node_modules").glob(pattern))
        if not found:
            raise ExtensionError(f"node_modules/{pattern} is missing: run `npm ci --ignore-scripts` in the project folder")
        files |= {Path(folder, path.name).as_posix(): path for path in found}
    plotly = importlib.util.find_spec("plotly")
    if plotly is None or plotly.origin is None:
        raise ExtensionError("plotly is not installed: pip install -r requirements.txt")
    whole = Path(plotly.origin).parent / "package_data" / "plotly.min.js"
    pinned, theirs = (version_of(path) for path in (files["plotly-cartesian.min.js"], whole))
    if pinned != theirs:
        raise ExtensionError(f"package.json pins plotly.js {pinned}, the Python package brings {theirs}: pin {theirs}")
    return files | {"plotly.min.js": whole}


def version_of(bundle: Path) -> str:
    """Return the version that a bundle of plotly.js names in its first line of notice, such as 4.1.1."""
    with bundle.open(encoding="utf8") as file:
        found = re.search(r"plotly\.js.* v(\d+\.\d+\.\d+)", file.read(2000))
    return found[1] if found else "of an unknown version"


def copy_vendored(app: Sphinx) -> None:
    """Copy the vendored files that are missing from the site or differ in size or age."""
    if app.builder.format != "html":
        return
    for target, source in vendored(Path(app.confdir)).items():
        destination = Path(app.outdir, "_static", "vendor", target)
        if not _same(source, destination):
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, destination)


def _same(source: Path, target: Path) -> bool:
    if not target.exists():
        return False
    a, b = source.stat(), target.stat()
    return (a.st_size, int(a.st_mtime)) == (b.st_size, int(b.st_mtime))


def own_styles_only(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Drop any style sheet that lies elsewhere."""
    context["css_files"][:] = [css for css in context["css_files"] if "://" not in str(getattr(css, "filename", css))]


def setup(app: Sphinx) -> None:
    """Connect the copy and the page hook."""
    app.connect("builder-inited", copy_vendored)
    app.connect("html-page-context", own_styles_only, priority=900)
