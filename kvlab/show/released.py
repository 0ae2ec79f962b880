"""Figures and tables of the experiment `released`. Each takes a Run and returns a `go.Figure`, or Markdown."""

from __future__ import annotations

import itertools
import math

import plotly.graph_objects as go

from kvlab.compare import BEYOND
from kvlab.experiments import released_cases as cases
from kvlab.experiments import released_results as results
from kvlab.experiments.released_cases import Case
from kvlab.experiments.released_results import ABSENT, REFUSES, RIGHT, UNCLEAR, UNJUDGED, WRONG
from kvlab.record import Run, number
from kvlab.show.theme import HEALTHY, MUTED, SICK, apply

FLOOR = 1e-2  # identical runs have Δ 0, which a logarithmic axis cannot show
# Colour alone tells nothing here: each state has a mark of its own.
MARKS = {
    RIGHT: ("circle-open", HEALTHY, "right"),
    WRONG: ("diamond", SICK, "wrong"),
    UNCLEAR: ("square-open", "#b08818", "unclear"),
    REFUSES: ("line-ew", MUTED, "refuses"),
    UNJUDGED: ("x-thin", MUTED, "no verdict"),
}


def one_axis(run: Run) -> go.Figure:
    """Every judged run on one axis: the largest |Δlogit| in units of its own ε."""
    groups = {"the pairs": set(), "the calendar": set()}
    for case in (*cases.BUGS, cases.NAMED, cases.REAL, cases.ACQUITTED, *cases.OPEN, cases.SOUND):
        groups["the pairs"] |= {(case.package, version, case.what) for version in (case.broken, case.fixed)}
    rows = {"the pairs": [], "the calendar": []}
    for row in results.judged(run):
        key = row["package"], row["version"], row["what"]
        rows["the pairs" if key in groups["the pairs"] else "the calendar"].append(row)
    fig = go.Figure()
    for wanted in (RIGHT, UNCLEAR, WRONG):
        symbol, colour, label = MARKS[wanted]
        x, y, text = [], [], []
        for place, found in enumerate(rows.values()):
            for index, row in enumerate(found):
                if results.state(row) != wanted:
                    continue
                x.append(max(results.ratio(row), FLOOR))
                y.append(place + 0.33 * (((index * 37) % 23) / 11 - 1))
                text.append(
                    f"{row['package']} {row['version']}, {row['what']}<br>Δ {number(row['delta'])}, ε {number(row['epsilon'])}"
                )
        if x:
            fig.add_scatter(
                x=x,
                y=y,
                mode="markers",
                name={RIGHT: "noise", WRONG: "state fault"}.get(wanted, label),
                marker={"color": colour, "size": 6, "symbol": symbol, "opacity": 0.8, "line": {"width": 1, "color": colour}},
                text=text,
                hovertemplate="%{text}<extra></extra>",
            )
    fig.add_vrect(x0=1, x1=BEYOND, fillcolor=MUTED, opacity=0.25, line_width=0)
    for at, words, side in ((1, "ε", "right"), (BEYOND, f"{BEYOND:g}ε", "left")):
        fig.add_vline(x=at, line={"color": MUTED, "dash": "dot"})
        fig.add_annotation(x=math.log10(at), y=1.52, text=words, showarrow=False, xanchor=side)  # on a log axis: the exponent
    fig.update_xaxes(type="log", title="largest |Δlogit|, in units of ε", exponentformat="power", dtick=2)
    fig.update_yaxes(tickvals=[0, 1], ticktext=list(rows), range=[-0.6, 1.7], showgrid=False, zeroline=False)
    found = results.apart(run)
    return apply(
        fig,
        height=380,
        alt=f"{found['runs']} runs of released software as points on one logarithmic axis, the largest logit difference in units of "
        f"epsilon. {found['noise']} circles lie left of one, {found['faults']} diamonds right of {number(results.ratio(found['least']))}; "
        f"{found['between']} runs lie between.",
    )


