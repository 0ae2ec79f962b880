"""Chapter 2's calculator in the built page: what it says is what the Python ledger says, by keyboard, on a phone, without a script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import checks
import pytest
from conftest import serve
from playwright.sync_api import Browser, Locator, Page, expect

from kvlab.core import ledger
from kvlab.core.cards import CARDS, MODELS
from kvlab.faults import fault
from kvlab.show import ledger as show

pytestmark = pytest.mark.site
PAGE = "book/02-ledger.html"


@pytest.fixture
def page(browser: Browser, site: Path) -> Iterator[Page]:
    """The chapter, its calculator live."""
    with checks.visit(browser, f"{serve(site)}/{PAGE}") as seen:
        expect(seen.page.locator(".kvl")).to_have_attribute("data-state", "live")
        yield seen.page


def says(page: Page) -> Locator:
    return page.locator(".kvl-says")


def test_it_opens_with_what_python_says(page: Page) -> None:
    start = show.setting(MODELS[show.MODEL], CARDS[show.CARD].memory)
    expect(says(page)).to_have_text(ledger.sentence(start))
    expect(page.locator('[data-out="token"]')).to_have_text(f"{ledger.ledger(start).token:,} bytes")
    expect(page.locator(".kvl-still")).to_be_hidden()


def test_it_follows_the_form(page: Page) -> None:
    """Another model, card, length, batch and format, typed and chosen: the sentence and the numbers are Python's."""
    page.get_by_label("Model", exact=True).select_option("Gemma 3 27B")
    page.get_by_label("Card", exact=True).select_option("A100 80 GB")
    page.get_by_label("Tokens of a request, prompt and answer", exact=True).fill("33333")
    page.get_by_label("Requests at once", exact=True).fill("7")
    page.get_by_label("K and V kept as").select_option("int4")
    s = show.setting(MODELS["Gemma 3 27B"], CARDS["A100 80 GB"].memory, 33_333, 7, form="int4")
    found = ledger.ledger(s)
    expect(says(page)).to_have_text(ledger.sentence(s))
    expect(page.locator('[data-out="request"]')).to_contain_text(f"{found.request:,} bytes")
    expect(page.locator('[data-out="left"]')).to_have_text(ledger.human(found.room - found.kv))


@pytest.mark.parametrize("name", ["Jamba v0.1", "Qwen3-Next 80B", "MiMo-V2-Flash", "DeepSeek-V3", "gpt-oss-120b"])
def test_it_says_what_each_kind_of_layer_keeps(page: Page, name: str) -> None:
    page.get_by_label("Model", exact=True).select_option(name)
    page.get_by_label("Card", exact=True).select_option("H100 80 GB")
    s = show.setting(MODELS[name], CARDS["H100 80 GB"].memory)
    found = ledger.ledger(s)
    expect(page.locator('[data-out="layers"]')).to_have_text("; ".join(ledger.layer_lines(s.spec, s.form)))
    expect(page.locator('[data-out="grows"]')).to_have_text(f"{found.grows:,} bytes")
    expect(page.locator('[data-out="state"]')).to_have_text(ledger.human(found.state))
    expect(page.locator('[data-out="request"]')).to_contain_text(f"{found.request:,} bytes")
    page.locator(".kvl summary").click()
    page.get_by_label("Layers", exact=True).fill("5")  # an edited shape is nobody's: all its layers are alike, and it says so
    expect(page.locator('[data-out="layers"]')).to_contain_text("5 layers with")
    expect(page.locator('[data-out="state"]')).to_have_text("0 B")


def test_the_shape_can_be_broken_and_edited(page: Page) -> None:
    page.locator(".kvl summary").click()
    s = show.setting(MODELS[show.MODEL], CARDS[show.CARD].memory)
    page.get_by_label("Break it").check()
    with fault("query-heads-counted"):
        expect(says(page)).to_have_text(ledger.sentence(s))
    page.get_by_label("Break it").uncheck()
    page.get_by_label("K/V heads", exact=True).fill("1")
    expect(says(page)).to_contain_text("This shape supports")
    expect(page.locator('[data-out="token"]')).to_have_text(f"{ledger.ledger(s).token // 8:,} bytes")


@pytest.mark.parametrize(
    ("label", "value", "complaint"),
    [
        ("Requests at once", "0", "Requests at once: give a whole number"),
        ("Tokens of a request, prompt and answer", "1.5", "give a whole number"),
        ("Tokens of a request, prompt and answer", "", "give a whole number"),
    ],
)
def test_a_number_that_is_none_is_named_and_mended(page: Page, label: str, value: str, complaint: str) -> None:
    field = page.get_by_label(label, exact=True)
    field.fill(value)
    expect(says(page)).to_contain_text(complaint)
    expect(field).to_have_attribute("aria-invalid", "true")
    field.fill("2")
    expect(says(page)).to_contain_text("supports")
    expect(field).to_have_attribute("aria-invalid", "false")


def test_it_works_by_keyboard(page: Page) -> None:
    """Tab from the first field on reaches every control of the form; an arrow moves a slider and the number beside it."""
    first = page.get_by_label("Model", exact=True)
    first.focus()
    before = says(page).text_content()
    page.keyboard.press("ArrowDown")
    expect(says(page)).not_to_have_text(before or "")
    reached = []
    for _ in range(7):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("document.activeElement.name || document.activeElement.dataset.for || document.activeElement.tagName")
        )
    assert reached == ["card", "context", "context", "batch", "batch", "form", "SUMMARY"]
    page.get_by_label("Requests at once, slider").focus()
    page.keyboard.press("End")
    assert page.get_by_label("Requests at once", exact=True).input_value() == "256"


def test_what_does_not_fit_is_shown(page: Page) -> None:
    over = page.locator('[data-part="over"]').first
    assert over.bounding_box()["width"] < 1
    page.get_by_label("Requests at once", exact=True).fill("64")
    expect(page.locator(".kvl")).to_have_attribute("data-fits", "false")
    page.wait_for_function("document.querySelector('.kvl-bar [data-part=\"over\"]').getBoundingClientRect().width > 50")
    assert "too much" in (page.locator(".kvl-bar").get_attribute("aria-label") or "")


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_on_a_phone_nothing_is_cut_off(browser: Browser, site: Path, mode: str) -> None:
    with checks.visit(browser, (site / PAGE).as_uri(), viewport=checks.PHONE, mode=mode) as seen:
        seen.page.locator(".kvl summary").click()
        for field in seen.page.locator(".kvl :is(select, input)").all():
            box = field.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= checks.PHONE["width"]
        assert not checks.complaints(seen)
        assert not checks.axe_violations(seen)


def test_without_scripts_it_says_one_setting(browser: Browser, site: Path) -> None:
    page = browser.new_page(java_script_enabled=False)
    try:
        page.goto(f"{serve(site)}/{PAGE}")
        expect(says(page)).to_contain_text("supports 131,072 tokens")
        expect(page.locator(".kvl-still")).to_be_visible()
    finally:
        page.close()
