"""Figures of the password experiment and of the leak. Each takes a Run and returns a `go.Figure`, or HTML text."""

from __future__ import annotations

import html
import math
import statistics

import plotly.graph_objects as go

from kvlab.experiments import confusion
from kvlab.experiments.password import ARMS
from kvlab.record import Run, number
from kvlab.show.theme import HEALTHY, HEALTHY_TO_SICK, MUTED, SICK, apply, switch

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
TICKS = ["0", "1e−4", "0.01", "1"]
FLOOR = 1e-6  # identical runs have |Δlogit| 0, which a logarithmic axis cannot show


def heat_map(run: Run) -> go.Figure:
    """Arm by step: the median |Δlogit| over the prompts whose texts still agree, one dtype at a time."""
    arms = list(reversed(ARMS))
    traces, buttons = [], []
    for dtype, measured in run.data["arms"].items():
        z, text = [], []
        for arm in arms:
            by_step: list[list[float]] = [[] for _ in range(run.manifest.settings["new_tokens"])]
            for _, _, deltas, _, _ in measured[arm]:
                for step, delta in enumerate(deltas):
                    by_step[step].append(delta)
            middles = [statistics.median(values) if values else None for values in by_step]
            z.append([None if m is None else math.log10(max(m, FLOOR)) for m in middles])
            text.append(
                [
                    f"{arm}, token {step}<br>median |Δlogit| {number(m)}<br>{len(values)} prompts still agree"
                    for step, (m, values) in enumerate(zip(middles, by_step))
                ]
            )
        traces.append(
            go.Heatmap(
                z=z,
                x=[f"token {step}" for step in range(len(z[0]))],
                y=arms,
                zmin=math.log10(FLOOR),
                zmax=1.5,
                colorscale=HEALTHY_TO_SICK,
                xgap=2,
                ygap=2,
                text=text,
                hovertemplate="%{text}<extra></extra>",
                visible=dtype == "float32",
                colorbar={"title": {"text": "|Δlogit|"}, "tickvals": [-6, -4, -2, 0], "ticktext": TICKS},
            )
        )
        shown = [other == dtype for other in run.data["arms"]]
        buttons.append({"label": SHORT[dtype], "method": "update", "args": [{"visible": shown}]})
    fig = go.Figure(traces)
    switch(fig, buttons)
    return apply(
        fig,
        height=560,
        alt="Heat map of the median logit difference by arm and token. Twelve healthy arms are pale at every token; the four sick "
        "arms are strongly coloured, two of them from token 0 and two from token 1 on.",
    )


def separation(run: Run) -> go.Figure:
    """Runs as points: the largest |Δlogit| against the fp32 reference, healthy beside sick, with ε of each dtype.

    Every fourth run of an arm, and its extremes: what lies apart is there, and the page stays light.
    """
    epsilon = confusion.epsilons(run)
    fig = go.Figure()
    dtypes = list(run.data["arms"])
    for kind, colour, shift in (("healthy", HEALTHY, 0.18), ("sick", SICK, -0.18)):
        x, y, text = [], [], []
        for row, dtype in enumerate(dtypes):
            for name, rows in run.data["arms"][dtype].items():
                if ARMS[name].kind != kind:
                    continue
                largest = [max(deltas) for _, _, deltas, _, _ in rows]
                extremes = {largest.index(min(largest)), largest.index(max(largest))}
                for index in sorted(extremes | set(range(0, len(rows), 4))):
                    x.append(max(largest[index], FLOOR))
                    y.append(row + shift + 0.13 * (((index * 37 + len(name) * 11) % 23) / 11 - 1))
                    text.append(name)
        fig.add_scatter(
            x=x,
            y=y,
            mode="markers",
            name=kind,
            marker={"color": colour, "size": 4, "opacity": 0.45},
            text=text,
            hovertemplate="%{text}<br>|Δlogit| %{x:.2g}<extra></extra>",
        )
    for row, dtype in enumerate(dtypes):
        bound = epsilon[dtype]
        fig.add_shape(
            type="line", x0=bound, x1=bound, y0=row - 0.42, y1=row + 0.42, line={"color": MUTED, "width": 2, "dash": "dot"}
        )
        fig.add_annotation(x=math.log10(bound), y=row + 0.46, text=f"ε = {number(bound)}", showarrow=False, yanchor="bottom")
    fig.update_xaxes(
        type="log",
        title="largest |Δlogit| of a run (identical runs at the left edge)",
        exponentformat="power",
    )
    fig.update_yaxes(tickvals=list(range(len(dtypes))), ticktext=[SHORT[d] for d in dtypes], range=[-0.6, len(dtypes) - 0.25])
    return apply(
        fig,
        height=460,
        alt="Points on a logarithmic axis, for every fourth run and each arm's extremes. In fp32 healthy runs lie below the bound epsilon and sick runs four "
        "orders of magnitude above it; in bf16 and fp16 the gap is narrow.",
    )


