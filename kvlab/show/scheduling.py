"""Figures and tables of the scheduling run. Each takes a Run, or a day of it, and returns a `go.Figure`, or Markdown.

Times are shown in steps: multiples of one step of the same day or of the same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlab.core.simulate import Cost, Work, card_cost
from kvlab.record import Run, number
from kvlab.show.theme import HEALTHY, MUTED, OWNERS, PAD, SHARED, SICK, apply, switch

WAITS, PROMPT, TALKS, STANDS = PAD, SHARED, OWNERS["D"], SICK
KINDS = (
    ("in the queue", WAITS, 0.35),
    ("its prompt is computed", PROMPT, 0.8),
    ("it gets tokens", TALKS, 0.8),
    ("it runs, and gets nothing", STANDS, 0.35),
)
NAMES = {
    "lockstep": "lockstep, padded",
    "static": "static, packed",
    "apart": "apart, prefill first",
    "mixed": "mixed, in pieces",
}
MACHINES = {"own": "this CPU, simulated", "A100": "A100 80 GB, computed"}


# ---- who runs when -----------------------------------------------------------------------------------------------------------


def spans(day: Mapping) -> list[list[tuple[int, float, float]]]:
    """For each kind of KINDS: (request, begin, end) in seconds; steps that follow each other are one span."""
    out: list[list] = [[] for _ in KINDS]
    for n, (_, _, at, admitted, *_rest) in enumerate(day["requests"]):
        if admitted > at:
            out[0].append((n, at, admitted))
    open_span: dict[int, list] = {}

    def close(n: int) -> None:
        kind, begin, end = open_span.pop(n)
        out[kind].append((n, begin, end))

    last = {n: row[5] for n, row in enumerate(day["requests"])}
    admitted = {n: row[3] for n, row in enumerate(day["requests"])}
    for start, end, *_rest, names, prompts in day["moments"]:
        for n in last:
            if n in prompts:
                kind = 1
            elif n in names:
                kind = 2
            elif admitted[n] <= start and end <= last[n]:
                kind = 3
            else:
                if n in open_span:
                    close(n)
                continue
            if n in open_span and open_span[n][0] == kind and abs(open_span[n][2] - start) < (end - start) / 2:
                open_span[n][2] = end
            else:
                if n in open_span:
                    close(n)
                open_span[n] = [kind, start, end]
    for n in list(open_span):
        close(n)
    return out


def gantt(
    days: Mapping[str, Mapping], *, unit: float, alt: str, names: Mapping[str, str] | None = None, height: int = 420
) -> go.Figure:
    """Requests as rows, time from left to right; a button for each day. `unit`: the seconds that count as 1."""
    fig, buttons, names = go.Figure(), [], names or {}
    for which, (label, day) in enumerate(days.items()):
        for (kind, colour, width), found in zip(KINDS, spans(day), strict=True):
            fig.add_bar(
                y=[n + 1 for n, _, _ in found],
                x=[(end - begin) / unit for _, begin, end in found],
                base=[begin / unit for _, begin, _ in found],
                orientation="h",
                name=kind,
                legendgroup=kind,
                marker={"color": colour, "line": {"width": 0}},
                width=width,
                visible=which == 0,
                hovertemplate=f"request %{{y}}: {kind}, %{{x:.1f}} steps long<extra></extra>",
            )
        shown = [other == which for other in range(len(days)) for _ in KINDS]
        buttons.append({"label": names.get(label, label), "method": "restyle", "args": [{"visible": shown}]})
    end = max(row[5] for day in days.values() for row in day["requests"]) / unit
    fig.update_layout(barmode="overlay", bargap=0)
    fig.update_xaxes(title="time, in steps of decoding", range=[0, end * 1.01])
    fig.update_yaxes(title="request, by arrival", autorange="reversed", dtick=None)
    if len(days) > 1:
        switch(fig, buttons, name="Policy")
    return apply(fig, alt=alt, height=height)


def step_of(day: Mapping) -> float:
    """Seconds of the middle one of the steps that only decode: the unit of time of its figures."""
    only = [end - start for start, end, decode, prefill, *_ in day["moments"] if decode and not prefill]
    return statistics.median(only or [end - start for start, end, *_ in day["moments"]])


def arriving(run: Run) -> go.Figure:
    """The same arrivals under three policies."""
    found = {name: run.data["arriving"][name] for name in ("static", "apart", "mixed")}
    return gantt(
        found,
        names=NAMES,
        unit=step_of(found["mixed"]),
        height=640,
        alt="A row for each request over time, for three policies. With static batches long grey bars show requests in the queue "
        "until the whole batch before them has ended; with the two others they begin soon after they arrive.",
    )


def starving(run: Run) -> go.Figure:
    """Eight who talk, three long prompts in between."""
    arms = run.data["starving"]["arms"]
    return gantt(
        arms,
        unit=run.data["starving"]["step"],
        alt="Rows of eight requests that get tokens and three long prompts. With whole prompts the eight rows are red, getting "
        "nothing, each time a long prompt is computed; with prompts in pieces the red bars are gone and steps are a little longer.",
    )


def composition(run: Run) -> go.Figure:
    """What each step was made of, for the same day with prompts whole and in pieces."""
    arms = {name: run.data["starving"]["arms"][name] for name in ("whole prompts", "pieces of 128")}
    fig = make_subplots(rows=2, cols=1, vertical_spacing=0.16, subplot_titles=list(arms))
    unit = run.data["starving"]["step"]
    for at, day in enumerate(arms.values(), start=1):
        for column, label, colour in ((3, "tokens of prompts", PROMPT), (2, "rows that decode", TALKS)):
            fig.add_bar(
                x=[(m[0] + m[1]) / 2 / unit for m in day["moments"]],
                y=[m[column] for m in day["moments"]],
                width=[(m[1] - m[0]) / unit for m in day["moments"]],
                name=label,
                legendgroup=label,
                showlegend=at == 1,
                marker={"color": colour, "line": {"width": 0}},
                hovertemplate=f"%{{y}} {label}<extra></extra>",
                row=at,
                col=1,
            )
        fig.update_yaxes(title="tokens", row=at, col=1)
    fig.update_layout(barmode="stack", bargap=0)
    fig.update_xaxes(title="time, in steps of decoding", row=2, col=1)
    return apply(
        fig,
        height=480,
        alt="Two strips of bars, one bar a step. With whole prompts there are three wide tall bars of prompt tokens with no decoding "
        "row in them; in pieces, prompt tokens and decoding rows stand on top of each other in every step while a prompt lasts.",
    )


def blocks(run: Run) -> go.Figure:
    """Blocks held over time, with what it takes to serve the same requests from a pool that is too small."""
    arms = run.data["churning"]
    unit = step_of(arms["roomy pool"])
    fig = go.Figure()
    for name, colour, dash in (
        ("roomy pool", HEALTHY, "solid"),
        ("tight pool", SICK, "solid"),
        ("tight, watermark 0.3", OWNERS["C"], "dash"),
        ("tight, swapped out", OWNERS["A"], "dot"),
    ):
        day = arms[name]
        x, y = [m[1] / unit for m in day["moments"]], [m[6] for m in day["moments"]]
        fig.add_scatter(x=x, y=y, mode="lines", name=name, line={"color": colour, "dash": dash, "shape": "hv"},
                        hovertemplate="%{y} blocks<extra>" + name + "</extra>")  # fmt: skip
        at = [n for n, m in enumerate(day["moments"]) if m[7]]
        fig.add_scatter(x=[x[n] for n in at], y=[y[n] for n in at], mode="markers", name=f"{name}: preempted", showlegend=False,
                        marker={"color": colour, "symbol": "x", "size": 8},
                        text=[str(day["moments"][n][7]) for n in at],
                        hovertemplate="%{text} preempted<extra>" + name + "</extra>")  # fmt: skip
    fig.update_xaxes(title="time, in steps of decoding")
    fig.update_yaxes(title="blocks held", rangemode="tozero")
    return apply(
        fig,
        height=400,
        alt="Lines of blocks held over time. In the roomy pool the line rises once and falls. In the tight pool it stays at the "
        "ceiling, with crosses where requests are preempted, and ends latest of all.",
    )


# ---- throughput --------------------------------------------------------------------------------------------------------------


def policies(run: Run) -> go.Figure:
    """Throughput when everybody waits at once, as a multiple of lockstep's: measured, simulated, computed for a card."""
    rows = [("measured here, Alpaca", run.data["saturated"])]
    for machine, label in MACHINES.items():
        for workload, found in run.data["policies"][machine].items():
            rows.append((f"{label}, {workload}", found["saturated"]))
    fig = go.Figure()
    for policy, colour in (("static", PAD), ("apart", OWNERS["A"]), ("mixed", TALKS)):
        fig.add_bar(
            y=[label for label, _ in rows],
            x=[found[policy]["tokens_per_second"] / found["lockstep"]["tokens_per_second"] for _, found in rows],
            orientation="h",
            name=NAMES[policy],
            marker_color=colour,
            hovertemplate="%{x:.2f} times lockstep<extra>" + NAMES[policy] + "</extra>",
        )
    fig.add_vline(x=1, line={"color": MUTED, "dash": "dot"})
    fig.update_xaxes(title="throughput, lockstep = 1", rangemode="tozero")
    fig.update_yaxes(autorange="reversed")
    return apply(
        fig,
        height=440,
        alt="Groups of three bars of throughput against lockstep. Static batches without padding gain a little, the two policies that "
        "refill a batch gain much more, and they lie close to each other.",
    )


