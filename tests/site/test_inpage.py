"""The model in the page: what loads when, what is kept, what is refused; the two experiments; and the recorded answers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import checks
import pytest
from conftest import serve
from playwright.sync_api import Browser, Page, expect
from shared_state import model as parts
from sphinx.errors import ExtensionError
from tokenizers import Tokenizer

from kvlab import record
from kvlab.runtime import weights
from kvlab.show import inpage as show

PAGE = "book/inpage.html"
MODEL = weights.BUNDLED[weights.DEFAULT]
READY = 120_000  # milliseconds; a busy machine is slow, not wrong
SECRET = "ABCD-1234"
HEAVY = ("/model/", "/wllama/", "inpage-engine")


# ---- the parts, without a browser --------------------------------------------------------------------------------------------


def test_the_parts_are_the_file(tmp_path: Path) -> None:
    """Joined they are the file, the index says how large each is; whole ones are left alone, others written anew."""
    source, folder = tmp_path / "a.gguf", tmp_path / "model"
    source.write_bytes(bytes(range(250)) * 10)
    index = parts.write_parts(source, folder, 1000)
    assert [part["bytes"] for part in index["parts"]] == [1000, 1000, 500] and index["bytes"] == 2500
    assert b"".join((folder / part["name"]).read_bytes() for part in index["parts"]) == source.read_bytes()
    assert index["sha256"] == weights.sha256(source)
    assert [part["sha256"] for part in index["parts"]] == [weights.sha256(folder / part["name"]) for part in index["parts"]]
    before = (folder / "part-00.bin").stat().st_mtime_ns
    assert parts.write_parts(source, folder, 1000) == index == json.loads((folder / "index.json").read_text())
    assert (folder / "part-00.bin").stat().st_mtime_ns == before
    (folder / "part-02.bin").write_bytes(b"cut")
    (folder / "left-over").touch()
    assert parts.write_parts(source, folder, 1000) == index
    assert len(list(folder.iterdir())) == 4 and (folder / "part-02.bin").stat().st_size == 500


def test_a_site_has_the_weights_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked: the parts, and pages that say so. Not asked: the folder goes. No file, or another one: said with the remedy."""
    source, folder = tmp_path / MODEL.filename, tmp_path / "_static" / "model"
    app = SimpleNamespace(
        outdir=tmp_path, builder=SimpleNamespace(format="html"), config=SimpleNamespace(shared_state_model=True)
    )
    monkeypatch.setattr(weights, "gguf_path", lambda model: source)
    with pytest.raises(ExtensionError, match="kvlab model fetch"):
        parts.place_model(app, None)
    source.write_bytes(b"something else")
    with pytest.raises(ExtensionError, match="damaged"):
        parts.place_model(app, None)
    assert not folder.exists()
    monkeypatch.setattr(weights, "find", lambda name: SimpleNamespace(sha256=weights.sha256(source)))
    parts.place_model(app, None)
    assert (folder / "part-00.bin").read_bytes() == b"something else"
    context = {"body": show.model_html(MODEL)}
    parts.tell_page(app, PAGE, "", context, None)
    assert parts.WITH in context["body"] and parts.WITHOUT not in context["body"]
    app.config.shared_state_model = False
    parts.place_model(app, None)
    assert not folder.exists()
    for value, meant in {"": False, "0": False, "1": True}.items():
        monkeypatch.setenv(parts.VARIABLE, value)
        assert parts.wanted() is meant


def test_the_recorded_run_is_of_the_page_as_it_is() -> None:
    """Its texts are the page's, its leak is one, its counts add up, and a shared beginning pays."""
    run = record.load("inpage")
    assert run.data["texts"] == {"a": show.A, "b": show.B, "system": show.SYSTEM, "first": show.FIRST, "second": show.SECOND}
    emptied, kept = (run.data["password"][name] for name in show.ARMS)
    assert SECRET in show.A and SECRET in kept["text"] and SECRET not in emptied["text"]
    marked, without = show.leaks(kept["text"], show.A, show.B, emptied["text"]), emptied["text"]
    assert [kept["text"][begin:end] for begin, end in marked] == [SECRET]
    assert "<mark>" in show.side_html(kept, show.A, show.B, without)
    assert "<mark>" not in show.side_html(emptied, show.A, show.B, without)
    assert emptied["cached"] == 0 and kept["computed"] == emptied["computed"] == sum(owner == "B" for _, owner in kept["held"])
    assert kept["cached"] == sum(owner == "A" for _, owner in kept["held"])
    assert run.data["one_piece"] < 1e-3 < abs(emptied["candidates"][0][0][1] - kept["candidates"][0][0][1])
    first, second, changed = run.data["prefix"]
    assert first["cached"] == 0 and changed["cached"] < 10 < second["computed"] < second["cached"]
    assert second["ratio"] < 0.5 < changed["ratio"]