def margin_against_flips(run: Run) -> go.Figure:
    """How often a 16-bit token differs from fp32's, against the fp32 margin: flips live where the margin is small."""
    edges = [0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, math.inf]
    labels = [f"{low:g}–{high:g}" if math.isfinite(high) else f"over {low:g}" for low, high in zip(edges, edges[1:])]
    fig = go.Figure()
    for (dtype, flips), colour in zip(run.data["places"]["flips"].items(), ("#4a80ee", "#ac4a12")):
        counts = [[0, 0] for _ in labels]
        for text, row in zip(run.data["places"]["texts"], flips):
            for margin, flag in zip(text["margins"], row):
                bin_ = next(i for i, high in enumerate(edges[1:]) if margin < high)
                counts[bin_][0] += flag == "1"
                counts[bin_][1] += 1
        rates = [hits / count if count else None for hits, count in counts]
        bounds = [confusion.wilson(hits, count) if count else (0, 0) for hits, count in counts]
        fig.add_bar(
            x=labels,
            y=rates,
            name=SHORT[dtype],
            marker_color=colour,
            error_y={
                "array": [b[1] - r if r is not None else 0 for r, b in zip(rates, bounds)],
                "arrayminus": [r - b[0] if r is not None else 0 for r, b in zip(rates, bounds)],
                "color": MUTED,
                "thickness": 1.2,
            },
            customdata=counts,
            hovertemplate="margin %{x}: %{customdata[0]} of %{customdata[1]} tokens differ<extra></extra>",
        )
    fig.update_xaxes(title="fp32 margin, top 1 minus top 2")
    fig.update_yaxes(title="share of tokens that differ", tickformat=".0%")
    return apply(
        fig,
        height=420,
        alt="Bars of the share of tokens that a 16-bit run chooses differently, by fp32 margin: highest in the lowest "
        "margin bin and falling to zero as the margin grows.",
    )


def places_figure(run: Run, dtype: str = "bfloat16") -> go.Figure:
    """Claim A8: flips and low margins at each of the three places, as ratios to everywhere else."""
    found = confusion.places(run, dtype)
    series = (
        ("flip_ratio", "flips, against all other tokens", "#4a80ee"),
        ("low_ratio", "low margins, against all other tokens", "#b08818"),
        ("adjusted", "flips, against what the margins foresee", "#9140b4"),
    )
    fig = go.Figure()
    names = list(confusion.PLACES)
    for offset, (key, label, colour) in zip((0.22, 0, -0.22), series):
        values = [found["places"][name][key] for name in names]
        fig.add_scatter(
            x=[v["value"] for v in values],
            y=[len(names) - 1 - i + offset for i in range(len(names))],
            mode="markers",
            name=label,
            marker={"color": colour, "size": 10},
            error_x={
                "array": [max(v["high"] - v["value"], 0) for v in values],
                "arrayminus": [max(v["value"] - v["low"], 0) for v in values],
                "thickness": 2,
            },
            text=[f"{label}: {v['value']:.2f} [{v['low']:.2f}, {v['high']:.2f}]" for v in values],
            hovertemplate="%{text}<extra></extra>",
        )
    fig.add_vline(x=1, line={"color": MUTED, "dash": "dot"})
    fig.update_xaxes(
        title="ratio, with 95 % interval (1: as often as elsewhere)",
        type="log",
        tickvals=[0.25, 0.5, 1, 2, 4],
        ticktext=["¼", "½", "1", "2", "4"],
    )
    fig.update_yaxes(tickvals=list(range(len(names)))[::-1], ticktext=names, range=[-0.5, len(names) - 0.5])
    return apply(
        fig,
        height=420,
        alt="For each of the three places of claim A8, three ratios with intervals: flips against elsewhere, low margins "
        "against elsewhere, and flips against what the margins foresee.",
    )


