"""Figures and tables of the prefix run. Each takes a Run and returns a `go.Figure`, or Markdown."""

from __future__ import annotations

import math
import statistics

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlab.experiments import prefix_results as results
from kvlab.record import Run, number
from kvlab.show.theme import FREE, HEALTHY, MUTED, OWNERS, PAD, SHARED, SICK, apply

FLOOR = 1e-6  # identical runs have |Δlogit| 0, which a logarithmic axis cannot show

# Claim B13, as reported: (first token ms, last token ms, memory GB, output) for each group, isolated and shared.
REPORT = {
    ("1", "isolated"): (320, 580, 14.2, "consistent"),
    ("1", "shared"): (185, 410, 13.8, "consistent"),
    ("2", "isolated"): (315, 575, 14.2, "consistent"),
    ("2", "shared"): (190, 420, 13.9, "inconsistent"),
    ("3", "isolated"): (318, 590, 14.3, "consistent"),
    ("3", "shared"): (188, 415, 13.8, "inconsistent"),
}


# ---- figures ----------------------------------------------------------------------------------------------------------


def deltas(run: Run) -> go.Figure:
    """Every way to share as a row of points, one for each pair: |Δlogit| of the request it hits worse, against isolated."""
    found = [f for f in results.arms(run).values() if f["arm"].kind != "isolated"]
    found.sort(key=lambda f: (-f["arm"].group, f["arm"].kind == "right", f["arm"].name))
    bound = results.epsilon(run)
    fig = go.Figure()
    for kind, colour, symbol in (("right", HEALTHY, "circle"), ("wrong", SICK, "diamond")):
        x, y, text = [], [], []
        for f in found:
            if f["arm"].kind != kind:
                continue
            for pair in run.data["pairs"]:
                if f["arm"].name in pair["arms"]:
                    request = pair["arms"][f["arm"].name]["requests"][f["hurt"]]
                    x.append(max(max(request["row"][2]), FLOOR))
                    y.append(_label(f))
                    text.append(f"{f['arm'].what}<br>request {f['hurt']}, |Δlogit| {number(max(request['row'][2]))}")
        fig.add_scatter(
            x=x,
            y=y,
            mode="markers",
            name=f"shared {'rightly' if kind == 'right' else 'wrongly'}",
            marker={"color": colour, "size": 11, "symbol": symbol, "opacity": 0.75},
            text=text,
            hovertemplate="%{text}<extra></extra>",
        )
    fig.add_vline(x=bound, line={"color": MUTED, "dash": "dot"})
    fig.add_annotation(x=math.log10(bound), y=1, yref="paper", yanchor="bottom", text=f"ε = {number(bound)}", showarrow=False)
    fig.update_xaxes(type="log", title="largest |Δlogit| (identical at the left edge)", exponentformat="power")
    fig.update_yaxes(categoryorder="array", categoryarray=[_label(f) for f in found])
    return apply(
        fig,
        height=560,
        alt="Points on a logarithmic axis. All ways to share rightly lie below epsilon, about a ten-thousandth; all ways to share "
        "wrongly lie far above it, most of them by four orders of magnitude or more.",
    )


def memory(run: Run) -> go.Figure:
    """K/V bytes of the requests that run at once behind one prefix: a bar for isolated, a bar for shared."""
    together = run.data["together"]
    names = ["isolated", "shared"]
    fig = go.Figure()
    for key, label, colour in (("prefix_bytes", "the prefix", SHARED), ("own_bytes", "the requests' own", OWNERS["A"])):
        fig.add_bar(
            y=names,
            x=[together[name][key] / 2**20 for name in names],
            orientation="h",
            name=label,
            marker_color=colour,
            hovertemplate=label + ": %{x:.0f} MiB<extra></extra>",
        )
    fig.update_layout(barmode="stack")
    fig.update_xaxes(title="K/V held, MiB")
    fig.update_yaxes(autorange="reversed")
    return apply(
        fig,
        height=260,
        alt="Two bars of K/V memory. Isolated, nearly all of it is copies of the prefix; shared, the prefix is there once and a "
        "small bar remains.",
    )