def calendar(run: Run) -> go.Figure:
    """Releases of Transformers downwards, bugs across: right, wrong, refuses, or not there (no mark)."""
    releases, rows, states = results.calendar(run)
    fig = go.Figure()
    for wanted, (symbol, colour, label) in MARKS.items():
        at = [(v, n, case) for v, (n, case) in itertools.product(releases, enumerate(rows)) if states[v, case.what] == wanted]
        if not at:
            continue
        fig.add_scatter(
            x=[n for _, n, _ in at],
            y=[v for v, _, _ in at],
            mode="markers",
            name=label,
            marker={
                "symbol": symbol,
                "color": colour,
                "size": 10 if wanted == WRONG else 7,
                "line": {"width": 1.5, "color": colour},
            },
            text=[f"{v}, {case.symptom}: {label}" for v, _, case in at],
            hovertemplate="%{text}<extra></extra>",
        )
    fig.update_xaxes(
        tickvals=list(range(len(rows))),
        ticktext=[str(n + 1) for n in range(len(rows))],
        side="top",
        range=[-0.6, len(rows) - 0.4],
    )
    fig.update_yaxes(type="category", categoryorder="array", categoryarray=releases, autorange="reversed", dtick=1)
    wrong = "; ".join(f"{n + 1}: {_stretches(run, case)}" for n, case in enumerate(rows))
    return apply(
        fig,
        height=120 + 17 * len(releases),
        alt=f"A calendar of {len(releases)} releases of Transformers, downwards, and {len(rows)} bugs, across, by number. Diamonds mark "
        f"releases that are wrong, circles those that are right, dashes those that refuse. Wrong are, {wrong}.",
    )


def _stretches(run: Run, case: Case) -> str:
    spans = results.spans(run, case.what)
    return ", ".join(first if first == last else f"{first} to {last}" for first, last, _ in spans) or "none"


def calendar_key(run: Run) -> str:
    """Markdown: the calendar's numbers, what each stands for, and where it is wrong."""
    releases, rows, states = results.calendar(run)
    lines = ["| | bug | wrong in | refused, not there |", "|---:|---|---|---:|"]
    for n, case in enumerate(rows):
        count = [sum(states[v, case.what] == kind for v in releases) for kind in (REFUSES, ABSENT)]
        lines.append(f"| {n + 1} | {case.symptom} | {_stretches(run, case)} | {count[0]}, {count[1]} |")
    return "\n".join(lines)


def thread(name: str) -> str:
    """Markdown: a thread with its address."""
    repository, _, issue = name.partition("#")
    label = "" if repository == cases.HF else repository.partition("/")[2]
    return f"[{label}#{issue}](https://github.com/{repository}/issues/{issue})"


def _threads(case: Case) -> str:
    return ", ".join(map(thread, case.threads)) or "none found"


def _text(row: dict) -> str:
    return {True: "nothing", False: "a change", None: "not comparable"}[row["same_text"]]


