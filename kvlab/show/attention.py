"""Figures, tables and numbers of lab 1. Figures take a Run (or what a lab measured) and return a `go.Figure`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from kvlab.core.ledger import human
from kvlab.experiments import attention_cost as cost
from kvlab.record import Run, number
from kvlab.show.theme import HEALTHY, MUTED, OWNERS, SEQUENTIAL, SHARED, SICK, apply, switch

FLOOR = 1e-8  # what is equal to the last bit has |Δ| 0, which a logarithmic axis cannot show
BOUND = 1e-5
ARMS = {"uncached": ("no cache", OWNERS["B"], "diamond"), "cached": ("with a cache", OWNERS["A"], "circle")}


# ---- against the model ---------------------------------------------------------------------------------------------------


def by_layer(right: Sequence[float], slips: Mapping[str, Sequence[float]] = {}, name: str = "by hand") -> go.Figure:
    """|Δ| of the heads' outputs against the model's own, layer by layer; classic slips beside it."""
    fig = go.Figure()
    symbols = ("x", "cross", "diamond-open", "triangle-up-open")
    for (label, values), symbol in zip(slips.items(), symbols):
        fig.add_scatter(
            x=list(range(len(values))),
            y=list(values),
            mode="lines+markers",
            name=label,
            line={"color": SICK, "width": 1},
            marker={"symbol": symbol, "size": 7},
            hovertemplate="layer %{x}: %{y:.2g}<extra>" + label + "</extra>",
        )
    fig.add_scatter(
        x=list(range(len(right))),
        y=[max(value, FLOOR) for value in right],
        mode="lines+markers",
        name=name,
        line={"color": HEALTHY, "width": 2.5},
        marker={"size": 7},
        hovertemplate="layer %{x}: %{y:.2g}<extra>" + name + "</extra>",
    )
    fig.add_hline(y=BOUND, line={"color": MUTED, "dash": "dot"})
    fig.update_xaxes(title="layer", range=[-0.7, len(right) - 0.3])
    fig.update_yaxes(type="log", title="largest |Δ|", exponentformat="power", range=[-8.2, 1.5])
    more = f", and {len(slips)} classic slips, which lie five orders of magnitude higher in every layer" if slips else ""
    return apply(
        fig,
        height=430,
        alt=f"Largest difference between attention by hand and the model's own, for each layer, below 1e-5 in all{more}.",
    )


def against_layers(run: Run) -> go.Figure:
    """`by_layer` of the recorded run."""
    return by_layer([row["heads"] for row in run.data["layers"]], run.data["slips"])


def unchanged(run: Run) -> go.Figure:
    """How far the past's keys and values move, by layer, when the last token is another: with a causal mask and without."""
    fig = go.Figure()
    arms = (("causal", "causal mask", HEALTHY), ("every token sees every other", "no mask", SICK))
    for arm, label, colour in arms:
        for kind, dash in (("keys", "solid"), ("values", "dot")):
            values = run.data["past"][f"{arm}: another last token"][kind]
            fig.add_scatter(
                x=list(range(len(values))),
                y=[max(value, FLOOR) for value in values],
                customdata=values,
                mode="lines+markers",
                name=f"{label}: {kind}",
                line={"color": colour, "dash": dash, "width": 2},
                marker={"size": 6},
                hovertemplate="layer %{x}: %{customdata:.2g}<extra>" + f"{label}: {kind}" + "</extra>",
            )
    fig.update_xaxes(title="layer", range=[-0.7, len(values) - 0.3])
    fig.update_yaxes(
        type="log",
        title="largest |Δ|, share of the layer's largest",
        tickvals=[FLOOR, 1e-6, 1e-4, 1e-2, 1],
        ticktext=["equal bits", "10⁻⁶", "10⁻⁴", "0.01", "1"],
        range=[-8.4, 0.3],
    )
    return apply(
        fig,
        height=420,
        alt="Change of the past's keys and values by layer when the last token is exchanged. With a causal mask it is zero in every "
        "layer; without one it is zero in the first layer only and grows to tens of percent.",
    )