def waiting(run: Run) -> go.Figure:
    """When each of the requests that arrive at once has its first token, as a multiple of one isolated prefill."""
    together = run.data["together"]
    unit = statistics.median(together["isolated"]["ttft"])
    fig = go.Figure()
    for name, colour, symbol in (("isolated", MUTED, "circle-open"), ("shared", SHARED, "circle")):
        y = [t / unit for t in together[name]["first_token_after"]]
        fig.add_scatter(
            x=list(range(1, len(y) + 1)),
            y=y,
            name=name,
            mode="lines+markers",
            line={"color": colour},
            marker={"symbol": symbol, "size": 9},
            hovertemplate="request %{x}: after %{y:.1f} isolated prefills<extra>" + name + "</extra>",
        )
    fig.update_xaxes(title="request, in the order they are prefilled")
    fig.update_yaxes(title="first token, in isolated prefills", rangemode="tozero")
    return apply(
        fig,
        height=380,
        alt="Two lines of the time to the first token for requests that arrive together. Isolated, each waits one whole prefill "
        "longer than the one before; shared, the line rises slowly after the first.",
    )


def block_size(run: Run) -> go.Figure:
    """Block size against the share of tokens found and against the slots held: bookkeeping on made-up traffic."""
    rows = run.data["block_sizes"]
    size = [str(row["size"]) for row in rows]
    fig = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    fig.add_scatter(
        x=size,
        y=[row["hit_rate"] for row in rows],
        mode="lines+markers",
        name="tokens found in the pool",
        line={"color": SHARED},
        hovertemplate="blocks of %{x}: %{y:.1%} found<extra></extra>",
        row=1,
        col=1,
    )
    per_token = run.data["shape"]["bytes_per_token"]
    for key, label, colour in (("used", "holding tokens", OWNERS["A"]), ("slots_unused", "reserved and empty", PAD)):
        slots = [row["slots_unused"] if key == "slots_unused" else row["slots_held"] - row["slots_unused"] for row in rows]
        fig.add_bar(
            x=size,
            y=[s * per_token / 2**20 for s in slots],
            name=label,
            marker={"color": colour, "pattern": {"shape": "/" if key == "slots_unused" else ""}},
            customdata=[row["table_entries"] for row in rows],
            hovertemplate=label + ": %{y:.0f} MiB; %{customdata:.0f} table entries<extra></extra>",
            row=2,
            col=1,
        )
    fig.update_layout(barmode="stack")
    fig.update_yaxes(title="found", tickformat=".0%", rangemode="tozero", row=1, col=1)
    fig.update_yaxes(title="K/V held, MiB", row=2, col=1)
    fig.update_xaxes(type="category")
    fig.update_xaxes(title="tokens in a block", row=2, col=1)
    return apply(
        fig,
        height=520,
        alt="Above, the share of tokens found falls slowly from block size 1 to 32 and fast after 64. Below, the memory held grows "
        "with the block size, and so does its empty part.",
    )


def boundary(run: Run) -> go.Figure:
    """Tokens a hit has to compute, for every length of the common prefix around the recorded one."""
    curve = run.data["boundary"]["curve"]
    suffix, block = run.manifest.settings["suffix"], run.data["shape"]["block"]
    fig = go.Figure()
    fig.add_bar(
        x=[length for length, _ in curve],
        y=[suffix] * len(curve),
        name="the suffix",
        marker_color=OWNERS["B"],
        hovertemplate="prefix of %{x}: %{y} tokens of the suffix<extra></extra>",
    )
    fig.add_bar(
        x=[length for length, _ in curve],
        y=[computed - suffix for _, computed in curve],
        name="common, but in a block that is not full",
        marker={"color": PAD, "pattern": {"shape": "/"}},
        hovertemplate="prefix of %{x}: %{y} common tokens computed again<extra></extra>",
    )
    fig.update_layout(barmode="stack", bargap=0.1)
    fig.update_xaxes(title="common prefix, tokens", dtick=block)
    fig.update_yaxes(title="tokens computed on a hit")
    return apply(
        fig,
        height=360,
        alt=f"A saw-tooth: tokens computed on a hit rise by one with each token of the prefix and drop back at every multiple of {block}.",
    )


def edits(run: Run) -> go.Figure:
    """What of a prompt is shared after each edit: shared, common but lost, equal further on but of no use, and new."""
    rows = list(reversed(run.data["edits"]))
    names = [row["what"] for row in rows]
    overlap = [min(row["overlap"][2], row["length"] - row["common"]) if row["overlap"] else 0 for row in rows]
    series = (
        ("shared", [row["shared"] for row in rows], SHARED, ""),
        ("common, computed again", [row["common"] - row["shared"] for row in rows], PAD, "/"),
        ("equal further on, of no use", overlap, SICK, "x"),
        ("different", [row["length"] - row["common"] - o for row, o in zip(rows, overlap)], FREE, ""),
    )
    fig = go.Figure()
    for label, values, colour, shape in series:
        fig.add_bar(
            y=names,
            x=values,
            orientation="h",
            name=label,
            marker={"color": colour, "pattern": {"shape": shape, "fgopacity": 0.5}},
            hovertemplate="%{y}<br>" + label + ": %{x} tokens<extra></extra>",
        )
    fig.update_layout(barmode="stack")
    fig.update_xaxes(title="tokens")
    return apply(
        fig,
        height=560,
        alt="A bar for each pair of prompts. Where only the end differs nearly all is shared; with a timestamp, a blank or an edit near the "
        "start almost nothing is, although most tokens are equal.",
    )


