"""Render Plotly output as a figure with a name, drawn when the reader comes near it.

The page holds an empty box of the right height for the figure and its data as JSON, or, where that is large, the address of a
script that holds it (a script, since a page opened from the disk may load nothing else). `assets/js/figures.js` loads plotly.js
and the data when the box nears the window, and draws it in the colours of the page. So text shows first and nothing jumps.

A figure's accessible name is `layout.meta["alt"]`, which `kvlab.show.theme.apply` sets; without one the title serves,
and without either the build warns.
"""

from __future__ import annotations

import hashlib
import json
import re
from html import escape
from pathlib import Path
from typing import Any

import myst_nb.core.render as render
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

PLOTLY = "application/vnd.plotly.v1+json"
DEFAULT_HEIGHT = 450  # plotly.js's own, in CSS pixels
LARGE = 4096  # characters of JSON; above, a figure's data moves out of the page
DATA = re.compile(r'(<figure class="kv-figure">.*?<script type="application/json")>(.*?)</script>', re.DOTALL)

logger = logging.getLogger(__name__)


def alt_text(layout: dict[str, Any]) -> str:
    """Return what a screen reader says for a figure: `meta.alt`, else its title, else an empty string."""
    meta = layout.get("meta")
    if isinstance(meta, dict) and str(meta.get("alt") or "").strip():
        return str(meta["alt"]).strip()
    title = layout.get("title")
    return str((title.get("text") if isinstance(title, dict) else title) or "").strip()


def figure_html(figure: dict[str, Any]) -> str:
    """Return the HTML that `figures.js` turns into a drawn figure."""
    layout = figure.get("layout", {})
    payload = {"data": figure.get("data", []), "layout": layout, "frames": figure.get("frames", [])}
    # "</" may not stand inside a script element
    script = json.dumps(payload, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    alt = escape(alt_text(layout))
    height = int(layout.get("height") or DEFAULT_HEIGHT)
    return (
        f'<figure class="kv-figure">'
        f'<div class="kv-plot" role="img" aria-label="{alt}" style="min-height:{height}px"></div>'
        f'<script type="application/json">{script}</script>'
        f"<noscript><p>This figure is drawn by JavaScript. It shows: {alt}</p></noscript>"
        f"</figure>"
    )


class PlotlyRenderer(render.MimeRenderPlugin):
    """The myst-nb plugin for Plotly's MIME type, for every builder; those that do not write HTML skip the raw node."""

    mime_priority_overrides = [("*", PLOTLY, 5)]

    @staticmethod
    def handle_mime(renderer: Any, data: Any, inline: bool) -> list[nodes.Node] | None:
        """Return the figure's nodes, or None where this plugin has nothing to say."""
        if inline or data.mime_type != PLOTLY:
            return None
        if not alt_text(data.content.get("layout", {})):
            logger.warning(
                'figure without a name: pass alt="…" to kvlab.show.theme.apply, or set layout.meta.alt or a title',
                location=(renderer.source, data.line),
                type="shared_state",
                subtype="alt",
            )
        renderer.add_js_file("figures", "js/figures.js", {"defer": "defer"})
        return [nodes.raw(text=figure_html(data.content), format="html")]


def move_data_out(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Write the data of the page's large figures beside the site's scripts, and their addresses into the page."""
    if "kv-figure" not in context.get("body", ""):
        return
    folder, stem = Path(app.outdir, "_static", "figures"), pagename.replace("/", "-")
    for stale in folder.glob(f"{stem}.*.js"):
        stale.unlink()

    def move(found: re.Match[str]) -> str:
        head, data = found.groups()
        if len(data) < LARGE:
            return found[0]
        # the name tells the content: a page and a figure from two builds never meet in a reader's cache
        name = f"{stem}.{hashlib.sha256(data.encode()).hexdigest()[:12]}.js"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f'(window.kvFigures ??= {{}})["{name}"] = {data};\n', "utf8")
        return f'{head} data-src="{context["pathto"](f"_static/figures/{name}", resource=True)}"></script>'

    context["body"] = DATA.sub(move, context["body"])


def setup(app: Sphinx) -> None:
    """Put the renderer before myst-nb's own plugins, and move figures' data out of the pages that are written.

    myst-nb finds plugins by entry point; a site's extension is no installed package, so its list is extended instead.
    """
    load = render.load_mime_renders
    if not getattr(load, "has_plotly", False):

        def with_plotly() -> list[type]:
            return [PlotlyRenderer, *load()]

        with_plotly.has_plotly = True  # type: ignore[attr-defined]
        render.load_mime_renders = with_plotly
    app.connect("html-page-context", move_data_out)
