"""Render Plotly output as a figure with a name, drawn when the reader comes near it.

The page holds the figure as JSON beside an empty box of the right height; `assets/js/figures.js` loads plotly.js once,
when the first box nears the window, and draws it in the colours of the page. So text shows first and nothing jumps.

A figure's accessible name is `layout.meta["alt"]`, which `kvlab.show.theme.apply` sets; without one the title serves,
and without either the build warns.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

import myst_nb.core.render as render
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

PLOTLY = "application/vnd.plotly.v1+json"
DEFAULT_HEIGHT = 450  # plotly.js's own, in CSS pixels

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


def setup(app: Sphinx) -> None:
    """Put the renderer before myst-nb's own plugins.

    myst-nb finds plugins by entry point; a site's extension is no installed package, so its list is extended instead.
    """
    load = render.load_mime_renders
    if not getattr(load, "has_plotly", False):

        def with_plotly() -> list[type]:
            return [PlotlyRenderer, *load()]

        with_plotly.has_plotly = True  # type: ignore[attr-defined]
        render.load_mime_renders = with_plotly
