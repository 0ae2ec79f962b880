"""The page that runs the model itself: its fields and its recorded answers as HTML, drawn as `book/assets/js/inpage.js` draws live ones."""

from __future__ import annotations

import html
import math
import re

from kvlab.experiments.leak import USER_A, USER_B
from kvlab.record import Run, number
from kvlab.runtime.weights import Bundled

A, B = USER_A, USER_B.strip()  # the page puts the space between two messages back
SYSTEM = (
    "You answer questions about the course Shared State. The course explains the key-value cache of language models. A model "
    "reads a prompt token by token and keeps two vectors for each token and layer, a key and a value. Together they are the "
    "cache. A later token looks at them, and they need not be computed again. A server that gives many people the same "
    "instructions can keep the cache of the instructions and use it for all of them. This is called sharing a prefix. It is "
    "right when the tokens are the same from the first one on, because what is kept for a token depends on everything before "
    "it. It is wrong when somebody else's words are among them. Answer in one short sentence. If you do not know the answer, "
    "say that you do not know it. Use plain words and no lists. The office is open from nine to five, and the library closes "
    "at six. Room 12 is on the second floor, next to the stairs."
)
FIRST, SECOND = "When does the library close?", "Where is room 12?"
ARMS = {
    "emptied": "Emptied between the two",
    "kept": "Not emptied",
}
# Little words are in every answer and are nobody's. The page's script has them from the page, so that there is one list.
LITTLE = (
    "a an and are as at be but by can did do does for from had has have he her him his how i if in is it its me my no not of on "
    "or our s she so t that the their them then there they this to us was we were what when where which who will with you your"
)
# A word, or one character of a script that writes no spaces; inpage.js has the same
WORD = re.compile("[\u3040-\u30ff\u3400-\u9fff]|(?:(?![\u3040-\u30ff\u3400-\u9fff])[^\\W_])+")


def model_html(model: Bundled) -> str:
    """The part that loads the model: a button, a bar, and a file's place where the site has no weights beside it."""
    size = megabytes(model.size)
    return (
        f'<div class="kvi" id="kvi-model" data-state="still" data-carried="no" data-name="{model.filename}" '
        f'data-bytes="{model.size}" data-sha256="{model.sha256}">\n'
        '<p class="kvi-says" data-part="says" role="status" tabindex="-1">Without JavaScript the recorded answers below are all there is to see.</p>\n'
        '<progress data-part="bar" max="1" value="0" aria-label="Loading the model" hidden></progress>\n'
        '<div class="kvi-row">\n'
        f'<button type="button" class="kvi-first" data-part="load" hidden>Load the model ({size})</button>\n'
        '<button type="button" data-part="stop" hidden>Stop</button>\n'
        '<button type="button" data-part="remove" hidden>Remove it from this browser</button>\n'
        '</div>\n<div data-part="pick" hidden>\n'
        f'<label for="kvi-file">The file {model.filename} ({size})</label>\n'
        '<input type="file" id="kvi-file" accept=".gguf">\n'
        '<p class="kvi-note"><code>kvlab model show</code> tells where it lies on your machine, in the line “downloaded”; '
        "<code>kvlab model fetch</code> fetches it.</p>\n</div>\n</div>"
    )


def password_html(run: Run) -> str:
    """The password: the two users' fields, the switch, and both ways of serving with their recorded answers."""
    texts, sides = run.data["texts"], run.data["password"]
    columns = "\n".join(
        f'<section class="kvi-side" data-side="{name}" data-answer="{html.escape(sides[name]["text"])}" aria-labelledby="kvi-{name}">\n'
        f'<h3 class="kvi-title" id="kvi-{name}">{title}</h3>\n<p class="kvi-source" data-part="source">recorded</p>\n'
        f'<div data-part="drawn">{side_html(sides[name], texts["a"], texts["b"], sides["emptied"]["text"])}</div>\n</section>'
        for name, title in ARMS.items()
    )
    return (
        f'<div class="kvi" id="kvi-password" data-little="{LITTLE}">\n<form aria-label="Two users of one server">\n<fieldset data-part="controls" disabled>\n'
        '<legend class="visually-hidden">Two users of one server</legend>\n'
        '<label for="kvi-a">User A says</label>\n'
        f'<textarea id="kvi-a" data-own="a" rows="2">{html.escape(texts["a"])}</textarea>\n'
        '<label for="kvi-b">User B, who never saw it, asks</label>\n'
        f'<textarea id="kvi-b" data-own="b" rows="2">{html.escape(texts["b"])}</textarea>\n'
        '<div class="kvi-switch"><input type="checkbox" role="switch" id="kvi-fault">'
        '<label for="kvi-fault">Do not empty the cache between the two</label></div>\n'
        '<div class="kvi-row"><button type="button" class="kvi-first" data-part="serve">Serve A, then B</button>\n'
        '<button type="button" data-part="stop" hidden>Stop</button></div>\n'
        '</fieldset>\n</form>\n<p class="kvi-says" data-part="says" role="status"></p>\n'
        f'<div class="kvi-sides">\n{columns}\n</div>\n</div>'
    )