# ---- tables -----------------------------------------------------------------------------------------------------------


def report_table(run: Run) -> str:
    """Markdown: claim B13's table, and the same six rows as measured here, as ratios to the isolated row."""
    found = results.arms(run)
    rows = [
        ("1", "isolated", "isolated", "1 isolated"),
        ("1", "shared", "shared", "1 shared"),
        ("2", "isolated", "isolated", "2 isolated"),
        ("2", "shared", "shared, wrongly", "2 found by its own tokens"),
        ("2", None, "shared, rightly (nothing is found)", "2 shared"),
        ("3", "isolated", "isolated", "3 isolated"),
        ("3", "shared", "shared “wrongly”: as the report's code does it", "3 saved cache, the object itself"),
        ("3", None, "shared, rightly", "3 shared"),
    ]
    lines = [
        "| sharing | reported: first token / all / memory | output | here: first token / all / K/V | B computes | \\|Δlogit\\| | output |",
        "|---|---|---|---|---:|---:|---|",
    ]
    for group, key, label, arm in rows:
        f = found[arm]
        isolated, theirs = f["arm"].kind == "isolated", ["", ""]
        if isolated:
            lines.append(f"| **{group}: {run.data['groups'][group]}** | | | | | | |")
        if key:
            base, mine = REPORT[group, "isolated"], REPORT[group, key]
            theirs = [" / ".join(_ratio(a / b) for a, b in zip(mine[:3], base[:3])), mine[3]]
        ours = " / ".join(_ratio(f[part]) for part in ("ttft", "latency", "held"))
        cells = [label, *theirs, ours, f"{f['computed']} of {f['length']}"]
        lines.append("| " + " | ".join([*cells, *(["", ""] if isolated else [_deltas(f), _output(f)])]) + " |")
    return "\n".join(lines)


def groups_table(run: Run) -> str:
    """Markdown: every arm with what B computed, its ratios to isolated, and the verdict."""
    lines = [
        "| way to share | what it does | B computes | first token / all / K/V | \\|Δlogit\\| (request) | verdict | `check()` |",
        "|---|---|---:|---|---:|---|---|",
    ]
    for f in results.arms(run).values():
        arm, mark = f["arm"], "**" if f["arm"].kind == "wrong" else ""
        isolated = arm.kind == "isolated"
        said = "noise" if f["faults"] == 0 else f"state fault, {f['faults']} of {f['pairs']}; text changed in {f['texts']}"
        said = "other ids: not the same prompt" if arm.group == 5 and f["faults"] else said
        ratios = " / ".join("–" if f[part] is None else _ratio(f[part]) for part in ("ttft", "latency", "held"))
        cells = [f"{mark}{arm.name}{mark}", arm.what, f"{f['computed']} of {f['length']}", ratios]
        cells += ["", ""] if isolated else [f"{_deltas(f)} ({f['hurt']})", said]
        lines.append("| " + " | ".join([*cells, f["check"] or ""]) + " |")
    return "\n".join(lines)


def texts_table(run: Run) -> str:
    """Markdown: what the request that is hit worse says in the first pair, isolated and shared wrongly."""
    lines = ["| shared wrongly | request | isolated it says | now it says |", "|---|---|---|---|"]
    arms = run.data["pairs"][0]["arms"]
    for f in results.wrong(run):
        reference = arms[f"{f['arm'].name.split()[0]} isolated"]["requests"][f["hurt"]]["text"]
        lines.append(f"| {f['arm'].name} | {f['hurt']} | {_quote(reference)} | {_quote(f['text'])} |")
    return "\n".join(lines)


def decision_table(run: Run) -> str:
    """Markdown: claim B8's rows, each with its evidence."""
    lines = ["| condition | the report says | measured, \\|Δlogit\\| | holds |", "|---|---|---|---|"]
    for condition, says, measured, holds in results.decisions(run):
        lines.append(f"| {condition} | {says} | {measured} | {'yes' if holds else 'no'} |")
    return "\n".join(lines)


