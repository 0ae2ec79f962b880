"""The bug zoo as text, as a table, and as the page's cards, which CSS alone filters by symptom. No script, no kernel."""

from __future__ import annotations

import functools
import html

from kvlab import record
from kvlab.experiments.zoo import SIGNS
from kvlab.faults import ZOO, Fault
from kvlab.record import Run, powers

HEARD = ("no detector", "a detector")


@functools.cache
def recorded(device: str = "cpu") -> Run | None:
    """The recorded run, None when there is none."""
    try:
        return record.load("zoo", device)
    except record.RunError:
        return None


def issue(case: str) -> str:
    """The address of a public case, `owner/repository#number`."""
    repository, _, number = case.partition("#")
    return f"https://github.com/{repository}/issues/{number}"


def switch(entry: Fault) -> str:
    """How a fault is switched on."""
    return f'with fault("{entry.name}"):'


def speech(told: dict) -> list[str]:
    """What the detectors said of one played scene, one line each; empty when all were silent."""
    lines = [told["sentence"]] if told.get("kind") == "state fault" else []
    if told.get("log"):
        lines.append(f"The log: {told['log']}.")
    return [powers(line) for line in [*lines, *(f"{word}." for word in told["words"])]]


def numbers(told: dict) -> str:
    """|Δlogit|, the first other token and its margin, ε."""
    if "epsilon" not in told:
        return told["symptom"] or ""
    delta = "NaN" if told["delta"] is None else f"{told['delta']:.2g}"
    flip = "no token differs"
    if told["first"] is not None:
        flip = f"token {told['first']} differs, where the margin was {told['margin']:.2g}"
    return powers(f"|Δlogit| {delta}, ε {told['epsilon']:.1g}; {flip}")


def text(entry: Fault, run: Run | None = None) -> str:
    """All there is to say of a fault, for a terminal; with its recorded symptom where there is one."""
    run = run or recorded()
    rows = {
        "name": entry.name,
        "symptom": entry.symptom,
        "mechanism": entry.mechanism,
        "family": entry.family,
        "switch it on": f"{switch(entry)}  replaces {entry.breaks}",
        "detector": entry.detector,
        "fix": entry.fix,
        "public cases": ", ".join(entry.cases),
        "claims": ", ".join(entry.claims),
    }
    outcome = run.data["faults"].get(entry.name) if run else None
    if outcome:
        sick = outcome["sick"]
        rows["recorded"] = f"{outcome['what']} ({outcome['model']})"
        if "said" in sick:
            rows["  it said"] = repr(sick["said"])
            rows["  it should say"] = repr(sick["meant"])
        rows["  measured"] = numbers(sick)
        rows["  detectors"] = " ".join(speech(sick)) or HEARD[0]
        rows["  switched off"] = " ".join(speech(outcome["healthy"])) or f"silent; {numbers(outcome['healthy'])}"
    return "\n".join(f"{label:16} {value}" for label, value in rows.items())


def outcome_table(outcomes: dict[str, dict]) -> str:
    """What `kvlab zoo run` prints: a line for each fault, in fixed columns."""
    lines = [f"{'fault':27} {'|Δlogit|':>9} {'flip':>5} {'margin':>7}  {'with the fault':22} {'without'}"]
    for name, outcome in outcomes.items():
        sick, off = outcome["sick"], outcome["healthy"]
        delta = "" if "epsilon" not in sick else "NaN" if sick["delta"] is None else f"{sick['delta']:.2g}"
        first = "" if sick.get("first") is None else str(sick["first"])
        margin = "" if sick.get("margin") is None else f"{sick['margin']:.2g}"
        quiet = "silent" if not off["caught"] else "ACCUSED: " + " ".join(speech(off))
        lines.append(f"{name:27} {delta:>9} {first:>5} {margin:>7}  {_heard(sick):22} {quiet}")
    caught = sum(outcome["caught"] for outcome in outcomes.values())
    accused = sum(outcome["accused"] for outcome in outcomes.values())
    return "\n".join([*lines, f"{caught} of {len(outcomes)} faults caught, {accused} healthy runs accused"])


def _heard(sick: dict) -> str:
    by = ["logits"] if sick.get("kind") == "state fault" else []
    by += ["log"] if sick.get("log") else []
    by += sorted({word.partition(":")[0].removesuffix("()") for word in sick["words"]})
    return "caught: " + ", ".join(by) if by else "NOT CAUGHT"


