"""Figures and tables of lab 4, padding and positions, and the padded batch that a reader edits in the page."""

from __future__ import annotations

import html
import json
import math
import statistics
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlab.core import padding as by_hand
from kvlab.experiments.padding import ARMS, KINDS, LAYER_ARMS, difference_of, epsilon, largest, outcome, verdicts
from kvlab.record import Run, number
from kvlab.show.password import SHORT
from kvlab.show.theme import HEALTHY, HEALTHY_TO_SICK, MUTED, OWNERS, SICK, apply, switch

FLOOR = 1e-12  # a KL of 0 has no place on a logarithmic scale
SAYS = {"harmless": "harmless", "always": "wrong", "with pads": "wrong from 1 pad on", "mixed": "wrong at times"}
LINES = {
    "all in fp32": (HEALTHY, "solid"),
    "cos and sin in bf16": (OWNERS["A"], "dash"),
    "cos and sin in fp16": (OWNERS["D"], "dash"),
    "angles in bf16": (SICK, "solid"),
    "angles in fp16": (OWNERS["B"], "solid"),
}


# --- the grid ------------------------------------------------------------------------------------------------------------


def kl_by_pads(run: Run) -> go.Figure:
    """Arm by number of pads: the median KL from the prompt alone, with a switch for kind of model and dtype."""
    names = list(reversed(ARMS))
    traces, buttons = [], []
    combinations = [(kind, dtype) for kind in KINDS for dtype in run.data["grid"][kind]]
    for index, (kind, dtype) in enumerate(combinations):
        arms = run.data["grid"][kind][dtype]
        pads = sorted({count for arm in arms.values() for count in arm["pads"]})
        z, text = [], []
        for name in names:
            cells = dict(zip(arms[name]["pads"], arms[name]["rows"]))
            z.append([_log(statistics.median(row[4] for row in cells[p])) if p in cells else None for p in pads])
            text.append([_cell(name, p, cells.get(p)) for p in pads])
        traces.append(
            go.Heatmap(
                z=z,
                x=[str(p) for p in pads],
                y=names,
                zmin=-7,
                zmax=1,
                colorscale=HEALTHY_TO_SICK,
                xgap=2,
                ygap=2,
                text=text,
                hovertemplate="%{text}<extra></extra>",
                hoverongaps=False,
                visible=index == 0,
                colorbar={
                    "title": {"text": "KL, nats"},
                    "tickvals": [-6, -4, -2, 0],
                    "ticktext": ["1e−6", "1e−4", "0.01", "1"],
                },
            )
        )
        shown = [other == index for other in range(len(combinations))]
        label = f"{KINDS[kind]}, {SHORT[dtype]}"
        buttons.append({"label": label, "method": "update", "args": [{"visible": shown}]})
    fig = go.Figure(traces)
    fig.update_xaxes(title="pads before or behind each prompt", type="category")
    switch(fig, buttons, dropdown=True)
    return apply(
        fig,
        height=600,
        alt="Heat map of the KL divergence by arm and number of pads. The three healthy arms are pale for both kinds of model. Counting "
        "pads throughout and counting from 1 throughout are pale for RoPE and strongly coloured for learned positions; every other "
        "mistake is coloured for both.",
    )


def _log(value: float) -> float:
    return math.log10(max(value, FLOOR))


def _cell(name: str, pads: int, rows: list | None) -> str:
    if rows is None:
        return ""
    flips = [row[0] for row in rows if row[0] is not None]
    flip = f"first flip at token {min(flips)}, {len(flips)} of {len(rows)} texts differ" if flips else "no token differs"
    kl, delta = statistics.median(row[4] for row in rows), max(row[3] for row in rows)
    return f"{name}, {pads} pads<br>median KL {number(kl)}, largest |Δlogit| {number(delta)}<br>{flip}"


