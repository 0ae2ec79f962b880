"""Figures in a small site of their own: what they say, when they load, and that their controls work by keyboard."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import checks
import nbformat
import plotly.graph_objects as go
import pytest
from conftest import ROOT, serve
from playwright.sync_api import Browser
from shared_state.figures import PLOTLY, alt_text, figure_html
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace

from kvlab.show import theme

CONF = {
    "project": "small",
    "extensions": ["myst_nb", "shared_state"],
    "include_patterns": ["index.ipynb"],  # not the README of every npm package
    "html_theme": "basic",
    "html_static_path": ["book/assets"],
    "html_css_files": ["css/shared-state.css"],
    "nb_execution_mode": "off",
    "html_favicon": "book/assets/img/mark.svg",
}


def stepped() -> go.Figure:
    """A figure with all three kinds of control."""
    fig = go.Figure(go.Scatter(x=[0, 1, 2], y=[1, 2, 3], name="run"))
    fig.frames = [go.Frame(name=str(n), data=[go.Scatter(x=[0, 1, 2], y=[n, n, n])]) for n in (10, 20, 30)]
    steps = [{"label": f"{f.name} ms", "method": "animate", "args": [[f.name], {"mode": "immediate"}]} for f in fig.frames]
    hide, show = (
        {"label": name, "method": "restyle", "args": ["opacity", value]} for name, value in (("faint", 0.2), ("full", 1))
    )
    fig.update_layout(
        sliders=[{"active": 0, "currentvalue": {"prefix": "Delay: "}, "steps": steps}],
        updatemenus=[
            {"name": "Line", "type": "dropdown", "buttons": [show, hide]},
            {"name": "Line again", "type": "buttons", "buttons": [show, hide]},
        ],
    )
    return theme.apply(fig, alt="A line that a slider lifts.", height=300)


def build(folder: Path, figures: list[go.Figure], builder: str = "html") -> tuple[Path, str]:
    """Build one page with these figures far apart; return the output folder and the warnings."""
    for name in ("node_modules", "package-lock.json", "kvlab"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "book").mkdir()
    (folder / "book" / "assets").symlink_to(ROOT / "book" / "assets")
    cells: list[Any] = [nbformat.v4.new_markdown_cell("# Page")]
    for fig in figures:
        data = {PLOTLY: fig.to_plotly_json() | {"frames": [f.to_plotly_json() for f in fig.frames]}, "text/plain": "Figure"}
        output = nbformat.v4.new_output("display_data", data=nbformat.from_dict(data))
        cells += [nbformat.v4.new_code_cell("fig", outputs=[output]), nbformat.v4.new_markdown_cell("Text.\n\n" * 150)]
    nbformat.write(
        nbformat.v4.new_notebook(cells=cells, metadata={"language_info": {"name": "python"}}), folder / "index.ipynb"
    )
    warnings, out = io.StringIO(), folder / builder
    with docutils_namespace():  # one process builds several sites
        Sphinx(folder, None, out, folder / "doctrees", builder, CONF, status=None, warning=warnings).build()
    return out, warnings.getvalue()


@pytest.fixture(scope="module")
def small_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page whose second figure lies far below the window."""
    out, warnings = build(tmp_path_factory.mktemp("small"), [stepped(), theme.apply(go.Figure(go.Bar(y=[1])), alt="One bar.")])
    assert not warnings
    return out


def test_name_of_a_figure() -> None:
    """The alt text, else the title in either of its two forms, else nothing."""
    assert alt_text({"meta": {"alt": " says it "}, "title": {"text": "title"}}) == "says it"
    assert alt_text({"title": {"text": "title"}}) == alt_text({"title": "title"}) == "title"
    assert alt_text({"meta": ["other"]}) == alt_text({"title": {}}) == ""


def test_figure_text_cannot_leave_its_script() -> None:
    """A title with markup in it stays data, and in the name it is escaped."""
    html = figure_html({"data": [], "layout": {"title": '</script><b>"x"'}})
    assert html.count("</script>") == 1
    assert 'aria-label="&lt;/script&gt;&lt;b&gt;&quot;x&quot;"' in html


def test_nameless_figure_warns(tmp_path: Path) -> None:
    """The build says which page holds a figure without a name, and what to do."""
    _, warnings = build(tmp_path, [go.Figure(go.Bar(y=[1]))])
    assert "index.ipynb" in warnings and "figure without a name" in warnings and "theme.apply" in warnings


@pytest.mark.parametrize("builder", ["text", "latex", "dummy"])
def test_other_builders_do_not_stumble(tmp_path: Path, builder: str) -> None:
    """A figure is no reason for a warning where there is no HTML."""
    _, warnings = build(tmp_path, [stepped()], builder)
    assert not warnings


