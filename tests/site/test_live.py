"""Python in the page: cells that run, fail, are edited, reset and stopped; and the block manager's playground."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import checks
import pytest
from conftest import ROOT, serve
from playwright.sync_api import Browser, Locator, Page, expect
from shared_state.live import library_files, light

from kvlab.core import playground
from kvlab.core.playground import ASKS, SAYS, SECRET, SYSTEM, Game, Move, board, every_game, replayed
from kvlab.faults import ZOO, fault

sys.path.insert(0, str(ROOT / "book" / "assets" / "py"))
import cell

PAGE = "book/playground.html"
BOOT = 120_000  # milliseconds; a busy machine is slow, not wrong

COPY = [Move("allocate", "A", SYSTEM), Move("fork", "A", to="B"), Move("append", "B", ASKS), Move("append", "A", SAYS)]
COUNT = [Move("allocate", "C", SYSTEM), Move("fork", "C", to="B"), Move("free", "C"), Move("allocate", "A", SAYS)]
LEAKS = {"no-copy-on-write": COPY, "fork-without-reference": COUNT, "freed-on-cancel": COUNT}


# ---- the game, without a browser ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEAKS)
def test_four_moves_leak_with_the_fault_on_and_not_without(name: str) -> None:
    """B reads A's password, a check complains; the same moves without the fault: its own words, and silence."""
    sick, well = replayed(LEAKS[name], name, fault), replayed(LEAKS[name], None, fault)
    assert len(sick.moves) == len(well.moves) == 4
    assert sick.told() and sick.complaints()
    assert not well.told() and not well.complaints()
    assert not any(read.foreign for who in well.manager.sequences for read in well.reads(who))
    assert "B reads A’s password" in board(sick) and "B reads A’s password" not in board(well)
    assert 'class="kvb-foreign"' in board(sick) and 'class="kvb-foreign"' not in board(well)


def test_no_game_of_three_moves_leaks_without_a_fault() -> None:
    """All games there are; with a fault that leaks in four, some of four do. (The page plays four; three are quick enough here.)"""
    count, told = every_game(3, None, fault)
    assert count > 200 and not told
    assert not every_game(3, "no-copy-on-write", fault)[1]


def test_the_search_finds_the_leak() -> None:
    """From a pool that is one move short of it: the search is not blind."""
    last = COPY[-1]
    game = replayed(COPY[:3], "no-copy-on-write", fault)
    assert last in list(playground.options(game))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(playground, "options", lambda game: iter([COPY[len(game.moves)]]))
        assert every_game(4, "no-copy-on-write", fault) == (1, [COPY])
        assert every_game(4, None, fault) == (1, [])


def test_a_stale_hash_gives_the_words_of_others() -> None:
    moves = [Move("allocate", "B", SYSTEM), Move("free", "B"), Move("evict"), Move("allocate", "B", SYSTEM)]
    assert [read.found for read in replayed(moves, "stale-hash", fault).reads("B")][:4] == ["…"] * 4
    assert not any(read.foreign for read in replayed(moves, None, fault).reads("B"))


def test_a_fork_may_read_what_it_was_given() -> None:
    """A copy of A's conversation has the password among its own words: no leak."""
    game = replayed([Move("allocate", "A", SAYS), Move("fork", "A", to="B")], None, fault)
    assert game.reads("B")[-1].found == SECRET and not game.told()


@pytest.mark.parametrize(
    ("move", "said"),
    [
        (Move("allocate", "A", SYSTEM), "exists already"),
        (Move("append", "D", "x"), "no sequence 'D'"),
        (Move("fork", "A"), "to is empty"),
        (Move("share_prefix", "A", to="C", count=99), "past the end"),
        (Move("allocate", "C", "x " * 99), "blocks short"),
        (Move("evict"), "nothing to evict"),
        (Move("burn"), "do is 'burn'"),
    ],
)
def test_a_refused_move_changes_nothing(move: Move, said: str) -> None:
    game = Game()
    game.play(Move("allocate", "A", SYSTEM))
    before = board(game)
    with pytest.raises((ValueError, LookupError, RuntimeError), match=said):
        game.play(move)
    assert board(game) == before


def test_words_are_escaped() -> None:
    game = Game()
    game.play(Move("allocate", "A", "<script>alert(1)</script>"))
    assert "<script" not in board(game)


# ---- the cell runner and the files, without a browser ------------------------------------------------------------------------------


def test_a_cell_runs_as_in_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    """Names last from cell to cell; the last expression's value is told, None is not."""
    names: dict = {}
    assert json.loads(cell.run("x = 2\nprint('said')\nx + 1", names, "<cell 1>")) == {"value": "3"}
    assert json.loads(cell.run("x * 10", names, "<cell 2>")) == {"value": "20"}
    assert json.loads(cell.run("print('more')", names, "<cell 3>")) == {"value": None}
    assert capsys.readouterr().out == "said\nmore\n"
    assert json.loads(cell.run("'as it is'", names, "<cell>", raw=True)) == {"value": "as it is"}