# ---- who reads -------------------------------------------------------------------------------------------------------------


def _labels(run: Run) -> list[str]:
    """The prompt's tokens, each with its place, so that equal ones stay apart on an axis."""
    return [f"{place} {token.strip() or '␣'}" for place, token in enumerate(run.data["maps"]["tokens"])]


def reading(run: Run) -> go.Figure:
    """What the last token of the prompt looks at: heads against tokens, one layer at a time, by a slider."""
    last, labels = run.data["maps"]["last"], _labels(run)
    first = run.data["readers"]["order"][0][0]
    heads = [f"head {head}" for head in range(len(last[0]))]
    fig = go.Figure(_weights_map(last[first], labels, heads))
    _mark_secret(fig, run)
    fig.update_layout(
        sliders=[
            {
                "active": first,
                "currentvalue": {"prefix": "Layer "},
                "pad": {"t": 70},
                "steps": [{"label": str(n), "method": "restyle", "args": [{"z": [last[n]]}]} for n in range(len(last))],
            }
        ]
    )
    fig.update_yaxes(autorange="reversed")
    return apply(
        fig,
        height=460,
        alt=f"Heat map of the attention of the prompt's last token in layer {first}: nine heads against the prompt's tokens. The "
        "password's tokens are framed. A slider chooses the layer.",
    )


def _weights_map(z: list, x: list[str], y: list[str]) -> go.Heatmap:
    return go.Heatmap(
        z=z,
        x=x,
        y=y,
        zmin=0,
        zmax=1,
        colorscale=SEQUENTIAL,
        xgap=1,
        ygap=1,
        hovertemplate="%{y} looks at %{x}: %{z:.0%}<extra></extra>",
        colorbar={"title": {"text": "weight"}, "tickformat": ".0%"},
    )


def _mark_secret(fig: go.Figure, run: Run) -> None:
    secret = run.data["maps"]["secret"]
    fig.add_shape(
        type="rect",
        x0=secret[0] - 0.5,
        x1=secret[-1] + 0.5,
        y0=0,
        y1=1,
        yref="paper",
        line={"color": SHARED, "width": 3},
    )
    fig.update_xaxes(tickangle=-60)


def one_head(run: Run) -> go.Figure:
    """The whole map of a head, every token against every earlier one; a slider goes through the heads that were kept."""
    full, labels = run.data["maps"]["full"], _labels(run)
    fig = go.Figure(_weights_map(_triangle(full[0]["map"]), labels, labels))
    _mark_secret(fig, run)
    names = [f"layer {one['layer']}, head {one['head']}" for one in full]
    fig.update_layout(
        sliders=[
            {
                "active": 0,
                "currentvalue": {"prefix": "Head: "},
                "pad": {"t": 90},
                "steps": [
                    {"label": name, "method": "restyle", "args": [{"z": [_triangle(one["map"])]}]}
                    for name, one in zip(names, full)
                ],
            }
        ]
    )
    fig.update_yaxes(autorange="reversed", title="the token that looks")
    fig.update_xaxes(title="the token it looks at")
    return apply(
        fig,
        height=560,
        alt=f"Attention map of {names[0]}: each token of the prompt against those before it. In its second half, each token looks at the "
        "token that followed its own earlier occurrence. A slider shows other heads.",
    )


def _triangle(rows: list[list[float]]) -> list[list[float | None]]:
    """Nothing where the causal mask hides."""
    return [[value if column <= row else None for column, value in enumerate(values)] for row, values in enumerate(rows)]