DOG = ("My dog is called Waffles and my door code is 7712", "The name of the dog is")


def test_what_is_a_leak() -> None:
    """A word of A's, with a digit or without; not B's own, not one that B is told anyway, not a little one, not a part of one."""

    def marked(text: str, without: str = "", a: str = DOG[0], b: str = DOG[1]) -> list[str]:
        return [text[begin:end] for begin, end in show.leaks(text, a, b, without)]

    assert marked(" Waffles.") == ["Waffles"] and marked("it is waffles, yes") == ["waffles"]
    assert marked(" Waffles.", without=" Waffles, as many are.") == []
    assert marked(" my dog and the name is called") == ["called"]
    assert marked(" Waffleson, 77123 uncalled") == []
    assert marked("7712 and Waffles, door code is 7712") == ["7712", "Waffles", "door code is 7712"]
    assert marked(" ABCD-1234.", a=show.A, b=show.B) == [SECRET]
    assert marked("是狗", a="口令是狗", b="口令是") == ["狗"]
    assert marked("Waffles", a="") == [] == marked("")


# ---- in Chromium -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights in parts, as the site would have them."""
    source = weights.gguf_path(MODEL)
    if not source.is_file():
        pytest.fail(f"{source} is not there: run `kvlab model fetch`")
    folder = tmp_path_factory.mktemp("parts") / "model"
    parts.write_parts(source, folder)
    return folder


def copy(site: Path, folder: Path, pieces: Path | None) -> str:
    """Serve the site's page with the weights beside it, or without; everything else is linked. Return the page's address."""
    if not (site / PAGE).exists():
        pytest.fail("book/inpage is not in the site: add it to _toc.yml")
    text = (site / PAGE).read_text("utf8").replace(parts.WITH, parts.WITHOUT)
    (folder / "book").mkdir()
    (folder / PAGE).write_text(text.replace(parts.WITHOUT, parts.WITH) if pieces else text, "utf8")
    (folder / "_static").mkdir()
    for path in (site / "_static").iterdir():
        if path.name != parts.FOLDER:
            (folder / "_static" / path.name).symlink_to(path)
    if pieces:
        (folder / "_static" / parts.FOLDER).symlink_to(pieces)
    return f"{serve(folder)}/{PAGE}"