def test_a_traceback_begins_in_the_cell() -> None:
    """It shows the cell's line, and not the runner's frames; a syntax error points at its place; exit is an error."""
    error = json.loads(cell.run("def f():\n    return 1 / 0\nf()", {}, "<cell 1>"))["error"]
    assert error.startswith("Traceback") and "return 1 / 0" in error and "ZeroDivisionError" in error and "cell.py" not in error
    assert "SyntaxError" in json.loads(cell.run("x = (", {}, "<cell 1>"))["error"]
    assert "SystemExit" in json.loads(cell.run("raise SystemExit('no')", {}, "<cell 1>"))["error"]


def test_a_figure_is_told_from_a_value() -> None:
    found = json.loads(cell.run("{'data': [{'y': [1, 2]}], 'layout': {'title': 'T'}}", {}, "<cell>"))
    assert found["figure"]["data"] == [{"y": [1, 2]}]
    assert "value" in json.loads(cell.run("{'data': 1, 'layout': 2}", {}, "<cell>"))


def test_the_page_gets_the_library_itself() -> None:
    """Every module of core and the block manager's faults, as they stand in the checkout; of the rest nothing but the names."""
    files = library_files(ROOT)
    for path in [*(ROOT / "kvlab" / "core").glob("*.py"), ROOT / "kvlab" / "faults" / "blocks.py"]:
        assert files[path.relative_to(ROOT).as_posix()] == path.read_text("utf8")
    assert files["kvlab/faults/transformers.py"] == ""
    names = {name for text in files.values() for node in ast.walk(ast.parse(text)) for name in _imported(node)}
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names == {"kvlab"}


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


@pytest.mark.parametrize("line", ["import torch", "from kvlab.runtime import load", "def f():\n    import numpy as np"])
def test_what_needs_more_is_not_light(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.py").write_text(line)
    assert not light(tmp_path / "a.py")
    (tmp_path / "a.py").write_text("import re\nfrom kvlab.core.blocks import BlockManager\nfrom kvlab.faults.zoo import add")
    assert light(tmp_path / "a.py")


# ---- in Chromium --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seen(browser: Browser, site: Path) -> Iterator[checks.Visit]:
    """The playground's page, open for all tests of this file that follow each other on it."""
    if not (site / PAGE).exists():
        pytest.fail("book/playground is not in the site: add it to _toc.yml")
    with checks.visit(browser, f"{serve(site)}/{PAGE}") as visit:
        visit.page.set_default_timeout(BOOT)
        yield visit


def live(page: Page, number: int) -> Locator:
    return page.locator(".cell.tag_live").nth(number - 1)


def write(page: Page, number: int, source: str) -> None:
    """Put `source` into a cell's editor."""
    one = live(page, number)
    if one.locator("textarea").is_hidden():
        one.get_by_role("button", name="Edit").click()
    one.locator("textarea").fill(source)


def outcome(page: Page, number: int, state: str) -> str:
    expect(live(page, number)).to_have_attribute("data-live", state, timeout=BOOT)
    return live(page, number).locator(".kv-live-out").inner_text()


@pytest.mark.site
def test_nothing_of_python_is_fetched_before_a_click(seen: checks.Visit) -> None:
    assert not checks.python_unasked(seen)
    assert seen.page.evaluate("kvKernel.starts") == 0


@pytest.mark.site
def test_a_cell_runs_and_says_what_was_recorded(seen: checks.Visit) -> None:
    """By keyboard: the live output is the recorded one, from the library's own code."""
    recorded = live(seen.page, 1).locator(".cell_output").inner_text().strip()
    live(seen.page, 1).get_by_role("button", name="Run cell 1").focus()
    seen.page.keyboard.press("Enter")
    assert outcome(seen.page, 1, "done").strip() == recorded
    expect(live(seen.page, 1).locator(".cell_output")).to_be_hidden()
    expect(live(seen.page, 1).get_by_role("status")).to_contain_text("Done in")
    assert seen.page.evaluate("document.activeElement.textContent") == "Run"  # the focus has stayed
    assert checks.python_unasked(seen)  # asked for by now: the check would have seen it
    assert not checks.complaints(seen)


@pytest.mark.site
def test_edit_value_error_and_reset(seen: checks.Visit) -> None:
    """The cells share one memory; an error is shown as a traceback; reset brings code and recorded output back."""
    page = seen.page
    write(page, 2, "m.num_free_blocks  # the manager of cell 1")
    live(page, 2).locator("textarea").press("Control+Enter")
    assert outcome(page, 2, "done").strip() == "5"
    write(page, 2, "def f():\n    return unknown\nprint('before')\nf()")
    live(page, 2).get_by_role("button", name="Run cell 2").click()
    said = outcome(page, 2, "failed")
    assert "before" in said and "return unknown" in said and "NameError" in said
    live(page, 2).get_by_role("button", name="Reset cell 2").click()
    expect(live(page, 2).locator(".kv-live-out")).to_be_hidden()
    expect(live(page, 2).locator(".cell_output")).to_be_visible()
    expect(live(page, 2).locator("textarea")).to_be_hidden()
    assert "request_bytes" in live(page, 2).locator("textarea").input_value()


@pytest.mark.site
def test_the_editor_by_keyboard(seen: checks.Visit) -> None:
    """Enter keeps the indentation, Tab leaves, Escape closes and gives the focus back."""
    page = seen.page
    write(page, 2, "")
    page.keyboard.type("if True:\nx = 1")
    assert live(page, 2).locator("textarea").input_value() == "if True:\n    x = 1"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Run"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.textContent") == "Edit"
    live(page, 2).get_by_role("button", name="Reset cell 2").click()


