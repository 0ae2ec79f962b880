"""Figures and tables of the memory ledger, and its calculator: as a form for the page and as widgets for a notebook."""

from __future__ import annotations

import html
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from kvlab.core import ledger
from kvlab.core.cards import CARDS, MODELS, PublicModel
from kvlab.core.ledger import GB, GIB, MIB, Setting, human
from kvlab.core.spec import ModelSpec
from kvlab.faults import fault
from kvlab.record import Run
from kvlab.show.theme import FREE, HEALTHY, MUTED, OWNERS, SHARED, SICK, apply

if TYPE_CHECKING:
    import ipywidgets

MODEL, CARD, CONTEXT, BATCH = "Llama 3.1 8B", "RTX 4090 24 GB", 8192, 4  # what the calculator opens with
CACHES = {"DynamicCache": OWNERS["A"], "StaticCache": OWNERS["C"], "pool, in use": OWNERS["D"], "pool": OWNERS["B"]}
MIXED = ("Gemma 3 27B", "gpt-oss-120b", "MiMo-V2-Flash", "Jamba v0.1", "Qwen3-Next 80B", "DeepSeek-V3")
KINDS = {"MHA": OWNERS["B"], "GQA": OWNERS["A"], "MQA": OWNERS["D"], "MLA": OWNERS["C"]}


def setting(
    model: PublicModel, memory: int, context: int = CONTEXT, batch: int = BATCH, *, form: str = "bfloat16", **more: Any
) -> Setting:
    """A public model on a card of `memory` bytes; `more` as for `kvlab.core.ledger.Setting`."""
    return Setting(model.spec, model.parameters, memory, context, batch, form=form, **more)


# ---- the recorded run ---------------------------------------------------------------------------------------------------


def growth(run: Run) -> go.Figure:
    """Bytes of the three caches, token by token."""
    found = run.data["growth"]
    tokens = len(found["DynamicCache"])
    fig = go.Figure()
    for name, sizes in found.items():
        fig.add_scatter(
            x=list(range(1, tokens + 1)),
            y=[size / MIB for size in sizes],
            name=name,
            mode="lines",
            line={"color": CACHES[name], "width": 3, "shape": "hv" if name != "DynamicCache" else "linear"},
            hovertemplate="%{x} tokens: %{y:.2f} MiB<extra>" + name + "</extra>",
        )
    fig.update_xaxes(title="tokens in the cache", range=[0, tokens + 1])
    fig.update_yaxes(title="MiB", rangemode="tozero")
    return apply(
        fig,
        height=400,
        alt="Memory against tokens. DynamicCache is a straight line through the origin, the pool a staircase that touches it at every "
        "block's end, StaticCache flat from the first token.",
    )


def predicted_against_measured(run: Run) -> go.Figure:
    """Every measured cache as a point: what the ledger said against what the tensors take; and what the fault would have said."""
    rows = [row for row in run.data["caches"] + run.data["grid"] if row["cache"] in CACHES]
    fig = go.Figure()
    ends = [min(row["measured"] for row in rows) / MIB / 1.6, max(row["measured"] for row in rows) / MIB * 1.6]
    fig.add_scatter(x=ends, y=ends, mode="lines", line={"color": MUTED, "dash": "dot"}, name="equal", hoverinfo="skip")
    for name, colour in CACHES.items():
        chosen = [row for row in rows if row["cache"] == name]
        fig.add_scatter(
            x=[row["measured"] / MIB for row in chosen],
            y=[row["predicted"] / MIB for row in chosen],
            mode="markers",
            name=name,
            marker={"color": colour, "size": 10, "opacity": 0.75},
            text=[f"{row['dtype']}: {row['predicted']:,} predicted, {row['measured']:,} measured" for row in chosen],
            hovertemplate="%{text}<extra>" + name + "</extra>",
        )
    spec = run.data["spec"]
    wrong = spec["heads"] // spec["kv_heads"]
    fig.add_scatter(
        x=[row["measured"] / MIB for row in rows],
        y=[wrong * row["predicted"] / MIB for row in rows],
        mode="markers",
        name="query heads counted",
        marker={"color": SICK, "size": 8, "symbol": "x"},
        hovertemplate="%{y:.2f} MiB planned, %{x:.2f} MiB used<extra>the fault</extra>",
    )
    fig.update_xaxes(type="log", title="measured on the tensors, MiB")
    fig.update_yaxes(type="log", title="predicted, MiB")
    return apply(
        fig,
        height=460,
        alt="Predicted against measured bytes of every cache, on logarithmic axes: all points lie on the diagonal. The fault's "
        f"predictions lie on a parallel line {wrong} times higher.",
    )


