"""Chapter 4's padded batch in the built page: what it says is what Python says, by keyboard, on a phone, without a script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import checks
import pytest
from conftest import serve
from playwright.sync_api import Browser, Locator, Page, expect

from kvlab.core.padding import attends, look, sentence
from kvlab.show import padding as show

pytestmark = pytest.mark.site
PAGE = "book/04-padding.html"
PRESETS = show.presets()


@pytest.fixture
def page(browser: Browser, site: Path) -> Iterator[Page]:
    """The chapter, its batch live."""
    with checks.visit(browser, f"{serve(site)}/{PAGE}") as seen:
        expect(seen.page.locator(".kvp")).to_have_attribute("data-state", "live")
        yield seen.page


def row(page: Page, name: str) -> Locator:
    return page.locator(f'.kvp [data-row="{name}"]')


def test_every_way_to_fill_it_says_what_python_says(page: Page) -> None:
    for preset, rows in PRESETS.items():
        page.get_by_label("Begin with").select_option(preset)
        for name, filled in rows.items():
            expect(row(page, name).locator(".kvp-says")).to_have_text(sentence(show.row_of(filled)))
            expect(row(page, name).locator(".kvp-attends")).to_have_text(attends(show.row_of(filled), filled["text"]))
            for kind in ("rope", "learned"):
                fine = str(getattr(look(show.row_of(filled)), kind)).lower()
                expect(row(page, name).locator(f'[data-kind="{kind}"]')).to_have_attribute("data-ok", fine)


def test_it_follows_what_is_edited(page: Page) -> None:
    """A bit of the mask, a position, a token: the sentence and the cells are Python's."""
    filled = next(iter(PRESETS.values()))["B"]
    begun, says = show.row_of(filled), row(page, "B").locator(".kvp-says")
    page.get_by_label("Row B, column 1, seen").check()
    mask = tuple(bit or column == 1 for column, bit in enumerate(begun.mask))
    expect(says).to_have_text(sentence(replace(begun, mask=mask)))
    seen = row(page, "B").locator('.kvp-see [data-k="pad"]:not([data-idle="true"])')
    assert seen.count() == sum(begun.tokens)
    page.get_by_label("Row B, column 1, seen").uncheck()
    page.get_by_label("Row B, column 7, position").fill("9")
    expect(says).to_have_text(sentence(replace(begun, positions=(*begun.positions[:-1], 9))))
    assert row(page, "B").locator('.kvp-see [data-off="true"]').count() == sum(begun.tokens) - 1
    page.get_by_label("Row B, column 7, position").fill("4")
    page.get_by_label("Row B, column 3, token").fill("")
    expect(says).to_contain_text("Wrong in both kinds of model: 1 pad can be seen")


def test_a_number_that_is_none_is_named_and_mended(page: Page) -> None:
    field, says = page.get_by_label("Row A, column 2, position"), row(page, "A").locator(".kvp-says")
    for wrong in ("", "1.5", "-1", "100"):
        field.fill(wrong)
        expect(says).to_contain_text("Position: give a whole number")
        expect(field).to_have_attribute("aria-invalid", "true")
    field.fill("2")
    expect(says).to_contain_text("As if alone")
    row(page, "A").get_by_label("read at column").fill("8")
    expect(says).to_contain_text("from 0 to 7")


def test_it_works_by_keyboard(page: Page) -> None:
    page.get_by_label("Begin with").focus()
    before = row(page, "C").locator(".kvp-says").text_content()
    page.keyboard.press("ArrowDown")
    expect(row(page, "C").locator(".kvp-says")).not_to_have_text(before or "")
    reached = []
    for _ in range(25):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.tagName"))
    kinds = ("token", "seen", "position")
    assert reached[:24] == [f"Row A, column {column}, {kind}" for kind in kinds for column in range(8)]
    page.get_by_label("Row B, column 0, seen").focus()
    page.keyboard.press("Space")
    expect(row(page, "B").locator(".kvp-says")).to_contain_text("1 pad can be seen")


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_on_a_phone_nothing_is_cut_off(browser: Browser, site: Path, mode: str) -> None:
    with checks.visit(browser, (site / PAGE).as_uri(), viewport=checks.PHONE, mode=mode) as seen:
        for field in seen.page.locator(".kvp :is(select, input, .kvp-see)").all():
            box = field.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= checks.PHONE["width"]
        assert not checks.complaints(seen)
        assert not checks.axe_violations(seen)


def test_without_scripts_it_says_the_first_way(browser: Browser, site: Path) -> None:
    page = browser.new_page(java_script_enabled=False)
    try:
        page.goto(f"{serve(site)}/{PAGE}")
        expect(row(page, "B").locator(".kvp-says")).to_have_text("As if alone, in both kinds of model.")
        expect(page.locator(".kvp-still")).to_be_visible()
    finally:
        page.close()