@pytest.mark.site
def test_a_figure_is_drawn(seen: checks.Visit) -> None:
    write(seen.page, 2, "{'data': [{'type': 'bar', 'y': [1, 2]}], 'layout': {'height': 200, 'meta': {'alt': 'Two bars.'}}}")
    live(seen.page, 2).get_by_role("button", name="Run cell 2").click()
    outcome(seen.page, 2, "done")
    expect(seen.page.get_by_role("img", name="Two bars.")).to_be_visible()
    assert not checks.undrawn_figures(seen)
    live(seen.page, 2).get_by_role("button", name="Reset cell 2").click()


@pytest.mark.site
def test_the_challenge_by_keyboard(seen: checks.Visit) -> None:
    """Start, switch a fault on, four moves: B reads A's password; the same moves without the fault: it does not."""
    page = seen.page
    root, says = page.locator(".kvb"), page.locator('.kvb [data-part="says"]')
    expect(root.locator(".kvb-told")).to_be_visible()  # the recorded game
    expect(page.get_by_label("Request", exact=True)).to_be_disabled()
    page.get_by_role("button", name="Start Python and play").focus()
    page.keyboard.press("Enter")
    expect(root).to_have_attribute("data-state", "live")
    expect(page.get_by_label("Request", exact=True)).to_be_focused()
    expect(says).to_have_text("The pool is empty. Your move.")
    page.get_by_label("Fault").select_option("no-copy-on-write")
    expect(says).to_contain_text("is on from the next move")
    options = page.get_by_label("Fault").locator("option").all_inner_texts()
    ours = [f.name for f in ZOO.values() if f.breaks.startswith("kvlab.core.blocks:BlockManager.")]
    assert options == ["none", *ours] and len(ours) >= 5

    def play(do: str, seq: str, words: str = "", to: str = "") -> None:
        page.get_by_label("Request", exact=True).select_option(seq)
        if words:
            page.get_by_label("Words, for allocate and append").fill(words)
        if to:
            page.get_by_label("To, for fork and share").select_option(to)
        moves = int(root.get_attribute("data-moves") or 0)
        page.get_by_role("button", name=do, exact=True).focus()
        page.keyboard.press("Enter")
        expect(root).to_have_attribute("data-moves", str(moves + 1))

    play("allocate", "A", SYSTEM)
    expect(says).to_contain_text("A got the blocks 0, 1")
    play("fork", "A", to="B")
    play("append", "B", ASKS)
    expect(root).to_have_attribute("data-told", "false")
    play("append", "A", SAYS)
    expect(says).to_contain_text("B reads A’s password, after 4 moves.")
    expect(root.locator("mark.kvb-foreign", has_text=SECRET)).to_be_visible()
    expect(root.locator(".kvb-check")).to_contain_text("written without a copy")
    assert page.locator('[data-part="board"]').inner_html() == page.evaluate(
        "html => { const box = document.createElement('div'); box.innerHTML = html; return box.innerHTML; }",
        board(replayed(COPY, "no-copy-on-write", fault)),
    )  # the browser's Python and this one agree
    assert not checks.axe_violations(seen)
    page.get_by_role("button", name="The same moves, no fault").click()
    expect(root).to_have_attribute("data-told", "false")
    expect(root.locator(".kvb-check")).to_have_text("check(): every rule holds.")
    page.get_by_role("button", name="Undo").click()
    expect(root).to_have_attribute("data-moves", "3")