@pytest.fixture(scope="module")
def with_weights(site: Path, pieces: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return copy(site, tmp_path_factory.mktemp("with"), pieces)


@pytest.fixture(scope="module")
def without_weights(site: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return copy(site, tmp_path_factory.mktemp("without"), None)


@pytest.fixture(scope="module")
def seen(browser: Browser, with_weights: str) -> Iterator[checks.Visit]:
    """The page, open for the tests that follow each other on it."""
    with checks.visit(browser, with_weights) as visit:
        visit.page.set_default_timeout(READY)
        yield visit


def says(page: Page, part: str = "model"):
    return page.locator(f'#kvi-{part} [data-part="says"]')


def ready(page: Page) -> None:
    expect(page.locator("#kvi-model")).to_have_attribute("data-state", "ready", timeout=READY)


def press(page: Page, name: str, part: str) -> str:
    """Press a button of an experiment; wait for its end and return what is said then."""
    page.get_by_role("button", name=name).click()
    expect(page.locator(f"#kvi-{part}")).not_to_have_attribute("aria-busy", "true", timeout=READY)
    return says(page, part).inner_text()


def heavy(visit: checks.Visit, since: int = 0) -> list[str]:
    return [url for url in visit.requests[since:] if any(part in url for part in HEAVY)]


def fetched(visit: checks.Visit, since: int = 0) -> list[int]:
    """Numbers of the parts that were asked for."""
    return [int(found[1]) for url in visit.requests[since:] if (found := re.search(r"/model/part-(\d+)\.bin", url))]


def drawn(page: Page, side: str) -> str:
    return page.locator(f'[data-side="{side}"] [data-part="drawn"]').inner_html()


def normal(page: Page, text: str) -> str:
    """HTML as the browser writes it."""
    return page.evaluate(
        "html => { const t = document.createElement('template'); t.innerHTML = html; return t.innerHTML; }", text
    )


@pytest.mark.site
def test_before_a_click_there_are_the_recorded_answers_and_nothing_is_fetched(seen: checks.Visit) -> None:
    page, run = seen.page, record.load("inpage")
    expect(says(page)).to_contain_text("Nothing is loaded")
    expect(page.get_by_role("button", name=f"Load the model ({show.megabytes(MODEL.size)})")).to_be_visible()
    expect(page.locator("#kvi-file")).to_be_hidden()
    assert page.evaluate("caches.keys()") == []
    for name in show.ARMS:
        sides = run.data["password"]
        assert drawn(page, name) == normal(page, show.side_html(sides[name], show.A, show.B, sides["emptied"]["text"]))
    expect(page.locator('[data-side="kept"] mark')).to_have_text(SECRET)
    expect(page.locator("#kvi-prefix tbody tr")).to_have_count(3)
    assert page.locator(".kvi [data-part=source]").all_inner_texts() == ["recorded"] * 3
    expect(page.get_by_role("button", name="Serve A, then B")).to_be_disabled()
    assert not heavy(seen) and not checks.complaints(seen)


ANSWERS = [
    " Waffles.", "the WAFFLES and my_door code is 7712, called 77", "", "口令是狗 😀 né Ünder ½ Ⅷ ١٢", "İstanbul ΣΑΣ <b>door</b>&code",
]  # fmt: skip


@pytest.mark.site
def test_the_page_draws_as_the_library_does(seen: checks.Visit) -> None:
    """Live and recorded answers look alike, odd ones too."""
    page, run = seen.page, record.load("inpage")
    odd = {
        "held": [["<|im_start|>", "A"], [" a\n\t'\"&", "A"], [" b", "B"]], "cached": 2, "computed": 1, "ended": True,
        "candidates": [[["<b>", math.log(0.0994)], ["x", math.log(0.0996)], ["y", -20.0]]], "text": " (k+1)? is <i>k+1</i> 'no'",
    }  # fmt: skip
    sides = run.data["password"]
    cases = [(side, show.A, show.B, without) for side in sides.values() for without in ("", sides["emptied"]["text"])]
    cases += [(odd, a, b, "") for a, b in (('It is "(k+1)?" & k2.', "i?"), ("k and <i>k+1</i>", ""), ("1", "k"))]
    cases += [(odd | {"text": text}, *DOG, without) for text in ANSWERS for without in ("", "code")]
    cases += [(odd | {"text": text}, f"{ANSWERS[-1]} {text.upper()}", "né 口", "") for text in ANSWERS]
    for case in cases:
        assert normal(page, show.side_html(*case)) == normal(page, page.evaluate("all => kvInpage.sideHTML(...all)", case)), (
            case
        )
    for row in [*run.data["prefix"], run.data["prefix"][0] | {"text": "<hr>", "ended": True, "ratio": 0.1234}]:
        inside = ["<table><tbody>", "</tbody></table>"]
        assert normal(page, show.row_html(row).join(inside)) == normal(
            page, page.evaluate("kvInpage.rowHTML", row).join(inside)
        )


@pytest.mark.site
def test_it_loads_by_keyboard_with_progress(seen: checks.Visit) -> None:
    page = seen.page
    page.evaluate(
        """() => { window.told = []; const says = document.querySelector('#kvi-model [data-part=says]');
        new MutationObserver(() => told.push([says.textContent, document.querySelector('#kvi-model progress').value])).observe(says, {childList: true}); }"""
    )
    page.get_by_role("button", name="Load the model").focus()
    page.keyboard.press("Enter")
    ready(page)
    told = page.evaluate("told")
    count = len(list(range(0, MODEL.size, parts.PART)))
    assert [text for text, _ in told if "part" in text] == [f"Loading part {i + 1} of {count} …" for i in range(count)]
    shares = [value for text, value in told if "part" in text]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] > 0.9
    expect(says(page)).to_contain_text("runs in this page, on 1 thread")
    expect(page.get_by_role("button", name="Serve A, then B")).to_be_focused()  # the button pressed is gone: on to the next
    expect(page.get_by_role("button", name="Remove it from this browser")).to_be_visible()
    expect(page.get_by_role("button", name="Serve A, then B")).to_be_enabled()
    assert fetched(seen) == list(range(count))
    assert heavy(seen)  # the check before the click would have seen it
    assert not checks.external_requests(seen) and not checks.complaints(seen)


TEXTS = [
    show.A, f" {show.B}", show.SYSTEM, "Don't we've 12,345 items?\n\n  x\ty ", "你好，口令是 7788 😀 né", "a" * 40 + " __init__(self): ",
    "<|im_start|>user\nhi<|im_end|>\n", " ",
]  # fmt: skip


@pytest.mark.site
def test_it_cuts_text_as_the_model_does(seen: checks.Visit) -> None:
    """The strip's tokens are the tokenizer's, and as many as the engine counts."""
    folder = weights.folder(MODEL)
    if not folder.is_dir():
        pytest.fail(f"{folder} is not there: run `kvlab model fetch`")
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False).ids
        ours = seen.page.evaluate("text => kvInpage.engine.tokens(text)", text)
        assert ours == [theirs.decode([i], skip_special_tokens=False) for i in ids], text
    for text in (
        show.A,
        TEXTS[3],
        TEXTS[6],
        "a ١٢ ½ Ⅷ",
    ):  # of the last, digits with a space, the converted tokenizer makes fewer
        told = seen.page.evaluate(
            "async text => [await kvInpage.engine.ask({prompt: text, words: 1, fresh: true}), kvInpage.engine.tokens(text).length]",
            text,
        )
        assert told[0]["cached"] == 0 and told[0]["computed"] == told[1], text


