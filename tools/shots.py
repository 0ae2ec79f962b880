"""Take a picture of pages of the built site, light and dark, on a phone and on a desktop.

python tools/shots.py book/03-password solutions/03-password --out /some/folder
"""

from __future__ import annotations

import argparse
from pathlib import Path

from browser import launch
from playwright.sync_api import sync_playwright

SITE = Path(__file__).parents[1] / "_build" / "html"
SIZES = {"desktop": (1280, 860), "phone": (390, 844)}


def main() -> None:
    """Write one full-page PNG for each page, mode and size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="+", help="page names, without .html")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    parser.add_argument("--modes", nargs="+", default=["light", "dark"])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = launch(playwright)
        for page_name in args.pages:
            for mode in args.modes:
                for size in args.sizes:
                    width, height = SIZES[size]
                    page = browser.new_page(viewport={"width": width, "height": height})
                    page.add_init_script(f"localStorage.setItem('mode', '{mode}'); localStorage.setItem('theme', '{mode}')")
                    page.goto((SITE / f"{page_name}.html").as_uri())
                    page.wait_for_load_state("networkidle")
                    page.evaluate("dispatchEvent(new Event('beforeprint'))")  # draws every figure
                    page.wait_for_timeout(1500)
                    target = args.out / f"{page_name.replace('/', '-')}-{mode}-{size}.png"
                    page.screenshot(path=target, full_page=True)
                    page.close()
                    print(target)
        browser.close()


if __name__ == "__main__":
    main()
