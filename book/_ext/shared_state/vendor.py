"""Copy into the site what its pages load from other projects, and keep every page to that.

The npm packages are pinned by package-lock.json and installed by `npm ci`; plotly.js comes from the Python package, so
that the figures and the library that draws them are of one version.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

# source under node_modules -> destination under _static/vendor; a folder is copied whole
NPM = {
    "requirejs/require.js": "require.js",
    "@jupyter-widgets/html-manager/dist/embed-amd.js": "widgets/embed-amd.js",
    "mathjax/es5/tex-chtml.js": "mathjax/tex-chtml.js",
    "mathjax/es5/output/chtml/fonts/woff-v2": "mathjax/output/chtml/fonts/woff-v2",
    "@fontsource-variable/literata/files/literata-latin-wght-normal.woff2": "fonts/literata.woff2",
    "@fontsource-variable/literata/files/literata-latin-wght-italic.woff2": "fonts/literata-italic.woff2",
    "@fontsource-variable/ibm-plex-sans/files/ibm-plex-sans-latin-wght-normal.woff2": "fonts/plex-sans.woff2",
    "@fontsource/ibm-plex-mono/files/ibm-plex-mono-latin-400-normal.woff2": "fonts/plex-mono.woff2",
    "@fontsource/ibm-plex-mono/files/ibm-plex-mono-latin-600-normal.woff2": "fonts/plex-mono-bold.woff2",
}


def sources(root: Path) -> dict[Path, str]:
    """Return every file or folder to copy and where it goes under _static/vendor."""
    plotly = importlib.util.find_spec("plotly")
    if plotly is None or plotly.origin is None:
        raise ExtensionError("plotly is not installed: pip install -r requirements.txt")
    bundle = Path(plotly.origin).parent / "package_data" / "plotly.min.js"
    return {root / "node_modules" / source: target for source, target in NPM.items()} | {bundle: "plotly.min.js"}


def copy_vendor(app: Sphinx) -> None:
    """Copy the vendored files that are missing from the site or differ in size or age."""
    if app.builder.format != "html":
        return
    for source, target in sources(Path(app.confdir)).items():
        if not source.exists():
            raise ExtensionError(f"{source.name} is missing: run `npm ci --ignore-scripts` in the project folder")
        files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
        for path in files:
            destination = Path(app.outdir, "_static", "vendor", target, path.relative_to(source))
            if not _same(path, destination):
                destination.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, destination)


def _same(source: Path, target: Path) -> bool:
    if not target.exists():
        return False
    a, b = source.stat(), target.stat()
    return (a.st_size, int(a.st_mtime)) == (b.st_size, int(b.st_mtime))


def page_assets(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Point the widget loader at the site's own files, and drop any style sheet that lies elsewhere."""
    context["css_files"][:] = [css for css in context["css_files"] if "://" not in str(getattr(css, "filename", css))]
    embed = [js for js in context["script_files"] if "embed-amd.js" in str(getattr(js, "filename", ""))]
    if embed:
        base = context["pathto"]("_static/vendor/widgets/", resource=True)
        # require.js reads its configuration from a global that exists before it loads
        app.add_js_file(None, priority=100, body=f"var require = {{baseUrl: {base!r}}};")
        for js in embed:
            js.attributes["data-jupyter-widgets-cdn"] = base


def setup(app: Sphinx) -> None:
    """Connect the copy and the page hook."""
    app.connect("builder-inited", copy_vendor)
    app.connect("html-page-context", page_assets, priority=900)
