"""Tables in Markdown that more than one page needs."""

from __future__ import annotations

from collections.abc import Iterable

from kvlab.record import Run, number


def recorded_runs(runs: Iterable[Run]) -> str:
    """What each recorded run is and what produced it."""
    lines = [
        "| run | model, weights (sha256) | dtypes | device | threads | versions | seed | recorded | took | command |",
        "|---|---|---|---|---:|---|---:|---|---:|---|",
    ]
    for run in runs:
        m = run.manifest
        models = ", ".join(f"{name} `{sha[:12]}`" for name, sha in m.model.items())
        software = f"Python {m.versions['python']}, torch {m.versions['torch']}, transformers {m.versions['transformers']}"
        took = "" if m.seconds is None else f"{m.seconds / 60:.0f} min" if m.seconds >= 120 else f"{m.seconds:.0f} s"
        cells = (
            m.experiment,
            models,
            ", ".join(m.dtypes),
            m.device["name"],
            m.device["threads"],
            software,
            m.seed,
            m.created,
            took,
            f"`{m.command}`",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def predictions(guessed: dict[str, float], measured: dict[str, float]) -> str:
    """Markdown: what a reader guessed beside what was measured."""
    lines = ["| | guessed | measured |", "|---|---:|---:|"]
    lines += [f"| {name} | {number(guessed[name])} | {number(measured[name])} |" for name in guessed]
    return "\n".join(lines)