def same_kv_table(run: Run) -> str:
    """Markdown: the prefix's K/V computed in several shapes, against the prefix alone."""
    lines = [
        "| the prefix's K/V, computed | largest difference | equal to the bit | first layer's values |",
        "|---|---:|---:|---:|",
    ]
    for row in run.data["same_kv"]:
        lines.append(
            f"| {row['shape']} | {number(row['largest'])} | {row['equal']:.1%} | {number(row['first_layer_values'])} |"
        )
    return "\n".join(lines)


def joins_table(run: Run) -> str:
    """Markdown: seams between prefix and suffix, and whether the ids tokenised apart are those of the joined text."""
    lines = [
        "| seam | text | same ids | prefix tokens that can be used | \\|Δlogit\\| of the next token |",
        "|---|---|---|---:|---:|",
    ]
    for row in run.data["joins"]:
        if "same" not in row:
            continue
        seam = f"`{_code(row['begin'])}` + `{_code(row['end'])}`"
        delta = "" if row["same"] else number(row["delta"]) + (", another first choice" if row["flips"] else "")
        lines.append(
            f"| {row['what']} | {seam} | {'yes' if row['same'] else '**no**'} | {row['usable']} of {row['prefix']} | {delta} |"
        )
    return "\n".join(lines)


def siblings_table(run: Run) -> str:
    """Markdown: K/V of a model of the same shape, read by this one."""
    lines = ["| the K/V comes from this model, | \\|Δlogit\\| | the two models alone differ by |", "|---|---:|---:|"]
    for row in run.data["siblings"]:
        lines.append(f"| {row['sibling']} | {number(row['mixed'])} | {number(row['apart'])} |")
    return "\n".join(lines)


def life_table(run: Run) -> str:
    """Markdown: a prefix's blocks while its requests live, and after."""
    lines = ["| when | blocks of the prefix held by requests | tokens a new request would find |", "|---|---:|---:|"]
    lines += [f"| {row['when']} | {row['held_by_requests']} | {row['found']} |" for row in run.data["life"]]
    return "\n".join(lines)


def long_table(run: Run) -> str:
    """Markdown: a long system prompt under many requests, in blocks and tokens."""
    long, block = run.data["long_prompt"], run.data["shape"]["block"]
    lines = ["| | blocks | K/V on this model | tokens computed | references to its first block |", "|---|---:|---:|---:|---:|"]
    for name in ("isolated", "shared"):
        book = long["books"][name]
        size = book["blocks"] * block * run.data["shape"]["bytes_per_token"] / 2**30
        lines.append(f"| {name} | {book['blocks']:,} | {size:.2f} GiB | {book['computed']:,} | {book['references']} |")
    return "\n".join(lines)


