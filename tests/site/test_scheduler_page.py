"""Drive the scheduler, in Chromium: by keyboard, the three collapses and their remedies, bad input, Play, Stop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import checks
import pytest
from conftest import serve
from playwright.sync_api import Browser, Locator, Page, expect

from kvlab.core.station import PRESETS, Settings, Station, started
from kvlab.core.station_board import board

pytestmark = pytest.mark.site
PAGE = "book/scheduler.html"
BOOT = 120_000  # milliseconds; a busy machine is slow, not wrong


@pytest.fixture(scope="module")
def seen(browser: Browser, site: Path) -> Iterator[checks.Visit]:
    """The page, open for all tests of this file that follow each other on it."""
    if not (site / PAGE).exists():
        pytest.fail("book/scheduler is not in the site: add it to _toc.yml")
    with checks.visit(browser, f"{serve(site)}/{PAGE}") as visit:
        visit.page.set_default_timeout(BOOT)
        yield visit


def says(page: Page) -> Locator:
    return page.locator('.kvs [data-part="says"]')


def press(page: Page, name: str) -> None:
    """By keyboard."""
    page.get_by_role("button", name=name, exact=True).focus()
    page.keyboard.press("Enter")


def same_as(page: Page, station: Station) -> bool:
    """Whether the browser's Python and this one agree on the whole board."""
    drawn = page.locator('.kvs [data-part="board"]').inner_html()
    return drawn == page.evaluate(
        "html => { const box = document.createElement('div'); box.innerHTML = html; return box.innerHTML; }", board(station)
    )


def test_the_recorded_moment_is_there_before_python(seen: checks.Visit) -> None:
    """First paint: a queue, a pool and bars; nothing can be pressed but Start; nothing of Python was fetched."""
    page = seen.page
    assert not checks.python_unasked(seen)
    for place in ("Running", "Preempted", "Waiting"):
        expect(page.get_by_role("heading", name=place)).to_be_visible()
    assert page.locator(".kvs-rows li").count() > 20
    expect(page.get_by_label("Policy")).to_be_disabled()
    expect(page.get_by_role("button", name="Step", exact=True)).to_be_disabled()


def test_steps_by_keyboard(seen: checks.Visit) -> None:
    """Start, a step, twenty, two requests sent, to the end: each time the same as the library here."""
    page, here = seen.page, Station()
    press(page, "Start Python and drive")
    expect(page.locator(".kvs[data-state]")).to_have_attribute("data-state", "live", timeout=BOOT)
    expect(page.get_by_label("Workload")).to_be_focused()
    for name, move in {
        "Step": lambda: here.run(1),
        "20 steps": lambda: here.run(20),
        "Send a short request": lambda: here.send("short"),
        "Send a long one": lambda: here.send("long"),
        "To the end": lambda: here.run(),
    }.items():
        press(page, name)
        expect(says(page)).to_have_text(move())
        assert same_as(page, here), name
        assert page.evaluate("document.activeElement.textContent") == name  # the focus has stayed
    assert not checks.complaints(seen) + checks.external_requests(seen)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_collapse_and_its_remedy(seen: checks.Visit, number: int) -> None:
    """The fields show what is set; the remedy serves the same arrivals, and the table has both columns."""
    page, preset = seen.page, PRESETS[number - 1]
    press(page, f"{number} {preset.name.capitalize()}")
    expect(says(page)).to_contain_text(preset.ask)
    expect(page.get_by_label("Requests that come")).to_have_value(str(preset.settings.count))
    expect(page.get_by_label("Policy")).to_have_value(preset.settings.policy)
    press(page, "20 steps")
    expect(says(page)).to_contain_text("20 steps, ")
    mended = started(number).remedied()
    page.get_by_role("button", name="Remedy").click()
    expect(says(page)).to_contain_text("With the remedy, ")
    assert same_as(page, mended)
    heads = page.locator(".kvs[data-state] .kvs-numbers thead th").all_inner_texts()
    assert [text.partition(":")[0] for text in heads] == ["before", "now"]
    [(name, value)] = preset.remedy.items()
    assert page.locator(f'.kvs [name="{name}"]').input_value() == str(value)