@pytest.mark.site
def test_figures_load_when_near_and_nothing_jumps(browser: Browser, small_site: Path) -> None:
    """The figure in the window is drawn and the far one not, until the reader is near; their boxes keep their height."""
    with checks.visit(browser, f"{serve(small_site)}/index.html") as seen:
        state = "() => [...document.querySelectorAll('.kv-figure')].map(f => f.dataset.state ?? 'waiting')"
        seen.page.wait_for_function("() => document.querySelector('.kv-figure').dataset.state === 'drawn'")
        assert seen.page.evaluate(state) == ["drawn", "waiting"]
        far = seen.page.locator(".kv-figure").nth(1)
        before = far.bounding_box()["height"]
        assert not checks.undrawn_figures(seen)
        assert seen.page.evaluate(state) == ["drawn", "drawn"]
        assert far.bounding_box()["height"] == before
        assert sum("/plotly" in url for url in seen.requests) == 1


@pytest.mark.site
def test_plotly_is_not_fetched_before_a_figure_is_near(browser: Browser, small_site: Path) -> None:
    """The 1.5 MB wait while the reader is elsewhere on the page."""
    page = small_site / "index.html"
    html = page.read_text("utf8")
    (small_site / "far.html").write_text(html.replace("<figure", '<div style="height:5000px"></div><figure', 1), "utf8")
    with checks.visit(browser, f"{serve(small_site)}/far.html") as seen:
        assert not [url for url in seen.requests if "/plotly" in url]
        assert not checks.undrawn_figures(seen)
        assert [url for url in seen.requests if "/plotly" in url]


@pytest.mark.site
@pytest.mark.parametrize(("kind", "bundle"), [("scatter", "plotly-cartesian.min.js"), ("scattergl", "plotly.min.js")])
def test_a_figure_gets_the_smallest_bundle_that_draws_it(browser: Browser, tmp_path: Path, kind: str, bundle: str) -> None:
    """Plain charts need a third of plotly.js."""
    trace = {"type": kind, "x": [1, 2], "y": [1, 2], "mode": "markers"}
    out, _ = build(tmp_path, [theme.apply(go.Figure([trace]), alt="Two points.", height=300)])
    with checks.visit(browser, f"{serve(out)}/index.html") as seen:
        assert not checks.undrawn_figures(seen)
        assert [url.split("/")[-1] for url in seen.requests if "/plotly" in url] == [bundle]


@pytest.mark.site
def test_controls_work_by_keyboard(browser: Browser, small_site: Path) -> None:
    """Slider, menu and buttons are named inputs outside the drawing, and move the figure."""
    with checks.visit(browser, f"{serve(small_site)}/index.html") as seen:
        page = seen.page
        page.wait_for_selector(".kv-controls")
        trace = "key => document.querySelector('.kv-plot').data[0][key]"
        slider = page.get_by_role("slider", name="Delay")
        slider.focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_function("() => document.querySelector('.kv-plot').data[0].y[0] === 20")
        assert slider.get_attribute("aria-valuetext") == "20 ms"
        page.get_by_role("combobox", name="Line").select_option("faint")
        assert page.evaluate(trace, "opacity") == 0.2
        full = page.get_by_role("button", name="full")
        full.focus()
        page.keyboard.press("Enter")
        assert page.evaluate(trace, "opacity") == 1
        assert full.get_attribute("aria-pressed") == "true"
        assert page.get_by_role("button", name="faint").get_attribute("aria-pressed") == "false"
        assert not page.locator(".kv-plot .slider-container, .kv-plot .updatemenu-container").count()
        assert not checks.axe_violations(seen) + checks.complaints(seen)


@pytest.mark.site
def test_figures_follow_the_mode(browser: Browser, small_site: Path) -> None:
    """The same figure has dark text on a light page and light text on a dark one."""
    with checks.visit(browser, f"{serve(small_site)}/index.html") as seen:
        ink = "() => document.querySelector('.kv-plot')._fullLayout.font.color"
        checks.switch_mode(seen.page, "light")
        seen.page.wait_for_function("() => document.querySelector('.kv-figure').dataset.state === 'drawn'")
        assert seen.page.evaluate(ink) == "#1f2328"
        checks.switch_mode(seen.page, "dark")
        seen.page.wait_for_function("() => document.querySelector('.kv-plot')._fullLayout.font.color === '#e4e2dc'")


@pytest.mark.site
def test_without_javascript_a_figure_is_a_sentence(browser: Browser, small_site: Path) -> None:
    """The reader is told what the figure shows."""
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{serve(small_site)}/index.html")
    assert "It shows: A line that a slider lifts." in page.inner_text("body")
    context.close()
