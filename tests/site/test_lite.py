"""The labs that run in the browser: JupyterLite from the built site alone, with the worked answers and without."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import checks
import jupytext
import make_labs
import nbclient
import nbformat
import pytest
from conftest import ROOT, serve
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from playwright.sync_api import Browser, BrowserContext, Page, expect
from shared_state import labpage, lite

from kvlab.inbrowser import key

pytestmark = pytest.mark.site
LABS = lite.labs(ROOT)
BOOT = 120_000  # milliseconds; a busy machine is slow, not wrong
CELLS = """() => [...jupyterapp.shell.currentWidget.content.model.cells].filter(cell => cell.type === "code")
  .map(cell => ({ count: cell.executionCount, source: cell.sharedModel.source, outputs: cell.outputs.toJSON() }))"""
ANSWER = """answers => { for (const cell of jupyterapp.shell.currentWidget.content.model.cells) {
  const answer = answers[cell.sharedModel.getMetadata().nbgrader?.grade_id];
  if (answer) cell.sharedModel.setSource(answer); } }"""
ALL_RAN = """() => { const cells = [...jupyterapp.shell.currentWidget.content.model.cells].filter(cell => cell.type === "code");
  return cells.every(cell => cell.executionCount) || cells.some(cell => cell.outputs.toJSON().some(output => output.output_type === "error")); }"""


def answers(lab: str) -> dict[str, str]:
    """The worked answer for each exercise cell, by its nbgrader id."""
    cells = make_labs.worked(ROOT / "solutions" / f"{lab}.md").cells
    return {about["grade_id"]: cell.source for cell in cells if (about := cell.metadata.get("nbgrader", {})).get("solution")}


def opened(page: Page, site: Path, lab: str, *, worked: bool) -> None:
    """Open a lab and wait for its cells."""
    page.goto(f"{serve(site)}/lite/notebooks/index.html?path={lab}.ipynb")
    page.wait_for_function("window.jupyterapp?.shell?.currentWidget?.content?.model?.cells?.length > 3", timeout=BOOT)
    page.wait_for_function(
        "jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'", timeout=BOOT, polling=200
    )
    if worked:
        page.evaluate(ANSWER, answers(lab))


def ran(page: Page) -> list[dict]:
    """Run every cell; return the code cells once all have run or one has failed."""
    page.evaluate("() => void jupyterapp.commands.execute('notebook:run-all-cells')")
    page.wait_for_function(ALL_RAN, timeout=BOOT, polling=500)
    return page.evaluate(CELLS)


def errors(cells: list[dict]) -> list[str]:
    return [output["evalue"] for cell in cells for output in cell["outputs"] if output["output_type"] == "error"]


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser that has not been here before, and notes what it asks other hosts for."""
    made = browser.new_context()
    made.asked = []  # type: ignore[attr-defined]
    made.on("request", lambda request: made.asked.append(request.url))  # type: ignore[attr-defined]
    yield made
    made.close()


def foreign(context: BrowserContext, site: Path) -> list[str]:
    return [url for url in context.asked if not url.startswith((serve(site), "data:", "blob:"))]  # type: ignore[attr-defined]


@pytest.mark.parametrize("lab", LABS)
def test_a_worked_lab_runs_to_its_end(context: BrowserContext, site: Path, lab: str) -> None:
    """Every cell, in the page, on the answers: no error, the checks satisfied, the model's cells recorded, no other host asked."""
    page = context.new_page()
    opened(page, site, lab, worked=True)
    cells = ran(page)
    assert not errors(cells)
    said = json.dumps([cell["outputs"] for cell in cells], ensure_ascii=False)
    exercises = json.loads((ROOT / "labs" / f"{lab}.ipynb").read_text("utf8"))["cells"]
    points = [cell for cell in exercises if cell["metadata"].get("nbgrader", {}).get("grade")]
    assert len(re.findall(r"Exercise \d \(\w+\): right", said)) == len(points) > 0
    model = [cell for cell in cells if "Recorded with the worked lab" in json.dumps(cell["outputs"])]
    silent = [cell["source"] for cell in model if len(cell["outputs"]) < 2]
    assert model and all("import" in source or "def " in source for source in silent), silent
    assert foreign(context, site) == []


