"""What makes the built site self-contained and light: what a page shows comes from the site, and no sooner than needed.

Uses Sphinx and myst-nb only, so that it outlives Jupyter Book 1.x. Its parts:

- `figures`: Plotly output becomes a named, lazily drawn figure;
- `labpage`: how to open a lab, and its answers folded away;
- `lite`: JupyterLite, for labs that run in the browser;
- `live`: cells that run in the page;
- `math`: formulas are set at build time;
- `model`: the weights beside the site, when asked;
- `search`: the search page shows where a word stands, offline too;
- `slim`: what the theme loads and no page needs is taken out;
- `vendor`: the files of other people that the pages load are copied into the site;
- `rerun`: a notebook is executed again when the library or the results it uses change.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.environment import BuildEnvironment

from . import figures, labpage, lite, live, math, model, rerun, search, slim, vendor


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def note_own_files(app: Sphinx, config: Config) -> None:
    """Make the site's own files part of its configuration.

    Sphinx looks at pages only: without this an edited style sheet would stay out of a site whose pages are unchanged.
    """
    root = Path(app.confdir)
    assets = [path for name in ("assets", "_templates") for path in (root / "book" / name).rglob("*") if path.is_file()]
    config.shared_state_assets = _digest([*assets, root / "package-lock.json"])
    config.shared_state_code = _digest(Path(__file__).parent.glob("*.py"))


def drop_removed_pages(app: Sphinx, env: BuildEnvironment, added: set[str], changed: set[str], removed: set[str]) -> list[str]:
    """Delete the HTML of pages whose source is gone, which Sphinx leaves behind; no page is read again for it."""
    if app.builder.format == "html":
        for docname in removed:
            Path(app.builder.get_outfilename(docname)).unlink(missing_ok=True)
    return []


def mend_lists(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Take the role from docutils' list of citations: its children are no list items, which axe calls critical."""
    if "body" in context:
        context["body"] = context["body"].replace('role="list" class="citation-list"', 'class="citation-list"')


def setup(app: Sphinx) -> dict[str, object]:
    """Connect the parts to Sphinx."""
    app.add_config_value("shared_state_assets", "", "html")  # a change writes every page again
    app.add_config_value("shared_state_code", "", "env")  # a change reads every page again
    app.connect("config-inited", note_own_files)
    app.connect("env-get-outdated", drop_removed_pages)
    app.connect("html-page-context", mend_lists)
    figures.setup(app)
    labpage.setup(app)
    lite.setup(app)
    live.setup(app)
    math.setup(app)
    model.setup(app)
    search.setup(app)
    slim.setup(app)
    vendor.setup(app)
    rerun.setup(app)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