def outcomes_table(run: Run) -> str:
    """Markdown: every arm, and what it does in either kind of model in fp32."""
    lines = [
        "| arm | what is done | RoPE | \\|Δlogit\\| | learned positions | \\|Δlogit\\| | parrot's answers right, 0 pads → most |",
        "|---|---|---|---:|---|---:|---:|",
    ]
    for name, arm in ARMS.items():
        cells = []
        for kind in KINDS:
            says = SAYS[outcome(run, kind, name)]
            cells += [says if says == "harmless" else f"**{says}**", number(largest(run, kind, name))]
        exact = run.data["grid"]["learned"]["float32"][name]["exact"]
        right = f"{exact[0]:.0%} → {exact[-1]:.0%}" if exact else ""
        lines.append(f"| {name} | {arm.what} | {' | '.join(cells)} | {right} |")
    return "\n".join(lines)


def sixteen_bits_table(run: Run) -> str:
    """Markdown: of the runs that fp32 calls a fault, how many bf16 catches before the replay; and how far ε is."""
    lines = [
        "| kind of model | ε in fp32 | ε in bf16 | faults in fp32 | of them caught in bf16, before the replay | missed |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for kind in KINDS:
        counted = sixteen_bits(run, kind)
        missed = ", ".join(f"{name} ({count})" for name, count in counted["missed"].items()) or "none"
        bounds = " | ".join(number(epsilon(run, kind, dtype)) for dtype in ("float32", "bfloat16"))
        lines.append(f"| {KINDS[kind]} | {bounds} | {counted['faults']} | {counted['caught']} | {missed} |")
    return "\n".join(lines)


def sixteen_bits(run: Run, kind: str) -> dict:
    """Runs (arm, padding, prompt) that fp32 calls a fault: how many there are, how many bf16 catches, which arms it misses how often."""
    found: dict = {"faults": 0, "caught": 0, "missed": {}}
    grid = run.data["grid"][kind]
    for name in ARMS:
        full = dict(zip(grid["float32"][name]["pads"], verdicts(run, kind, name)))
        half = dict(zip(grid["bfloat16"][name]["pads"], verdicts(run, kind, name, "bfloat16")))
        for pads in full.keys() & half.keys():
            for a, b in zip(full[pads], half[pads]):
                if a.kind == "state fault":
                    found["faults"] += 1
                    found["caught"] += b.kind == "state fault"
                    if b.kind != "state fault":
                        found["missed"][name] = found["missed"].get(name, 0) + 1
    return found


def library_table(run: Run) -> str:
    """Markdown: what Transformers does with a padded row, by the way it is called."""
    lines = [
        "| how it is called | RoPE: \\|Δlogit\\| at token 0 | at most | text | learned: at token 0 | at most | text |",
        "|---|---:|---:|---|---:|---:|---|",
    ]
    for name in run.data["library"]["rope"]:
        cells = []
        for kind in KINDS:
            first, _, at_once, most, _, _ = run.data["library"][kind][name]
            bound = epsilon(run, kind)
            shown = [number(value) if value <= bound else f"**{number(value)}**" for value in (at_once, most)]
            cells += [*shown, "same" if first is None else f"differs at token {first}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


# --- by token and layer --------------------------------------------------------------------------------------------------


def by_layer(run: Run) -> go.Figure:
    """|Δlogit| by layer and token, RoPE above, learned positions below, with a switch for the mistake."""
    arms = list(LAYER_ARMS)
    titles = [f"{KINDS[kind]} ({run.data['shape'][kind]['model']})" for kind in KINDS]
    fig = make_subplots(rows=2, cols=1, row_heights=[0.72, 0.28], vertical_spacing=0.2, subplot_titles=titles)
    for arm in arms:
        for row, kind in enumerate(KINDS, 1):
            found = run.data["layers"][kind][arm]
            names = [f"{at} {piece.strip() or '␣'}" for at, piece in enumerate(found["tokens"])]
            layers = ["embedding", *(f"layer {n}" for n in range(1, len(found["delta"])))]
            z = [[math.log10(max(value, 1e-6)) for value in line] for line in found["delta"]]
            text = [
                [f"{layer}, {_place(found, at)}<br>|Δlogit| {number(value)}" for at, value in enumerate(line)]
                for layer, line in zip(layers, found["delta"])
            ]
            fig.add_heatmap(
                z=z,
                x=names,
                y=layers,
                text=text,
                zmin=-6,
                zmax=1.5,
                colorscale=HEALTHY_TO_SICK,
                hovertemplate="%{text}<extra></extra>",
                visible=arm == arms[0],
                showscale=row == 1,
                colorbar={
                    "title": {"text": "|Δlogit|"},
                    "tickvals": [-6, -4, -2, 0],
                    "ticktext": ["0", "1e−4", "0.01", "1"],
                    "len": 0.7,
                    "y": 0.65,
                },
                row=row,
                col=1,
            )
    buttons = [
        {"label": arm, "method": "update", "args": [{"visible": [other == arm for other in arms for _ in KINDS]}]}
        for arm in arms
    ]
    switch(fig, buttons, dropdown=True, y=1.07)
    fig.update_xaxes(tickangle=-90)
    fig.update_yaxes(nticks=8)
    return apply(
        fig,
        height=760,
        alt="Two heat maps of the logit difference by layer and token. With learned positions a wrong position shows in the embedding already; "
        "with RoPE the embedding is equal and the difference begins in the first layer, or nowhere when all positions are shifted alike.",
    )


def _place(found: dict, at: int) -> str:
    kind = "prompt" if at < found["prompt"] else "answer"
    return f"{html.escape(repr(found['tokens'][at]))} of the {kind}"


# --- positions -----------------------------------------------------------------------------------------------------------


def angle_errors(run: Run) -> go.Figure:
    """Largest error of a cosine by position, for what is held in low precision."""
    found = run.data["positions"]["angles"]
    fig = go.Figure()
    for name, errors in found["errors"].items():
        colour, dash = LINES[name]
        points = [(p, e) for p, e in zip(found["positions"], errors) if p and e]
        fig.add_scatter(
            x=[p for p, _ in points],
            y=[e for _, e in points],
            name=name,
            mode="lines",
            line={"color": colour, "width": 2.5, "dash": dash},
            hovertemplate=f"{name}, position %{{x}}: %{{y:.2g}}<extra></extra>",
        )
    fig.update_xaxes(type="log", title="position", tickvals=[1, 8, 64, 512, 4096])
    fig.update_yaxes(type="log", title="largest error of a cosine", exponentformat="power", dtick=1)
    return apply(
        fig,
        height=440,
        alt="Lines on logarithmic axes. With angles in fp32 the error grows in proportion to the position and stays below a thousandth; with angles in bf16 "
        "it reaches 2, a full reversal, at about 1000, with angles in fp16 at about 4000. With only cosine and sine rounded it is flat.",
    )


def moved(run: Run) -> go.Figure:
    """|Δlogit| of a prompt whose first token stands further in, by what is held in low precision."""
    found = run.data["positions"]["moved"]
    fig = go.Figure()
    for name, rows in found["variants"].items():
        colour, dash = LINES[name]
        points = [(offset, row[0]) for offset, row in zip(found["offsets"], rows) if offset]
        fig.add_scatter(
            x=[p for p, _ in points],
            y=[max(d, 1e-6) for _, d in points],
            name=name,
            mode="lines+markers",
            line={"color": colour, "width": 2.5, "dash": dash},
            hovertemplate=f"{name}, first token at %{{x}}: |Δlogit| %{{y:.2g}}<extra></extra>",
        )
    fig.update_xaxes(type="log", title="position of the prompt's first token", tickvals=found["offsets"][1:])
    fig.update_yaxes(type="log", title="|Δlogit| against the prompt at 0", exponentformat="power", dtick=1)
    return apply(
        fig,
        height=440,
        alt="Lines on logarithmic axes. In fp32 the difference grows with the offset and stays below 0.001; with angles in bf16 it is of whole "
        "units from the first few hundred positions on; with only cosine and sine rounded it grows little and not at all after some hundred positions.",
    )


def turned(run: Run) -> go.Figure:
    """Error of a key that is turned by one position again and again."""
    fig = go.Figure()
    for (name, errors), colour in zip(run.data["positions"]["turns"].items(), (HEALTHY, SICK, OWNERS["B"])):
        fig.add_scatter(
            x=list(range(1, len(errors) + 1)),
            y=[error or None for error in errors],
            name=f"key kept in {SHORT[name]}",
            mode="lines",
            line={"color": colour, "width": 2.5},
            hovertemplate="%{x} turns: %{y:.2g}<extra></extra>",
        )
    fig.update_xaxes(title="times turned by one position")
    fig.update_yaxes(type="log", title="relative error of the key", exponentformat="power", dtick=1)
    return apply(
        fig,
        height=360,
        alt="Three lines that rise with every turn: a key that is turned again and again gathers error, in bf16 up to five percent after 64.",
    )


def beyond(run: Run) -> go.Figure:
    """Loss by position along a text longer than the model was made for."""
    found = run.data["positions"]["beyond"]
    fig = go.Figure()
    fig.add_scatter(
        x=found["positions"],
        y=found["loss"],
        mode="lines+markers",
        name=f"mean of {found['size']} tokens",
        line={"color": OWNERS["A"], "width": 2},
        error_y={"array": found["error"], "color": MUTED, "thickness": 1},
        hovertemplate="around %{x}: %{y:.2f} nats a token<extra></extra>",
    )
    fig.add_scatter(
        x=[at for at, _ in found["again"]],
        y=[value for _, value in found["again"]],
        mode="markers",
        name=f"the same tokens from position 0, {found['before']:,} tokens before them",
        marker={"color": HEALTHY, "size": 8, "symbol": "circle-open", "line": {"width": 2}},
        hovertemplate="the tokens around %{x}, read from 0: %{y:.2f} nats a token<extra></extra>",
    )
    fig.add_vline(x=found["made_for"], line={"color": MUTED, "dash": "dot"}, annotation_text=f"made for {found['made_for']:,}")
    fig.update_xaxes(title="position")
    fig.update_yaxes(title="loss, nats a token", rangemode="tozero")
    return apply(
        fig,
        height=400,
        alt="Loss along one text by position. It wavers with the text, before and behind the length the model was made for, and the same tokens read from position 0 have much the same loss.",
    )


def learning(run: Run) -> go.Figure:
    """The parrot's loss while it was trained."""
    steps, loss = zip(*run.data["parrot"]["loss"])
    fig = go.Figure(
        go.Scatter(
            x=steps,
            y=loss,
            mode="lines",
            line={"color": OWNERS["C"], "width": 2.5},
            hovertemplate="step %{x}: %{y:.3g} nats<extra></extra>",
        )
    )
    fig.update_xaxes(title="step")
    fig.update_yaxes(title="loss, nats a character", type="log", exponentformat="power", dtick=1)
    return apply(
        fig,
        height=320,
        alt="The parrot's loss by training step on a logarithmic axis: a plateau at the start, then a steep fall.",
    )


def counted_table(run: Run) -> str:
    """Markdown: cached steps whose position is counted in bf16."""
    lines = [
        "| prompt, tokens | the steps belong at | in bf16 they stand at | \\|Δlogit\\| | first other token |",
        "|---:|---|---|---:|---|",
    ]
    for length, stands, delta, first in run.data["positions"]["counted"]["rows"]:
        belong = ", ".join(str(length + n) for n in range(len(stands)))
        said = "none" if first is None else str(first)
        lines.append(f"| {length} | {belong} | {', '.join(map(str, stands))} | {number(delta)} | {said} |")
    return "\n".join(lines)


# --- in the lab ----------------------------------------------------------------------------------------------------------


def guesses(guessed: dict[str, tuple[str, str]], measured: dict[str, tuple[str, str]]) -> str:
    """Markdown: what a reader guessed for RoPE and for learned positions, beside what was measured; "harmless" or "wrong"."""
    lines = ["| mistake | RoPE: guessed | measured | learned: guessed | measured |", "|---|---|---|---|---|"]
    for name, guess in guessed.items():
        cells = [f"{said} | {found} {'✓' if said == found else '✗'}" for said, found in zip(guess, measured[name])]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


# --- numbers of the prose ------------------------------------------------------------------------------------------------


def facts(run: Run) -> dict[str, str]:
    """The numbers chapter 4 says in its prose, by name, as text."""
    data, settings = run.data, run.manifest.settings
    positions, taught = data["positions"], data["parrot"]
    healthy = [name for name, arm in ARMS.items() if arm.healthy]
    found = {
        "rows_rope": str(data["shape"]["rope"]["rows"]),
        "rows_learned": str(data["shape"]["learned"]["rows"]),
        "length_rope": str(data["shape"]["rope"]["length"]),
        "length_learned": str(data["shape"]["learned"]["length"]),
        "positions_learned": str(data["shape"]["learned"]["most"]),
        "most_pads": str(max(settings["pads"])),
        "most_pads_learned": str(max(data["grid"]["learned"]["float32"]["left, masked"]["pads"])),
        "arms_healthy": str(len(healthy)),
        "arms_sick": str(len(ARMS) - len(healthy)),
        "transformers": run.manifest.versions["transformers"],
        "parameters": f"{taught['parameters']:,}",
        "steps": f"{taught['settings']['steps']:,}",
        "minutes": f"{taught['seconds'] / 60:.0f}",
        "held_out": str(taught["held_out"]["prompts"]),
        "held_out_exact": f"{taught['held_out']['exact']:.1%}",
        "layer_pads": str(data["layers"]["rope"][LAYER_ARMS[0]]["pads"]),
    }
    for kind in KINDS:
        sick = [name for name in ARMS if outcome(run, kind, name) != "harmless"]
        harmless = [name for name in ARMS if name not in sick and name not in healthy]
        found |= {
            f"eps_{kind}": number(epsilon(run, kind)),
            f"noise_{kind}": number(max(largest(run, kind, name) for name in healthy)),
            f"sick_{kind}": str(len(sick)),
            f"harmless_{kind}": ", ".join(f"“{name}”" for name in harmless) or "none",
            f"harmless_most_{kind}": number(max((largest(run, kind, name) for name in harmless), default=0.0)),
            f"sick_most_{kind}": number(max((largest(run, kind, name) for name in sick), default=0.0)),
            f"sick_least_{kind}": number(min((_least(run, kind, name) for name in sick), default=0.0)),
        }
    exact = {name: data["grid"]["learned"]["float32"][name]["exact"] for name in ARMS}
    found["exact_alone"] = f"{exact['left, masked'][0]:.0%}"
    found["exact_padded"] = f"{exact['left, masked'][-1]:.0%}"
    found["exact_columns"] = f"{exact['both count pads'][1]:.0%}"
    found["exact_short"] = f"{exact['mask one short'][-1]:.0%}"
    steps = [row for rows in data["grid"]["rope"]["float32"]["steps one too far"]["rows"] for row in rows]
    found["same_texts"] = f"{sum(row[0] is None for row in steps)} of {len(steps)}"
    if "bfloat16" in data["grid"]["rope"]:
        for kind in KINDS:
            counted = sixteen_bits(run, kind)
            found[f"eps16_{kind}"] = number(epsilon(run, kind, "bfloat16"))
            found[f"faults_{kind}"], found[f"caught16_{kind}"] = str(counted["faults"]), str(counted["caught"])
    for dtype, short in (("bfloat16", "bf16"), ("float16", "fp16")):
        one = positions["distinct"][dtype]
        found |= {
            f"values_{short}": f"{one['values']:,}",
            f"lost_{short}": f"{one['first_lost']:,}",
            f"counter_{short}": f"{one['counter']:,}",
            f"turns_{short}": f"{positions['turns'][dtype][-1]:.1%}",
        }
    found["turns"] = str(len(positions["turns"]["float32"]))
    found["turns_fp32"] = number(positions["turns"]["float32"][-1])
    for name, key in (
        ("all in fp32", "fp32"),
        ("angles in bf16", "angles_bf16"),
        ("angles in fp16", "angles_fp16"),
        ("cos and sin in bf16", "tables_bf16"),
    ):
        rows = positions["moved"]["variants"][name]
        found[f"cos_{key}"] = number(max(positions["angles"]["errors"][name]))
        found[f"moved_{key}"] = number(rows[-1][0])
        found[f"moved_first_{key}"] = number(rows[1][0])
        found[f"moved_most_{key}"] = number(max(row[0] for row in rows[1:]))
        found[f"moved_least_{key}"] = number(min(row[0] for row in rows[1:]))
        found[f"paths_{key}"] = number(max(row[3] for row in rows))
    # half the distance of neighbouring fp32 numbers there: 24 bits of precision
    found["angle_fp32"] = number(math.ulp(positions["moved"]["offsets"][-1]) * 2 ** (53 - 24) / 2)
    found["moved_from"], found["moved_to"] = (f"{positions['moved']['offsets'][n]:,}" for n in (1, -1))
    points = positions["along"]["points"]
    found["along_first"], found["along_last"] = number(points[0][1]), number(points[-1][1])
    found["along_part"] = str(len(points))
    found["along_to"] = f"{points[-1][0] + points[0][0]:,}"
    loss = positions["beyond"]
    inside = [value for at, value in zip(loss["positions"], loss["loss"]) if at < loss["made_for"]]
    outside = [value for at, value in zip(loss["positions"], loss["loss"]) if at > loss["made_for"]]
    found["made_for"] = f"{loss['made_for']:,}"
    found["read"] = f"{loss['positions'][-1] + loss['positions'][0]:,}"
    found["loss_inside"] = f"{statistics.mean(inside):.2f}"
    found["loss_before"] = f"{loss['before']:,}"
    for name, within in (("inside", True), ("outside", False)):
        pairs = [(long, value) for at, value in loss["again"] for p, long in zip(loss["positions"], loss["loss"]) if p == at]
        chosen = [(a, b) for (a, b), (at, _) in zip(pairs, loss["again"]) if (at < loss["made_for"]) == within]
        found[f"pair_{name}_long"] = f"{statistics.mean(a for a, _ in chosen):.2f}" if chosen else "not read"
        found[f"pair_{name}_again"] = f"{statistics.mean(b for _, b in chosen):.2f}" if chosen else "not read"
    found["loss_outside"] = f"{statistics.mean(outside):.2f}" if outside else "not read"
    return found


def _least(run: Run, kind: str, arm: str) -> float:
    """The smallest |Δlogit| among those runs of an arm that were called a fault, in fp32."""
    rows = run.data["grid"][kind]["float32"][arm]["rows"]
    bound = epsilon(run, kind)
    return min(delta for each in rows for row in each if (delta := difference_of(row).delta) > bound)


# --- the batch in the page -----------------------------------------------------------------------------------------------

TEXTS = {"A": "thekeyis", "B": "   redis", "C": "     hi!"}
COLUMNS = 8


def presets() -> dict[str, dict[str, dict[str, Any]]]:
    """Ways to fill the batch, each with tokens, mask, positions and the column that is read, by row."""

    def rows(side: str = "left", mask: str = "right", positions: str = "right", read: str = "last") -> dict:
        found = {}
        for name, text in TEXTS.items():
            letters = text.strip().ljust(COLUMNS) if side == "right" else text
            tokens = [letter != " " for letter in letters]
            seen = [True] * COLUMNS if mask == "omitted" else [*tokens[:-1], False] if mask == "short" else tokens
            at, own = list(by_hand.from_mask(tokens)), sum(tokens)
            if positions in ("columns", "mixed"):
                at = list(range(COLUMNS)) if positions == "columns" else [*range(COLUMNS - 1), at[-1]]
            if positions == "restart":
                at[-1] = 0
            if positions == "from 1":
                at = [number + here for number, here in zip(at, tokens)]
            end = own - 1 if side == "right" and read == "own" else COLUMNS - 1
            found[name] = {"text": letters, "mask": seen, "positions": at, "read": end}
        return found

    return {
        "padding on the left, all right": rows(),
        "no position ids: columns are counted": rows(positions="columns"),
        "mask omitted": rows(mask="omitted"),
        "mask one column short": rows(mask="short"),
        "prefill counts pads, the last step does not": rows(positions="mixed"),
        "the last step starts again at 0": rows(positions="restart"),
        "all positions counted from 1": rows(positions="from 1"),
        "padding on the right, read at the last column": rows(side="right"),
        "padding on the right, each row read at its end": rows(side="right", read="own"),
    }


def row_of(filled: dict[str, Any]) -> by_hand.Row:
    """A preset's row as `kvlab.core.padding` takes it."""
    tokens = tuple(letter != " " for letter in filled["text"])
    return by_hand.Row(tokens, tuple(filled["mask"]), tuple(filled["positions"]), filled["read"])


def batch() -> str:
    """HTML: the batch that `book/assets/js/padding.js` brings to life. Without a script it shows the first preset."""
    known = presets()
    first = next(iter(known.values()))
    options = "".join(f"<option>{html.escape(name)}</option>" for name in known)
    rows = "".join(_batch_row(name, filled) for name, filled in first.items())
    data = json.dumps(known, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    return (
        '<div class="kvp"><form aria-label="A padded batch"><fieldset disabled>'
        f'<div class="kvp-pick"><label for="kvp-preset">Begin with</label><select id="kvp-preset" name="preset">{options}</select></div>'
        f'{rows}</fieldset></form><p class="kvp-key">'
        '<i class="kvp-cell" data-k="own">2</i> a token that is seen, with its distance '
        '<i class="kvp-cell" data-k="own" data-off="true">5</i> a wrong distance '
        '<i class="kvp-cell" data-k="pad"></i> a pad that is seen '
        '<i class="kvp-cell" data-k="lost"></i> a token that should be seen '
        '<i class="kvp-cell" data-k="hidden"></i> hidden</p>'
        '<p class="kvp-still">Editing needs JavaScript; what is shown is the first way to fill the batch.</p>'
        f'<script type="application/json">{data}</script></div>'
    )


def _batch_row(name: str, filled: dict[str, Any]) -> str:
    row, columns = row_of(filled), range(COLUMNS)
    found = by_hand.look(row)

    def line(label: str, cell) -> str:
        return f'<tr><th scope="row">{label}</th>{"".join(f"<td>{cell(c)}</td>" for c in columns)}</tr>'

    def box(kind: str, c: int, rest: str) -> str:
        return f'<input data-{kind}="{c}" aria-label="Row {name}, column {c}, {LABELS[kind]}" {rest}>'

    head = f'<tr><th scope="row">column</th>{"".join(f"<th scope=col>{c}</th>" for c in columns)}</tr>'
    table = (
        head
        + line(
            "token",
            lambda c: box("text", c, f'type="text" maxlength="1" value="{filled["text"][c].strip()}" autocomplete="off"'),
        )
        + line("mask", lambda c: box("mask", c, f'type="checkbox"{" checked" if filled["mask"][c] else ""}'))
        + line("position", lambda c: box("at", c, f'type="number" min="0" max="99" value="{filled["positions"][c]}"'))
    )
    cells = "".join(_see(row, q, k) for q in columns for k in columns)
    attends = html.escape(by_hand.attends(row, filled["text"]))
    return (
        f'<fieldset class="kvp-row" data-row="{name}"><legend>Row {name}</legend><div class="kvp-edit"><table>{table}</table>'
        f'<label class="kvp-read">read at column <input data-read type="number" min="0" max="{COLUMNS - 1}" value="{filled["read"]}"></label></div>'
        f'<div class="kvp-see" role="img" aria-label="{attends}">{cells}</div>'
        f'<output class="kvp-says" aria-live="polite">{html.escape(by_hand.sentence(row))}</output>'
        f'<p class="kvp-attends">{attends}</p><p class="kvp-kinds"><span data-kind="rope" data-ok="{str(found.rope).lower()}">RoPE</span> '
        f'<span data-kind="learned" data-ok="{str(found.learned).lower()}">learned</span></p></fieldset>'
    )


LABELS = {"text": "token", "mask": "seen", "at": "position"}


def _see(row: by_hand.Row, query: int, column: int) -> str:
    kind, distance = see(row, query, column)
    wrong = ""
    if distance is not None:
        true = sum(row.tokens[column + 1 : query + 1])
        wrong = ' data-off="true"' if distance != true else ""
    idle = "" if row.tokens[query] else ' data-idle="true"'
    read = ' data-read="true"' if query == row.read else ""
    said = "" if distance is None else str(distance).replace("-", "−")
    return f'<i class="kvp-cell" data-k="{kind}"{wrong}{idle}{read}>{said}</i>'


def see(row: by_hand.Row, query: int, column: int) -> tuple[str, int | None]:
    """What a query has at a column: "own", "pad", "lost", "hidden" or "later"; and, between tokens that see each other, the distance."""
    if column > query:
        return "later", None
    visible = column in by_hand.seen(row, query)
    if not visible:
        return ("lost" if row.tokens[column] and row.tokens[query] else "hidden"), None
    if not row.tokens[column]:
        return "pad", None
    return "own", row.positions[query] - row.positions[column] if row.tokens[query] else None
