"""What must hold on every page of the built site.

Each check takes a visit (a page opened in Chromium, with what it asked for and complained about) and returns the problems
it found, as sentences. `test_checks.py` shows each of them a page it must object to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

from axe_playwright_python.sync_playwright import Axe
from bs4 import BeautifulSoup
from playwright.sync_api import Browser, Page

DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
OURS = "article"  # axe judges what the course wrote, not the theme's frame


@dataclass
class Visit:
    """An open page, the addresses it asked for, the requests that failed, and what it wrote to the console as errors."""

    page: Page
    requests: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@contextmanager
def visit(browser: Browser, url: str, *, viewport: dict[str, int] = DESKTOP, mode: str = "light") -> Iterator[Visit]:
    """Open a page in a fresh context and let it settle; `mode` is "light" or "dark"."""
    context = browser.new_context(viewport=viewport, reduced_motion="reduce", has_touch=viewport is PHONE)
    context.add_init_script(f"try {{ localStorage.mode = localStorage.theme = '{mode}' }} catch {{}}")
    context.set_default_timeout(60_000)  # a busy machine is slow, not wrong
    page = context.new_page()
    seen = Visit(page)
    page.on("request", lambda request: seen.requests.append(request.url))
    page.on("requestfailed", lambda request: seen.failed.append(f"{request.url}: {request.failure}"))
    page.on("response", lambda answer: answer.status >= 400 and seen.failed.append(f"{answer.url}: {answer.status}"))
    page.on("console", lambda message: message.type == "error" and seen.errors.append(message.text))
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    try:
        page.goto(url)
        page.wait_for_load_state("networkidle")
        yield seen
    finally:
        context.close()


def switch_mode(page: Page, mode: str) -> None:
    """Turn the page to light or dark, as its own button does, and wait until the colours have arrived."""
    page.evaluate(
        """async mode => {
          document.documentElement.dataset.theme = document.documentElement.dataset.mode = mode;
          for (let frame = 0; frame < 3; frame++) await new Promise(done => requestAnimationFrame(done));
          await Promise.all(document.getAnimations().map(each => each.finished.catch(() => {})));
        }""",
        mode,
    )


def external_requests(seen: Visit) -> list[str]:
    """The page asks no host but the one it came from."""
    home = urlparse(seen.page.url)
    strangers = [url for url in seen.requests if urlparse(url).scheme not in {"data", "blob", "about"}]
    return [f"asks {url}" for url in strangers if (urlparse(url).scheme, urlparse(url).netloc) != (home.scheme, home.netloc)]


def raw_exponents(seen: Visit) -> list[str]:
    """No number in the prose stands as the computer writes it, such as 4e-05; code and its output may."""
    text = BeautifulSoup(seen.page.content(), "html.parser")
    for tag in text.find_all(["pre", "code", "script", "style", "svg", "textarea"]):
        tag.decompose()
    return [f"reads {found}" for found in re.findall(r"\S*\d[eE][+-]\d\d\b.{0,30}", text.get_text())]


def complaints(seen: Visit) -> list[str]:
    """Nothing fails to load, and no error reaches the console."""
    return [f"failed: {text}" for text in seen.failed] + [f"console: {text}" for text in seen.errors]


_FIGURES = """() => [...document.querySelectorAll('.kv-figure')].map(figure => {
  const plot = figure.querySelector('.kv-plot');
  const big = element => { const box = element.getBoundingClientRect(); return box.width + box.height > 1; };
  const marks = [...plot.querySelectorAll(
    '.trace path, .trace image, .trace rect, .trace text, .hm image, .heatmaplayer image, .slice path, .shapelayer path,' +
    '.annotation-text, .gl-container canvas, .table-control-view path')].filter(big);
  const paper = plot.getBoundingClientRect();
  const cut = [...plot.querySelectorAll('.xtitle, .ytitle, .gtitle')].filter(big).filter(title => {
    const box = title.getBoundingClientRect();
    return box.left < paper.left - 2 || box.right > paper.right + 2 || box.top < paper.top - 2 || box.bottom > paper.bottom + 2;
  }).map(title => title.textContent);
  return {
    cut, name: plot.getAttribute('aria-label') || '', state: figure.dataset.state || 'not drawn',
    said: plot.innerText.slice(0, 200), marks: marks.length, width: plot.scrollWidth, room: figure.parentElement.clientWidth,
  };
})"""


def undrawn_figures(seen: Visit) -> list[str]:
    """Every figure, once scrolled to, is drawn with something in it, has a name, and fits its column, with its titles."""
    for handle in seen.page.query_selector_all(".kv-figure"):
        handle.scroll_into_view_if_needed()
        seen.page.wait_for_function("figure => ['drawn', 'failed'].includes(figure.dataset.state)", arg=handle)
    problems = []
    for number, figure in enumerate(seen.page.evaluate(_FIGURES), 1):
        which = f"figure {number} ({figure['name'][:60] or 'no name'})"
        if not figure["name"].strip():
            problems.append(f"{which} has no accessible name")
        if figure["state"] != "drawn":
            problems.append(f"{which} is {figure['state']}: {figure['said']}")
        elif not figure["marks"]:
            problems.append(f"{which} is empty")
        problems += [f"{which} cuts off the title {title!r}" for title in figure["cut"]]
        if figure["width"] > figure["room"] + 1:
            problems.append(f"{which} is {figure['width']} px wide in a column of {figure['room']}")
    return problems


_MATH = """() => [...document.querySelectorAll('article .math')].filter(place => {
  const wide = part => place.querySelector(part)?.getBoundingClientRect().width ?? 0;
  // the copy for screen readers is cut to a point by KaTeX's style sheet
  return wide('.katex-html') < 1 || wide('.katex-mathml') > 2 || place.querySelector('.katex-error');
}).map(place => place.textContent.trim().slice(0, 80))"""


def untypeset_math(seen: Visit) -> list[str]:
    """Every formula is typeset, once for the eye."""
    return [f"math not typeset: {text}" for text in seen.page.evaluate(_MATH)]


def missing_widgets(seen: Visit, patience: float = 20_000) -> list[str]:
    """Every ipywidget of the page is drawn, within so many milliseconds of the reader's coming near the first."""
    wanted = seen.page.locator('script[type="application/vnd.jupyter.widget-view+json"]').count()
    if not wanted:
        return []
    seen.page.evaluate("document.querySelector('.widget-subarea').scrollIntoView()")
    try:
        seen.page.wait_for_function(
            "n => document.querySelectorAll('.widget-subarea > .jupyter-widgets, .widget-subarea .lm-Widget').length >= n",
            arg=wanted,
            timeout=patience,
        )
    except Exception:  # playwright's time-out: the widgets are not there
        return [f"{wanted} widgets in the page, {seen.page.locator('.jupyter-widgets').count()} drawn"]
    return []


