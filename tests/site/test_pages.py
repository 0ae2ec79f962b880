"""Every page of the built site, in Chromium: from a server on a desktop, and from the disk on a phone."""

from __future__ import annotations

import re
from pathlib import Path

import checks
import pytest
from conftest import SITE, serve
from playwright.sync_api import Browser, expect

pytestmark = pytest.mark.site
# collected before the fixture can say that there is no site; one name then, so that it does
PAGES = checks.pages_of(SITE) or ["index"]


@pytest.mark.parametrize("name", PAGES)
def test_page_on_a_desktop(browser: Browser, site: Path, name: str) -> None:
    """Served over HTTP: light, nothing from outside, no complaint, all drawn, axe content in light and in dark."""
    with checks.visit(browser, f"{serve(site)}/{name}.html", viewport=checks.DESKTOP, mode="light") as seen:
        problems = checks.too_heavy(seen) + checks.iconless(seen) + checks.python_unasked(seen)
        problems += checks.undrawn_figures(seen) + checks.untypeset_math(seen) + checks.missing_widgets(seen)
        problems += checks.axe_violations(seen) + checks.raw_exponents(seen)
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
    """A word of chapter 3 finds chapter 3 and shows where it stands there, served and from the disk."""
    home = serve(site) if scheme == "http" else site.as_uri()
    with checks.visit(browser, f"{home}/search.html?q=password") as seen:
        found = seen.page.locator("#search-results li", has=seen.page.locator('a[href*="book/03-password"]')).first
        expect(found.locator(".context mark").first).to_have_text(re.compile("password", re.IGNORECASE))
        problems = checks.external_requests(seen) + checks.complaints(seen)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("query", "marked"), [("copy-on-write", {"copy-on-write"}), ("the references of blocks", {"references", "blocks"})]
)
def test_a_summary_shows_the_query_or_a_word_of_it(browser: Browser, site: Path, query: str, marked: set[str]) -> None:
    """As it was typed where it stands so, else a word that counts, from its beginning."""
    with checks.visit(browser, f"{serve(site)}/search.html?q={query}") as seen:
        found = seen.page.locator("#search-results li", has=seen.page.locator('a[href*="book/05-blocks"]')).first
        said = {text.lower() for text in found.locator(".context mark").all_inner_texts()}
    assert said and said <= marked


def test_only_the_search_page_loads_the_index(browser: Browser, site: Path) -> None:
    """The index grows with the book; a chapter has no use for it."""
    with checks.visit(browser, f"{serve(site)}/book/05-blocks.html") as seen:
        assert not [url for url in seen.requests if "search" in url]
    with checks.visit(browser, f"{serve(site)}/search.html?q=block") as seen:
        assert {"searchindex.js", "search-text.js"} <= {url.split("/")[-1].split("?")[0] for url in seen.requests}