def heads(run: Run) -> go.Figure:
    """Layer against head: what it costs to hide the password from a head; or, by a button, how hard it looks at it."""
    found = run.data["readers"]
    ways = (
        ("what hiding it costs", found["need"], "nats a token", max(max(row) for row in found["need"])),
        ("how hard it looks", found["look"], "weight", 1.0),
    )
    fig = go.Figure()
    for index, (_, z, unit, top) in enumerate(ways):
        fig.add_heatmap(
            z=z,
            zmin=0,
            zmax=top,
            colorscale=SEQUENTIAL,
            xgap=1,
            ygap=1,
            visible=index == 0,
            hovertemplate="layer %{y}, head %{x}: %{z:.2f}<extra></extra>",
            colorbar={"title": {"text": unit}},
        )
    taken = found["arms"]["the readers"]["heads"]
    fig.add_scatter(
        x=[head for _, head in taken],
        y=[layer for layer, _ in taken],
        mode="markers",
        name="a reader",
        marker={"symbol": "square-open", "size": 17, "color": SICK, "line": {"width": 2.5}},
        hovertemplate="layer %{y}, head %{x}<extra>a reader</extra>",
        showlegend=False,  # on a phone it would lie on the colour bar
    )
    buttons = [
        {"label": label, "method": "update", "args": [{"visible": [index == 0, index == 1, True]}]}
        for index, (label, *_) in enumerate(ways)
    ]
    switch(fig, buttons, name="Colour")
    fig.update_xaxes(title="head", dtick=1)
    fig.update_yaxes(title="layer", range=[len(found["need"]) - 0.5, -0.5])
    return apply(
        fig,
        height=620,
        alt=f"Heat map of {len(found['need'])} layers by {len(found['need'][0])} heads: hiding the password costs something in few heads, "
        f"all in the upper half of the layers. The {len(taken)} readers are marked. A button shows how hard each head looks at it.",
    )


def readers_table(run: Run) -> str:
    """Markdown: from which heads the password was hidden, and how often it was still said."""
    found = run.data["readers"]
    lines = ["| password hidden from | heads | still said |", "|---|---:|---:|"]
    for name, arm in found["arms"].items():
        lines.append(f"| {name} | {arm['count']} | {arm['said']} of {found['judged']} |")
    return "\n".join(lines)


# ---- what it costs -------------------------------------------------------------------------------------------------------------


def _polynomial(c: Sequence[float], x: float) -> float:
    return sum(coefficient * x**power for power, coefficient in enumerate(c))


def _grid(low: float, high: float, count: int = 60) -> list[float]:
    return [low * (high / low) ** (i / (count - 1)) for i in range(count)]


def steps(run: Run) -> go.Figure:
    """Time of one token against its history, with a cache and without, in units of the cached step's constant part."""
    data, found = run.data["cost"], cost.conclusions(run.data["cost"])
    unit = found["cached"]["coefficients"][0]
    fig = go.Figure()
    for arm, (label, colour, symbol) in ARMS.items():
        x, y = cost.series(data, arm)
        line = _grid(x[0], x[-1])
        fig.add_scatter(
            x=line,
            y=[_polynomial(found[arm]["coefficients"], past) / unit for past in line],
            mode="lines",
            name=f"{label}: {'a + b·t + c·t²' if arm == 'uncached' else 'a + b·t'}",
            line={"color": colour, "width": 2},
            hoverinfo="skip",
        )
        fig.add_scatter(
            x=x,
            y=[seconds / unit for seconds in y],
            mode="markers",
            name=f"{label}, measured",
            marker={"color": colour, "size": 10, "symbol": symbol},
            hovertemplate="after %{x} tokens: %{y:.2f}<extra>" + label + "</extra>",
        )
    fig.update_xaxes(type="log", title="history t, tokens", tickvals=[32, 64, 128, 256, 512, 1024, 2048, 4096])
    fig.update_yaxes(type="log", title="time of a token (cached, no history: 1)", tickvals=[1, 2, 5, 10, 20, 50, 100])
    return apply(
        fig,
        height=440,
        alt="Time of one token against its history on logarithmic axes. Without a cache it rises steeply with the history; with one "
        "it is nearly flat up to a thousand tokens and bends upward after.",
    )


