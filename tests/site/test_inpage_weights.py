"""The weights in the page: a part that lost bytes, an index of another model, no room, Stop; and plain http, really."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser as chromium
import checks
import conftest
import pytest
import test_inpage as inpage
from playwright.sync_api import Browser, Page, expect
from shared_state import model as parts

LIBRARY = Path(__file__).parents[2] / "book" / "assets" / "js" / "inpage-model.js"
SIZE = 1000  # bytes of a part of the little file
pieces, with_weights = inpage.pieces, inpage.with_weights


# ---- the parts, without a browser --------------------------------------------------------------------------------------------


def test_a_damaged_part_is_written_anew(tmp_path: Path) -> None:
    """One bit differs, the size does not: that part is written, the others are left alone. So for a source of the same size."""
    source, folder = tmp_path / "a.gguf", tmp_path / "model"
    source.write_bytes(bytes(range(250)) * 10)
    index = parts.write_parts(source, folder, SIZE)
    first, second = folder / "part-00.bin", folder / "part-01.bin"
    whole, before = second.read_bytes(), first.stat().st_mtime_ns
    second.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert parts.write_parts(source, folder, SIZE) == index
    assert second.read_bytes() == whole and first.stat().st_mtime_ns == before
    (folder / "index.json").write_text("{}")
    assert parts.write_parts(source, folder, SIZE) == index == json.loads((folder / "index.json").read_text())
    source.write_bytes(bytes(range(250))[::-1] * 10)
    assert parts.write_parts(source, folder, SIZE) != index
    assert b"".join(path.read_bytes() for path in sorted(folder.glob("part-*"))) == source.read_bytes()


# ---- the module alone, with a little file ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """A page with nothing but the module and a file in three parts beside it; its address and what the module is told."""
    folder = tmp_path_factory.mktemp("little")
    (folder / "index.html").write_text("<!doctype html><title>parts</title><link rel=icon href=data:,>")
    (folder / "js").mkdir()
    (folder / "js" / LIBRARY.name).symlink_to(LIBRARY)
    source = folder / "little.gguf"
    source.write_bytes(bytes(range(250)) * 10)
    index = parts.write_parts(source, folder / "model", SIZE)
    return f"{conftest.serve(folder)}/index.html", {name: index[name] for name in ("name", "bytes", "sha256")}


@pytest.fixture
def alone(browser: Browser, little: tuple[str, dict[str, Any]]) -> Iterator[checks.Visit]:
    with checks.visit(browser, little[0]) as visit:
        yield visit


CALL = """async ([model, body]) => {
  const library = await import('/js/inpage-model.js'), box = await caches.open('shared-state-model');
  const at = (part) => `/shared-state-model/${model.sha256}/${part}`, text = async (blob) => blob && [...new Uint8Array(await blob.arrayBuffer())];
  const late = new Promise((_, reject) => setTimeout(() => reject(new Error('no end after 10 s')), 10000));
  try { return await Promise.race([late, new Function('library', 'model', 'box', 'at', 'text', `return (async () => { ${body} })()`)(library, model, box, at, text)]); }
  catch (error) { return { error: error.name, said: error.message, damaged: Boolean(error.damaged) }; }
}"""


def call(page: Page, little: tuple[str, dict[str, Any]], body: str) -> Any:
    """Run statements with the module as `library`, what it is told as `model` and its box; return what they return, or the error."""
    return page.evaluate(CALL, [little[1], body])


LOAD = "const got = await library.load(model); return { kept: got.kept, whole: await text(got.blob) };"
LOOK = "const got = await library.look(model); return { bytes: got.bytes, whole: await text(got.whole) };"
WHOLE = list(range(250)) * 10
HARMS = {
    "zeros": "await box.put(at(1), new Response(new Uint8Array(1000)));",
    "a bit": "const b = new Uint8Array(await (await box.match(at(1))).arrayBuffer()); b[9] ^= 1; await box.put(at(1), new Response(b));",
    "short": "await box.put(at(1), new Response((await (await box.match(at(1))).blob()).slice(1)));",
    "gone": "await box.delete(at(1));",
}


@pytest.mark.site
@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("looked", [True, False])
def test_a_kept_part_that_lost_bytes_is_fetched_again(alone: checks.Visit, little: tuple, harm: str, looked: bool) -> None:
    """Looked at or loaded, it is thrown away; that part alone is asked for again, and the file is whole."""
    page = alone.page
    assert call(page, little, LOAD) == {"kept": True, "whole": WHOLE} and inpage.fetched(alone) == [0, 1, 2]
    assert call(page, little, LOOK) == {"bytes": 2500, "whole": WHOLE}
    call(page, little, HARMS[harm])
    if looked:
        assert call(page, little, LOOK) == {"bytes": 1500, "whole": None}
        assert call(page, little, "return Boolean(await box.match(at(1)));") is False
    since = len(alone.requests)
    assert call(page, little, LOAD) == {"kept": True, "whole": WHOLE} and inpage.fetched(alone, since) == [1]
    assert call(page, little, LOOK) == {"bytes": 2500, "whole": WHOLE}


@pytest.mark.site
@pytest.mark.parametrize("harm", ["new Uint8Array(40)", "JSON.stringify([1000, 1000, 500])"])
def test_a_list_that_is_damaged_or_of_before_is_nothing(alone: checks.Visit, little: tuple, harm: str) -> None:
    """No error: nothing is kept, and a load makes the list anew."""
    call(alone.page, little, LOAD)
    call(alone.page, little, f"await box.put(at('list'), new Response({harm}));")
    assert call(alone.page, little, LOOK) == {"bytes": 0, "whole": None}
    assert call(alone.page, little, LOAD) == {"kept": True, "whole": WHOLE}
    assert call(alone.page, little, LOOK) == {"bytes": 2500, "whole": WHOLE}


@pytest.mark.site
@pytest.mark.parametrize("differs", [{"sha256": "0" * 64}, {"bytes": 2499}])
def test_an_index_of_another_model_is_refused(alone: checks.Visit, little: tuple, differs: dict[str, Any]) -> None:
    """Its parts are not asked for, and nothing is kept."""

    def other(route) -> None:
        route.fulfill(json=route.fetch().json() | differs)

    alone.page.route("**/index.json", other)
    told = call(alone.page, little, LOAD)
    assert told == {"error": "Error", "said": "index.json is of another model than this page.", "damaged": True}
    assert inpage.fetched(alone) == [] and call(alone.page, little, "return (await box.keys()).length;") == 0


FULL = "Cache.prototype.put = async () => { throw new DOMException('no room', 'QuotaExceededError'); };"


@pytest.mark.site
@pytest.mark.parametrize("room", range(4))
def test_no_room_is_not_called_kept(alone: checks.Visit, little: tuple, room: int) -> None:
    """The browser takes `room` of four things, refuses the next, takes what follows: the file is whole, in memory, and not called kept."""
    once = f"const put = Cache.prototype.put; let left = {room}; Cache.prototype.put = async function (...all) {{ if (left--) return put.apply(this, all); throw new DOMException('no room', 'QuotaExceededError'); }};"
    assert call(alone.page, little, f"{once} {LOAD}") == {"kept": False, "whole": WHOLE}


TAKE = """const file = new File([new Uint8Array({bytes})], 'mine.gguf'), halt = new AbortController();
  const taken = library.take(model, file, {{ signal: halt.signal }}); {then}
  const got = await taken; return {{ kept: got.kept, whole: await text(got.blob) }};"""


@pytest.mark.site
def test_a_chosen_file(alone: checks.Visit, little: tuple) -> None:
    """Stopped while it is checked: an end at once, nothing kept. Not stopped: kept, or in memory where there is no room."""
    page, right = alone.page, TAKE.format(bytes=WHOLE, then="")
    stopped = TAKE.format(bytes=WHOLE, then="halt.abort();")
    assert call(page, little, stopped)["error"] == "AbortError"
    opening = (
        "const open = caches.open.bind(caches); CacheStorage.prototype.open = (name) => { halt.abort(); return open(name); };"
    )
    assert call(page, little, TAKE.format(bytes=WHOLE, then=opening))["error"] == "AbortError"
    page.reload()
    page.wait_for_timeout(200)  # for a check that goes on
    assert call(page, little, LOOK) == {"bytes": 0, "whole": None}
    # one that never can be read stands for one that takes long
    never = "File.prototype.arrayBuffer = () => new Promise(() => {});"
    late = f"{never} {TAKE.format(bytes=WHOLE, then='setTimeout(() => halt.abort(), 50);')}"
    assert call(page, little, late)["error"] == "AbortError"
    page.reload()
    assert call(page, little, f"{FULL} {right}") == {"kept": False, "whole": WHOLE}
    page.reload()
    assert call(page, little, right) == {"kept": True, "whole": WHOLE}
    assert call(page, little, LOOK) == {"bytes": 2500, "whole": WHOLE}
    call(page, little, "await box.put(at(0), new Response(new Uint8Array(2500)));")
    assert call(page, little, LOOK) == {"bytes": 0, "whole": None}


@pytest.mark.site
def test_stop_between_kept_parts(alone: checks.Visit, little: tuple) -> None:
    """A load that asks nobody can be stopped too."""
    call(alone.page, little, LOAD)
    halted = "const halt = new AbortController(); await library.load(model, { signal: halt.signal, onPart: (i) => i && halt.abort() });"
    assert call(alone.page, little, halted)["error"] == "AbortError"


# ---- the page itself, with the weights ---------------------------------------------------------------------------------------


@pytest.mark.site
def test_a_page_with_a_damaged_kept_part_fetches_it_again(browser: Browser, with_weights: str) -> None:
    """The engine is not started on zeros: the page says what is missing, fetches that part alone, and starts."""
    with checks.visit(browser, with_weights) as visit:
        page = visit.page
        page.set_default_timeout(inpage.READY)
        model = {"name": inpage.MODEL.filename, "bytes": inpage.MODEL.size, "sha256": inpage.MODEL.sha256}
        page.evaluate(
            """async model => {
              await (await import('../_static/js/inpage-model.js')).load(model);
              const box = await caches.open('shared-state-model');
              await box.put(`/shared-state-model/${model.sha256}/5`, new Response(new Uint8Array(8 << 20)));
            }""",
            model,
        )
        page.reload()
        since = len(visit.requests)
        page.get_by_role("button", name="Load the rest of the model (98 MB, 90 MB are here)").click()
        inpage.ready(page)
        assert inpage.fetched(visit, since) == [5]
        expect(inpage.says(page)).to_contain_text("This browser keeps its 98 MB")


@pytest.mark.site
def test_an_engine_that_failed_is_gone(browser: Browser, with_weights: str) -> None:
    """Half a file has the vocabulary and not the weights: an error, and no worker stays with it. So for no model at all."""
    with checks.visit(browser, with_weights) as visit:
        said = visit.page.evaluate(
            """async () => {
              const { start } = await import('../_static/js/inpage-engine.js');
              const half = await (await fetch('../_static/model/part-00.bin')).blob();
              return Promise.all([half, new Blob([new Uint8Array(1e6)])].map((blob) => start(blob).then(() => 'started', (error) => error.message)));
            }"""
        )
        assert said == ["it cannot read the file", "the file has no vocabulary that can be read"]
        visit.page.wait_for_timeout(300)
        assert visit.page.workers == []


def open_to_others(folder: Path) -> str:
    """Serve a folder under an address that a browser does not take for this machine's own; return the address."""
    server = chromium.serve(folder, "0.0.0.0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # of a datagram socket: nothing is sent
            name = probe.getsockname()[0]
        except OSError:  # no network: this address leads here too, and is not called secure
            name = "0.0.0.0"
    return f"http://{name}:{server.server_port}"


@pytest.mark.site
def test_on_an_address_that_is_not_secure(browser: Browser, site: Path, pieces: Path, tmp_path: Path) -> None:
    """As a class opens a teacher's machine: no Cache Storage, no hash, none of the engine's own storage. It runs all the same."""
    inpage.copy(site, tmp_path, pieces)
    with checks.visit(browser, f"{open_to_others(tmp_path)}/{inpage.PAGE}") as visit:
        page = visit.page
        page.set_default_timeout(inpage.READY)
        assert page.evaluate("[isSecureContext, typeof caches, typeof crypto.subtle]") == [False, "undefined", "undefined"]
        expect(inpage.says(page)).to_contain_text("not on https or localhost: the browser will keep nothing")
        page.get_by_role("button", name=re.compile("^Load the model")).click()
        inpage.ready(page)
        expect(inpage.says(page)).to_contain_text("in memory only")
        told = page.evaluate("kvInpage.engine.ask({prompt: 'The capital of France is', words: 2, fresh: true})")
        assert "Paris" in told["text"] and told["computed"] == 5
        assert not checks.external_requests(visit) + checks.complaints(visit)
