"""The book as one PDF: all pages in the order of the table of contents, an outline, every figure drawn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import ROOT
from playwright.sync_api import Browser
from shared_state.figures import figure_html
from shared_state.pdf import print_site

FIGURE = figure_html({"data": [{"type": "bar", "y": [1, 2]}], "layout": {"meta": {"alt": "Two bars."}, "height": 200}})
PAGES = {"index": "Front", "02-second": "Second", "10-tenth": "Tenth"}


def small_book(folder: Path, site: Path, **more: str) -> Path:
    """Three pages with a side bar; `more` is what a page has besides."""
    (folder / "book").mkdir()
    (folder / "_static").mkdir()
    (folder / "_static" / "js").symlink_to(ROOT / "book" / "assets" / "js")
    (folder / "_static" / "vendor").symlink_to(site / "_static" / "vendor")
    nav = "".join(f'<a class="reference internal" href="{name}.html">{title}</a>' for name, title in PAGES.items())
    for name, title in PAGES.items():
        (folder / "book" / f"{name}.html").write_text(
            f'<!doctype html><html lang="en"><head><meta charset="utf8"><title>{title}</title><link rel="icon" href="data:,"></head>'
            f'<body><nav class="bd-links">{nav}</nav><article><h1 id="top">{title}</h1><a href="02-second.html#top">link</a>'
            f"{more.get(title, '')}</article></body></html>",
            "utf8",
        )
    return folder


@pytest.mark.site
def test_the_pdf_has_all_pages_in_order(browser: Browser, site: Path, tmp_path: Path) -> None:
    """Each begins on a page of its own and stands in the outline; links lead to places in the document."""
    target = tmp_path / "book.pdf"
    assert print_site(small_book(tmp_path, site, Second=FIGURE), target, browser) == 3
    pdf = target.read_bytes()
    assert [title.decode() for title in re.findall(rb"/Title \((Front|Second|Tenth)\)\s*/(?:Dest|Parent|A)", pdf)] == list(
        PAGES.values()
    )
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == 3
    assert b"p1-top" in pdf and b"127.0.0.1" not in pdf


@pytest.mark.site
def test_a_figure_that_cannot_be_drawn_is_no_pdf(browser: Browser, site: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="1 figures could not be drawn"):
        print_site(small_book(tmp_path, site, Tenth=FIGURE.replace('"data":', '"data"::')), tmp_path / "book.pdf", browser)
    assert not (tmp_path / "book.pdf").exists()


@pytest.mark.site
def test_a_page_that_is_missing_is_named(browser: Browser, site: Path, tmp_path: Path) -> None:
    folder = small_book(tmp_path, site)
    (folder / "book" / "10-tenth.html").unlink()
    with pytest.raises(Exception, match="10-tenth.html: 404"):
        print_site(folder, tmp_path / "book.pdf", browser)
