"""Tables of the sweep over every causal language model that Transformers has: read and equal, or refused."""

from __future__ import annotations

from collections import Counter

from kvlab.core import ledger
from kvlab.core.cards import MODELS
from kvlab.core.layers import FAMILIES, head_dim, kv_heads, reader, size
from kvlab.record import Run

KEEPS = {"full": "the whole context", "window": "a window", "state": "a state", "none": "nothing of the text"}


def _cells(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _named(row: dict) -> str:
    return f"{row['type']}, {row['setting']}" if row["setting"] else row["type"]


def _mix(row: dict) -> tuple[str, ...]:
    """The kinds of layer a row's model has, in the order of `KEEPS`."""
    there = {part.split()[1] for part in row["layers"].split(", ")}
    return tuple(kind for kind in KEEPS if kind in there)


def summary_table(run: Run) -> str:
    """Markdown: how many of the classes have which mixture of layers, and that all their caches are as predicted."""
    lines = ["| layers keep | models | equal to the byte | such as |", "|---|---:|---:|---|"]
    read = [row for row in run.data["rows"] if row["outcome"] != "refused"]
    for mix, count in Counter(map(_mix, read)).most_common():
        rows = [row for row in read if _mix(row) == mix]
        equal = sum(row["outcome"] == "equal" for row in rows)
        names = ", ".join(f"`{row['type']}`" for row in rows[:4])
        lines.append(_cells(" · ".join(KEEPS[kind] for kind in mix), count, equal, names))
    refused = [row for row in run.data["rows"] if row["outcome"] == "refused"]
    lines.append(_cells("refused, by the key's name", len(refused), "", ", ".join(f"`{row['type']}`" for row in refused[:4])))
    return "\n".join(lines)


def rows_table(run: Run) -> str:
    """Markdown: every class that is read, what it keeps, and the three sizes predicted; measured ones where they differ."""
    lines = [
        "| model | layers | a token, bytes | beyond the windows | whole cache | of it state | differ by | run on |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in run.data["rows"]:
        if row["outcome"] == "refused":
            continue
        said, held = row["predicted"], row.get("measured", {})
        gap = max((abs(said[key] - held[key]) for key in held), default="not run")
        sizes = (f"{said[key]:,}" for key in ("token", "grows", "whole"))
        state = f"{row['state']:,}" if row["state"] else ""
        lines.append(_cells(_named(row), row["layers"], *sizes, state, gap, row.get("device", "")))
    return "\n".join(lines)


def refused_table(run: Run) -> str:
    """Markdown: every class that is refused, and the sentence that says why."""
    lines = ["| model | what `ModelSpec.from_config` says |", "|---|---|"]
    lines += [_cells(_named(row), row["why"]) for row in run.data["rows"] if row["outcome"] == "refused"]
    return "\n".join(lines)


def alike(name: str) -> float:
    """How many times too much a public model's token would seem if every layer kept keys and values of one shape."""
    model = MODELS[name]
    read = reader(model.config)
    wrong = 2 * size(read, "number of layers") * kv_heads(read) * ledger.stored_bytes(head_dim(read), model.spec.dtype)
    return wrong / ledger.token_bytes(model.spec)


def facts(run: Run) -> dict[str, str]:
    """The numbers that pages say in their prose, by name, as text."""
    rows = run.data["rows"]
    read = [row for row in rows if row["outcome"] != "refused"]
    return {
        "shapes_classes": str(len({row["class"] + row["type"] for row in rows})),
        "shapes_rows": str(len(rows)),
        "shapes_read": str(len(read)),
        "shapes_equal": str(sum(row["outcome"] == "equal" for row in rows)),
        "shapes_refused": str(sum(row["outcome"] == "refused" for row in rows)),
        "shapes_other": str(sum(row["outcome"] not in ("equal", "refused") for row in rows)),
        "shapes_mixed": str(sum(len(_mix(row)) > 1 for row in read)),
        "shapes_meta": str(sum(row.get("device") == "meta" for row in rows)),
        "shapes_alone": str(sum(row["alone"] == "same" for row in read)),
        "shapes_transformers": run.manifest.versions["transformers"],
        "shapes_families": str(len(FAMILIES)),
        "shapes_near": str(run.manifest.settings["lengths"][1]),
        "shapes_far": str(run.manifest.settings["lengths"][-1]),
        "shapes_window": str(run.manifest.settings["window"]),
        "jamba_alike": f"{alike('Jamba v0.1'):.0f}",
        "next_alike": f"{alike('Qwen3-Next 80B'):.0f}",
    }