def facts(run: Run) -> dict[str, str]:
    """The numbers chapter 6 says in its prose, by name, as text."""
    found, together, long = results.arms(run), run.data["together"], run.data["long_prompt"]
    s, bound = run.manifest.settings, results.epsilon(run)
    rows = {row["size"]: row for row in run.data["block_sizes"]}
    same = {row["shape"]: row for row in run.data["same_kv"]}
    right, wrong = results.right(run), results.wrong(run)
    alias, half = found["3 saved cache, the object itself"], found["3½ shared, copied on write"]
    first = {name: statistics.fmean(together[name]["first_token_after"]) for name in ("isolated", "shared")}
    seams = [row for row in run.data["joins"] if "same" in row]
    turns = run.data["turns"]
    stamp, late = results.edit(run, "a timestamp first"), results.edit(run, "a timestamp last, in the question")
    goes_on = results.edit(run, "the conversation goes on")
    out = {
        "prefix": str(s["prefix"]),
        "suffix": str(s["suffix"]),
        "new": str(s["new"]),
        "pairs": str(len(run.data["pairs"])),
        "requests": str(s["requests"]),
        "minutes": f"{(run.manifest.seconds or 0) / 60:.0f}",
        "epsilon": number(bound),
        "right_arms": str(len(right)),
        "wrong_arms": str(len(wrong)),
        "right_max": number(max(f["delta"][1] for f in right)),
        "wrong_min": number(min(f["delta"][0] for f in wrong)),
        "wrong_max": number(max(f["delta"][1] for f in wrong)),
        "apart": f"{math.log10(min(f['delta'][0] for f in wrong) / max(f['delta'][1] for f in right)):.1f}",
        "wrong_same_text": str(sum(f["pairs"] - f["texts"] for f in wrong)),
        "wrong_runs": str(sum(f["pairs"] for f in wrong)),
        "computed": str(found["3 shared"]["computed"]),
        "length": str(found["3 shared"]["length"]),
        "ttft": f"{results.first_token(run):.1f}",
        "ttft_1": f"{1 / found['1 shared']['ttft']:.1f}",
        "computed_1": str(found["1 shared"]["computed"]),
        "held": f"{found['3 shared']['held']:.0%}",
        "delta_3": number(found["3 shared"]["delta"][1]),
        "delta_alias": _deltas(alias),
        "leaks": f"{alias['leaks']} of {alias['pairs']}",
        "alias_held": f"{found['3 saved cache, copied']['held']:.0%}",
        "delta_half": number(half["delta"][1]),
        "delta_overlap": _deltas(found["2 found by its own tokens"]),
        "delta_from_zero": _deltas(found["3 suffix positions from 0"]),
        "delta_written": _deltas(found["3½ shared block written"]),
        "delta_rounded": _deltas(found["3½ hit rounded up"]),
        "delta_edited": _deltas(found["4 blocks not verified"]),
        "delta_pieces": _deltas(found["5 tokenised apart"]),
        "delta_twice": _deltas(found["1 last token fed twice"]),
        "kv_same": number(same["the prefix alone, again"]["largest"]),
        "kv_pieces": number(max(row["largest"] for shape, row in same.items() if shape.startswith("in pieces"))),
        "kv_behind": number(same["with a suffix behind it"]["largest"]),
        "kv_texts": number(same["with two suffixes behind it, against each other"]["largest"]),
        "kv_moved": number(same["behind another beginning"]["largest"]),
        "prefix_share": f"{together['shared']['prefix_bytes'] / together['isolated']['prefix_bytes']:.1%}",
        "held_share": f"{together['shared']['held'] / together['isolated']['held']:.0%}",
        "first_token_saved": f"{1 - first['shared'] / first['isolated']:.0%}",
        "makespan": f"{together['isolated']['makespan'] / together['shared']['makespan']:.1f}",
        "together_same": f"{together['same_texts']} of {s['requests']}",
        "long": f"{long['length']:,}",
        "many": str(long["requests"]),
        "long_blocks": f"{long['books']['isolated']['blocks']:,}",
        "long_one": f"{long['books']['shared']['blocks']:,}",
        "long_times": f"{long['books']['isolated']['blocks'] / long['books']['shared']['blocks']:.0f}",
        "long_computed": f"{long['books']['isolated']['computed'] / long['books']['shared']['computed']:.0f}",
        "long_model": str(len(long["model"]["ttft"])),
        "long_ttft": f"{long['model']['ttft_isolated'] / statistics.median(long['model']['ttft'][1:]):.0f}",
        "long_delta": number(long["model"]["delta"]),
        "hit_1": f"{rows[1]['hit_rate']:.1%}",
        "hit_16": f"{rows[16]['hit_rate']:.1%}",
        "hit_256": f"{rows[256]['hit_rate']:.1%}",
        "stamp_first": f"{stamp['shared']} of {stamp['length']}",
        "stamp_last": f"{late['shared']} of {late['length']}",
        "goes_on": f"{goes_on['shared']} of {goes_on['length']}",
        "seams": str(len(seams)),
        "seams_split": str(sum(not row["same"] for row in seams)),
        "turns": str(len(turns)),
        "turns_kept": str(sum(row["kept"] >= row["prompt"] + row["answer"] for row in turns)),
        "sibling_bf16": number(run.data["siblings"][0]["mixed"]),
        "sibling_epsilons": f"{run.data['siblings'][0]['mixed'] / bound:,.0f}",
    }
    if "2 moved, keys turned back" in found:
        out["delta_moved"] = _deltas(found["2 moved, keys turned back"])
    return out


def _label(found: dict) -> str:
    return found["arm"].name


def _output(found: dict) -> str:
    if found["faults"]:
        return f"**another state** (text changed in {found['texts']} of {found['pairs']})"
    return "the same" if not found["texts"] else f"text changed in {found['texts']}, within 2ε"


def _ratio(value: float) -> str:
    return f"{value:.2f}"


def _deltas(found: dict) -> str:
    low, high = (number(value) for value in found["delta"])
    return low if low == high else f"{low} to {high}"


def _quote(text: str) -> str:
    return "“" + " ".join(text.split()).replace("|", "\\|") + "”"


def _code(text: str) -> str:
    return text.replace("\n", "⏎").replace("|", "\\|")