def multiply(run: Run) -> go.Figure:
    """Claim C22: memory when one of context, requests and beams grows, and when all three do."""
    base = min(run.data["grid"], key=lambda row: row["measured"])
    start = {key: base[key] for key in ("tokens", "rows", "beams")}
    lines = {"context": {"tokens"}, "requests": {"rows"}, "beams": {"beams"}, "all three": {"tokens", "rows", "beams"}}
    colours = (OWNERS["A"], OWNERS["B"], OWNERS["D"], SICK)
    fig = go.Figure()
    for shift, ((name, grown), colour) in enumerate(zip(lines.items(), colours, strict=True)):
        points = []
        for factor in (1, 2, 4):
            want = {key: value * (factor if key in grown else 1) for key, value in start.items()}
            row = next(row for row in run.data["grid"] if all(row[key] == value for key, value in want.items()))
            points.append((factor, row["measured"] / base["measured"]))
        fig.add_scatter(
            x=[x * (1 + 0.02 * (shift - 1)) if len(grown) == 1 else x for x, _ in points],
            y=[y for _, y in points],
            mode="lines+markers",
            name=name,
            line={"color": colour, "width": 3},
            marker={"size": 9},
            hovertemplate="%{y:.0f} times the memory<extra>" + name + "</extra>",
        )
    fig.update_xaxes(type="log", title="each of them grown by a factor of", tickvals=[1, 2, 4])
    fig.update_yaxes(type="log", title="measured memory, times", tickvals=[1, 2, 4, 8, 16, 32, 64])
    return apply(
        fig,
        height=420,
        alt="Measured memory as context, requests and beams grow. Each alone is a line of slope one on logarithmic axes; the three "
        "together a line of slope three: a product, no exponential.",
    )