def table(run: Run) -> str:
    """Markdown: every fault with what was measured and who caught it."""
    lines = [
        "| fault | family | \\|Δlogit\\| | first other token | caught by | family, as named | without the fault |",
        "|---|---|---:|---:|---|---|---|",
    ]
    for name, outcome in run.data["faults"].items():
        sick, off = outcome["sick"], outcome["healthy"]
        delta = "" if "epsilon" not in sick else "NaN" if sick["delta"] is None else f"{sick['delta']:.2g}"
        first = "" if "epsilon" not in sick else "none" if sick["first"] is None else str(sick["first"])
        caught = _heard(sick).removeprefix("caught: ")
        named = sick.get("named", [])
        named = f"{named[0]} {'✓' if named[0] == ZOO[name].family else '✗'}" if len(named) == 1 else "several" if named else ""
        quiet = "silent" if not off["caught"] else "accused"
        lines.append(f"| `{name}` | {ZOO[name].family} | {delta} | {first} | {caught} | {named} | {quiet} |")
    return "\n".join(lines)


def facts(run: Run) -> dict[str, str]:
    """The numbers of the page's prose, by name, as text."""
    outcomes = run.data["faults"]
    sick = [outcome["sick"] for outcome in outcomes.values()]
    judged = {name: o["sick"] for name, o in outcomes.items() if "epsilon" in o["sick"]}
    plain = [
        name for name, told in judged.items() if not outcomes[name]["model"].startswith("tiny") and name != "angles-in-bf16"
    ]
    known = [judged[name]["delta"] for name in plain if judged[name]["delta"] is not None]
    least = min(plain, key=lambda name: judged[name]["delta"] or float("inf"))
    logged = [name for name, told in judged.items() if told["log"]]
    blind = [name for name in judged if name not in logged]
    silent = [name for name, told in judged.items() if told["first"] is None and not told["symptom"]]
    off = [o["healthy"]["delta"] for n, o in outcomes.items() if n in plain]
    return {
        "faults": str(len(outcomes)),
        "caught": str(sum(o["caught"] for o in outcomes.values())),
        "accused": str(sum(o["accused"] for o in outcomes.values())),
        "judged": str(len(judged)),
        "by_logits": str(sum(told.get("kind") == "state fault" for told in sick)),
        "least": f"{judged[least]['delta']:.2g}",
        "least_name": least,
        "most": f"{max(known):.2g}",
        "epsilon": powers(f"{judged[least]['epsilon']:.1g}"),
        "off_most": powers(f"{max(off):.1g}"),
        "silent": str(len(silent)),
        "silent_names": ", ".join(silent) or "none",
        "logged": str(len(logged)),
        "logged_right": str(sum(judged[name]["named"] == [ZOO[name].family] for name in logged)),
        "blind": str(len(blind)),
        "afar_epsilon": powers(f"{judged['angles-in-bf16']['epsilon']:.1g}"),
        "cases": str(len({case for name in outcomes for case in ZOO[name].cases})),
        "repositories": str(len({case.partition("#")[0] for name in outcomes for case in ZOO[name].cases})),
    }


# --- the page's cards ----------------------------------------------------------------------------------------------------

_STYLE = """
.zoo { font-family: var(--kv-sans); font-size: 0.92rem; line-height: 1.5; }
.zoo fieldset { border: 1px solid var(--kv-grid); border-radius: 10px; background: var(--kv-card); padding: 0.8rem 1.1rem 1rem; margin: 1.4rem 0 1.8rem; display: flex; flex-wrap: wrap; gap: 0.35rem 0.5rem; }
.zoo legend { float: left; width: 100%; font-size: 0.92rem; font-weight: 600; margin: 0 0 0.3rem; padding: 0; }
.zoo .zoo-sign { position: relative; margin: 0; }
.zoo .zoo-sign input { position: absolute; inset: 0; width: 100%; height: 100%; opacity: 0; margin: 0; cursor: pointer; }
.zoo .zoo-sign span { display: block; border: 1.5px solid var(--kv-muted); border-radius: 1.2rem; padding: 0.25rem 0.8rem; background: var(--kv-paper); color: var(--kv-ink); }
.zoo .zoo-sign input:checked + span { background: var(--kv-ink); border-color: var(--kv-ink); color: var(--kv-paper); }
.zoo .zoo-sign input:focus-visible + span { outline: 3px solid var(--kv-accent); outline-offset: 2px; }
.zoo .zoo-card { border-top: 1px solid var(--kv-grid); padding: 1.2rem 0 0.6rem; }
.zoo .zoo-card h3 { font-family: var(--kv-mono); font-size: 1.02rem; margin: 0 0 0.3rem; letter-spacing: 0; }
.zoo .zoo-family { font-size: 0.82rem; color: var(--kv-muted); margin: 0 0 0.4rem; }
.zoo .zoo-symptom { font-family: var(--kv-serif); font-size: 1.04rem; margin: 0 0 0.7rem; max-width: 44em; }
.zoo dl { display: grid; grid-template-columns: 8.5rem minmax(0, 1fr); gap: 0.3rem 1rem; margin: 0; }
.zoo dt { font-weight: 600; color: var(--kv-muted); margin: 0; }
.zoo dd { margin: 0; overflow-wrap: anywhere; }
.zoo dd p { margin: 0 0 0.25rem; }
.zoo .zoo-said { border-left: 4px solid var(--kv-sick); padding-left: 0.6rem; }
.zoo .zoo-meant { border-left: 4px solid var(--kv-healthy); padding-left: 0.6rem; }
@media (max-width: 600px) { .zoo dl { grid-template-columns: minmax(0, 1fr); gap: 0.1rem; } .zoo dd { margin-bottom: 0.5rem; } }
@media (forced-colors: active) { .zoo .zoo-sign input:checked + span { outline: 3px solid; } }
@media print { .zoo fieldset { display: none; } .zoo .zoo-card { break-inside: avoid; } }
"""