def side_html(side: dict, a: str, b: str, without: str) -> str:
    """One way of serving: what the cache held, what was computed, the likeliest tokens, and what B was told.

    side    held [[piece, owner], …], cached, computed, candidates [[[token, log p], …], …], text, ended
    a, b    what the two said; without: what B is told where the cache is emptied, "" if nobody asked. See `leaks`.
    """
    count = {owner: sum(who == owner for _, who in side["held"]) for owner in "AB"}
    held = f"{tokens(count['A'])} of A, then {tokens(count['B'])} of B" if count["A"] else f"{tokens(count['B'])} of B"
    strip = "".join(f'<span data-own="{owner.lower()}">{html.escape(shown(piece))}</span>' for piece, owner in side["held"])
    lists = "".join(
        f'<p class="kvi-rank">{"First" if place == 0 else "Second"} token, the likeliest</p><ol class="kvi-likely">'
        + "".join(
            f'<li><code>{html.escape(shown(token))}</code><span class="kvi-bar" style="--p:{share(p)}" aria-hidden="true"></span>'
            f"<span>{share(p)}</span></li>"
            for token, p in rivals
        )
        + "</ol>"
        for place, rivals in enumerate(side["candidates"])
    )
    return (
        f'<div class="kvi-strip" role="img" aria-label="The cache at B’s first token: {held}.">{strip}</div>'
        f'<p class="kvi-facts">{facts_of(side)}</p>{lists}'
        f'<p class="kvi-told"><b>B is told</b> {told(side["text"], leaks(side["text"], a, b, without))}{"" if side["ended"] else "…"}</p>'
    )


def facts_of(side: dict) -> str:
    """Three facts: how many of B's tokens were computed, how many came from the cache, and whose those were."""
    whose = "They are A’s." if side["cached"] else "There was nothing in it."
    return f"Computed for B: <b>{tokens(side['computed'])}</b>, all B’s own. Read from the cache: <b>{tokens(side['cached'])}</b>. {whose}"


def words_of(text: str) -> list[str]:
    """The words of a text, in small letters."""
    return [word.lower() for word in WORD.findall(text)]


def leaks(text: str, a: str, b: str, without: str) -> list[tuple[int, int]]:
    """Where B's answer has words of A's, as (begin, end); those that stand together in A's text are one.

    Not counted are B's own words, those that B is told `without` A's as well, and little ones.
    """
    own = {*words_of(a)} - {*words_of(b), *words_of(without), *LITTLE.split()}
    found: list[tuple[int, int]] = []
    for match in WORD.finditer(text):
        if match[0].lower() not in own:
            continue
        if found and text[found[-1][0] : match.end()].lower() in a.lower():
            found[-1] = (found[-1][0], match.end())
        else:
            found.append(match.span())
    return found


def told(text: str, marked: list[tuple[int, int]]) -> str:
    """B's answer with these places marked."""
    out, at = [], 0
    for begin, end in marked:
        out += [html.escape(text[at:begin]), f"<mark>{html.escape(text[begin:end])}</mark>"]
        at = end
    return "".join([*out, html.escape(text[at:])])