def caches_table(run: Run) -> str:
    """Markdown: the loaded model's caches, predicted and measured."""
    lines = [
        "| cache | dtype | requests | tokens | block | predicted, bytes | measured, bytes | differ by |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in run.data["caches"]:
        if row["dtype"] == "float32" or (row["rows"], row["tokens"]) == (3, 33):
            lines.append(_line(row["cache"], row["dtype"], row["rows"], row["tokens"], row.get("block", ""), *_pair(row)))
    return "\n".join(lines)


def shapes_table(run: Run) -> str:
    """Markdown: the small models of other shapes, predicted and measured."""
    lines = [
        "| model | cache | K/V heads of query heads | window | predicted, bytes | measured, bytes | differ by |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    for row in run.data["shapes"]:
        window = f"{row['window']}, in {row['windowed']} of 4 layers" if row["window"] else ""
        lines.append(_line(row["shape"], row["cache"], f"{row['kv_heads']} of {row['heads']}", window, *_pair(row)))
    row = run.data["latent"]
    lines.append(_line("MLA", row["cache"], "one latent", "", *_pair(row)))
    return "\n".join(lines)


def decoding_table(run: Run) -> str:
    """Markdown: how the next token is chosen, against bytes and contents of the cache."""
    lines = [
        "| how a token is chosen | sequences kept | bytes of the cache | of one greedy run | largest difference of a cached number |",
        "|---|---:|---:|---:|---:|",
    ]
    one = run.data["decoding"][0]["measured"]
    for row in run.data["decoding"]:
        contents = "" if row["contents"] is None else "0" if row["contents"] == 0 else f"{row['contents']:.1g}"
        lines.append(_line(row["how"], row["copies"], f"{row['measured']:,}", f"{row['measured'] / one:g} ×", contents))
    return "\n".join(lines)


def packed_table(run: Run) -> str:
    """Markdown: K and V in int8 and int4."""
    lines = [
        "| kept as | predicted, bytes | measured, bytes | of fp32 | of 16 bits | without scales it would be | relative error of K and V |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in run.data["packed"]:
        bare = row["plain"] * ledger.FORMATS[row["dtype"]].bits // 32
        share, half = row["measured"] / row["plain"], 2 * row["measured"] / row["plain"]
        lines.append(
            _line(
                row["dtype"],
                f"{row['predicted']:,}",
                f"{row['measured']:,}",
                f"{share:.1%}",
                f"{half:.1%}",
                f"{bare:,}",
                f"{row['error']:.1%}",
            )
        )
    return "\n".join(lines)


def _pair(row: dict) -> tuple[str, str, str]:
    gap = row["predicted"] - row["measured"]
    return f"{row['predicted']:,}", f"{row['measured']:,}", "0" if gap == 0 else f"**{gap:,}**"


def _line(*cells: Any) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


# ---- public models -------------------------------------------------------------------------------------------------------


def models() -> go.Figure:
    """Bytes of a token's K and V in 16 bits, for the public models; the pale bar is what as many K/V heads as query heads would take."""
    order = sorted(MODELS.values(), key=lambda model: ledger.token_bytes(model.spec), reverse=True)
    names = [model.name for model in order]
    grouped = [model for model in order if model.kind != "MLA"]
    with fault("query-heads-counted"):
        full = [ledger.token_bytes(model.spec) / 1024 for model in grouped]
    fig = go.Figure()
    fig.add_bar(
        y=[model.name for model in grouped],
        x=full,
        orientation="h",
        name="if every query head kept its own",
        marker_color=FREE,
        hoverinfo="skip",
    )
    for kind in ("MHA", "GQA", "MQA"):
        chosen = [model for model in order if model.kind == kind]
        fig.add_bar(
            y=[model.name for model in chosen],
            x=[ledger.token_bytes(model.spec) / 1024 for model in chosen],
            orientation="h",
            name=kind,
            marker_color=KINDS[kind],
            customdata=[[model.spec.kv_heads, model.spec.heads] for model in chosen],
            hovertemplate="%{y}: %{x:.0f} KiB a token, %{customdata[0]} of %{customdata[1]} heads<extra></extra>",
        )
    latent = [model for model in order if model.kind == "MLA"]
    fig.add_bar(
        y=[model.name for model in latent],
        x=[ledger.token_bytes(model.spec) / 1024 for model in latent],
        orientation="h",
        name="MLA",
        marker_color=KINDS["MLA"],
        hovertemplate="%{y}: %{x:.0f} KiB a token, one latent vector a layer<extra></extra>",
    )
    fig.update_layout(barmode="overlay")
    fig.update_xaxes(type="log", title="KiB of K and V for one token, 16 bits", tickvals=[8, 32, 128, 512, 2048, 8192])
    fig.update_yaxes(categoryorder="array", categoryarray=names)
    return apply(
        fig,
        height=620,
        alt=f"Bars of the K/V bytes of one token for {len(order)} public models on a logarithmic axis, coloured by how heads are shared. "
        f"They span a factor of {ledger.token_bytes(order[0].spec) / ledger.token_bytes(order[-1].spec):.0f} and do not follow the number of weights.",
    )


def models_table() -> str:
    """Markdown: the public models' shapes, what a token takes, what grows and what does not, and the source of each."""
    lines = [
        "| model | weights | what its layers keep, 16 bits | supports | a token | of it stays | state | source |",
        "|---|---:|---|---:|---:|---:|---:|---|",
    ]
    for model in MODELS.values():
        s = model.spec
        token, grows, state = ledger.token_bytes(s), ledger.growth_bytes(s), ledger.state_bytes(s)
        kinds = "; ".join(ledger.layer_lines(s)) + f" ({model.kind}, {s.heads} query heads)"
        cells = (model.name, _billions(model.parameters), kinds, f"{s.max_context:,}", human(token), human(grows))
        lines.append(_line(*cells, human(state) if state else "", model.source))
    return "\n".join(lines)


def kinds_table(names: tuple[str, ...] = MIXED) -> str:
    """Markdown: public models whose layers differ, kind by kind, with what grows and what does not."""
    lines = [
        "| model | its layers, 16 bits | a token | of it stays | state | 100,000 tokens |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for spec in (MODELS[name].spec for name in names):
        state = ledger.state_bytes(spec)
        sizes = human(ledger.token_bytes(spec)), human(ledger.growth_bytes(spec)), human(state) if state else ""
        kinds = ";<br>".join(ledger.layer_lines(spec))
        lines.append(_line(spec.name, kinds, *sizes, human(ledger.request_bytes(spec, 100_000))))
    return "\n".join(lines)


def cards_table() -> str:
    """Markdown: the cards' memory as the box says, as the driver reports, in both units."""
    lines = [
        "| card | the driver reports | in GiB (2³⁰) | in GB (10⁹) | source |",
        "|---|---:|---:|---:|---|",
    ]
    for card in CARDS.values():
        cells = (card.name, f"{card.memory // MIB:,} MiB", f"{card.memory / GIB:.2f}", f"{card.memory / GB:.2f}", card.source)
        lines.append(_line(*cells))
    return "\n".join(lines)


def _billions(n: int) -> str:
    return f"{n / 1e9:.1f} billion" if n >= 1e9 else f"{n / 1e6:.0f} million"


def stack(setting: Setting, batches: tuple[int, ...] = (1, 2, 4, 8, 16)) -> go.Figure:
    """Stacked bars: weights, activations and K/V of several batches, against the watermark and the card."""
    found = ledger.ledger(setting)
    names = [f"{batch} at once" for batch in batches]
    kv = [batch * found.request for batch in batches]
    inside = [min(size, max(found.room, 0)) for size in kv]
    fig = go.Figure()
    for name, sizes, colour in (
        ("weights", [found.weights] * len(names), HEALTHY),
        ("activations", [setting.activations] * len(names), SHARED),
        ("K/V that fits", inside, OWNERS["A"]),
        ("K/V that does not", [a - b for a, b in zip(kv, inside, strict=True)], SICK),
    ):
        fig.add_bar(
            y=names,
            x=[size / GIB for size in sizes],
            orientation="h",
            name=name,
            marker_color=colour,
            hovertemplate="%{x:.2f} GiB<extra>" + name + "</extra>",
        )
    fig.add_vline(x=setting.memory / GIB, line={"color": MUTED, "width": 2})
    fig.add_vline(x=found.limit / GIB, line={"color": MUTED, "dash": "dot", "width": 2})
    fig.update_layout(barmode="stack")
    fig.update_xaxes(title="GiB (dotted: the watermark; solid: the card)")
    fig.update_yaxes(autorange="reversed")
    return apply(
        fig, height=360, alt="Stacked bars of weights, activations and K/V for several batch sizes. " + ledger.sentence(setting)
    )


# ---- the calculator -----------------------------------------------------------------------------------------------------


def page_spec(spec: ModelSpec) -> dict[str, Any]:
    """A shape as the page's script takes it: its layers by kind, a state in bytes."""
    return {
        **{key: getattr(spec, key) for key in ("name", "layers", "heads", "kv_heads", "head_dim", "max_context")},
        "caches": [
            {
                **{
                    key: getattr(cache, key)
                    for key in ("kind", "count", "heads", "key_dim", "value_dim", "shared", "window", "why")
                },
                "state": ledger.layer_state_bytes(spec, cache),
            }
            for cache in spec.caches
        ],
    }


def calculator_data() -> dict[str, Any]:
    """What the page's calculator knows: models, cards and formats, as plain values."""
    return {
        "models": {model.name: page_spec(model.spec) | {"parameters": model.parameters} for model in MODELS.values()},
        "cards": {card.name: {"memory": card.memory} for card in CARDS.values()},
        "formats": {name: asdict(form) for name, form in ledger.FORMATS.items()},
    }


def calculator() -> str:
    """HTML: the form that `book/assets/js/ledger.js` brings to life. Without a script it shows one setting, worked out here."""
    start = setting(MODELS[MODEL], CARDS[CARD].memory)
    found = ledger.ledger(start)
    data = json.dumps(calculator_data(), ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    numbers = {
        "layers": ("", "Layers", "; ".join(ledger.layer_lines(start.spec, start.form))),
        "token": ("", "K/V of a token", f"{found.token:,} bytes"),
        "grows": ("", "of it stays beyond the windows", f"{found.grows:,} bytes"),
        "state": ("", "State of a request", human(found.state)),
        "request": ("", "of a request", f"{human(found.request)} ({found.request:,} bytes)"),
        "weights": ("weights", "Weights", human(found.weights)),
        "activations": ("activations", "Activations", human(start.activations)),
        "kv": ("kv", "K/V of all requests", human(found.kv)),
        "limit": ("headroom", "May be used", human(found.limit)),
        "left": ("free", "Left of that", human(found.room - found.kv)),
    }
    terms = "".join(
        f"<div><dt>{f'<i data-part={part!r}></i>' if part else ''}{label}</dt><dd data-out={name!r}>{text}</dd></div>"
        for name, (part, label, text) in numbers.items()
    )
    parts = "".join(f"<span data-part={p!r}></span>" for p in ("weights", "activations", "kv", "over", "free", "headroom"))
    kept = {name: name for name in ("bfloat16", "float16", "float32", "float8", "int8", "int4")}
    main = "".join(
        (
            _select("model", "Model", list(MODELS), MODEL),
            _select("card", "Card", list(CARDS), CARD),
            _number("context", "Tokens of a request, prompt and answer", CONTEXT, slider=(16, 80)),
            _number("batch", "Requests at once", BATCH, slider=(0, 32)),
            _select("form", "K and V kept as", list(kept), "bfloat16"),
        )
    )
    more = "".join(
        (
            _select("weight_form", "Weights kept as", list(kept), "bfloat16"),
            _number("beams", "Beams", 1),
            _number("block", "Tokens in a block", start.block),
            _number("activations", "Activations, GiB", 1, step="any"),
            _number("watermark", "Watermark, % of the card", 90, step="any"),
            _number("memory", "The card's memory, GiB", f"{start.memory / GIB:.3f}", step="any"),
            _number("layers", "Layers", start.spec.layers),
            _number("heads", "Query heads", start.spec.heads),
            _number("kv_heads", "K/V heads", start.spec.kv_heads),
            _number("head_dim", "Numbers in a head", start.spec.head_dim),
            _number("max_context", "Tokens it supports", start.spec.max_context),
            _number("parameters", "Weights, billions", start.parameters / 1e9, step="any"),
            '<div class="kvl-field kvl-check"><input type="checkbox" id="kvl-broken" name="broken">'
            '<label for="kvl-broken">Break it: count query heads in place of K/V heads</label></div>',
        )
    )
    return (
        f'<div class="kvl"><form aria-label="KV memory calculator"><fieldset disabled><div class="kvl-fields">{main}</div>'
        f"<details><summary>More: weights, beams, blocks, headroom, the shape itself</summary>"
        f'<div class="kvl-fields">{more}</div></details></fieldset></form>'
        f'<output class="kvl-says" aria-live="polite">{html.escape(ledger.sentence(start, found))}</output>'
        f'<div class="kvl-bar" role="img" aria-label="{html.escape(ledger.sentence(start, found))}">{parts}'
        f'<span class="kvl-edge"></span></div><dl>{terms}</dl>'
        '<p class="kvl-still">The form needs JavaScript. <code>kvlab ledger</code> says the same on a command line.</p>'
        f'<script type="application/json">{data}</script></div>'
    )


def _select(name: str, label: str, options: list[str], chosen: str) -> str:
    items = "".join(f"<option{' selected' if option == chosen else ''}>{html.escape(option)}</option>" for option in options)
    return f'<div class="kvl-field"><label for="kvl-{name}">{label}</label><select id="kvl-{name}" name="{name}">{items}</select></div>'


def _number(name: str, label: str, value: Any, *, step: str = "1", slider: tuple[int, int] | None = None) -> str:
    low = "0" if step == "any" else "1"
    box = f'<input type="number" id="kvl-{name}" name="{name}" value="{value}" min="{low}" step="{step}" inputmode="decimal">'
    bar = ""
    if slider:
        bar = (
            f'<input type="range" data-for="{name}" aria-label="{label}, slider" min="{slider[0]}" max="{slider[1]}" step="1">'
        )
    return f'<div class="kvl-field"><label for="kvl-{name}">{label}</label>{box}{bar}</div>'


def widgets() -> ipywidgets.Widget:
    """The calculator as ipywidgets, for a notebook with a kernel."""
    import ipywidgets as w

    wide = {"style": {"description_width": "7.5em"}, "layout": {"width": "34em"}}
    model = w.Dropdown(options=list(MODELS), value=MODEL, description="Model", **wide)
    card = w.Dropdown(options=list(CARDS), value=CARD, description="Card", **wide)
    context = w.SelectionSlider(options=[2**n for n in range(8, 21)], value=CONTEXT, description="Tokens", **wide)
    batch = w.SelectionSlider(options=[2**n for n in range(11)], value=BATCH, description="Requests", **wide)
    form = w.Dropdown(options=list(ledger.FORMATS), value="bfloat16", description="K and V as", **wide)
    beams = w.IntSlider(1, min=1, max=16, description="Beams", **wide)
    broken = w.Checkbox(False, description="Break it: count query heads", **wide)
    says = w.HTML()

    def update(_=None) -> None:
        s = setting(
            MODELS[model.value], CARDS[card.value].memory, context.value, batch.value, form=form.value, beams=beams.value
        )
        with fault("query-heads-counted" if broken.value else None):
            says.value = bars(s)

    controls = (model, card, context, batch, form, beams, broken)
    for control in controls:
        control.observe(update, names="value")
    update()
    return w.VBox([*controls, says])


def bars(setting: Setting) -> str:
    """HTML: the sentence and one stacked bar, in plain elements."""
    found = ledger.ledger(setting)
    scale = max(setting.memory, found.weights + setting.activations + found.kv)
    inside = max(0, min(found.kv, found.room))
    used = found.weights + setting.activations + found.kv
    parts = (
        ("weights", found.weights, HEALTHY),
        ("activations", setting.activations, SHARED),
        ("K/V", inside, OWNERS["A"]),
        ("K/V too much", found.kv - inside, SICK),
        ("free", max(0, found.limit - used), FREE),
    )
    spans = "".join(f'<span style="width:{100 * size / scale:.3f}%;background:{colour}"></span>' for _, size, colour in parts)
    legend = " · ".join(f'<span style="color:{colour}">■</span> {name} {human(size)}' for name, size, colour in parts if size)
    return (
        f"<p>{html.escape(ledger.sentence(setting, found))}</p>"
        f'<div style="display:flex;height:2em;width:100%;border:1px solid {MUTED}">{spans}</div><p>{legend}</p>'
        f"<p>{found.token:,} bytes a token, {found.request:,} bytes a request.</p>"
    )


# ---- prose ---------------------------------------------------------------------------------------------------------------


def facts(run: Run) -> dict[str, str]:
    """The numbers chapter 2 says in its prose, by name, as text."""
    data, spec = run.data, run.data["spec"]
    llama, old = MODELS["Llama 3.1 8B"], MODELS["Llama 2 7B"]
    card = CARDS[CARD]
    plan = ledger.ledger(setting(llama, card.memory))
    half = replace(old.spec, dtype="float16")
    token = ledger.token_bytes(half)
    window = next(r for r in data["shapes"] if r["shape"] == "window, all layers" and r["cache"] == "DynamicCache")
    falcon = next(r for r in data["shapes"] if r["shape"].startswith("Falcon"))
    fits, forked, latent = data["fits"], data["forked"], data["latent"]
    one = data["growth"]["DynamicCache"]
    gqa = [m.spec.heads // m.spec.kv_heads for m in MODELS.values() if m.kind == "GQA"]
    mqa = [m.spec.heads for m in MODELS.values() if m.kind == "MQA"]
    deepseek, jamba = MODELS["DeepSeek-V3"].spec, MODELS["Jamba v0.1"].spec
    gemma = MODELS["Gemma 3 27B"]
    long = ledger.request_bytes(gemma.spec, gemma.spec.max_context)
    unwindowed = replace(gemma.spec, window=None, mixed=())
    checked = data["caches"] + data["grid"] + data["decoding"] + data["packed"] + [forked]
    return {
        "layers": str(spec["layers"]),
        "heads": str(spec["heads"]),
        "kv_heads": str(spec["kv_heads"]),
        "head_dim": str(spec["head_dim"]),
        "token": f"{one[0]:,}",
        "step": f"{one[1] - one[0]:,}",
        "growth_tokens": str(len(one)),
        "slots": str(run.manifest.settings["slots"]),
        "static": f"{data['growth']['StaticCache'][0] / one[0]:.0f}",
        "checked": str(len(checked)),
        "caches": str(len(data["caches"])),
        "wrong": str(spec["heads"] // spec["kv_heads"]),
        "empty": f"{1 - spec['kv_heads'] / spec['heads']:.0%}",
        "seven_token": f"{token:,}",
        "seven_2048": human(2048 * token),
        "seven_2048_gb": f"{2048 * token / GB:.3f}",
        "seven_4096": human(4096 * token),
        "seven_8": human(8 * 4096 * token),
        "seven_8_gb": f"{8 * 4096 * token / GB:.2f}",
        "seven_in_16gb": str(16 * GB // (4096 * token)),
        "gib_over_gb": f"{GIB / GB - 1:.1%}",
        "gqa_models": str(len(gqa)),
        "gqa_least": str(min(gqa)),
        "gqa_most": str(max(gqa)),
        "mqa_least": str(min(mqa)),
        "mqa_most": str(max(mqa)),
        "models": str(len(MODELS)),
        "deepseek": human(ledger.token_bytes(deepseek)),
        "deepseek_heads": str(deepseek.heads),
        "jamba_layers": str(jamba.layers),
        "jamba_state": str(sum(cache.count for cache in jamba.caches if cache.kind == "state")),
        "latent_saves": f"{latent['expanded'] / latent['measured']:.0f}",
        "window": str(window["window"]),
        "window_kept": str(window["window"] - 1),
        "window_prefill": f"{window['held_after_prefill'] / window['held']:.1f}",
        "falcon": f"{falcon['measured'] // falcon['predicted']}",
        "gemma_tokens": f"{gemma.spec.max_context:,}",
        "gemma_long": human(long),
        "gemma_long_full": human(ledger.request_bytes(unwindowed, gemma.spec.max_context)),
        "prompt": str(run.manifest.settings["prompt"]),
        "new_tokens": str(run.manifest.settings["new_tokens"]),
        "beams": str(run.manifest.settings["beams"]),
        "beams_apart": human(forked["apart"]),
        "beams_shared": human(forked["measured"]),
        "beams_saved": f"{1 - forked['measured'] / forked['apart']:.0%}",
        "fits_total": human(fits["memory"]),
        "fits_tokens": str(fits["tokens"]),
        "fits_predicted": str(fits["predicted"]),
        "fits_admitted": str(fits["admitted"]),
        "fits_without_blocks": str(fits["without_blocks"]),
        "fits_without_watermark": str(fits["without_watermark"]),
        "weights": human(fits["weights_measured"]),
        "int4_bits": f"{8 * ledger.stored_bytes(32, 'int4') / 32:g}",
        "int4": f"{data['packed'][1]['measured'] / data['packed'][1]['plain']:.1%}",
        "card": card.name,
        "card_model": llama.name,
        "card_supports": f"{llama.spec.max_context:,}",
        "card_longest": f"{plan.longest_alone:,}",
        "card_sentence": ledger.sentence(setting(llama, card.memory)),
    }