def cards(run: Run) -> str:
    """HTML: every fault of the run as a card, and a row of radio buttons that leaves those with one symptom."""
    outcomes = run.data["faults"]
    signs = {key: label for key, label in SIGNS.items() if any(key in outcome["signs"] for outcome in outcomes.values())}
    buttons = [_button("all", f"all {len(outcomes)}", checked=True)]
    rules = []
    for key, label in signs.items():
        buttons.append(_button(key, f"{label} ({sum(key in outcome['signs'] for outcome in outcomes.values())})"))
        rules.append(f".zoo:has(#zoo-sign-{key}:checked) .zoo-card:not(.zoo-is-{key}) {{ display: none; }}")
    body = "\n".join(_card(ZOO[name], outcome) for name, outcome in outcomes.items() if name in ZOO)
    return (
        f"<style>{_STYLE}{chr(10).join(rules)}</style>\n"
        f'<div class="zoo"><fieldset><legend>What do you see?</legend>{"".join(buttons)}</fieldset>\n{body}</div>'
    )


def _button(key: str, label: str, checked: bool = False) -> str:
    state = " checked" if checked else ""
    return (
        f'<label class="zoo-sign"><input type="radio" name="zoo-sign" id="zoo-sign-{key}"{state}>'
        f"<span>{html.escape(label)}</span></label>"
    )


def _card(entry: Fault, outcome: dict) -> str:
    sick, off = outcome["sick"], outcome["healthy"]
    shown = [f"<p>{html.escape(outcome['what'])}</p>"]
    if "said" in sick and outcome["model"].startswith("tiny"):
        shown.append(f"<p>On a {html.escape(outcome['model'])} with random weights: only numbers mean something here.</p>")
    elif "said" in sick and sick["said"] != sick["meant"]:
        shown.append(f'<p class="zoo-said">With the fault: …{_quote(sick["prompt"], sick["said"])}</p>')
        shown.append(f'<p class="zoo-meant">It should be: …{_quote(off["prompt"], sick["meant"])}</p>')
    elif "said" in sick and not sick["symptom"]:
        shown.append(f'<p class="zoo-said">With the fault, as without: …{_quote(sick["prompt"], sick["said"])}</p>')
    if sick["symptom"]:
        shown.append(f'<p class="zoo-said">With the fault: {html.escape(sick["symptom"])}</p>')
        shown.append(f'<p class="zoo-meant">Without: {html.escape(off["symptom"])}</p>')
    if "epsilon" in sick:
        shown.append(f"<p>{html.escape(numbers(sick))}</p>")
    spoken = "".join(f"<p>{html.escape(line)}</p>" for line in speech(sick))
    quiet = " ".join(speech(off)) or f"Silent. {numbers(off) if 'epsilon' in off else off['symptom']}"
    cases = ", ".join(f'<a href="{issue(case)}" rel="external">{html.escape(case)}</a>' for case in entry.cases)
    rows = {
        "Mechanism": html.escape(entry.mechanism),
        "Switch it on": f"<code>{html.escape(switch(entry))}</code> replaces <code>{html.escape(entry.breaks)}</code>",
        "Recorded": "".join(shown),
        "Detector": html.escape(entry.detector),
        "Heard": spoken,
        "Without the fault": html.escape(quiet),
        "Fix": html.escape(entry.fix),
        "Public cases": cases,
        "Claims": f'<a href="claims.html">{", ".join(entry.claims)}</a>',
    }
    listed = "".join(f"<dt>{label}</dt><dd>{value}</dd>" for label, value in rows.items())
    classes = " ".join(["zoo-card", *(f"zoo-is-{sign}" for sign in outcome["signs"])])
    return (
        f'<article class="{classes}" id="zoo-{entry.name}"><h3>{entry.name}</h3>'
        f'<p class="zoo-family">{html.escape(entry.family)}: {html.escape("; ".join(SIGNS[s] for s in outcome["signs"]))}</p>'
        f'<p class="zoo-symptom">{html.escape(entry.symptom)}</p><dl>{listed}</dl></article>'
    )


def _quote(prompt: str, said: str) -> str:
    """The end of the prompt, and what followed in bold."""
    tail = " ".join(prompt.split())[-60:]
    return f"{html.escape(tail)}<strong>{html.escape(said).replace(chr(10), ' ')}</strong>"