def knee(run: Run) -> go.Figure:
    """Throughput against rows, as a multiple of one row's: measured, fitted, and what the two rooflines allow."""
    rows = run.data["knee"]
    one = rows[0]["tokens_per_second"]
    fig = go.Figure()
    xs = [2 ** (k / 4) for k in range(41)]
    for label, cost, colour, dash in (
        ("this machine's roofline", Cost(**run.data["cost"]["roofline"]), HEALTHY, "dash"),
        ("A100 80 GB, computed", card_cost(), OWNERS["C"], "dot"),
    ):
        ys = [x / cost.seconds(Work(x, int(32 * x), 0)) * cost.seconds(Work(1, 32, 0)) for x in xs]
        fig.add_scatter(x=xs, y=ys, mode="lines", name=label, line={"color": colour, "dash": dash}, hovertemplate="%{y:.1f} times one row<extra>" + label + "</extra>")  # fmt: skip
    fig.add_scatter(
        x=[row["rows"] for row in rows],
        y=[row["tokens_per_second"] / one for row in rows],
        mode="markers+lines",
        name="measured",
        line={"color": TALKS},
        marker={"size": 9},
        hovertemplate="%{x} rows: %{y:.1f} times one row<extra>measured</extra>",
    )
    fig.update_xaxes(type="log", title="rows that decode together", tickvals=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024])
    fig.update_yaxes(type="log", title="throughput, one row = 1", dtick=1)
    return apply(
        fig,
        height=420,
        alt="Throughput against rows on two logarithmic axes. The card's line rises with the rows up to about 150 and is flat behind "
        "that; this machine's roofline bends at a few rows already; the measured points bend softly.",
    )


