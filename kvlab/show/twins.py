"""The twins of the zoo as tables: what each fault was named, to what it met, and how far everything else missed."""

from __future__ import annotations

from kvlab.faults.twins import OUTSIDE, TWINS
from kvlab.record import Run, powers


def _size(value: float | None) -> str:
    return "NaN" if value is None else powers(f"{value:.1e}") if value < 0.01 else f"{value:.2g}"


def _others(told: dict) -> list[dict]:
    """The tries of hypotheses that did not meet."""
    names = {one["hypothesis"] for one in told["met"]}
    return [one for one in told["tried"] if one["hypothesis"] not in names]


def table(run: Run) -> str:
    """Markdown: every fault that a twin met."""
    lines = [
        "| fault | its twin says | family | meets to | the next numbers miss by | the nearest other hypothesis misses by | healthy run |",
        "|---|---|---|---:|---:|---|---:|",
    ]
    for name, outcome in run.data["faults"].items():
        told = outcome["sick"]
        if not told["met"]:
            continue
        says = "; or ".join(one["says"] for one in told["met"])
        first, numbers = told["met"][0], [one["number"] for one in told["met"]]
        beside = ", ".join(_size(miss) for _, number, miss in told["neighbours"] if number not in numbers)
        other = min(_others(told), key=lambda one: one["miss"] or float("inf"), default=None)
        missed = f"{_size(other['miss'])} (`{other['hypothesis']}`)" if other else ""
        family = " or ".join(first["families"])
        lines.append(
            f"| `{name}` | {says} | {family} | {_size(first['miss'])} | {beside} | {missed} | {_size(told['distance'])} |"
        )
    return "\n".join(lines)


def outside(run: Run) -> str:
    """Markdown: the faults that are in no hypothesis, and what the search said."""
    lines = ["| fault | why no twin | the nearest | misses by | healthy run |", "|---|---|---|---:|---:|"]
    for name, why in OUTSIDE.items():
        if name not in run.data["faults"]:
            continue
        told = run.data["faults"][name]["sick"]
        near = min(told["tried"], key=lambda one: one["miss"] or float("inf"), default=None)
        nearest, miss = (f"`{near['hypothesis']}`", _size(near["miss"])) if near else ("", "")
        lines.append(f"| `{name}` | {why} | {nearest} | {miss} | {_size(told['distance'])} |")
    return "\n".join(lines)


def facts(run: Run) -> dict[str, str]:
    """The numbers of the page's prose, by name, as text."""
    told = {name: outcome["sick"] for name, outcome in run.data["faults"].items()}
    named = {name: one for name, one in told.items() if one["kind"] == "named"}
    none = [name for name, one in told.items() if not one["met"]]
    counted = {name: [miss for _, n, miss in one["neighbours"] if n not in _numbers(one)] for name, one in named.items()}
    misses = [miss for row in counted.values() for miss in row if miss is not None]
    away = [one["miss"] for row in told.values() for one in _others(row) if one["miss"] is not None]
    wide = [name for name, one in named.items() if one["met"][0]["miss"] > one["epsilon"]]
    return {
        "faults": str(len(told)),
        "absent": ", ".join(f"`{name}`" for name in [*TWINS, *OUTSIDE] if name not in told) or "none",
        "named": str(len(named)),
        "several": str(sum(one["kind"] == "several" for one in told.values())),
        "none": str(len(none)),
        "hypotheses": str(run.manifest.settings["hypotheses"]),
        "met_most": powers(f"{max(one['met'][0]['miss'] for one in named.values()):.1e}"),
        "next_least": f"{min(misses):.2g}",
        "other_least": f"{min(away):.2g}",
        "unsure": ", ".join(f"`{name}`" for name, one in named.items() if len(one["met"]) > 1) or "none",
        "wide": ", ".join(f"`{name}`" for name in wide) or "none",
        "runs": str(sorted(one["runs"] for one in told.values())[len(told) // 2]),
    }


def _numbers(told: dict) -> list:
    return [one["number"] for one in told["met"]]
