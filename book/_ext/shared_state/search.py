"""Summaries on the search page, from a file of the pages' text, so that they show for pages opened from the disk too.

The theme's own summaries fetch every page that was found, which a browser refuses for files. `assets/js/summaries.js` reads the
text that is written here; only the search page loads it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bs4 import BeautifulSoup
from sphinx.application import Sphinx

TEXT = "search-text.js"
# what a reader does not read: code that draws, anchors, the copy of a formula for screen readers
SKIP = "script, style, noscript, .headerlink, .katex-mathml, .toctree-wrapper, form"


def text_of(page: str) -> str:
    """Return the words of a page's article, on one line."""
    soup = BeautifulSoup(page, "html.parser")
    article = soup.select_one("article") or soup
    for tag in article.select(SKIP):
        tag.decompose()
    return " ".join(article.get_text(" ").split())


def write_text(app: Sphinx, exception: Exception | None) -> None:
    """Write the text of every page into one script."""
    if exception is not None or app.builder.format != "html":
        return
    pages = {name: Path(app.builder.get_outfilename(name)) for name in sorted(app.env.found_docs)}
    text = {name: text_of(path.read_text("utf8")) for name, path in pages.items() if path.exists()}
    script = f"window.kvText = {json.dumps(text, ensure_ascii=False, separators=(',', ':'))};\n"
    Path(app.outdir, "_static", TEXT).write_text(script, "utf8")


def load_text(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Have the search page load it."""
    if pagename == "search":
        app.add_js_file("js/summaries.js", defer="defer")


def setup(app: Sphinx) -> None:
    """Connect to the search page and the end of the build."""
    app.connect("html-page-context", load_text)
    app.connect("build-finished", write_text)