def prefix_html(run: Run) -> str:
    """The same beginning: the prompts' fields and the recorded requests."""
    texts = run.data["texts"]
    rows = "".join(row_html(row) for row in run.data["prefix"])
    return (
        '<div class="kvi" id="kvi-prefix">\n<form aria-label="Two questions with the same beginning">\n'
        '<fieldset data-part="controls" disabled>\n<legend class="visually-hidden">Two questions with the same beginning</legend>\n'
        '<label for="kvi-system">System prompt: the beginning of both</label>\n'
        f'<textarea id="kvi-system" data-own="shared" rows="7">{html.escape(texts["system"])}</textarea>\n'
        '<div class="kvi-row kvi-small"><button type="button" data-part="change">Change one letter near the beginning</button>\n'
        '<button type="button" data-part="restore">As it was</button></div>\n'
        f'<label for="kvi-first">Question 1</label>\n<input id="kvi-first" value="{html.escape(texts["first"])}" autocomplete="off">\n'
        f'<label for="kvi-second">Question 2</label>\n<input id="kvi-second" value="{html.escape(texts["second"])}" autocomplete="off">\n'
        '<div class="kvi-row"><button type="button" class="kvi-first" data-part="first">Empty the cache, ask question 1</button>\n'
        '<button type="button" data-part="second">Ask question 2</button>\n<button type="button" data-part="stop" hidden>Stop</button></div>\n'
        '<p class="kvi-note">On one thread a prompt as long as this one takes a while to read. The bar shows how far it is.</p>\n'
        '</fieldset>\n</form>\n<progress data-part="bar" max="1" value="0" aria-label="Reading the prompt" hidden></progress>\n'
        '<p class="kvi-says" data-part="says" role="status"></p>\n<p class="kvi-source" data-part="source">recorded</p>\n'
        '<div class="kvi-scroll" tabindex="0" role="group" aria-label="The requests">\n<table class="kvi-asked">\n<thead><tr><th scope="col">request'
        '</th><th scope="col">tokens</th><th scope="col">from the cache</th><th scope="col">computed</th>'
        f'<th scope="col">time</th></tr></thead>\n<tbody data-part="rows">{rows}</tbody>\n</table>\n</div>\n</div>'
    )


def row_html(row: dict) -> str:
    """One request as a row; its time is a ratio to the first row's."""
    part = f"{100 * row['cached'] / row['tokens']:.0f}%"
    end = "" if row["ended"] else "…"
    ratio = 1 if row["ratio"] is None else row["ratio"]
    return (
        f'<tr><th scope="row">{html.escape(row["name"])}<span class="kvi-answer">{html.escape(row["text"])}{end}</span></th>'
        f'<td>{row["tokens"]}</td><td><span class="kvi-bar" style="--p:{part}" aria-hidden="true"></span>{row["cached"]}</td>'
        f"<td>{row['computed']}</td><td>{ratio:.2f}</td></tr>"
    )


def shown(piece: str) -> str:
    """A token with its spaces and line ends visible."""
    return piece.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥")


def share(logarithm: float) -> str:
    """A probability from its natural logarithm, as in 17% or 0.3%."""
    percent = 100 * math.exp(logarithm)
    return f"{percent:.0f}%" if percent >= 9.95 else f"{percent:.1f}%"


def tokens(count: int) -> str:
    """As in "1 token"."""
    return f"{count} token{'' if count == 1 else 's'}"


def megabytes(size: int) -> str:
    """Bytes as on a download button."""
    return f"{size / 1e6:.0f} MB"


def facts(run: Run) -> dict[str, str]:
    """The numbers of the page's prose, by name, as text."""
    sides, rows, engine = run.data["password"], run.data["prefix"], run.data["engine"]
    first, second, edited = rows
    return {
        "engine": f"wllama {engine['wllama']} (llama.cpp {engine['llama.cpp']}) in {engine['browser']}",
        "threads": tokens(engine["threads"]).replace("token", "thread"),
        "cpu": run.manifest.device["name"].partition(",")[0],
        "recorded": run.manifest.created,
        "a_tokens": str(sides["kept"]["cached"]),
        "b_tokens": str(sides["kept"]["computed"]),
        "one_piece": number(run.data["one_piece"]),
        "tokens": str(second["tokens"]),
        "cached": str(second["cached"]),
        "computed": str(second["computed"]),
        "ratio": f"{second['ratio']:.2f}",
        "edited_cached": str(edited["cached"]),
        "edited_computed": str(edited["computed"]),
        "first_tokens": str(first["tokens"]),
    }
