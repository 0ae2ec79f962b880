"""What the teacher's page shows, made from the checks, the labs and the recorded run, so that it cannot go stale."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from kvlab.checks import Exercise
from kvlab.classroom.grade import find
from kvlab.classroom.hidden import COUNT
from kvlab.classroom.remote import DEFAULT
from kvlab.classroom.samples import SAMPLES
from kvlab.record import Run


def exercises(notebook: Path) -> list[tuple[Exercise, int]]:
    """Each exercise of a lab's notebook with its points, in order."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    graded = [about for cell in cells if (about := cell["metadata"].get("nbgrader", {})).get("grade")]
    return [(find(notebook.stem, about["grade_id"]), about["points"]) for about in graded]


def plan(notebooks: Iterable[Path]) -> str:
    """A line for each lab: how many exercises and points, and what its head says of time and difficulty."""
    lines = ["| lab | exercises, points | time | difficulty |", "|---|---|---|---|"]
    for notebook in notebooks:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        head = "".join("".join(cell["source"]) + "\n" for cell in cells[:4] if cell["cell_type"] == "markdown")
        title = next(line.removeprefix("# Lab ") for line in head.splitlines() if line.startswith("# Lab "))
        row = {
            key.strip(): value.strip()
            for key, value in (line.split("|")[1:3] for line in head.splitlines() if line.startswith("| "))
        }
        found = exercises(notebook)
        lines.append(f"| {title} | {len(found)}, {sum(points for _, points in found)} | {row['time']} | {row['difficulty']} |")
    return "\n".join(lines)


def mistakes(notebook: Path) -> str:
    """For each exercise: its points, its cases, and what the check says to each usual wrong answer."""
    lines = ["| exercise | points | what its check says to the usual wrong answers |", "|---|---:|---|"]
    for exercise, points in exercises(notebook):
        said = dict.fromkeys(mistake.says for mistake in exercise.mistakes)
        told = "<br>".join(f"• {says}" for says in said).replace("|", "\\|")
        lines.append(f"| {exercise.number}. `{exercise.name}` | {points} | {told} |")
    return "\n".join(lines)


def samples(notebook: Path) -> str:
    """The calibrated answers of a lab, each with the points it gets."""
    points = {exercise.name: most for exercise, most in exercises(notebook)}
    parts = []
    for sample in SAMPLES:
        if sample.lab == notebook.stem:
            most = points[sample.exercise]
            parts.append(f"**{sample.share * most:g} of {most}**: {sample.why}.\n\n```python\n{sample.code.rstrip()}\n```")
    return "\n\n".join(parts)


def facts(run: Run) -> dict[str, str]:
    """The numbers of the page's prose, from the recorded run of `tools/record_class.py`."""
    data = run.data
    return {
        "hidden": str(COUNT),
        "limit": f"{DEFAULT.seconds:.0f}",
        "recorded_on": run.manifest.sentence(),
        "grade_plain": f"{data['seconds_per_answer']['plain']:.1g}",
        "grade_tensors": f"{data['seconds_per_answer']['tensors']:.1f}",
        "grade_class": f"{30 * max(data['seconds_per_lab'].values()) / 60:.0f}",
        "model_gib": f"{data['resident_gib']['loaded']:.1f}",
        "kernel_gib": f"{data['resident_gib']['lab']:.1f}",
        "shared_mib": f"{data['weights_mib']:.0f}",
    }