def cached_step(run: Run) -> go.Figure:
    """The cached step on plain axes: its constant part, and what grows with the history, of which the append is a share."""
    data, found = run.data["cost"], cost.conclusions(run.data["cost"])
    unit = found["cached"]["coefficients"][0]
    x, y = cost.series(data, "cached")
    append = dict(zip(*cost.series(data, "append")))
    fig = go.Figure()
    top = [0, x[-1]]
    fig.add_scatter(
        x=top,
        y=[1, 1],
        mode="lines",
        name="constant: the new token, through all weights",
        line={"color": OWNERS["D"], "width": 0},
        fill="tozeroy",
        hoverinfo="skip",
    )
    fig.add_scatter(
        x=top,
        y=[_polynomial(found["cached"]["coefficients"], t) / unit for t in top],
        mode="lines",
        name="O(t): the history's keys and values",
        line={"color": OWNERS["A"], "width": 2},
        fill="tonexty",
        hoverinfo="skip",
    )
    fig.add_scatter(
        x=x,
        y=[seconds / unit for seconds in y],
        mode="markers",
        name="measured",
        marker={"color": OWNERS["A"], "size": 9, "line": {"width": 1}},
        hovertemplate="after %{x} tokens: %{y:.2f}<extra>a cached step</extra>",
    )
    fig.add_scatter(
        x=list(append),
        y=[seconds / unit for seconds in append.values()],
        mode="markers+lines",
        name="of it, copying the cache to append a token",
        line={"color": SHARED, "dash": "dot"},
        marker={"symbol": "square", "size": 7},
        hovertemplate="after %{x} tokens: %{y:.2f}<extra>appending</extra>",
    )
    fig.update_xaxes(title="history t, tokens", rangemode="tozero")
    fig.update_yaxes(title="time of a step (no history: 1)", rangemode="tozero")
    return apply(
        fig,
        height=420,
        alt="A cached step's time against its history on plain axes: a constant band, and above it a wedge that grows in proportion to "
        "the history. A dotted line shows how much of the wedge is copying the cache.",
    )


