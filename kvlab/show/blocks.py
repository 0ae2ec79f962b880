"""Figures of the block manager's experiment. Each takes a Run, or the part of its data that a lab has just made itself."""

from __future__ import annotations

import math

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlab.experiments.allocators import PAPER
from kvlab.experiments.bookkeeping import OWNERS as NAMES
from kvlab.faults import ZOO
from kvlab.record import Run, powers
from kvlab.show.theme import FREE, HEALTHY, MUTED, OWNERS, SHARED, SICK, apply

FINDABLE = "rgba(176, 136, 24, 0.32)"  # SHARED, faded: nobody holds it, and its old prompt may come again
FLOOR = 1e-6
STATES = ("free", "free, findable", "shared", *NAMES)
COLOURS = (FREE, FINDABLE, SHARED, *(OWNERS[name] for name in NAMES))
WORDS = {
    "reserve": "given to",
    "hit": "found by",
    "share": "shared with",
    "append": "written by",
    "copy": "copied for",
    "release": "given back by",
    "publish": "findable, by",
    "unpublish": "no longer findable, by",
    "evict": "evicted",
}


def pool_map(run: Run | dict, *, columns: int = 12) -> go.Figure:
    """The pool as a map, one cell a block, coloured by owner; a slider over time; each block's last events on hover."""
    day = run.data["day"] if isinstance(run, Run) else run
    ticks, count = len(day["states"]), len(day["stories"])
    rows = -(-count // columns)

    def grid(cells: list) -> list[list]:
        return [cells[row * columns : (row + 1) * columns] for row in range(rows)]

    def picture(tick: int) -> go.Heatmap:
        states = day["states"][tick]
        return go.Heatmap(
            z=grid([_code(state) for state in states]),
            text=grid([state if state in NAMES else "" if state in ("free", "found") else "+" for state in states]),
            hovertext=grid([_story(i, state, day["stories"][i], tick) for i, state in enumerate(states)]),
        )

    first = picture(ticks // 2)
    shares = [i / len(STATES) for i in range(len(STATES) + 1)]
    first.update(
        colorscale=[[share, colour] for i, colour in enumerate(COLOURS) for share in shares[i : i + 2]],
        zmin=-0.5,
        zmax=len(STATES) - 0.5,
        xgap=3,
        ygap=3,
        texttemplate="%{text}",
        hovertemplate="%{hovertext}<extra></extra>",
        colorbar={"tickvals": list(range(len(STATES))), "ticktext": list(STATES), "thickness": 16},
    )
    fig = go.Figure(first, frames=[go.Frame(data=[picture(tick)], name=str(tick), traces=[0]) for tick in range(ticks)])
    still = {"mode": "immediate", "frame": {"duration": 0, "redraw": True}, "transition": {"duration": 0}}
    film = {"fromcurrent": True, "frame": {"duration": 350, "redraw": True}, "transition": {"duration": 0}}
    fig.update_layout(
        sliders=[
            {
                "active": ticks // 2,
                "currentvalue": {"prefix": "tick "},
                "steps": [{"label": str(t), "method": "animate", "args": [[str(t)], still]} for t in range(ticks)],
            }
        ],
        updatemenus=[
            {
                "type": "buttons",
                "direction": "right",
                "showactive": False,
                "x": 0,
                "xanchor": "left",
                "y": 1.02,
                "yanchor": "bottom",
                "buttons": [
                    {"label": "Play", "method": "animate", "args": [None, film]},
                    {"label": "Pause", "method": "animate", "args": [[None], still]},
                ],
            }
        ],
    )
    fig.update_xaxes(visible=False)
    fig.update_yaxes(visible=False, autorange="reversed")
    return apply(
        fig,
        height=430,
        alt=f"A map of {count} blocks over {ticks} ticks, coloured by owner. The blocks of a common system prompt are shared by several "
        "owners throughout; the others change hands, and at first unused blocks are soon all held or still findable.",
    )


def _code(state: str) -> int:
    if state in ("free", "found"):
        return 0 if state == "free" else 1
    return STATES.index(state) if state in NAMES else 2


def _story(block: int, state: str, lines: list, tick: int) -> str:
    shown = {"free": "free", "found": "free, but findable"}.get(state) or f"held by {', '.join(state)}"
    told = [f"<b>block {block}</b>: {shown}"]
    for when, what, who, start, stop in [line for line in lines if line[0] <= tick][-4:]:
        where = "" if start is None else f", tokens {start}–{stop - 1}"
        told.append(f"tick {when}: {WORDS.get(what, what)}{f' {who}' if who else ''}{where}")
    return "<br>".join(told)


PARTS = (
    ("written", "holds a token", HEALTHY),
    ("to_come", "kept for tokens to come", "#7fb2ac"),
    ("never", "held and never used", "#c9932b"),
    ("free", "free, and too small or too broken to use", "#9aa0aa"),
)


def utilisation(run: Run | dict, workload: str = "ShareGPT", spread: str = "1.0") -> go.Figure:
    """What the slots of a full pool do, by policy, beside the share of token state in PagedAttention's figure 2.

    Given a Run, a menu offers its workloads and spreads; given one simulation's dict, that one is shown.
    """
    if isinstance(run, Run):
        cases = {
            (name, width): found for name, by_spread in run.data["utilisation"].items() for width, found in by_spread.items()
        }
    else:
        cases = {(workload, spread): run}
    chosen = (workload, spread) if (workload, spread) in cases else next(iter(cases))
    fig = go.Figure()
    policies = list(PAPER)[::-1]
    owners = []
    for case, found in cases.items():
        for key, label, colour in PARTS:
            owners.append(case)
            fig.add_bar(
                y=policies,
                x=[found[policy][key] for policy in policies],
                orientation="h",
                name=label,
                marker_color=colour,
                visible=case == chosen,
                hovertemplate="%{y}: %{x:.1%} " + label + "<extra></extra>",
            )
    fig.add_scatter(
        y=policies,
        x=[PAPER[policy] / 100 for policy in policies],
        mode="markers",
        name="token state in the paper",
        marker={"symbol": "diamond-open", "size": 12, "color": SICK, "line": {"width": 2.5}},
        hovertemplate="%{y}: %{x:.1%} in the paper<extra></extra>",
    )
    if len(cases) > 1:
        buttons = [
            {
                "label": f"{name}, σ {width}",
                "method": "update",
                "args": [{"visible": [owner == (name, width) for owner in owners] + [True]}],
            }
            for name, width in cases
        ]
        active = list(cases).index(chosen)
        fig.update_layout(
            updatemenus=[
                {
                    "name": "Lengths",
                    "buttons": buttons,
                    "active": active,
                    "x": 1,
                    "xanchor": "right",
                    "y": 1.32,
                    "yanchor": "bottom",
                }
            ]
        )
    fig.update_layout(barmode="stack", legend={"traceorder": "normal"})
    fig.update_xaxes(title="share of the pool", tickformat=".0%", range=[0, 1.001])
    return apply(
        fig,
        height=420,
        alt="Stacked bars of what a full pool's slots do, for four policies. Reserving the maximum length, a power of two or the known "
        "length leaves most slots without a token; paging fills nearly all. Diamonds mark the paper's values.",
    )


def sweep(run: Run | dict) -> go.Figure:
    """Block size against what a block wastes and what a table costs."""
    sizes = run.data["block_sizes"] if isinstance(run, Run) else {str(size): found for size, found in run.items()}
    x = list(sizes)
    fig = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.12)
    fig.add_scatter(
        x=x,
        y=[1 - found["of_held"] for found in sizes.values()],
        mode="lines+markers",
        name="held slots without a token",
        line={"color": SHARED, "width": 2.5},
        marker={"size": 8},
        hovertemplate="block size %{x}: %{y:.1%} of what is held is empty<extra></extra>",
        row=1,
        col=1,
    )
    fig.add_scatter(
        x=x,
        y=[found["entries"] for found in sizes.values()],
        mode="lines+markers",
        name="table entries of a request",
        line={"color": OWNERS["A"], "width": 2.5, "dash": "dot"},
        marker={"size": 8, "symbol": "square"},
        hovertemplate="block size %{x}: %{y:.0f} entries<extra></extra>",
        row=2,
        col=1,
    )
    fig.update_xaxes(type="category")
    fig.update_xaxes(title="tokens a block holds", row=2, col=1)
    fig.update_yaxes(title="empty", tickformat=".0%", row=1, col=1)
    fig.update_yaxes(title="entries", type="log", row=2, col=1)
    return apply(
        fig,
        height=460,
        alt="Two curves over the block size from 1 to 256. The share of held slots that are empty rises with the block size; the "
        "entries of a block table fall in proportion to it.",
    )


ARMS = (
    ("copies", "no sharing: each sample has a copy", MUTED, "dash"),
    ("sharing", "sharing", HEALTHY, "solid"),
    ("sharing, leaking", "sharing, with a leaked reference", SICK, "solid"),
)


def leak(run: Run | dict) -> go.Figure:
    """Blocks held over time with and without a leaking count; below, how long ago every block still counted was last used."""
    arms = run.data["leak"] if isinstance(run, Run) else run
    fig = make_subplots(rows=2, cols=1, vertical_spacing=0.2)
    for key, label, colour, dash in ARMS:
        fig.add_scatter(
            y=arms[key]["held"],
            mode="lines",
            name=label,
            line={"color": colour, "width": 2.5, "dash": dash},
            hovertemplate="after request %{x}: %{y} blocks held<extra></extra>",
            row=1,
            col=1,
        )
    now = max(block[2] for block in arms["sharing, leaking"]["blocks"])
    for live, label, colour, symbol in (
        (True, "named by a request's table", HEALTHY, "circle"),
        (False, "counted, named by none", SICK, "x"),
    ):
        chosen = [block for block in arms["sharing, leaking"]["blocks"] if block[3] is live]
        fig.add_scatter(
            x=[block[0] for block in chosen],
            y=[now - block[2] for block in chosen],
            mode="markers",
            name=label,
            marker={"color": colour, "size": 7, "symbol": symbol},
            customdata=[block[1] for block in chosen],
            hovertemplate="block %{x}: created at call %{customdata}, last access %{y} calls ago<extra></extra>",
            row=2,
            col=1,
        )
    fig.update_xaxes(title="requests served", row=1, col=1)
    fig.update_yaxes(title="blocks held", rangemode="tozero", row=1, col=1)
    fig.update_xaxes(title="block", row=2, col=1)
    fig.update_yaxes(title="calls since last access", rangemode="tozero", row=2, col=1)
    return apply(
        fig,
        height=640,
        alt="Above: blocks held over the requests served. Copies and sharing stay level, sharing below copies; with a leaked reference the "
        "line climbs until the pool is full. Below: calls since each block was last used: few for blocks in use, up to hundreds for leaked ones.",
    )


def separation(run: Run) -> go.Figure:
    """Each scene's victims: |Δlogit| against what they say alone, manager healthy and broken, with ε."""
    fig = go.Figure()
    names = list(run.data["scenes"])[::-1]
    for kind, colour, shift in (("healthy", HEALTHY, 0.16), ("sick", SICK, -0.16)):
        points = [
            (max(row[kind]["delta"], FLOOR), at + shift, f"{row['secret']}: {row[kind]['text']!r}")
            for at, name in enumerate(names)
            for row in run.data["scenes"][name]["rows"]
        ]
        fig.add_scatter(
            x=[p[0] for p in points],
            y=[p[1] for p in points],
            mode="markers",
            name="manager healthy" if kind == "healthy" else "fault on",
            marker={"color": colour, "size": 8, "symbol": "circle" if kind == "healthy" else "x", "opacity": 0.75},
            text=[p[2] for p in points],
            hovertemplate="%{text}<br>|Δlogit| %{x:.2g}<extra></extra>",
        )
    bound = run.data["equal"]["epsilon"]
    fig.add_vline(x=bound, line={"color": MUTED, "dash": "dot"})
    fig.add_annotation(
        x=math.log10(bound), y=1, yref="paper", text=f"ε = {bound:.2g}", showarrow=False, xanchor="left", xshift=6
    )
    fig.update_xaxes(
        type="log", title="largest |Δlogit| of the victim's answer (identical at the left edge)", exponentformat="power"
    )
    fig.update_yaxes(tickvals=list(range(len(names))), ticktext=names, range=[-0.5, len(names) - 0.5])
    return apply(
        fig,
        height=400,
        alt="For each of four faults, the victims' logit differences on a logarithmic axis: with the manager healthy below epsilon, with the "
        "fault on several units.",
    )


def predictions(guessed: dict[str, float], measured: dict[str, float]) -> go.Figure:
    """What a reader guessed beside what was measured: policy → share of the pool that holds a token, 0 to 1."""
    names = list(guessed)[::-1]
    fig = go.Figure()
    for label, values, colour, symbol in (
        ("guessed", guessed, MUTED, "circle-open"),
        ("measured", measured, OWNERS["A"], "circle"),
        ("in the paper", {name: value / 100 for name, value in PAPER.items()}, SICK, "diamond-open"),
    ):
        fig.add_scatter(
            x=[float(values[name]) for name in names],
            y=names,
            mode="markers",
            name=label,
            marker={"color": colour, "size": 13, "symbol": symbol, "line": {"width": 2.5}},
            hovertemplate="%{y}: %{x:.0%}<extra>" + label + "</extra>",
        )
    fig.update_xaxes(title="share of the pool that holds a token", tickformat=".0%", range=[0, 1])
    return apply(fig, height=320, alt="Guessed, measured and published shares of used memory for four ways to give it out.")


# ---- tables and prose ------------------------------------------------------------------------------------------------


def equal_table(run: Run) -> str:
    """Markdown: each way over each manager against a DynamicCache of one's own."""
    lines = ["| prompts run | over | largest \\|Δlogit\\| | texts that differ |", "|---|---|---:|---:|"]
    equal = run.data["equal"]
    for label, found in equal["arms"].items():
        arm, manager = label.rsplit(", ", 1)
        lines.append(f"| {arm} | {manager} | {found['delta']:.1g} | {found['flips']} of {equal['prompts']} |")
    lines.append(f"| in chunks and batched | DynamicCache | {equal['dynamic']:.1g} | |")
    return powers("\n".join(lines))


def scenes_table(run: Run) -> str:
    """Markdown: each fault, what the victim said with it off and on, and who noticed when."""
    lines = [
        "| fault | victim | fault off | fault on | says the password | `check()` complains when | owner scan |",
        "|---|---|---|---|---:|---|---|",
    ]
    for name, scene in run.data["scenes"].items():
        first, rows = scene["rows"][0], scene["rows"]
        told = sum(row["sick"]["said"] != "none" for row in rows)
        whole = sum(row["sick"]["said"] == "all" for row in rows)
        complaint = f"{first['complaint']['when']}: {first['complaint']['rule']}" if first["complaint"] else "never"
        finding = first["findings"][0].partition(": ")[0] if first["findings"] else "nothing"
        cells = (
            f"`{name}`",
            scene["victim"],
            _quoted(first["healthy"]["text"]),
            _quoted(first["sick"]["text"]),
            f"{told} of {len(rows)} (all of it {whole})",
            complaint,
            finding,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def zoo_table() -> str:
    """Markdown: what each fault of the manager replaces, and its fix."""
    lines = ["| fault | what is wrong | the fix |", "|---|---|---|"]
    lines += [
        f"| `{fault.name}` | {fault.mechanism} | {fault.fix} |" for fault in ZOO.values() if "BlockManager" in fault.breaks
    ]
    return "\n".join(lines)


def spreads_table(run: Run) -> str:
    """Markdown: the share of the pool that holds a token, by lengths and policy, beside the paper's."""
    lines = [
        "| lengths | " + " | ".join(PAPER) + " |",
        "|---|" + "---:|" * len(PAPER),
    ]
    for workload, by_spread in run.data["utilisation"].items():
        for spread, found in by_spread.items():
            lines.append(
                f"| {workload}, σ {spread} | " + " | ".join(f"{found[policy]['written']:.1%}" for policy in PAPER) + " |"
            )
    lines.append("| *the paper* | " + " | ".join(f"*{value} %*" for value in PAPER.values()) + " |")
    return "\n".join(lines)


def facts(run: Run) -> dict[str, str]:
    """The numbers chapter 5 says in its prose, by name, as text."""
    equal, scenes, sizes = run.data["equal"], run.data["scenes"], run.data["block_sizes"]
    rows = [row for scene in scenes.values() for row in scene["rows"]]
    use = run.data["utilisation"]["ShareGPT"]["1.0"]
    leaks, day = run.data["leak"], run.data["day"]
    lost = sum(not block[3] for block in leaks["sharing, leaking"]["blocks"])
    contiguous = [p for p in PAPER if p != "paged"]
    all_held = [
        found[p]["of_held"]
        for by_spread in run.data["utilisation"].values()
        for found in by_spread.values()
        for p in contiguous
    ]
    all_paged = [found["paged"]["of_held"] for by in run.data["utilisation"].values() for found in by.values()]
    ratios = [found["step_ratio"] for found in sizes.values() if "step_ratio" in found]
    return {
        "prompts": str(equal["prompts"]),
        "arms": str(len(equal["arms"])),
        "epsilon": powers(f"{equal['epsilon']:.2g}"),
        "alone_delta": powers(f"{max(arm['delta'] for name, arm in equal['arms'].items() if name.startswith('alone')):.1g}"),
        "paged_delta": powers(f"{max(arm['delta'] for arm in equal['arms'].values()):.1g}"),
        "dynamic_delta": powers(f"{equal['dynamic']:.1g}"),
        "paged_flips": str(sum(arm["flips"] for arm in equal["arms"].values())),
        "block_bytes": f"{equal['block_bytes']['measured']:,}",
        "token_bytes": f"{run.data['token_bytes']:,}",
        "secrets": str(len(next(iter(scenes.values()))["rows"])),
        "sick_runs": str(len(rows)),
        "sick_told": str(sum(row["sick"]["said"] != "none" for row in rows)),
        "sick_whole": str(sum(row["sick"]["said"] == "all" for row in rows)),
        "healthy_told": str(sum(row["healthy"]["said"] != "none" for row in rows)),
        "healthy_delta": powers(f"{max(row['healthy']['delta'] for row in rows):.1g}"),
        "sick_delta": f"{min(row['sick']['delta'] for row in rows):.2g}",
        "caught_by_check": str(sum(bool(row["complaint"]) for row in rows)),
        "caught_by_scan": str(sum(bool(row["findings"]) for row in rows)),
        "caught_by_logits": str(sum(row["verdict"] == "state fault" for row in rows)),
        "false_alarms": str(sum(row["healthy_caught"] or row["healthy_verdict"] == "state fault" for row in rows)),
        **{f"written_{policy.replace(' ', '_')}": f"{use[policy]['written']:.0%}" for policy in PAPER},
        **{f"counted_{policy.replace(' ', '_')}": f"{use[policy]['counted']:.0%}" for policy in contiguous},
        "contiguous_low": f"{min(all_held):.0%}",
        "contiguous_high": f"{max(all_held):.0%}",
        "paged_low": f"{min(all_paged):.0%}",
        "paged_high": f"{max(all_paged):.0%}",
        "running_max_length": f"{use['max length']['running']:.0f}",
        "running_paged": f"{use['paged']['running']:.0f}",
        "preempted": f"{use['paged']['preempted']:,.0f}",
        "steps": f"{run.manifest.settings['steps']:,}",
        "slots": f"{run.manifest.settings['slots']:,}",
        "empty_16": f"{1 - sizes['16']['of_held']:.1%}",
        "empty_256": f"{1 - sizes['256']['of_held']:.1%}",
        "entries_1": f"{sizes['1']['entries']:.0f}",
        "entries_16": f"{sizes['16']['entries']:.0f}",
        "table_share_1": f"{4 / run.data['token_bytes']:.3%}",
        "step_ratio_low": f"{min(ratios):.2f}" if ratios else "?",
        "step_ratio_high": f"{max(ratios):.2f}" if ratios else "?",
        "leak_requests": str(leaks["sharing, leaking"]["served"]),
        "leak_lost": str(lost),
        "leak_noticed": str((leaks["sharing, leaking"]["complaint"] or {}).get("request", "never")),
        "copies_held": f"{max(leaks['copies']['held'])}",
        "sharing_held": f"{max(leaks['sharing']['held'])}",
        "day_requests": str(day["requests"]),
        "day_blocks": str(len(day["stories"])),
        "day_ticks": str(len(day["states"])),
    }


def _quoted(text: str, length: int = 40) -> str:
    text = text.partition("<|im_end|>")[0].replace("\n", " ").replace("|", "\\|").strip()
    return f"“{text[:length]}{'…' if len(text) > length else ''}”"