def fit(run: Run) -> go.Figure:
    """What the fitted cost says of a step against what the step took; only steps it was not fitted to."""
    cost = Cost(**run.data["cost"]["fitted"])
    held = run.data["cost"]["steps"][1::2]
    unit = statistics.median(step[0] for step in held)
    fig = go.Figure()
    for label, colour, symbol, keep in (
        ("only decodes", TALKS, "circle", lambda pairs: not pairs),
        ("with a piece of a prompt", PROMPT, "diamond", bool),
    ):
        some = [step for step in held if keep(step[3])]
        fig.add_scatter(
            x=[step[0] / unit for step in some],
            y=[cost.seconds(Work(*step[1:])) / unit for step in some],
            mode="markers",
            name=label,
            marker={"color": colour, "symbol": symbol, "opacity": 0.7},
            text=[f"{step[1]} tokens, {step[2]} read" for step in some],
            hovertemplate="%{text}: took %{x:.2f}, said %{y:.2f}<extra></extra>",
        )
    ends = [min(step[0] for step in held) / unit, max(step[0] for step in held) / unit]
    fig.add_scatter(x=ends, y=ends, mode="lines", name="equal", line={"color": MUTED, "dash": "dot"}, hoverinfo="skip")
    fig.update_xaxes(type="log", title="took, the middle step = 1")
    fig.update_yaxes(type="log", title="said by the cost")
    return apply(
        fig,
        height=420,
        alt="Points of said against measured time of a step, on logarithmic axes, close to the diagonal over more than a factor of ten.",
    )


