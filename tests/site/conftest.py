"""The built site, a local server for it, and one Chromium for all tests."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import browser as chromium
import pytest
from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).parents[2]
SITE = ROOT / "_build" / "html"


@functools.cache
def serve(folder: Path) -> str:
    """Serve a folder on a free port of this machine until the tests end; return its address."""
    return f"http://127.0.0.1:{chromium.serve(folder).server_port}"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium, opened once."""
    with sync_playwright() as playwright:
        opened = chromium.launch(playwright)
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def site() -> Path:
    """The folder of the built site."""
    if not (SITE / "index.html").exists():
        pytest.fail("the site is not built: run `make site`, or leave these tests out with -m 'not site'")
    return SITE