@pytest.mark.site
def test_refusals_eviction_and_the_cells_beside_the_game(seen: checks.Visit) -> None:
    """A refused move says why and changes nothing; a freed block can be found until it is evicted; `game` is there for cells."""
    page = seen.page
    root, says = page.locator(".kvb"), page.locator('.kvb [data-part="says"]')
    page.get_by_role("button", name="New game").click()
    expect(root).to_have_attribute("data-moves", "0")
    page.get_by_role("button", name="evict").click()
    expect(says).to_contain_text("nothing to evict")
    page.get_by_label("Request", exact=True).select_option("A")
    page.get_by_label("Words, for allocate and append").fill(SYSTEM)
    page.get_by_role("button", name="allocate", exact=True).click()
    page.get_by_label("Tokens, for share").fill("4")
    page.get_by_label("To, for fork and share").select_option("C")
    page.get_by_role("button", name="share_prefix").click()
    expect(root.locator('.kvb-block[data-state="shared"]')).to_have_count(1)
    write(page, 2, "game.manager.block_table('C'), [str(move) for move in game.moves]")
    live(page, 2).get_by_role("button", name="Run cell 2").click()
    assert outcome(page, 2, "done").strip() == "([0], ['allocate(A, \"You are a clerk. Be brief.\")', 'share_prefix(A, C, 4)'])"
    for name in "AC":
        page.get_by_label("Request", exact=True).select_option(name)
        page.get_by_role("button", name="free", exact=True).click()
        expect(says).to_contain_text(f"{name} has ended")
    expect(root.locator('.kvb-block[data-state="found"]')).to_have_count(1)
    page.get_by_role("button", name="evict").click()
    expect(says).to_contain_text("1 blocks were evicted")
    expect(root.locator('.kvb-block[data-state="found"]')).to_have_count(0)
    live(page, 2).get_by_role("button", name="Reset cell 2").click()


@pytest.mark.site
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_it_is_readable_in_both_modes(seen: checks.Visit, mode: str) -> None:
    write(seen.page, 2, "1 / 0")
    live(seen.page, 2).get_by_role("button", name="Run cell 2").click()
    outcome(seen.page, 2, "failed")
    checks.switch_mode(seen.page, mode)
    assert not checks.axe_violations(seen)
    live(seen.page, 2).get_by_role("button", name="Reset cell 2").click()


@pytest.mark.site
def test_a_cell_that_never_ends_is_stopped(seen: checks.Visit) -> None:
    """It shows what it said so far; the page lives; Python starts anew, without the old names. The last on this page."""
    page = seen.page
    write(page, 2, "secret = 1\nprint('on and on')\nwhile True:\n    pass")
    live(page, 2).get_by_role("button", name="Run cell 2").click()
    expect(live(page, 2).get_by_role("button", name="Stop cell 2")).to_be_visible()
    expect(live(page, 2).get_by_role("status")).to_contain_text("Running")
    live(page, 2).get_by_role("button", name="Stop cell 2").click()
    outcome(page, 2, "stopped")
    starts = page.evaluate("kvKernel.starts")
    write(page, 2, "'secret' in globals()")
    live(page, 2).get_by_role("button", name="Run cell 2").click()
    assert outcome(page, 2, "done").strip() == "False"
    assert page.evaluate("kvKernel.starts") == starts + 1
    for _ in range(50):  # the browser ends it in its own time
        if len(page.workers) == 1:
            break
        page.wait_for_timeout(100)
    assert len(page.workers) == 1  # the thread that did not end is gone
    assert not checks.external_requests(seen) + checks.complaints(seen)


@pytest.mark.site
def test_from_the_disk_it_says_how_to_serve(browser: Browser, site: Path) -> None:
    """A browser starts no thread for files: one sentence says so, the recorded output and the recorded game stay."""
    with checks.visit(browser, (site / PAGE).as_uri(), viewport=checks.PHONE, mode="dark") as seen:
        live(seen.page, 1).get_by_role("button", name="Run cell 1").click()
        expect(live(seen.page, 1).get_by_role("status")).to_contain_text("python -m http.server")
        expect(live(seen.page, 1).locator(".cell_output")).to_be_visible()
        seen.page.get_by_role("button", name="Start Python and play").click()
        expect(seen.page.locator('.kvb [data-part="says"]')).to_contain_text("python -m http.server")
        expect(seen.page.locator(".kvb-told")).to_be_visible()
        assert not checks.sideways(seen) + checks.complaints(seen) + checks.axe_violations(seen)


@pytest.mark.site
def test_a_kernel_whose_files_are_missing_says_so(browser: Browser, site: Path) -> None:
    """And can be tried again."""
    with checks.visit(browser, f"{serve(site)}/{PAGE}") as seen:
        seen.page.route("**/kvlab.json", lambda route: route.abort())
        run = live(seen.page, 1).get_by_role("button", name="Run cell 1")
        run.click()
        expect(live(seen.page, 1).get_by_role("status")).to_contain_text("Python did not start", timeout=BOOT)
        seen.page.unroute("**/kvlab.json")
        run.click()
        outcome(seen.page, 1, "done")