def predictions(guessed: dict[str, float], measured: dict[str, float]) -> go.Figure:
    """What a reader guessed beside what was measured: name → |Δlogit|."""
    names = list(guessed)
    fig = go.Figure()
    for label, values, colour, symbol in (
        ("guessed", guessed, MUTED, "circle-open"),
        ("measured", measured, "#4a80ee", "circle"),
    ):
        fig.add_scatter(
            x=[max(float(values[name]), FLOOR) for name in names],
            y=names,
            mode="markers",
            name=label,
            marker={"color": colour, "size": 13, "symbol": symbol, "line": {"width": 2.5}},
            hovertemplate="%{y}: %{x:.2g}<extra>" + label + "</extra>",
        )
    fig.update_xaxes(type="log", title="largest |Δlogit|", exponentformat="power")
    fig.update_yaxes(autorange="reversed")
    return apply(fig, height=320, alt="Guessed and measured logit differences for each arm, on a logarithmic axis.")


def arms_table(run: Run, dtype: str = "float32") -> str:
    """Markdown: the arms with what they change, flips and the largest and smallest |Δlogit|, for one dtype."""
    lines = ["| arm | what it changes | texts that differ | \\|Δlogit\\|, least to most |", "|---|---|---:|---:|"]
    for name, rows in run.data["arms"][dtype].items():
        deltas = [max(row[2]) for row in rows]
        flips = sum(row[0] is not None for row in rows)
        mark = "**" if ARMS[name].kind == "sick" else ""
        lines.append(
            f"| {mark}{name}{mark} | {ARMS[name].what} | {flips} of {len(rows)} | {number(min(deltas))} – {number(max(deltas))} |"
        )
    return "\n".join(lines)


def confusion_table(run: Run) -> str:
    """Markdown: of the judged half, how many runs were called a fault or unclear; 16-bit runs before → after the fp32 replay.

    Each count comes with Wilson's 95 % interval (of the last count in the cell); for sick arms, how often the family was right.
    """
    dtypes = list(run.data["arms"])
    table = {(row["dtype"], row["arm"]): row for row in confusion.confusion(run)}
    heads = [SHORT[d] if d == "float32" else f"{SHORT[d]} → replayed" for d in dtypes]
    lines = [
        f"| arm | runs | {' | '.join(heads)} | family right, by log, all formats | by onset |",
        "|---|---:|" + "---:|" * len(dtypes) + "---:|---:|",
    ]
    for arm in ARMS:
        rows = [table[dtype, arm] for dtype in dtypes]
        cells = []
        for row in rows:
            low, high = row["interval"]
            count = _answers(row["accused"], row["unclear"])
            if row["dtype"] != "float32":
                count += f" → {_answers(row['accused_after_replay'], row['unclear_after_replay'])}"
            cells.append(f"{count} ({low:.0%}–{high:.0%})")
        family = ["", ""]
        if rows[0]["sick"]:
            caught = sum(row["accused_after_replay"] for row in rows)
            family = [f"{sum(row[key] or 0 for row in rows)} of {caught}" for key in ("family_by_log", "family_by_onset")]
        name = f"**{arm}**" if rows[0]["sick"] else arm
        lines.append("| " + " | ".join([name, str(rows[0]["runs"]), *cells, *family]) + " |")
    return "\n".join(lines)


def _answers(accused: int, unclear: int) -> str:
    return f"{accused}, {unclear} unclear" if unclear else str(accused)


def control_table(run: Run) -> str:
    """Markdown: each sick arm with the cache and without it (the control experiment of claim A24)."""
    lines = ["| arm | with the cache: \\|Δlogit\\| | without: \\|Δlogit\\| | without the cache it is |", "|---|---:|---:|---|"]
    bound = confusion.epsilons(run)["float32"]
    for name, rows in run.data["without_cache"].items():
        cached = max(max(row[2]) for row in run.data["arms"]["float32"][name][: len(rows)])
        off = max(max(row[2]) for row in rows)
        lines.append(f"| {name} | {number(cached)} | {number(off)} | {'within ε' if off <= bound else 'still wrong'} |")
    return "\n".join(lines)


def leak_switch(run: Run) -> str:
    """HTML: the two users, one switch, both recorded answers. No script: a checkbox and CSS, so it works everywhere."""
    data = run.data

    def answer(which: str) -> str:
        pieces = []
        for piece in data[which]["pieces"]:
            leaked = which == "kept" and piece.strip() and piece.strip() in data["secret"]
            text = html.escape(piece).replace("\n", "<br>")
            pieces.append(f"<mark>{text}</mark>" if leaked else text)
        return "…" + "".join(pieces) + ("" if data[which]["ended"] else "…")

    said = html.escape(data["user_a"]).replace(html.escape(data["secret"]), f"<strong>{html.escape(data['secret'])}</strong>")
    return f"""<div class="leak">
<p class="leak-turn leak-a"><span class="leak-who">User A</span> {said}</p>
<div class="leak-control"><input type="checkbox" id="leak-keep" role="switch" aria-controls="leak-answers">
<label for="leak-keep">Keep the cache: do not reset it between the two users</label></div>
<p class="leak-turn leak-b"><span class="leak-who">User B</span> {html.escape(data["user_b"].strip())} …</p>
<div class="leak-answers" id="leak-answers" aria-live="polite">
<p class="leak-turn leak-model leak-reset"><span class="leak-who">The model, cache reset</span> {answer("reset")}</p>
<p class="leak-turn leak-model leak-kept"><span class="leak-who">The model, cache kept</span> {answer("kept")}</p>
</div></div>"""