@pytest.mark.site
def test_the_password_by_keyboard(seen: checks.Visit) -> None:
    """Emptied, B is told nothing of A's. Not emptied, B is told the secret, and the engine computed B's tokens alone."""
    page, run = seen.page, record.load("inpage")
    serve_both = page.get_by_role("button", name="Serve A, then B")
    for name in show.ARMS:
        if name == "kept":
            page.get_by_role("switch", name="Do not empty the cache").focus()
            page.keyboard.press("Space")
        serve_both.focus()
        page.keyboard.press("Enter")
        expect(page.locator(f'[data-side="{name}"] [data-part="source"]')).to_have_text("measured in this page", timeout=READY)
        expect(page.locator("#kvi-password")).not_to_have_attribute("aria-busy", "true", timeout=READY)
        expect(serve_both).to_be_focused()
        found, recorded = page.evaluate("name => kvInpage.password[name]", name), run.data["password"][name]
        assert (SECRET in found["text"]) is (name == "kept")
        assert page.locator(f'[data-side="{name}"] mark').count() == (name == "kept")
        assert {key: found[key] for key in ("held", "cached", "computed")} == {
            key: recorded[key] for key in ("held", "cached", "computed")
        }
        assert [len(rivals) for rivals in found["candidates"]] == [5, 5]
        for (token, p), (theirs, q) in zip(found["candidates"][0], recorded["candidates"][0]):
            assert token == theirs and abs(p - q) < 0.05  # another processor may add in another order
        without = page.evaluate("kvInpage.password.emptied.text")
        assert drawn(page, name) == normal(page, show.side_html(found, show.A, show.B, without))
    expect(says(page, "password")).to_have_text(f"B is told what A said: “{SECRET}”.")
    emptied, kept = (page.evaluate("name => kvInpage.password[name].candidates[0]", name) for name in show.ARMS)
    assert max(abs(p - dict(kept)[token]) for token, p in emptied if token in dict(kept)) > 0.1


