"""Find Chromium and start it quietly: no first-run pages, no background requests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome", "msedge")
PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "C:/Program Files/Google/Chrome/Application/chrome.exe",
    "C:/Program Files (x86)/Microsoft/Edge/Application/msedge.exe",
)
# Playwright sets most of the quiet flags itself; these are what Debian's build asks for besides
FLAGS = ["--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-component-update"]


def chromium() -> str | None:
    """Return the path of an installed Chromium, Chrome or Edge: `CHROMIUM`, the PATH, the usual places; else None."""
    if named := os.environ.get("CHROMIUM"):
        return named if Path(named).exists() else None
    found = (shutil.which(name) for name in NAMES)
    return next((path for path in found if path), next((path for path in PLACES if Path(path).exists()), None))


def launch(playwright):
    """Start the browser; raise `FileNotFoundError` with the remedy when there is none."""
    path = chromium()
    if path is None:
        raise FileNotFoundError("no Chromium: install Debian's package `chromium`, or set CHROMIUM to a Chrome or Edge")
    return playwright.chromium.launch(executable_path=path, headless=True, args=FLAGS, chromium_sandbox=False)


if __name__ == "__main__":
    print(chromium() or "")