def test_a_bad_value_is_told_and_nothing_is_lost(seen: checks.Visit) -> None:
    """What was typed stays and is marked; the game goes on; a good value is taken, and the same requests come again."""
    page = seen.page
    press(page, "3 Block churn")
    expect(says(page)).to_contain_text("40 requests will come")
    press(page, "20 steps")
    expect(page.locator(".kvs[data-state]")).to_have_attribute("data-steps", "20")
    blocks = page.get_by_label("Blocks in the pool")
    for typed, said in {"": "must be a whole number from 1 to 1,024", "5": "would grow to"}.items():
        blocks.fill(typed)
        blocks.press("Tab")
        expect(says(page)).to_contain_text(said)
        expect(says(page)).to_contain_text("Nothing has changed.")
        expect(blocks).to_have_attribute("aria-invalid", "true")
        expect(blocks).to_have_value(typed)
        assert page.locator(".kvs[data-state]").get_attribute("data-steps") == "20"
        assert not checks.axe_violations(seen)
    blocks.fill("48")
    blocks.press("Tab")
    expect(says(page)).to_have_text("The same 40 requests, from the start.")
    expect(page.locator(".kvs [aria-invalid]")).to_have_count(0)
    press(page, "To the end")
    here = Station(replace(PRESETS[2].settings, blocks=48), preset=PRESETS[2])
    here.run()
    expect(page.locator(".kvs[data-state]")).to_have_attribute("data-over", "true")
    assert same_as(page, here)


def test_play_pauses_and_gives_way_to_a_step(seen: checks.Visit) -> None:
    """A screen reader is not told each frame; a move while it plays ends it."""
    page = seen.page
    root = page.locator(".kvs[data-state]")
    press(page, "3 Block churn")
    expect(root).to_have_attribute("data-steps", "0")
    press(page, "Play")
    expect(page.get_by_role("button", name="Pause", exact=True)).to_be_focused()
    expect(says(page)).to_have_attribute("aria-live", "off")
    expect(root).not_to_have_attribute("data-steps", "0")
    page.keyboard.press("Enter")
    expect(says(page)).to_contain_text("Paused after")
    assert says(page).get_attribute("aria-live") is None
    press(page, "Play")
    press(page, "Step")
    expect(says(page)).to_contain_text("Step ")
    expect(page.get_by_role("button", name="Play", exact=True)).to_be_visible()


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_it_is_readable_in_both_modes(seen: checks.Visit, mode: str) -> None:
    """Queue, numbered pool, bars and numbers; on a phone nothing scrolls sideways."""
    page = seen.page
    press(page, "3 Block churn")
    expect(page.locator(".kvs[data-state]")).to_have_attribute("data-steps", "0")
    for _ in range(5):
        press(page, "20 steps")
    expect(page.locator(".kvs[data-state]")).to_have_attribute("data-steps", "100")
    checks.switch_mode(page, mode)
    assert not checks.axe_violations(seen)
    page.set_viewport_size(checks.PHONE)
    assert not checks.sideways(seen)
    page.set_viewport_size(checks.DESKTOP)


def test_the_cell_shares_the_memory(seen: checks.Visit) -> None:
    page = seen.page
    one = page.locator(".cell.tag_live")
    one.get_by_role("button", name="Edit").click()
    one.locator("textarea").fill("station.steps, station.settings.blocks")
    one.get_by_role("button", name="Run cell 1").click()
    expect(one.locator(".kv-live-out")).to_have_text("(100, 96)")
    one.get_by_role("button", name="Reset cell 1").click()


def test_stop_ends_the_thread_and_start_begins_anew(seen: checks.Visit) -> None:
    """The last on this page. A long game that is stopped leaves the last picture, and says what to do."""
    page = seen.page
    root = page.locator(".kvs[data-state]")
    press(page, "1 Decode batch too large")
    expect(root).to_have_attribute("data-steps", "0")
    page.get_by_label("At most running").fill("1")
    page.get_by_label("At most running").press("Tab")
    expect(says(page)).to_contain_text("The same 480 requests")
    press(page, "To the end")
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(says(page)).to_have_text("Stopped. Start again: the settings will be the first ones.")
    expect(page.get_by_label("Policy")).to_be_disabled()
    press(page, "Start Python and drive")
    expect(root).to_have_attribute("data-state", "live", timeout=BOOT)
    expect(page.get_by_label("Requests that come")).to_have_value(str(Settings().count))
    assert not checks.external_requests(seen) + checks.complaints(seen)


def test_from_the_disk_it_says_how_to_serve(browser: Browser, site: Path) -> None:
    """A browser starts no thread for files: one sentence says so, and the recorded moment stays."""
    with checks.visit(browser, (site / PAGE).as_uri(), viewport=checks.PHONE, mode="dark") as seen:
        seen.page.get_by_role("button", name="Start Python and drive").click()
        expect(says(seen.page)).to_contain_text("python -m http.server")
        expect(seen.page.locator(".kvs-rows li").first).to_be_visible()
        assert not checks.sideways(seen) + checks.complaints(seen) + checks.axe_violations(seen)