def facts(run: Run) -> dict[str, str]:
    """The numbers chapter 3 says in its prose, by name, as text."""
    arms, settings = run.data["arms"], run.manifest.settings
    epsilon, totals = confusion.epsilons(run), confusion.totals(run)
    healthy = [name for name, arm in ARMS.items() if arm.kind == "healthy"]
    sick = [name for name, arm in ARMS.items() if arm.kind == "sick"]

    def deltas(names, dtype="float32"):
        return [max(row[2]) for name in names for row in arms[dtype][name]]

    sick_rows = [row for name in sick for row in arms["float32"][name]]
    quiet = sum(row[0] is None for row in sick_rows)
    said = sum(text["repeats_password"] for text in run.data["places"]["texts"])
    found = {
        "prompts": str(settings["prompts"]),
        "new_tokens": str(settings["new_tokens"]),
        "long_text": str(settings["long_text"]),
        "half": str(settings["prompts"] // 2),
        "control_prompts": str(len(next(iter(run.data["without_cache"].values())))),
        "arms_healthy": str(len(healthy)),
        "arms_sick": str(len(sick)),
        "noise_max": number(max(deltas(healthy))),
        "sick_min": number(min(deltas(sick))),
        "sick_max": number(max(deltas(sick))),
        "apart": f"{math.log10(min(deltas(sick)) / max(deltas(healthy))):.1f}",
        "sick_runs": str(len(sick_rows)),
        "sick_same_text": str(quiet),
        "sick_same_text_share": f"{quiet / len(sick_rows):.0%}",
        "said": str(said),
        "said_share": f"{said / settings['prompts']:.0%}",
    }
    for dtype, short in SHORT.items():
        if dtype not in arms:
            continue
        found[f"eps_{short}"] = number(epsilon[dtype])
        found[f"noise_{short}"] = number(max(deltas(healthy, dtype)))
        found[f"sick_min_{short}"] = number(min(deltas(sick, dtype)))
        flips = [flip for flip in confusion.tie_flips(run) if flip["dtype"] == dtype]
        found[f"flips_{short}"] = f"{len(flips)} of {len(healthy) * settings['prompts']}"
        found[f"flip_margin_{short}"] = number(max((flip["margin"] for flip in flips), default=0.0))
        for key, value in totals[dtype].items():
            if value["interval"] is None:
                continue
            low, high = value["interval"]
            found[f"{key}_{short}"] = f"{value['hits']} of {value['runs']} (95 % interval {low:.1%} to {high:.1%})"
    return found


def misses(run: Run) -> str:
    """Markdown: every kind of verdict in the judged half that is wrong or left open, counted and explained."""
    epsilon = confusion.epsilons(run)
    lines = []
    for replay, when in ((False, "before the replay"), (True, "after the replay")):
        kinds: dict[tuple, list] = {}
        for v in confusion.judged(run, replay=replay):
            if v["accused"] != v["sick"]:
                kinds.setdefault((v["dtype"], v["arm"], v["sick"], v["ended_before"], v["kind"] == "unclear"), []).append(v)
        for (dtype, arm, is_sick, ended, open_), found in kinds.items():
            deltas = sorted(v["delta"] for v in found)
            span = f"|Δlogit| {number(deltas[0])} to {number(deltas[-1])}, ε = {number(epsilon[dtype])}"
            if open_:
                why = "they lie between ε and the second bound, and the verdict asks for the replay"
            elif ended:
                why = "a near-tie flipped first, by rounding, and the comparison ended before the fault acted"
            elif is_sick:
                why = "the fault moves these runs by less than this dtype's noise may"
            else:
                why = "rounding went further here than twice what the calibration half showed"
            said = "left unclear" if open_ else "missed" if is_sick else "accused"
            lines.append(f"- {SHORT[dtype]}, {when}: {len(found)} runs of *{arm}* {said}: {why} ({span}).".replace("|", "\\|"))
    return "\n".join(lines) or "- None: no healthy run was accused and no sick run was missed, in any dtype."
