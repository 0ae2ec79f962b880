"""What keeps the pages light: formulas set at build time, icons without a font, figures and widgets that wait for the reader."""

from __future__ import annotations

import json
import re
from pathlib import Path

import checks
import ipywidgets
import pydata_sphinx_theme
import pytest
from conftest import ROOT, serve
from ipywidgets.embed import embed_data
from playwright.sync_api import Browser, expect
from shared_state import figures, slim, vendor
from shared_state.math import katex_html
from shared_state.search import text_of
from sphinx.errors import ExtensionError

THEME = Path(pydata_sphinx_theme.__file__).parent / "theme" / "pydata_sphinx_theme" / "static"
KATEX = ROOT / "node_modules" / "katex" / "dist" / "katex.min.js"


def test_a_formula_is_set_for_the_eye_and_for_a_screen_reader() -> None:
    """Displayed and in a line; TeX that cannot be read is refused in KaTeX's words."""
    block, line = katex_html(KATEX, r"\frac{a}{b}", True), katex_html(KATEX, "a<b", False)
    assert "katex-display" in block and "<mfrac>" in block
    assert "katex-display" not in line and "&lt;" in line
    with pytest.raises(ValueError, match="Undefined control sequence"):
        katex_html(KATEX, r"\nosuchthing", True)
    assert "<mi>a</mi>" in katex_html(KATEX, "a", False)  # and goes on


def test_the_theme_loses_its_font_and_keeps_its_icons() -> None:
    """Of the style sheet more than a fifth goes; the rest is as it was, icons included."""
    css = (THEME / "styles" / "pydata-sphinx-theme.css").read_text("utf8")
    thin = slim.slim_css(css, slim.icons_css((THEME / "scripts" / "fontawesome.js").read_text("utf8")))
    assert len(thin) < 0.8 * len(css)
    assert "webfonts" not in thin and "Font Awesome 6" not in thin
    assert ".bd-sidebar-primary" in thin and thin.count("{") == thin.count("}")
    for name in slim.ICONS:
        assert f".fa-{name}{{--w:" in thin
    with pytest.raises(ExtensionError, match="no longer holds"):
        slim.slim_css(thin, "")


def test_an_icon_that_the_theme_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slim, "ICONS", ("bars", "no-such"))
    with pytest.raises(ExtensionError, match="no icon 'no-such'"):
        slim.icons_css((THEME / "scripts" / "fontawesome.js").read_text("utf8") + " ")


def test_large_figures_leave_the_page(tmp_path: Path) -> None:
    """A small figure stays; a large one becomes a file that its page names and no other; an older one of the page goes."""
    small = figures.figure_html({"data": [{"y": [1]}], "layout": {"title": "small"}})
    large = figures.figure_html({"data": [{"y": list(range(3000))}], "layout": {"title": "large"}})
    app = type("App", (), {"outdir": tmp_path})
    (tmp_path / "_static" / "figures").mkdir(parents=True)
    stale = tmp_path / "_static" / "figures" / "book-page.0123.js"
    stale.write_text("")
    context = {"body": f"<p>A</p>{small}<p>B</p>{large}", "pathto": lambda path, resource: f"../{path}"}
    figures.move_data_out(app, "book/page", "", context, None)
    assert small in context["body"] and "2999" not in context["body"]
    [name] = re.findall(r'data-src="\.\./_static/figures/([^"]+)"', context["body"])
    assert not stale.exists()
    script = (tmp_path / "_static" / "figures" / name).read_text("utf8")
    assert json.loads(script.partition("] = ")[2].rstrip(";\n"))["data"][0]["y"][-1] == 2999


def test_both_bundles_of_plotly_are_of_one_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package.json that pins another plotly.js than Python's is refused, with the version to pin."""
    assert {"plotly-cartesian.min.js", "plotly.min.js"} <= vendor.vendored(ROOT).keys()
    (tmp_path / "old.js").write_text("/**\n* plotly.js (cartesian - minified) v1.2.3\n*/")
    assert vendor.version_of(tmp_path / "old.js") == "1.2.3"
    versions = iter(["1.2.3", "4.1.1"])
    monkeypatch.setattr(vendor, "version_of", lambda path: next(versions))
    with pytest.raises(ExtensionError, match=r"pins plotly.js 1\.2\.3, the Python package brings 4\.1\.1"):
        vendor.vendored(ROOT)


def test_text_of_a_page() -> None:
    page = "<nav>no</nav><article><h1>A<a class='headerlink'>#</a></h1><script>no</script><p>b &amp;\n c</p></article>"
    assert text_of(page) == "A b & c"


@pytest.mark.site
def test_widgets_wait_until_they_are_near(browser: Browser, site: Path, tmp_path: Path) -> None:
    """html-manager is fetched for the first widget that nears the window, and draws it with a name."""
    slider = ipywidgets.IntSlider(description="Blocks", value=3)
    data = embed_data(views=[slider])
    body = '<div style="height:5000px"></div>' + "".join(
        f'<script type="application/vnd.jupyter.widget-{kind}+json">{json.dumps(value)}</script>' if kind == "state"
        else f'<div class="widget-subarea"><script type="application/vnd.jupyter.widget-view+json">{json.dumps(value)}</script></div>'
        for kind, value in [("state", data["manager_state"]), *(("view", spec) for spec in data["view_specs"])]
    )  # fmt: skip
    (tmp_path / "js").symlink_to(ROOT / "book" / "assets" / "js")
    (tmp_path / "vendor").symlink_to(site / "_static" / "vendor")
    (tmp_path / "page.html").write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf8"><title>Widgets</title>'
        f'<link rel="icon" href="data:,"><script defer src="js/widgets.js"></script></head>'
        f"<body><main><article><h1>Widgets</h1>{body}</article></main></body></html>",
        "utf8",
    )
    for address in (f"{serve(tmp_path)}/page.html", (tmp_path / "page.html").as_uri()):
        with checks.visit(browser, address) as seen:
            assert not [url for url in seen.requests if "embed-amd" in url]
            assert not checks.missing_widgets(seen)
            expect(seen.page.get_by_role("slider", name="Blocks")).to_be_visible()
            assert not checks.complaints(seen)