@pytest.mark.site
def test_not_emptied_is_what_the_page_says(seen: checks.Visit) -> None:
    """The state the engine had is that of all the text computed at once: the probabilities agree."""
    whole = seen.page.evaluate(
        "([a, b]) => kvInpage.engine.ask({prompt: `${a} ${b}`, words: 2, fresh: true, candidates: 5})", [show.A, show.B]
    )
    kept = seen.page.evaluate("kvInpage.password.kept")
    assert whole["cached"] == 0 and whole["computed"] == kept["cached"] + kept["computed"]
    for one, again in zip(kept["candidates"], whole["candidates"]):
        assert [token for token, _ in one] == [token for token, _ in again]
        assert max(abs(p - q) for (_, p), (_, q) in zip(one, again)) < 1e-3


STALE = "with other words than those above"


@pytest.mark.site
def test_a_leak_without_a_digit_is_told_and_panels_of_other_words_are_marked(seen: checks.Visit) -> None:
    """A name leaks as a number does. A panel says so while the fields have other words than it was made from."""
    page = seen.page
    stale = page.locator(".kvi-side[data-stale]")
    expect(stale).to_have_count(0)
    page.fill("#kvi-a", DOG[0])
    expect(stale).to_have_count(2)
    page.fill("#kvi-a", show.A)
    expect(stale).to_have_count(0)
    page.fill("#kvi-a", DOG[0])
    page.fill("#kvi-b", DOG[1])
    for name in show.ARMS:
        expect(page.locator(f'[data-side="{name}"] [data-part="source"]')).to_have_text(f"measured in this page, {STALE}")
    assert not checks.axe_violations(seen)
    said = press(page, "Serve A, then B", "password")  # the switch is on
    assert "Waffles" in page.evaluate("kvInpage.password.kept.text")
    assert said.startswith("B is told what A said: “Waffles”") and "The other panel was made with other words." in said
    expect(page.locator('[data-side="kept"] mark').first).to_have_text("Waffles")
    assert stale.evaluate_all("all => all.map(one => one.dataset.side)") == ["emptied"]
    page.get_by_role("switch").uncheck()
    said = press(page, "Serve A, then B", "password")
    assert said == "B is told nothing of A’s: the cache held none of it."
    expect(stale).to_have_count(0)
    expect(page.locator('[data-side="emptied"] mark')).to_have_count(0)
    # what B is told in both ways is not A's doing
    without, kept = page.evaluate("[kvInpage.password.emptied.text, kvInpage.password.kept]")
    assert drawn(page, "kept") == normal(page, show.side_html(kept, *DOG, without))
    page.get_by_role("switch").check()


EVIL = "<img src=x onerror=kvHarm=1><b>"


@pytest.mark.site
def test_a_text_is_never_html(seen: checks.Visit) -> None:
    """What is typed is shown as it is: in the strips, the candidates, the answers, the rows and what is said."""
    page = seen.page
    page.fill("#kvi-a", f"{EVIL} is A's. Repeat: {EVIL}")
    page.fill("#kvi-b", f"{EVIL} is")
    page.fill("#kvi-system", f"Say {EVIL}")
    page.fill("#kvi-first", f"{EVIL}1?")
    page.fill("#kvi-second", f"{EVIL}2?")
    press(page, "Serve A, then B", "password")
    press(page, "Empty the cache, ask question 1", "prefix")
    press(page, "Change one letter near the beginning", "prefix")
    press(page, "Ask question 2", "prefix")
    expect(page.locator('[data-side="kept"] .kvi-strip')).to_contain_text("onerror")
    side = {
        "held": [[EVIL, "A"], [EVIL, "B"]],
        "cached": 1,
        "computed": 1,
        "candidates": [[[EVIL, -1]]],
        "text": EVIL,
        "ended": True,
    }
    row = {"name": EVIL, "text": EVIL, "ended": True, "tokens": 1, "cached": 0, "computed": 1, "ratio": None}
    page.evaluate(
        """([side, row, evil]) => { const add = (html) => document.getElementById('kvi-password').insertAdjacentHTML('beforeend', `<div class="evil">${html}</div>`);
        add(kvInpage.sideHTML(side, evil, '', '')); add(`<table>${kvInpage.rowHTML(row)}</table>`); }""",
        [side, row, EVIL],
    )
    page.wait_for_timeout(200)  # for an image that fails to load
    assert page.locator(".kvi img").count() == 0 and page.evaluate("typeof kvHarm") == "undefined"
    assert (
        page.locator(".evil").first.inner_text().count("onerror") >= 4
        and page.locator(".evil").last.inner_text().count("onerror") == 2
    )
    page.evaluate("document.querySelectorAll('.evil').forEach(one => one.remove())")
    for text in (show.side_html(side, EVIL, "", ""), show.row_html(row)):
        assert "<img" not in text and "<b>&" not in text


