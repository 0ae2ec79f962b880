"""The front page's switch: by keyboard and by mouse, with no script of ours, both answers as recorded."""

from __future__ import annotations

from pathlib import Path

import checks
import pytest
from conftest import serve
from playwright.sync_api import Browser, expect

from kvlab import record

pytestmark = pytest.mark.site


@pytest.mark.parametrize("script", [True, False], ids=["with scripts", "without scripts"])
def test_the_switch_works_by_keyboard(browser: Browser, site: Path, script: bool) -> None:
    """Tab to it, press space: the leak shows; press again: it is gone."""
    page = browser.new_page(viewport=checks.DESKTOP, java_script_enabled=script)
    try:
        page.goto(f"{serve(site)}/book/index.html")
        switch = page.get_by_role("switch", name="Keep the cache")
        clean, leaked = page.locator(".leak-reset"), page.locator(".leak-kept")
        expect(clean).to_be_visible()
        expect(leaked).to_be_hidden()
        switch.focus()
        page.keyboard.press("Space")
        expect(switch).to_be_checked()
        expect(leaked).to_be_visible()
        expect(clean).to_be_hidden()
        expect(leaked).to_contain_text(record.load("leak").data["secret"])
        page.keyboard.press("Space")
        expect(clean).to_be_visible()
        expect(leaked).to_be_hidden()
    finally:
        page.close()


def test_the_switch_is_reached_with_tab(browser: Browser, site: Path) -> None:
    """A reader without a mouse gets there."""
    page = browser.new_page(viewport=checks.DESKTOP)
    try:
        page.goto(f"{serve(site)}/book/index.html")
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.id") == "leak-keep":
                break
        assert page.evaluate("document.activeElement.id") == "leak-keep"
    finally:
        page.close()
