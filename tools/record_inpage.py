"""Record the page that runs the model itself, into results/inpage-cpu.json.gz: python tools/record_inpage.py [site folder]

The page of the built site is opened in Chromium and used as a reader would use it: the file chosen, A and B served both ways,
the two questions asked, then the second again with one letter changed. Times are kept as ratios to the first question's.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import statistics
import sys
import time
from pathlib import Path

from browser import launch, serve
from playwright.sync_api import Page, sync_playwright

from kvlab import record
from kvlab.runtime import weights

ROOT = Path(__file__).parents[1]
PATIENCE = 300_000  # milliseconds
ROUNDS = 3
SIDE = ("held", "cached", "computed", "candidates", "text", "ended")  # of a panel


def press(page: Page, button: str) -> None:
    """Press a button of an experiment and wait for its end."""
    page.get_by_role("button", name=button).click()
    page.wait_for_function("!document.querySelector('.kvi[aria-busy]')")


def use(page: Page, gguf: Path) -> dict:
    """Do what a reader would; return what the page drew, with natural logarithms to four digits and no times but ratios."""
    page.set_input_files("#kvi-file", gguf)
    page.wait_for_selector('#kvi-model[data-state="ready"]')
    press(page, "Serve A, then B")
    page.get_by_role("switch").check()
    press(page, "Serve A, then B")
    texts = {name: page.input_value(f"#kvi-{name}") for name in ("a", "b", "system", "first", "second")}
    # the same text from an empty cache, all at once: does "not emptied" mean what the page says?
    whole = page.evaluate(
        "([a, b]) => kvInpage.engine.ask({prompt: `${a} ${b}`, words: 2, fresh: true, candidates: 5})", [texts["a"], texts["b"]]
    )
    rounds = []
    for n in range(ROUNDS):  # a time on a shared machine is one of several; the middle ratio is kept
        press(page, "As it was")
        press(page, "Empty the cache, ask question 1")
        press(page, "Ask question 2")
        if n == ROUNDS - 1:
            press(page, "Change one letter near the beginning")
        else:  # another letter each time: the engine takes a prompt back that it has put aside
            page.fill("#kvi-system", texts["system"].replace("answer", "answe" + "xz"[n], 1))
        press(page, "Ask question 2")
        rounds.append(page.evaluate("kvInpage.prefix.map(row => row.ratio)"))
    found = page.evaluate(
        "({password: kvInpage.password, prefix: kvInpage.prefix, threads: kvInpage.engine.threads, version: kvInpage.engine.version})"
    )
    kept = found["password"]["kept"]["candidates"]
    moved = [
        abs(p - dict(again)[token]) for one, again in zip(kept, whole["candidates"]) for token, p in one if token in dict(again)
    ]
    for side in found["password"].values():
        side["candidates"] = [[[token, record.short(p)] for token, p in rivals] for rivals in side["candidates"]]
    rows = [{key: value for key, value in row.items() if key != "ms"} for row in found["prefix"]]
    for row, ratios in zip(rows[1:], list(zip(*rounds))[1:]):
        row["ratio"] = record.short(statistics.median(ratios), 3)
    pins = json.loads((ROOT / "package.json").read_text("utf8"))["dependencies"]
    return {
        "texts": texts,
        "password": {name: {key: found["password"][name][key] for key in SIDE} for name in ("emptied", "kept")},
        "one_piece": record.short(max(moved), 2),
        "prefix": rows,
        "engine": {
            "wllama": pins["@wllama/wllama"],
            "llama.cpp": found["version"],
            "threads": found["threads"],
            "browser": f"Chromium {page.context.browser.version}",
        },
    }


def main() -> int:
    """Returns the exit code."""
    site = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "_build" / "html"
    model = weights.BUNDLED[weights.DEFAULT]
    begin = time.monotonic()
    with sync_playwright() as playwright:
        browser = launch(playwright)
        page = browser.new_page()
        page.set_default_timeout(PATIENCE)
        page.goto(f"http://127.0.0.1:{serve(site).server_port}/book/inpage.html")
        data = use(page, weights.gguf_path(model))
        browser.close()
    engine = data["engine"]
    device = record.device_info("cpu")
    manifest = record.Manifest(
        experiment="inpage",
        command="python tools/record_inpage.py",
        model={model.name: model.sha256},
        dtypes=["Q4_1"],
        device=device | {"name": f"{device['name']}, {engine['browser']}", "threads": engine["threads"]},
        versions=record.versions() | {name: engine[name] for name in ("wllama", "llama.cpp", "browser")},
        seed=0,
        created=datetime.date.today().isoformat(),
        settings={"context": 2048, "batch": 8, "temperature": 0, "cache": "f16", "rounds": ROUNDS},
    )
    run = record.Run(dataclasses.replace(manifest, seconds=round(time.monotonic() - begin, 1)), data)
    print(run.save(), json.dumps(data, indent=1, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