def bugs_table(run: Run) -> str:
    """Markdown: each bug, the releases, the verdict on both, and what a comparison of texts would have seen.

    A verdict other than a state fault (broken) or noise (fixed) is written out.
    """
    lines = [
        "| package, broken → fixed | symptom | broken: Δ | ε | from token | fixed: Δ | by text alone | thread |",
        "|---|---|---:|---:|---:|---:|---|---|",
    ]
    for case in (*cases.BUGS, cases.REAL):
        bad, good = results.pair(run, case)
        symptom = case.symptom + (", on real weights" if case is cases.REAL else "")
        cells = [f"{case.package} {case.broken} → {case.fixed}", symptom, _delta(bad, WRONG)]
        cells += [number(bad["epsilon"]), str(bad["onset"]), _delta(good, RIGHT), _text(bad), _threads(case)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _delta(row: dict, expected: str) -> str:
    return number(row["delta"]) + ("" if results.state(row) == expected else f", {row['verdict']}")


def twins_table(run: Run) -> str:
    """Markdown: the bugs that a twin has named, its number, and how near the next one comes."""
    lines = [
        "| bug, in | the twin's number | found | twin to suspect: Δ | next best: Δ | ε |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for case, row, found in twins(run):
        lines.append(
            f"| {case.symptom}, {case.package} {case.broken} | {case.number} | **{found[0]}** | {number(found[1])} | "
            f"{number(results.nearest_other(row))} | {number(row['epsilon'])} |"
        )
    return "\n".join(lines)


def twins(run: Run) -> list[tuple[Case, dict, tuple[str, float]]]:
    """The cases that exactly one of their twins meets within ε."""
    found = []
    for case in (*cases.BUGS, cases.NAMED, cases.REAL, *cases.OPEN):
        row = results.pair(run, case)[0]
        if row and row["outcome"] == "ran" and (name := results.named(row)):
            found.append((case, row, name))
    return found


def twin_curve(deltas: dict[str, float], epsilon: float) -> go.Figure:
    """How far the twin is from the suspect, by the number of slots its cached queries see."""
    fig = go.Figure(
        go.Scatter(
            x=[int(slots) for slots in deltas],
            y=[max(delta, 1e-7) for delta in deltas.values()],
            mode="lines+markers",
            marker={"size": 7, "color": SICK},
            line={"color": MUTED},
            hovertemplate="%{x} slots: %{y:.2g}<extra></extra>",
        )
    )
    fig.add_hline(y=epsilon, line={"color": MUTED, "dash": "dot"})
    fig.update_xaxes(title="slots that a cached query of the twin sees")
    fig.update_yaxes(type="log", title="|Δlogit|, twin to suspect", exponentformat="power")
    best = min(deltas, key=deltas.get)
    return apply(
        fig,
        height=340,
        alt=f"The distance of the twin from the suspect against its number of slots: it falls below epsilon at {best} slots and is at least "
        f"{number(sorted(deltas.values())[1])} at every other number.",
    )


def left_out_table(run: Run) -> str:
    """Markdown: healthy arms that were sick themselves and were left out of ε."""
    groups: dict[tuple, list] = {}
    for row, arm, why in results.left_out(run):
        groups.setdefault((row["what"], arm), []).append((row, why))
    lines = [
        "| scenario and model | arm | runs | least to most |Δ| | ε without it, at most |".replace("|Δ|", "\\|Δ\\|"),
        "|---|---|---:|---:|---:|",
    ]
    for (what, arm), found in groups.items():
        sizes = [float(why.partition("differs by ")[2].partition(",")[0]) for _, why in found if "differs by" in why]
        span = f"{number(min(sizes))} – {number(max(sizes))}" if sizes else "–"
        lines.append(f"| {what} | {arm} | {len(found)} | {span} | {number(max(row['epsilon'] for row, _ in found))} |")
    return "\n".join(lines)


def facts(run: Run) -> dict[str, str]:
    """The numbers of chapter 13's prose, by name, as text."""
    found = results.apart(run)
    releases, rows, states = results.calendar(run)
    bugs = results.broken(run)
    faults = [row for _, row in bugs if results.state(row) == WRONG]
    real, real_fixed = results.pair(run, cases.REAL)
    named = twins(run)
    out = {
        "bugs": str(len(bugs)),
        "bugs_caught": str(len(faults)),
        "bugs_silent": str(sum(row["same_text"] is True for row in faults)),
        "packages": str(len({case.package for case, _ in bugs})),
        "runs": str(found["runs"]),
        "noise": str(found["noise"]),
        "faults": str(found["faults"]),
        "between": str(found["between"]),
        "beyond": f"{BEYOND:g}",
        "faults_silent": str(found["same_text"]),
        "highest": f"{results.ratio(found['highest']):.2f}",
        "least": number(results.ratio(found["least"])),
        "orders": f"{found['orders']:.1f}",
        "least_delta": number(found["least"]["delta"]),
        "delta_min": number(min(row["delta"] for row in faults)),
        "delta_max": number(max(row["delta"] for row in faults)),
        "refused": str(sum(row["outcome"] == "refused" for row in run.data["runs"])),
        "unjudged": str(sum(row["outcome"] == "no verdict" for row in run.data["runs"])),
        "releases": str(len(releases)),
        "first_release": releases[0],
        "last_release": releases[-1],
        "rows": str(len(rows)),
        "twins": str(len(named)),
        "fixed_kinds": ", ".join(sorted({good["verdict"] for case in cases.BUGS if (good := results.pair(run, case)[1])})),
        "real_delta": number(real["delta"]),
        "real_epsilon": number(real["epsilon"]),
        "real_fixed": number(real_fixed["delta"]),
        "real_steps": str(real["steps"]),
        "real_slots": (results.named(real) or ("none", 0.0))[0],
        "real_twin": number((results.named(real) or ("none", 0.0))[1]),
        "real_next": number(results.nearest_other(real)),
        "release_4_40": str(sum(case.fixed == cases.REAL.fixed for case in cases.BUGS)),
        "rows_4_40": str(sum(states.get((cases.REAL.broken, case.what)) == WRONG for case in rows)),
        "mamba_refuses": str(sum(states[v, "left_pad mamba"] == REFUSES for v in releases)),
        "prompt_tokens": str(run.data["prompt_tokens"]),
        "new_tokens": str(run.manifest.settings["new_tokens"]),
    }
    for case in (*cases.BUGS, cases.NAMED, *cases.OPEN, cases.SOUND, cases.ACQUITTED):
        bad, good = results.pair(run, case)
        name = case.name.replace("-", "_")
        for key, row in (("", bad), ("_fixed", good)):
            if row and row["outcome"] == "ran":
                out |= {f"{name}{key}_delta": number(row["delta"]), f"{name}{key}_eps": number(row["epsilon"])}
                out[f"{name}{key}_onset"] = str(row["onset"])
        if bad and (twin := results.named(bad)):
            out[f"{name}_twin"] = twin[0]
        if case.package == "transformers" and any(case.what == row.what for row in rows):
            out[f"{name}_wrong"] = _stretches(run, case)
            out[f"{name}_wrong_count"] = str(sum(count for _, _, count in results.spans(run, case.what)))
    return out