def axe_violations(seen: Visit, *, only: list[str] | None = None) -> list[str]:
    """axe finds nothing serious or critical in our content; `only` names the rules to run, else all."""
    if not seen.page.locator(OURS).count():
        return []
    # preload would ask the server again for what the style sheets import, from the wrong folder
    options = {
        "resultTypes": ["violations"],
        "preload": False,
        **({"runOnly": {"type": "rule", "values": only}} if only else {}),
    }
    found = Axe().run(seen.page, context=OURS, options=options).response["violations"]
    return [
        f"axe {item['impact']} {item['id']}: {node['target']} {node['html'][:160]}"
        for item in found
        if item["impact"] in {"serious", "critical"}
        for node in item["nodes"]
    ]


WEIGHT = 1_500_000  # bytes a page may transfer, figures not counted
# what a figure or a widget fetches when the reader comes near it
_FIGURES_OWN = ("/vendor/plotly", "/_static/figures/", "/require.js", "/@jupyter-widgets/")
_TRANSFERS = "() => performance.getEntries().filter(e => e.transferSize).map(e => [e.name, e.transferSize])"


def too_heavy(seen: Visit) -> list[str]:
    """The page, with all it loads but its figures, transfers less than `WEIGHT` bytes from a server that does not compress."""
    sizes = [(size, url) for url, size in seen.page.evaluate(_TRANSFERS) if not any(own in url for own in _FIGURES_OWN)]
    total = sum(size for size, _ in sizes)
    if total < WEIGHT:
        return []
    largest = ", ".join(f"{size:,} {url}" for size, url in sorted(sizes, reverse=True)[:3])
    return [f"transfers {total:,} bytes; the largest: {largest}"]


_PYTHON = ("/pyodide/", "/live/kvlab.json", "kernel-worker")


def python_unasked(seen: Visit) -> list[str]:
    """Nothing of the page's Python, 13 MB, is fetched before somebody asks for it."""
    return [f"fetches {url} before a click" for url in seen.requests if any(part in url for part in _PYTHON)]


_ICONS = """() => [...document.querySelectorAll(':is(.fa, .fas, .far, .fa-solid, .fa-regular)')]
  .filter(icon => !getComputedStyle(icon).maskImage.startsWith('url('))
  .map(icon => icon.className)"""


def iconless(seen: Visit) -> list[str]:
    """Every icon has a shape."""
    return [f"no shape for the icon {name}: add it to slim.ICONS" for name in seen.page.evaluate(_ICONS)]


_WIDE = """() => {
  const room = document.documentElement.clientWidth, scrolls = document.documentElement.scrollWidth - room;
  if (scrolls <= 0) return [];
  const wide = [...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > room + 1);
  return [`the page scrolls ${scrolls} px sideways`,
          ...wide.slice(0, 5).map(e => `too wide: <${e.tagName.toLowerCase()} class="${e.getAttribute('class') || ''}">`)];
}"""


def sideways(seen: Visit) -> list[str]:
    """The page does not scroll sideways."""
    return seen.page.evaluate(_WIDE)


def pages_of(site: Path) -> list[str]:
    """Return the names of the site's own pages, without `.html`, in order. JupyterLite's are in test_lite.py."""
    names = (path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html"))
    return sorted(name for name in names if not name.startswith(("_", "lite/")))


def broken_links(site: Path) -> list[str]:
    """Every link inside the site leads to a file that is there, and every anchor to an element with that id."""
    soups = {name: BeautifulSoup((site / f"{name}.html").read_text("utf8"), "html.parser") for name in pages_of(site)}
    ids = {
        name: {tag.get("id") for tag in soup.find_all(id=True)}
        | {tag["name"] for tag in soup.find_all("a", attrs={"name": True})}
        for name, soup in soups.items()
    }
    problems = []
    for name, soup in soups.items():
        for tag in soup.find_all(["a", "img", "script", "link", "source"]):
            address = tag.get("href") or tag.get("src")
            if not address or urlparse(address).scheme or address.startswith("//"):
                continue
            path, anchor = urldefrag(address)
            path = unquote(urlparse(path).path)
            target = (site / f"{name}.html").parent / path if path else site / f"{name}.html"
            target = target.resolve()
            if target.is_dir():
                target = target / "index.html"
            if not target.exists():
                problems.append(f"{name}: {address} leads nowhere")
            elif anchor and target.suffix == ".html":
                page = target.relative_to(site.resolve()).with_suffix("").as_posix()
                if page in ids and unquote(anchor) not in ids[page] | {"top", ""}:
                    problems.append(f"{name}: {address} names no element")
    return problems
