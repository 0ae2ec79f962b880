"""Every page of the built site, in Chromium: from a server on a desktop, and from the disk on a phone."""

from __future__ import annotations

from pathlib import Path

import checks
import pytest
from conftest import SITE, serve
from playwright.sync_api import Browser

pytestmark = pytest.mark.site
# collected before the fixture can say that there is no site; one name then, so that it does
PAGES = checks.pages_of(SITE) or ["index"]


@pytest.mark.parametrize("name", PAGES)
def test_page_on_a_desktop(browser: Browser, site: Path, name: str) -> None:
    """Served over HTTP: nothing from outside, no complaint, all drawn, axe content in light and in dark."""
    with checks.visit(browser, f"{serve(site)}/{name}.html", viewport=checks.DESKTOP, mode="light") as seen:
        problems = checks.undrawn_figures(seen) + checks.untypeset_math(seen) + checks.missing_widgets(seen)
        problems += checks.axe_violations(seen)
        checks.switch_mode(seen.page, "dark")
        problems += checks.axe_violations(seen, only=["color-contrast"])
        problems += checks.external_requests(seen) + checks.complaints(seen)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", PAGES)
def test_page_on_a_phone(browser: Browser, site: Path, name: str) -> None:
    """Opened from the disk at 390 px: the same, and no sideways scroll in either mode."""
    with checks.visit(browser, (site / f"{name}.html").as_uri(), viewport=checks.PHONE, mode="dark") as seen:
        problems = checks.undrawn_figures(seen) + checks.untypeset_math(seen) + checks.missing_widgets(seen)
        problems += checks.sideways(seen)
        checks.switch_mode(seen.page, "light")
        problems += checks.sideways(seen)
        problems += checks.external_requests(seen) + checks.complaints(seen)
    assert not problems, "\n".join(problems)


def test_links_resolve(site: Path) -> None:
    """No link or anchor inside the site is dead."""
    problems = checks.broken_links(site)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_search_works_offline(browser: Browser, site: Path, scheme: str) -> None:
    """A word of chapter 3 finds chapter 3, served and from the disk."""
    home = serve(site) if scheme == "http" else site.as_uri()
    with checks.visit(browser, f"{home}/search.html?q=password") as seen:
        seen.page.wait_for_selector("#search-results a")
        links = [link.get_attribute("href") for link in seen.page.query_selector_all("#search-results a")]
        problems = checks.external_requests(seen) + checks.complaints(seen)
    assert any("03-password" in (link or "") for link in links), links
    assert not problems, "\n".join(problems)
