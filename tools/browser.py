"""Find Chromium and start it quietly: no first-run pages, no background requests; and serve it a folder, without a log."""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import threading
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


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Say nothing."""


def serve(folder: Path, host: str = "127.0.0.1") -> http.server.ThreadingHTTPServer:
    """Serve a folder on a free port (`server_port`) until `shutdown()`, or until the process ends."""
    server = http.server.ThreadingHTTPServer((host, 0), functools.partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


if __name__ == "__main__":
    print(chromium() or "")