def test_the_lab_as_it_is_stops_at_its_first_exercise(context: BrowserContext, site: Path) -> None:
    """In one sentence; and the figure of another cell is drawn once that is written."""
    page = context.new_page()
    opened(page, site, "05-blocks", worked=False)
    told = [output for cell in ran(page) for output in cell["outputs"] if output["output_type"] == "error"]
    assert len(told) == 1
    assert "Exercise 1 (allocate) is not finished yet" in json.dumps(told[0]["traceback"])


def test_a_figure_is_drawn_and_work_is_kept(context: BrowserContext, site: Path) -> None:
    """Plotly's own drawing; after a reload the cell still holds what was written; a package is refused with a reason; so is the model."""
    page = context.new_page()
    opened(page, site, "05-blocks", worked=True)
    ran(page)
    expect(page.locator(".js-plotly-plot .main-svg").first).to_be_attached(timeout=BOOT)
    for source, says in (
        ("%pip install numpy", "installs nothing"),
        ("import torch", "does not run in a browser"),
        ("loaded.spec", "`loaded` comes from a cell that needs the model"),
        ('ZOO["stale-hash"].cases', "#"),
        ("mine_too = 41 + 1\nmine_too", '"42"'),
    ):
        page.evaluate(
            """async ([source]) => { const notebook = jupyterapp.shell.currentWidget.content;
              notebook.activeCellIndex = notebook.widgets.length - 1;
              await jupyterapp.commands.execute("notebook:insert-cell-below");
              notebook.activeCell.model.sharedModel.setSource(source);
              await jupyterapp.commands.execute("notebook:run-cell"); }""",
            [source],
        )
        page.wait_for_function(f"({CELLS})().at(-1).outputs.length", timeout=BOOT, polling=200)
        said = json.dumps(page.evaluate(CELLS)[-1]["outputs"])
        assert says in said
    page.evaluate("() => jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_function("!jupyterapp.shell.currentWidget.context.model.dirty")
    opened(page, site, "05-blocks", worked=False)
    assert page.evaluate(CELLS)[-1]["source"].startswith("mine_too")


def test_a_downloaded_notebook_is_the_lab_and_runs_elsewhere(tmp_path: Path) -> None:
    """In a kernel of its own it is the lab behind a word on where it ran: it stops at the first exercise, as the lab does."""
    made = nbformat.reads(lite.notebook(ROOT, "05-blocks"), as_version=4)
    given = nbformat.read(ROOT / "labs" / "05-blocks.ipynb", as_version=4)
    assert [cell.source for cell in made.cells[1:]] == [cell.source for cell in given.cells]
    made.cells = [cell for cell in made.cells if "load()" not in cell.source]  # the model is not what is tested
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="Exercise 1 .allocate. is not finished yet"):
        nbclient.NotebookClient(made, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()


# ---- what is in the site, without a browser ------------------------------------------------------------------------------


def test_the_wheels_are_those_of_this_environment_and_the_lock_tells_the_truth(site: Path) -> None:
    folder = site / "lite" / "wheels"
    lock = json.loads((folder / "pyodide-lock.json").read_text("utf8"))["packages"]
    assert set(lite.START) | {"kvlab", "plotly", "nbformat"} <= set(lock)
    for name, entry in lock.items():
        data = (folder / entry["file_name"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == entry["sha256"], name
        assert set(entry["depends"]) <= set(lock), name
    for name in ("ipython", "plotly", "ipywidgets"):
        assert lock[name]["version"] == importlib.metadata.version(name)
    assert {path.name for path in folder.glob("*.whl")} == {entry["file_name"] for entry in lock.values()}


def test_what_is_packed_is_the_same_each_time_and_leaves_out_what_cannot_run() -> None:
    files = {
        "a/__init__.py": b"1",
        "a/__pycache__/x.pyc": b"",
        "a/fast.so": b"",
        "a/tests/test_a.py": b"",
        "a-1.dist-info/RECORD": b"",
    }
    data = lite.wheel("a", "1", files)
    assert lite.wheel("a", "1", dict(reversed(files.items()))) == data
    assert zipfile.ZipFile(io.BytesIO(data)).namelist() == ["a-1.dist-info/METADATA", "a-1.dist-info/WHEEL", "a/__init__.py"]


def cached(folder: Path, source: Path, said: str) -> None:
    """Put a run of a solution into a cache, as a build in another place would have."""
    cells = [nbformat.v4.new_code_cell(cell.source, metadata=cell.metadata) for cell in jupytext.read(source).cells]
    for cell in cells:
        cell.outputs = [nbformat.v4.new_output("stream", text=said)]
    bundle = CacheBundleIn(nbformat.v4.new_notebook(cells=cells), f"/elsewhere/solutions/{source.name}")
    get_cache(str(folder)).cache_notebook_bundle(bundle, check_validity=False, overwrite=True)


def test_the_run_of_the_present_text_is_taken_wherever_it_was_made(tmp_path: Path) -> None:
    """Edited, built, undone, built: the first run counts again. A checkout that was moved keeps its runs."""
    source = tmp_path / "99-none.md"
    text = "---\njupytext:\n  text_representation: {extension: .md, format_name: myst}\n---\n```{code-cell} ipython3\n:tags: [model, other]\n\n%s\n```\n"
    for body, said in (("first", "one"), ("second", "two")):
        source.write_text(text % body, "utf8")
        cached(tmp_path / "cache", source, said)
    for body, said in (("first", "one"), ("second", "two")):
        source.write_text(text % body, "utf8")
        assert json.loads(lite.recorded(lite.executed(tmp_path / "cache", source))) == {key(body): [{"text/plain": said}]}
    source.write_text(text % "third", "utf8")
    with pytest.raises(lite.ExtensionError, match="as it is now, was not executed"):
        lite.executed(tmp_path / "cache", source)
    assert lite.MODEL_CELL.search(text) and not lite.MODEL_CELL.search(text.replace("model", "remodel"))


def test_wheels_are_renewed_and_old_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed library gets another file name; the old file goes; what did not change stays as it is."""
    monkeypatch.setattr(lite, "needed", lambda names: {"comm": [], "plotly": []})
    monkeypatch.setattr(lite, "installed", lambda name: ("1", {f"{name}.py": b""}))
    names = []
    for code in (b"1", b"2", b"1"):
        monkeypatch.setattr(lite, "course", lambda root, cache, code=code: {"kvlab/__init__.py": code})
        lite.write_wheels(ROOT, tmp_path, tmp_path / "kept", tmp_path / "wheels")
        names.append({path.name.partition("-")[0]: path.name for path in (tmp_path / "wheels").glob("*.whl")})
    assert names[0] == names[2] and names[0]["kvlab"] != names[1]["kvlab"]
    assert names[0] | {"kvlab": ""} == names[1] | {"kvlab": ""}
    assert not list(tmp_path.rglob("*.part"))


def test_markers_are_read_for_the_browser() -> None:
    """psutil and pexpect, which IPython wants elsewhere, are not wanted there; what its parts need is."""
    found = lite.needed(["ipython"])
    assert not {"psutil", "pexpect", "colorama"} & set(found)
    assert {"traitlets", "pygments", "wcwidth"} <= set(found)


def test_outputs_become_bundles() -> None:
    cells = [
        {"cell_type": "code", "metadata": {"tags": ["model"]}, "source": ["loaded = ", "load()"], "outputs": [{"output_type": "stream", "name": "stdout", "text": ["a\n", "b\n"]}, {"output_type": "execute_result", "data": {"text/plain": ["c"], "application/x+json": {"d": 1}}}, {"output_type": "error", "ename": "E", "evalue": "", "traceback": []}]},
        {"cell_type": "code", "metadata": {}, "source": "1", "outputs": [{"output_type": "stream", "text": "not this"}]},
    ]  # fmt: skip
    found = json.loads(lite.recorded(cells))
    assert list(found.values()) == [[{"text/plain": "a\nb"}, {"text/plain": "c", "application/x+json": {"d": 1}}]]


# ---- the page of a lab ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lab", sorted(path.stem for path in (ROOT / "labs").glob("[0-9]*.ipynb")))
def test_every_lab_page_says_how_to_work_on_it(browser: Browser, site: Path, lab: str) -> None:
    """The browser where it can, Colab, download, answers: by keyboard, by name."""
    with checks.visit(browser, f"{serve(site)}/solutions/{lab}.html") as seen:
        group = seen.page.get_by_role("group", name="Work on this lab")
        assert group.get_by_role("link", name="Open in the browser").count() == (lab in LABS)
        assert group.get_by_role("link", name="How to open in Colab").count() == 1
        with seen.page.expect_download() as download:
            group.get_by_role("link", name="Download the notebook").click()
        assert Path(download.value.path()).read_text("utf8") == (ROOT / "labs" / f"{lab}.ipynb").read_text("utf8")
        answers = seen.page.locator("details.kv-answer")
        exercises = len(re.findall(r"### BEGIN SOLUTION", (ROOT / "solutions" / f"{lab}.md").read_text("utf8")))
        assert answers.count() == exercises > 0
        expect(answers.first.locator(".cell_input")).to_be_hidden()
        button = group.get_by_role("button")
        button.focus()
        seen.page.keyboard.press("Enter")
        expect(button).to_have_text("Hide the answers")
        expect(button).to_have_attribute("aria-pressed", "true")
        assert all(answers.nth(i).locator(".cell_input").is_visible() for i in range(exercises))
        answers.first.locator("summary").click()
        expect(button).to_have_text("Show the answers")
        expect(button).to_have_attribute("aria-pressed", "false")
        folded = "[...document.querySelectorAll('details.kv-answer')].map(each => each.open)"
        before = seen.page.evaluate(folded)
        seen.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert all(seen.page.evaluate(folded)) and not all(before)
        seen.page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert seen.page.evaluate(folded) == before
        problems = checks.complaints(seen) + checks.external_requests(seen)
    assert not problems, "\n".join(problems)


def test_the_browser_button_leads_to_the_lab(browser: Browser, site: Path) -> None:
    with checks.visit(browser, f"{serve(site)}/solutions/05-blocks.html") as seen:
        with seen.page.expect_popup() as popup:
            seen.page.get_by_role("link", name="Open in the browser").click()
        expect(popup.value.get_by_role("heading", name="Lab 5. A hand-written block manager")).to_be_visible(timeout=BOOT)


def test_from_the_disk_the_button_says_why_not(browser: Browser, site: Path) -> None:
    with checks.visit(browser, (site / "solutions/05-blocks.html").as_uri()) as seen:
        seen.page.get_by_role("link", name="Open in the browser").click()
        expect(seen.page.locator(".kv-lab-says")).to_contain_text("python -m http.server")
        assert seen.page.url.endswith("05-blocks.html")


def test_the_setup_page_names_the_labs_that_run_in_the_browser(site: Path) -> None:
    numbers = [str(int(lab[:2])) for lab in LABS]
    words = f"Labs {', '.join(numbers[:-1])} and {numbers[-1]} open in the browser"
    assert words in " ".join((ROOT / "book" / "setup.md").read_text("utf8").split())


def test_with_a_repository_colab_opens_the_notebook_itself() -> None:
    with_one = labpage.bar("05-blocks", lambda path: path, in_browser=True, repository="someone/course")
    assert 'github/someone/course/blob/main/labs/05-blocks.ipynb">Open in Colab<' in with_one


def test_what_was_compiled_is_not_in_the_package(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "kvlab/__init__.py", "kvlab/__pycache__/x.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    names = zipfile.ZipFile(io.BytesIO(labpage.package(tmp_path))).namelist()
    assert names == ["kvlab/README.md", "kvlab/kvlab/__init__.py", "kvlab/pyproject.toml"]


def test_the_package_in_the_site_is_the_library(site: Path) -> None:
    """Everything pip needs to install it, and the parrot's weights; nothing that was only compiled."""
    names = zipfile.ZipFile(site / "_static" / "labs" / "kvlab.zip").namelist()
    assert {"kvlab/pyproject.toml", "kvlab/README.md", "kvlab/kvlab/__init__.py", "kvlab/kvlab/core/blocks.py"} <= set(names)
    assert any(name.endswith(".safetensors") for name in names)
    assert not [name for name in names if "__pycache__" in name]