def pools(run: Run) -> go.Figure:
    """Preemptions against the watermark, and against the block size."""
    rows = run.data["pools"]
    fig = make_subplots(
        rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.08, subplot_titles=["blocks of 16", "watermark 0.01"]
    )
    for at, (key, keep) in enumerate(
        (("watermark", lambda r: r["size"] == 16), ("size", lambda r: r["watermark"] == 0.01)), start=1
    ):
        some = sorted((row for row in rows if keep(row)), key=lambda row: row[key])
        fig.add_bar(
            x=[str(row[key]) for row in some],
            y=[row["preemptions"] for row in some],
            marker_color=SICK if at == 1 else OWNERS["A"],
            showlegend=False,
            text=[f"{row['again']:.1%} again" for row in some],
            hovertemplate="%{y} preemptions, %{text}<extra></extra>",
            row=1,
            col=at,
        )
        fig.update_xaxes(title="watermark" if at == 1 else "tokens in a block", type="category", row=1, col=at)
    fig.update_yaxes(title="preemptions", row=1, col=1)
    return apply(
        fig,
        height=360,
        alt="Two groups of bars of preemptions. They fall as the watermark rises from 0 to 0.2, and hardly depend on the block size.",
    )


# ---- tables ------------------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Markdown; the first column is text, the others are numbers."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def saturated_table(run: Run) -> str:
    """Everybody waits at once: throughput against lockstep, places used."""
    found = run.data["saturated"]
    base = found["lockstep"]["tokens_per_second"]
    return table(
        ["batches", "throughput", "places that got a wanted token"],
        [[NAMES[name], f"{found[name]['tokens_per_second'] / base:.2f}", f"{found[name]['places']:.0%}"] for name in NAMES],
    )


def arriving_table(run: Run) -> str:
    """Requests that arrive: waiting and speed, each against the mixed policy's."""
    found, foreseen = run.data["arriving"], run.data["foreseen"]["arriving"]
    base = found["mixed"]
    return table(
        ["policy", "mean TTFT", "p95 TTFT", "mean time of an answer", "longest pause, p95", "the clock said of the mean TTFT"],
        [
            [
                NAMES[name],
                *(f"{found[name][key] / base[key]:.2f}" for key in ("ttft_mean", "ttft_p95", "latency_mean", "stall_p95")),
                f"{foreseen[name]['ttft_mean'] / foreseen['mixed']['ttft_mean']:.2f}",
            ]
            for name in ("static", "apart", "mixed")
        ],
    )


def starving_table(run: Run) -> str:
    """The three arms of starvation, in steps of the talkers alone."""
    unit = run.data["starving"]["step"]
    arms = run.data["starving"]["arms"]
    return table(
        [
            "prompts",
            "longest pause of a talker",
            "mean time per token of a talker",
            "mean TTFT of a long prompt",
            "all done after",
        ],
        [
            [name, *(f"{day[key] / unit:.1f}" for key in ("talkers_stall", "talkers_tpot", "long_ttft", "seconds"))]
            for name, day in arms.items()
        ],
    )


def churning_table(run: Run) -> str:
    """A pool that is too small, and what helps."""
    arms = run.data["churning"]
    base = arms["roomy pool"]["tokens_per_second"]
    return table(
        ["", "blocks", "preemptions", "computed more than once", "throughput"],
        [
            [name, day["blocks"], day["preemptions"], f"{day['again']:.0%}", f"{day['tokens_per_second'] / base:.2f}"]
            for name, day in arms.items()
        ],
    )


def blocks_table(run: Run) -> str:
    """What small blocks cost in a step."""
    rows = run.data["small_blocks"]
    base = next(row["step"] for row in rows if row["size"] == 16)
    return table(
        ["tokens in a block", "a decode step", "the scheduler's share of it"],
        [[row["size"], f"{row['step'] / base:.2f}", f"{row['plan'] / row['step']:.2%}"] for row in rows],
    )


def queues_table(run: Run) -> str:
    """A flood and a quiet owner: waiting against what a fair queue gives."""
    found = run.data["queues"]
    base = found["least served first"]["quiet"]["ttft_mean"]
    return table(
        ["queue", "quiet owner: mean TTFT", "p95", "flooding owner: mean TTFT", "its last answer"],
        [
            [
                name,
                f"{who['quiet']['ttft_mean'] / base:.1f}",
                f"{who['quiet']['ttft_p95'] / base:.1f}",
                f"{who['floods']['ttft_mean'] / base:.0f}",
                f"{who['floods']['last'] / base:.0f}",
            ]
            for name, who in found.items()
        ],
    )


def equal_table(run: Run) -> str:
    """Every policy against each request alone."""
    found = run.data["equal"]
    return table(
        ["", "largest \\|Δlogit\\|", "answers that differ", "preemptions"],
        [[name, number(arm["delta"]), arm["flips"], arm["preemptions"]] for name, arm in found["arms"].items()],
    )
