"""Print the built site as one PDF: `python -m shared_state.pdf SITE FILE`, with `tools` and `book/_ext` on the path.

Chromium opens the front page, puts the articles of all other pages behind it in the order of the table of contents, draws
every figure, and prints the whole with an outline. What needs a click is left as it was recorded.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import browser as chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FRONT = "book/index.html"
# In order: take the pages from the side bar, read each, make its ids and links those of one document, and join them
JOIN = """async () => {
  const front = location.href.split("#")[0];
  const links = [...document.querySelectorAll("nav.bd-links a.reference.internal")].map(link => link.href.split("#")[0]);
  const pages = [...new Set([front, ...links])];
  const mark = (url) => "p" + pages.indexOf(url.split("#")[0]) + "-";
  const known = new Set([...document.styleSheets].map(sheet => sheet.href)), book = [];
  for (const url of pages) {
    const answer = await fetch(url);
    if (!answer.ok) throw new Error(`${url}: ${answer.status}`);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    page.head.prepend(Object.assign(page.createElement("base"), { href: url })); // so that .href and .src are whole
    for (const sheet of page.querySelectorAll('link[rel="stylesheet"]')) {
      if (!known.has(sheet.href)) { known.add(sheet.href); document.head.append(sheet.cloneNode()); document.head.lastChild.href = sheet.href; }
    }
    const article = page.querySelector("article");
    article.querySelectorAll("script:not([type='application/json']), .headerlink, .kv-live-bar").forEach(e => e.remove());
    article.querySelectorAll("[data-src]").forEach(e => e.dataset.src = new URL(e.dataset.src, url).href);
    article.querySelectorAll("img[src]").forEach(e => e.setAttribute("src", e.src));
    article.querySelectorAll("a[href]").forEach(e => {
      const [to, anchor] = e.href.split("#");
      e.setAttribute("href", pages.includes(to) ? `#${mark(to)}${anchor ?? ""}` : e.href);
    });
    article.querySelectorAll("[id]").forEach(e => e.id = mark(url) + e.id);
    article.id = mark(url);
    article.querySelectorAll("details").forEach(e => e.open = true);
    article.style.breakBefore = book.length ? "page" : "auto";
    book.push(article);
  }
  document.body.replaceChildren(...book.map(article => document.adoptNode(article)));
  return book.length;
}"""
STYLE = """
html, body { background: #fff !important; margin: 0; padding: 0; }
article { padding: 0 !important; max-width: none !important; }
.kv-figure, .kvb-block, table tr { break-inside: avoid; }
pre { white-space: pre-wrap !important; overflow-wrap: anywhere; }
.pst-scrollable-table-container { overflow: visible !important; }
.bd-article table { font-size: 0.74rem; }
.toggle-button, .toggle, .copybtn, .onlyprint { display: none !important; }
.toggle-hidden, .admonition.toggle-hidden > :not(.admonition-title) { visibility: visible !important; opacity: 1 !important; height: auto !important; }
"""
FOOT = (
    '<div style="font: 8px sans-serif; width: 100%; text-align: center; color: #555">'
    '<span class="pageNumber"></span> / <span class="totalPages"></span></div>'
)
WIDTH = 700  # CSS pixels between the margins of an A4 page


def print_site(site: Path, target: Path, browser: Browser) -> int:
    """Write the PDF; return how many pages of the site are in it. Raises RuntimeError for a figure that is not drawn."""
    server = chromium.serve(site)
    page = browser.new_page(viewport={"width": WIDTH, "height": 1000}, color_scheme="light", reduced_motion="reduce")
    try:
        page.set_default_timeout(180_000)
        page.goto(f"http://127.0.0.1:{server.server_port}/{FRONT}")
        page.wait_for_load_state("networkidle")
        count = page.evaluate(JOIN)
        page.emulate_media(media="print")
        page.add_style_tag(content=STYLE)
        _draw(page)
        margin = {"top": "18mm", "bottom": "18mm", "left": "13mm", "right": "13mm"}
        target.parent.mkdir(parents=True, exist_ok=True)
        page.pdf(
            path=target, format="A4", margin=margin, outline=True, tagged=True, print_background=True,
            display_header_footer=True, header_template="<span></span>", footer_template=FOOT,
        )  # fmt: skip
    finally:
        page.close()
        server.shutdown()
        server.server_close()
    return count


def _draw(page: Page) -> None:
    """Draw every figure, near or not, and wait for the fonts."""
    if page.locator(".kv-figure").count():
        if not page.evaluate("Boolean(window.kvDraw)"):
            page.add_script_tag(url="../_static/js/figures.js")
        page.evaluate("async () => { for (const figure of document.querySelectorAll('.kv-figure')) await kvDraw(figure); }")
        failed = page.locator('.kv-figure:not([data-state="drawn"])').count()
        if failed:
            raise RuntimeError(f"{failed} figures could not be drawn")
    page.evaluate("document.fonts.ready.then(() => true)")


def main(arguments: list[str]) -> None:
    """Read the two paths, open Chromium, print."""
    from playwright.sync_api import sync_playwright

    if len(arguments) != 2:
        sys.exit("usage: python -m shared_state.pdf SITE FILE")
    site, target = map(Path, arguments)
    with sync_playwright() as playwright:
        count = print_site(site, target, chromium.launch(playwright))
    print(f"{target}: {count} pages of the site")


if __name__ == "__main__":
    main(sys.argv[1:])
