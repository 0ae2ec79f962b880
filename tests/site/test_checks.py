"""Each check of the site is shown a page it must object to, and the same page mended, which it must let pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import checks
import pydata_sphinx_theme
import pytest
from conftest import ROOT, serve
from playwright.sync_api import Browser
from shared_state.figures import figure_html
from shared_state.math import katex_html
from shared_state.slim import icons_css

GOOD_FIGURE = figure_html({"data": [{"type": "bar", "y": [1, 2]}], "layout": {"meta": {"alt": "Two bars."}, "height": 200}})
THEME = Path(pydata_sphinx_theme.__file__).parent / "theme" / "pydata_sphinx_theme" / "static"
ICONS = icons_css((THEME / "scripts" / "fontawesome.js").read_text("utf8"))
EMPTY_FIGURE = figure_html({"data": [], "layout": {"meta": {"alt": "Nothing."}, "height": 200}})
NAMELESS_FIGURE = figure_html({"data": [{"type": "bar", "y": [1, 2]}], "layout": {"height": 200}})
LONG = (
    "a title so long that it will not stand under a figure as wide as the window of a telephone, however small its letters are"
)
CUT_FIGURE = figure_html(
    {
        "data": [{"type": "bar", "y": [1, 2]}],
        "layout": {"meta": {"alt": "Two."}, "yaxis": {"title": {"text": LONG}}, "height": 200},
    }
)
BROKEN_FIGURE = GOOD_FIGURE.replace('"data":', '"data"::')
KATEX = katex_html(ROOT / "node_modules" / "katex" / "dist" / "katex.min.js", r"\frac{1}{2}", False)
MATH = f'<link rel="stylesheet" href="vendor/katex/katex.min.css"><span class="math">{KATEX}</span>'
WIDGET = '<div class="widget-subarea"><script type="application/vnd.jupyter.widget-view+json">{}</script>%s</div>'

CASES: dict[str, tuple[Callable, str, str]] = {
    "an image from another host": (checks.external_requests, '<img alt="" src="http://127.0.0.2:9/x.png">', "<p>Text</p>"),
    "an error on the console": (checks.complaints, "<script>console.error('no')</script>", "<script>console.log(1)</script>"),
    "an uncaught exception": (checks.complaints, "<script>null.x</script>", "<script>1</script>"),
    "a file that is missing": (checks.complaints, '<img alt="" src="missing.png">', "<p>Text</p>"),
    "an empty figure": (checks.undrawn_figures, EMPTY_FIGURE, GOOD_FIGURE),
    "a figure without a name": (checks.undrawn_figures, NAMELESS_FIGURE, GOOD_FIGURE),
    "a title that is cut off": (checks.undrawn_figures, CUT_FIGURE, CUT_FIGURE.replace('"yaxis"', '"xaxis"')),
    "a figure that fails": (checks.undrawn_figures, BROKEN_FIGURE, GOOD_FIGURE),
    "a formula left as it is": (checks.untypeset_math, '<div class="math">x^2</div>', MATH),
    "a formula without its style": (checks.untypeset_math, f'<span class="math">{KATEX}</span>', MATH),
    "a page of 1.6 MB": (
        checks.too_heavy,
        f"<script>/*{'x' * 1_600_000}*/</script>",
        f"<script>/*{'x' * 1_400_000}*/</script>",
    ),
    "Python before a click": (checks.python_unasked, "<script>fetch('vendor/pyodide/pyodide.mjs')</script>", "<p>Text</p>"),
    "an icon without a shape": (
        checks.iconless,
        '<i class="fas fa-none"></i>',
        f"<style>{ICONS}</style><i class='fas fa-bars'></i>",
    ),
    "a widget that is not drawn": (
        partial(checks.missing_widgets, patience=500),
        WIDGET % "",
        WIDGET % '<div class="jupyter-widgets">1</div>',
    ),
    "low contrast": (checks.axe_violations, '<p style="color:#bbb">Faint</p>', '<p style="color:#333">Clear</p>'),
    "an image without a text": (checks.axe_violations, '<img src="data:image/gif;base64,R0lGODlhAQABAAAAACw=">', "<p>T</p>"),
    "a number as the computer writes it": (
        checks.raw_exponents,
        "<p>at most 4e-05</p>",
        "<p>at most 4·10⁻⁵; model2e</p><pre>4e-05</pre>",
    ),
    "a box 600 px wide": (checks.sideways, '<div style="width:600px">Wide</div>', '<div style="width:300px">Fits</div>'),
}


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to serve small pages from, with the site's scripts in it."""
    folder = tmp_path_factory.mktemp("stage")
    (folder / "js").symlink_to(ROOT / "book" / "assets" / "js")
    (folder / "css").symlink_to(ROOT / "book" / "assets" / "css")
    (folder / "vendor").symlink_to(ROOT / "_build" / "html" / "_static" / "vendor")
    return folder


@pytest.mark.site
@pytest.mark.parametrize("case", CASES)
def test_check_objects(browser: Browser, site: Path, stage: Path, case: str) -> None:
    """The check finds the planted fault and nothing on the mended page."""
    check, bad, good = CASES[case]
    found = {}
    for name, body in {"bad": bad, "good": good}.items():
        (stage / "page.html").write_text(
            f'<!doctype html><html lang="en" data-theme="light"><head><meta charset="utf8"><title>Page</title>'
            f'<link rel="icon" href="data:,"><link rel="stylesheet" href="css/shared-state.css">'
            f'<script defer src="js/figures.js"></script></head>'
            f'<body style="margin:0"><main><article><h1>Page</h1>{body}</article></main></body></html>',
            "utf8",
        )
        with checks.visit(browser, f"{serve(stage)}/page.html", viewport=checks.PHONE) as seen:
            found[name] = check(seen)
    assert found["bad"], f"{case}: not found"
    assert not found["good"], f"{case}: {found['good']}"


def test_broken_links_are_found(tmp_path: Path) -> None:
    """A dead link, a dead anchor and a missing script are named; live ones and other hosts are left alone."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.html").write_text('<h1 id="there">B</h1><a href="../a.html">A</a>', "utf8")
    (tmp_path / "a.html").write_text(
        '<a href="sub/b.html#there">ok</a><a href="#">top</a><a href="sub/c.html">dead</a><a href="sub/b.html#gone">dead</a>'
        '<script src="x.js"></script><a href="https://example.org/x">other</a>',
        "utf8",
    )
    assert checks.broken_links(tmp_path) == [
        "a: sub/c.html leads nowhere",
        "a: sub/b.html#gone names no element",
        "a: x.js leads nowhere",
    ]