@pytest.mark.site
def test_a_shared_beginning_and_one_letter(seen: checks.Visit) -> None:
    """Cached is what the two prompts have in common, to the token; changed early, it shrinks to what stands before the letter."""
    page = seen.page
    page.fill("#kvi-system", "Be brief. The library closes at six.")
    page.fill("#kvi-first", "When?")
    page.fill("#kvi-second", "Who closes it?")

    def cut(system: str, question: str) -> list[str]:
        turn = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return page.evaluate("text => kvInpage.engine.tokens(text)", turn)

    def common(one: list[str], other: list[str]) -> int:
        return next(i for i, (a, b) in enumerate(zip(one, other)) if a != b)

    press(page, "Empty the cache, ask question 1", "prefix")
    said = press(page, "Ask question 2", "prefix")
    press(page, "Change one letter near the beginning", "prefix")
    assert page.input_value("#kvi-system").startswith("Be Brief.")
    press(page, "Ask question 2", "prefix")
    first, second, changed = page.evaluate("kvInpage.prefix")
    before, after = (
        cut("Be brief. The library closes at six.", "Who closes it?"),
        cut("Be Brief. The library closes at six.", "Who closes it?"),
    )
    assert first["cached"] == 0 and first["tokens"] == first["computed"]
    assert (
        second["cached"]
        == common(cut("Be brief. The library closes at six.", "When?"), before)
        > changed["cached"]
        == common(before, after)
        > 0
    )
    assert second["tokens"] == second["cached"] + second["computed"] == len(before)
    assert second["ratio"] == pytest.approx(second["ms"] / first["ms"]) and second["ratio"] < changed["ratio"]
    assert f"{second['cached']} came from the cache; {second['computed']} were computed" in said
    rows = page.locator("#kvi-prefix tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(2)).to_contain_text("Question 2, the system prompt changed from word 2 of 7 on")
    expect(rows.nth(2).locator("td").last).to_contain_text(re.compile(r"^\d\.\d\d \(\d+\.\d\d s\)$"))
    press(page, "Change one letter near the beginning", "prefix")
    press(page, "Ask question 2", "prefix")  # what was put aside is taken back
    assert page.evaluate("kvInpage.prefix[3].cached") == len(before) - 1
    expect(rows.nth(3).locator("th")).to_have_text(re.compile("^Question 2(?!,)"))  # as in the first row again
    page.fill("#kvi-system", "Be brief. The library closes at ten.")
    press(page, "Ask question 2", "prefix")
    expect(rows.nth(4)).to_contain_text("Question 2, the system prompt changed from word 7 of 7 on")
    press(page, "As it was", "prefix")
    assert page.input_value("#kvi-system") == show.SYSTEM


@pytest.mark.site
def test_what_the_engine_cannot_do_is_said(seen: checks.Visit) -> None:
    """A text too long, half a character, a stop, an empty field: a sentence each, and the next request is served."""
    page = seen.page
    page.fill("#kvi-system", "word " * 2100)
    assert "room for 2,048 tokens" in press(page, "Empty the cache, ask question 1", "prefix")
    page.fill("#kvi-a", "口令是 77。")
    page.fill("#kvi-b", "口令是什么？口令是")
    assert "half a character" in press(page, "Serve A, then B", "password")
    expect(page.locator('[data-side="kept"] .kvi-facts')).to_contain_text("They are A’s.")
    page.fill("#kvi-b", " ")
    assert press(page, "Serve A, then B", "password") == "Write something for A and for B."
    page.fill("#kvi-system", "A word or two. " * 40)
    bar = page.locator("#kvi-prefix progress")
    page.evaluate("""() => { window.reached = []; const bar = document.querySelector('#kvi-prefix progress');
        new MutationObserver(() => reached.push(bar.hasAttribute('value') ? bar.value : null)).observe(bar, {attributes: true}); }""")
    page.get_by_role("button", name="Empty the cache, ask question 1").focus()
    page.keyboard.press("Enter")
    expect(says(page, "prefix")).to_contain_text("On one thread this takes a while.", timeout=1000)
    expect(bar).to_have_attribute("value", "0")
    expect(says(page, "prefix")).to_contain_text("are in the cache")
    page.wait_for_function("new Set(reached).size > 2")
    reached = page.evaluate("reached")
    assert None not in reached and reached == sorted(reached) and 0 < max(reached) < 0.5
    page.locator("#kvi-prefix").get_by_role("button", name="Stop").click()
    expect(says(page, "prefix")).to_have_text("Stopped.")
    expect(page.get_by_role("button", name="Empty the cache, ask question 1")).to_be_visible()
    page.fill("#kvi-system", "Be brief.")
    assert "came from the cache" in press(page, "Empty the cache, ask question 1", "prefix")


@pytest.mark.site
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_the_running_page_is_readable_in_both_modes(seen: checks.Visit, mode: str) -> None:
    checks.switch_mode(seen.page, mode)
    assert not checks.axe_violations(seen)


@pytest.mark.site
def test_kept_and_removed(seen: checks.Visit) -> None:
    """After a reload it starts without the network for its weights; removed, it is gone. The last on this page."""
    page = seen.page
    since = len(seen.requests)
    page.reload()
    expect(says(page)).to_contain_text(f"This browser keeps the model: {show.megabytes(MODEL.size)}")
    page.get_by_role("button", name="Start the model").click()
    ready(page)
    assert not [url for url in seen.requests[since:] if "/model/" in url]
    page.get_by_role("button", name="Remove it from this browser").click()
    expect(says(page)).to_contain_text("Removed from this browser")
    assert page.evaluate("caches.keys()") == []
    page.reload()
    expect(says(page)).to_contain_text("Nothing is loaded")
    expect(page.get_by_role("button", name="Remove it from this browser")).to_be_hidden()
    assert not checks.external_requests(seen) + checks.complaints(seen)


@pytest.mark.site
def test_a_cut_download_goes_on_where_it_stopped(browser: Browser, with_weights: str) -> None:
    """Part 4 of 12 does not arrive: one sentence. After a reload the first three are not asked for again."""
    with checks.visit(browser, with_weights) as visit:
        page = visit.page
        page.route("**/part-03.bin", lambda route: route.abort())
        page.get_by_role("button", name="Load the model").click()
        expect(says(page)).to_have_text(
            re.compile("part-03.bin did not arrive. It is not kept; what came before is. Press the button again")
        )
        expect(page.get_by_role("button", name="Load the rest of the model (98 MB, 25 MB are here)")).to_be_focused()
        expect(page.locator('[data-side="kept"] mark')).to_have_text(SECRET)
        page.unroute("**/part-03.bin")
        page.reload()
        since = len(visit.requests)
        page.get_by_role("button", name="Load the rest").click()
        ready(page)
        assert fetched(visit, since) == list(range(3, 12))


@pytest.mark.site
def test_stop_while_loading(browser: Browser, with_weights: str) -> None:
    with checks.visit(browser, with_weights) as visit:
        page = visit.page
        page.route("**/part-01.bin", lambda route: None)  # which never answers
        page.get_by_role("button", name="Load the model").click()
        expect(says(page)).to_have_text("Loading part 2 of 12 …")
        expect(page.locator("#kvi-model").get_by_role("button", name="Stop")).to_be_focused()
        page.keyboard.press("Enter")
        expect(says(page)).to_have_text(re.compile("^Stopped. What came before is kept."))
        expect(page.get_by_role("button", name="Load the rest")).to_be_focused()


@pytest.mark.site
@pytest.mark.parametrize("harm", ["damaged", "short"])
def test_a_broken_part_is_refused_and_not_kept(browser: Browser, with_weights: str, pieces: Path, harm: str) -> None:
    """One wrong bit, or the end missing: one sentence, nothing of it kept, the recorded answers stay; then it can be loaded."""
    whole = (pieces / "part-00.bin").read_bytes()
    broken = bytes([whole[0] ^ 1]) + whole[1:] if harm == "damaged" else whole[:-1]
    with checks.visit(browser, with_weights) as visit:
        page = visit.page
        page.route("**/part-00.bin", lambda route: route.fulfill(body=broken))
        page.get_by_role("button", name="Load the model").click()
        said = (
            "its SHA-256 differs. It is not kept. Build the site again"
            if harm == "damaged"
            else "bytes in place of 8,388,608. It is not kept"
        )
        expect(says(page)).to_contain_text(said)
        assert page.evaluate("caches.open('shared-state-model').then(box => box.keys()).then(keys => keys.length)") == 0
        expect(page.get_by_role("button", name="Remove it")).to_be_hidden()
        expect(page.locator('[data-side="kept"] mark')).to_have_text(SECRET)
        expect(page.get_by_role("button", name="Load the model")).to_be_enabled()
        assert not checks.axe_violations(visit) and fetched(visit) == [0]


@pytest.mark.site
def test_without_weights_the_reader_chooses_the_file(browser: Browser, without_weights: str, tmp_path: Path) -> None:
    """A file of another size or content is refused with a sentence; the right one runs and is kept."""
    small, wrong = tmp_path / "small.gguf", tmp_path / "wrong.gguf"
    small.write_bytes(b"GGUF")
    with wrong.open("wb") as file:
        file.truncate(MODEL.size)
    with checks.visit(browser, without_weights, viewport=checks.PHONE) as visit:
        page = visit.page
        expect(says(page)).to_contain_text("built without the weights")
        expect(page.get_by_role("button", name="Load the model")).to_be_hidden()
        chooser = page.get_by_label(f"The file {MODEL.filename}")
        assert not checks.axe_violations(visit) and not checks.sideways(visit)
        chooser.set_input_files(small)
        expect(says(page)).to_contain_text("small.gguf has 4 bytes, the weights have 98,362,432. Choose SmolLM2")
        chooser.set_input_files(wrong)
        expect(says(page)).to_contain_text("the right size and another SHA-256")
        expect(page.get_by_role("button", name="Remove it")).to_be_hidden()
        chooser.set_input_files(weights.gguf_path(MODEL))
        ready(page)
        page.reload()
        expect(page.get_by_role("button", name="Start the model")).to_be_visible()
        assert not [url for url in visit.requests if "/model/" in url]
        assert not checks.external_requests(visit) + checks.complaints(visit)


@pytest.mark.site
def test_on_plain_http_it_runs_and_is_not_kept(browser: Browser, with_weights: str) -> None:
    """Without a secure context there is neither Cache Storage nor a hash; the page says so and works."""
    context = browser.new_context()
    context.add_init_script(
        "for (const name of ['isSecureContext', 'caches']) Object.defineProperty(globalThis, name, {value: undefined});"
        "Object.defineProperty(Crypto.prototype, 'subtle', {value: undefined});"
    )
    try:
        page = context.new_page()
        page.goto(with_weights)
        expect(says(page)).to_contain_text("not on https or localhost: the browser will keep nothing")
        page.get_by_role("button", name="Load the model").click()
        ready(page)
        expect(says(page)).to_contain_text("in memory only")
        expect(page.get_by_role("button", name="Remove it")).to_be_hidden()
    finally:
        context.close()


@pytest.mark.site
def test_from_the_disk_it_says_how_to_serve(browser: Browser, site: Path) -> None:
    with checks.visit(browser, (site / PAGE).as_uri(), viewport=checks.PHONE, mode="dark") as visit:
        expect(says(visit.page)).to_contain_text("python -m http.server")
        expect(visit.page.locator('[data-side="kept"] mark')).to_have_text(SECRET)
        expect(visit.page.get_by_role("button", name="Load the model")).to_be_hidden()
        assert not checks.sideways(visit) + checks.complaints(visit) + checks.axe_violations(visit)


@pytest.mark.site
def test_without_scripts_the_recorded_answers_stand(browser: Browser, site: Path) -> None:
    page = browser.new_page(java_script_enabled=False)
    try:
        page.goto(f"{serve(site)}/{PAGE}")
        expect(says(page)).to_contain_text("Without JavaScript")
        expect(page.locator('[data-side="kept"] mark')).to_have_text(SECRET)
        expect(page.locator("#kvi-prefix tbody tr")).to_have_count(3)
    finally:
        page.close()