def fits_table(run: Run) -> str:
    """Markdown: how well polynomials of each degree foretell a measured point they were not fitted to."""
    found = cost.conclusions(run.data["cost"])
    names = ("constant", "linear", "quadratic", "cubic")
    lines = [f"| | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    for arm, (label, *_) in ARMS.items():
        errors = found[arm]["held_out"]
        cells = [f"**{e:.1%}**" if degree == found[arm]["degree"] else f"{e:.1%}" for degree, e in enumerate(errors)]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def roofline(run: Run) -> go.Figure:
    """FLOPs per byte against what was reached of the matmul ceiling, under the roof of the two measured ceilings."""
    data = run.data["cost"]
    ridge = cost.ridge(data)
    rows = cost.points(data)
    low, high = min(r["intensity"] for r in rows) / 2, max(r["intensity"] for r in rows) * 2
    fig = go.Figure()
    fig.add_scatter(
        x=[low, ridge, max(high, 2 * ridge)],
        y=[low / ridge, 1, 1],
        mode="lines",
        name="the roof: memory, then arithmetic",
        line={"color": MUTED, "width": 2.5},
        hoverinfo="skip",
    )
    for kind, label, colour, symbol, what, where in (
        ("prefill", "prefill, tokens", OWNERS["A"], "circle", "tokens", "top left"),
        ("decode", "decode step, rows", OWNERS["B"], "diamond", "rows", "bottom right"),
    ):
        mine = [row for row in rows if row["kind"] == kind]
        fig.add_scatter(
            x=[row["intensity"] for row in mine],
            y=[row["reached"] for row in mine],
            mode="lines+markers+text",
            name=label,
            text=[str(row["size"]) for row in mine],
            textposition=where,
            line={"color": colour, "width": 1, "dash": "dot"},
            marker={"size": 10, "symbol": symbol},
            customdata=[[row["of_roof"]] for row in mine],
            hovertemplate="%{text} "
            + what
            + ": %{x:.3g} FLOPs a byte, %{y:.1%} of the matmul ceiling, %{customdata[0]:.0%} of the roof"
            "<extra>" + label + "</extra>",
        )
    fig.update_xaxes(type="log", title="FLOPs per byte moved", tickvals=[0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000])
    fig.update_yaxes(
        type="log", title="share of the matmul ceiling", tickformat=".0%", tickvals=[0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1]
    )
    return apply(
        fig,
        height=460,
        alt=f"Roofline on logarithmic axes; the roof bends at {ridge:.1f} FLOPs a byte. A decode step of one row lies far left under the "
        "memory slope, long prefills lie right under the flat roof; more rows move decode from left to right.",
    )


def batch(run: Run) -> go.Figure:
    """Decode steps by rows: the step's time and a row's share of it, each against one row alone."""
    rows = [row for row in run.data["cost"]["roofline"] if row["kind"] == "decode"]
    one = rows[0]["seconds"]
    fig = go.Figure()
    for name, values, colour, symbol in (
        ("a step", [row["seconds"] / one for row in rows], OWNERS["B"], "diamond"),
        ("a row's share of it", [row["seconds"] / row["size"] / one for row in rows], OWNERS["A"], "circle"),
    ):
        fig.add_scatter(
            x=[row["size"] for row in rows],
            y=values,
            mode="lines+markers",
            name=name,
            line={"color": colour, "width": 2},
            marker={"size": 9, "symbol": symbol},
            hovertemplate="%{x} rows: %{y:.2f}<extra>" + name + "</extra>",
        )
    fig.update_xaxes(type="log", title="rows decoded together", tickvals=[row["size"] for row in rows])
    fig.update_yaxes(type="log", title="time (one row alone: 1)", tickvals=[0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10])
    return apply(
        fig,
        height=400,
        alt="As more rows are decoded together, a step takes longer, and a row's share of it gets shorter.",
    )


# ---- words ----------------------------------------------------------------------------------------------------------------------


def facts(run: Run) -> dict[str, str]:
    """The numbers chapter 1 says in its prose, by name, as text."""
    data = run.data
    found, rows = cost.conclusions(data["cost"]), cost.points(data["cost"])
    past, twice, readers, reads = data["past"], data["twice"], data["readers"], data["reads"]
    layers = data["layers"]
    worst = max(layers, key=lambda row: row["out"])
    by = {(row["kind"], row["size"]): row for row in rows}
    prefill = [row for row in rows if row["kind"] == "prefill"]
    decode = [row for row in rows if row["kind"] == "decode"]
    loose = past["every token sees every other: another last token"]
    causal = [past[f"causal: {what}"] for what in ("another last token", "one token more")]
    arms = readers["arms"]
    blind = [arm["said"] for name, arm in arms.items() if name.startswith("as many")]
    taken = {tuple(head) for head in arms["the readers"]["heads"]}
    secret = data["maps"]["secret"]
    crossing = next((row["size"] for row in decode if row["intensity"] > cost.ridge(data["cost"])), None)
    at = found["at"]
    kv_heads = round(len(readers["need"][0]) * reads["bytes of keys and values"] / reads["bytes of queries"] / 2)
    return {
        "layers": str(len(layers)),
        "heads": str(len(readers["need"][0])),
        "kv_heads": str(kv_heads),
        "groups": str(len(readers["need"][0]) // kv_heads),
        "all_heads": str(len(layers) * len(readers["need"][0])),
        "prompt": run.manifest.settings["prompt"],
        "prompt_tokens": str(len(data["maps"]["tokens"])),
        "secret_tokens": str(len(secret)),
        "heads_max": number(max(row["heads"] for row in layers)),
        "out_max": number(worst["out"]),
        "out_size": f"{worst['out_size']:.0f}",
        "out_step": number(2.0 ** (math.floor(math.log2(worst["out_size"])) - 23)),  # fp32 has 23 bits behind the first
        "out_layer": str(layers.index(worst)),
        "over": str(sum(row["out"] > BOUND for row in layers)),
        "rotation_max": number(max(data["pieces"]["rotation"])),
        "slip_min": number(min(min(values) for values in data["slips"].values())),
        "whole_max": number(max(data["whole"].values())),
        "past_same": number(max(max(causal[0][kind]) for kind in ("keys", "values"))),
        "past_shape": _other_shape(max(max(causal[1][kind]) for kind in ("keys", "values"))),
        "appended": number(data["appended"]),
        "loose_first": number(max(loose["keys"][0], loose["values"][0])),
        "loose_max": f"{max(max(loose['keys']), max(loose['values'])):.0%}",
        "read_keys": f"{reads['keys']:.2g}",
        "read_values": f"{reads['values']:.2g}",
        "read_queries": number(reads["queries"]),
        "kv_bytes": human(int(reads["bytes of keys and values"])),
        "q_bytes": human(int(reads["bytes of queries"])),
        "q_factor": f"{1 + reads['bytes of queries'] / reads['bytes of keys and values']:.2g}",
        "twice_keys": f"{max(twice['keys']):.0%}",
        "twice_values": f"{max(twice['values']):.0%}",
        "twice_outputs": f"{max(twice['outputs']):.0%}",
        "swapped": f"{_middle(twice['query swapped']):.0%}",
        "output_first": _said(data["outputs"]["the first"]["said"]),
        "output_first_meant": _said(data["outputs"]["the first"]["meant"]),
        "output_second": _said(data["outputs"]["the second"]["said"]),
        "output_second_meant": _said(data["outputs"]["the second"]["meant"]),
        "output_delta": f"{data['outputs']['the second']['delta']:.2g}",
        "count": str(readers["count"]),
        "finding": str(readers["finding"]),
        "judged": str(readers["judged"]),
        "said_all": str(arms["none"]["said"]),
        "said_readers": str(arms["the readers"]["said"]),
        "said_looking": str(arms["those that look hardest"]["said"]),
        "said_blind": f"{min(blind)} to {max(blind)}" if min(blind) != max(blind) else str(blind[0]),
        "said_first": str(arms["the first reader"]["said"]),
        "said_others": str(arms["all but the readers"]["said"]),
        "said_none": str(arms["all"]["said"]),
        "others": str(arms["all but the readers"]["count"]),
        "first_reader": "head {1} of layer {0}".format(*readers["order"][0]),
        "habit": _habit(readers),
        "resting": str(sum(max(head) == head[0] for layer in data["maps"]["last"] for head in layer)),
        "reader_layers": f"{min(taken)[0]} to {max(taken)[0]}",
        "both": str(len(taken & {tuple(head) for head in arms["those that look hardest"]["heads"]})),
        "at": f"{at:,}",
        "growing": f"{found['cached']['shares'][1]:.0%}",
        "equal": _equal(found["equal_at"], found["longest"]),
        "append_share": f"{found['append_share']:.0%}" if found["append_share"] else "–",
        "times_moved": f"{found['times_moved']:.1f}",
        "longest": f"{max(cost.series(data['cost'], 'cached')[0]):,}",
        "step_ratio": f"{found['step_ratio']:.0f}",
        "total_ratio": f"{found['total_ratio']:.0f}",
        "uncached_linear": f"{found['uncached']['shares'][1]:.0%}",
        "counted_quadratic": f"{_quadratic_by_count(data['cost'], at):.0%}",
        "uncached_quadratic": f"{found['uncached']['shares'][2]:.0%}",
        "total_quadratic": f"{found['total_shares'][1]:.0%}",
        "total_cubic": f"{found['total_shares'][2]:.0%}",
        "tokens_uncached": f"{at * (at + 1) // 2:,}",
        "ridge": f"{cost.ridge(data['cost']):.1f}",
        "decode_intensity": f"{by['decode', 1]['intensity']:.2g}",
        "decode_reached": f"{by['decode', 1]['reached']:.1%}",
        "decode_of_roof": f"{by['decode', 1]['of_roof']:.0%}",
        "prefill_tokens": f"{prefill[-1]['size']:,}",
        "prefill_intensity": f"{prefill[-1]['intensity']:.0f}",
        "prefill_reached": f"{prefill[-1]['reached']:.0%}",
        "short_tokens": str(prefill[0]["size"]),
        "short_intensity": f"{prefill[0]['intensity']:.1f}",
        "crossing": str(crossing) if crossing else "none of these",
        "rows": str(decode[-1]["size"]),
        "rows_step": f"{decode[-1]['seconds'] / decode[0]['seconds']:.1f}",
        "rows_share": f"{decode[-1]['seconds'] / decode[-1]['size'] / decode[0]['seconds']:.0%}",
        "behind": str(run.manifest.settings["behind"]),
        "tries": str(max(row["rounds"] for row in data["cost"]["steps"])),
        "products_share": f"{data['cost']['products'][0]['seconds'] / decode[0]['seconds']:.0%}",
        "second_row": _second_row(decode[1]["seconds"] / decode[0]["seconds"], decode[1]["size"]),
        "counted": str(len(data["cost"]["counted"])),
        "miscounted": str(sum(row["counted"] != row["formula"] for row in data["cost"]["counted"])),
    }


def _middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _other_shape(change: float) -> str:
    return "they came out the same" if change == 0 else f"they differ by up to {number(change)} of the largest number"


def _equal(history: float | None, longest: int) -> str:
    """Where the part that grows is as large as the constant one, in words."""
    if history is None:
        return "never as much as all the rest together"
    where = f"after about {round(history, -2):,.0f} tokens"
    farther = f", if the line holds so far: {longest:,} is the longest history measured" if history > longest else ""
    return f"as much as all the rest together {where}{farther}"


def _quadratic_by_count(data: Mapping, at: int) -> float:
    """The share of an uncached step's FLOPs that is quadratic in its length: two counts tell the parts apart."""
    short, long = sorted((row["past"] + 1, row["counted"]) for row in data["counted"] if row["arm"] == "uncached")[::2]
    known = data["head_flops"]  # of the logits, which are computed once
    a, b = (short[1] - known) / short[0], (long[1] - known) / long[0]
    square = (b - a) / (long[0] - short[0])
    linear = a - square * short[0]
    return square * at**2 / (square * at**2 + linear * at + known)


def _habit(readers: Mapping) -> str:
    """What the first reader looks at, in a few words."""
    layer, head = readers["order"][0]
    places = {
        "the token that followed an earlier occurrence of its own": readers["habits"]["what followed"][layer][head],
        "the token just before": readers["habits"]["the token before"][layer][head],
    }
    where, share = max(places.items(), key=lambda item: item[1])
    return f"{share:.0%} of its weight on {where}"


def _second_row(ratio: float, rows: int) -> str:
    """What the smallest batch costs, in a sentence."""
    if ratio < 1.25:
        return f"With {rows} rows the step takes {ratio:.2f} times as long: the second one is nearly free."
    return (
        f"Not from the first row on, however: with {rows} rows the step takes {ratio:.1f} times as long. By bytes the second row should be "
        "nearly free; here a product with more than one row takes another path through the library, and reads the weights more slowly."
    )


def _said(text: str) -> str:
    return " ".join(text.split()) or "(blank lines)"


def guesses(guessed: Mapping[str, float], measured: Mapping[str, float]) -> str:
    """Lines of text: what a reader guessed beside what was measured."""
    wide = max(map(len, guessed))
    return "\n".join(f"{what:{wide}s}   guessed {guessed[what]:>8.3g}   measured {measured[what]:>8.3g}" for what in guessed)
