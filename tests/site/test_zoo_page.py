"""The zoo's filter in a browser: no script, by mouse and by keyboard."""

import pytest

from kvlab import record
from kvlab.experiments.zoo import SIGNS
from kvlab.show import zoo

pytestmark = pytest.mark.site


@pytest.fixture
def page(browser):
    context = browser.new_context(java_script_enabled=True)
    page = context.new_page()
    page.set_content(f"<!doctype html><html lang=en><title>zoo</title><main>{zoo.cards(record.load('zoo'))}</main>")
    yield page
    context.close()


def shown(page) -> set[str]:
    """Names of the cards that can be seen."""
    cards = page.locator(".zoo-card")
    return {cards.nth(n).get_attribute("id").removeprefix("zoo-") for n in range(cards.count()) if cards.nth(n).is_visible()}


def test_arrow_keys_go_through_the_symptoms(page):
    outcomes = record.load("zoo").data["faults"]
    page.locator("#zoo-sign-all").focus()
    assert shown(page) == set(outcomes)
    for key in [key for key in SIGNS if any(key in outcome["signs"] for outcome in outcomes.values())]:
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.id") == f"zoo-sign-{key}"
        assert shown(page) == {name for name, outcome in outcomes.items() if key in outcome["signs"]}


def test_a_click_on_a_label_filters(page):
    page.get_by_label(SIGNS["memory"]).check(force=True)
    assert shown(page) == {"leaked-reference", "queries-cached", "query-heads-counted"}
