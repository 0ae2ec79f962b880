"""Record what a class costs on this machine, into results/classroom-cpu.json.gz: python tools/record_class.py

How long grading an answer takes, and how much memory a student's kernel holds, with the model and after a lab's Run section.
"""

from __future__ import annotations

import datetime
import json
import statistics
import subprocess
import sys
import time

import make_labs

from kvlab import record
from kvlab.classroom.grade import find, grade
from kvlab.classroom.tables import exercises
from kvlab.runtime import weights

# VmHWM, the most that was resident, in kB
PEAK = "next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmHWM'))"
LOADED = f"from kvlab.runtime import load\nloaded = load()\nprint({PEAK})"
LAB = (
    "from kvlab.runtime import load\nfrom kvlab.runtime.decode import greedy\nfrom kvlab.experiments import prompts\nimport kvlab.show.password\n"
    "loaded = load()\nrows = [list(p.ids) for p in prompts.make(loaded.tokenizer, 16, seed=3)]\n"
    f"for row in rows: greedy(loaded, [row], 8)\nprint({PEAK})"
)


def main() -> int:
    """Returns the exit code."""
    begin = time.monotonic()
    per_answer: dict[str, list[float]] = {"plain": [], "tensors": []}
    per_lab: dict[str, float] = {}
    for notebook in sorted((make_labs.ROOT / "labs").glob("[0-9]*.ipynb")):
        worked = make_labs.worked(make_labs.ROOT / "solutions" / f"{notebook.stem}.md")
        start = time.monotonic()
        for exercise, _ in exercises(notebook):
            cells = []
            for cell in worked.cells:
                about = cell.metadata.get("nbgrader", {})
                if about.get("grade_id") == f"{exercise.name}-check":
                    break
                if cell.cell_type == "code" and not about.get("grade"):
                    cells.append((cell.source, about.get("grade_id") == f"{exercise.name}-answer"))
            one = time.monotonic()
            outcome = grade(notebook.stem, find(notebook.stem, f"{exercise.name}-check"), cells, "recorded")
            if outcome.share != 1:
                raise SystemExit(f"{notebook.stem}, {exercise.name}: {outcome.says}")
            kind = "tensors" if any("torch" in source for source, _ in cells) else "plain"
            per_answer[kind].append(time.monotonic() - one)
        per_lab[notebook.stem] = record.short(time.monotonic() - start, 3)
    peak = {
        name: int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()[-1])
        for name, code in (("loaded", LOADED), ("lab", LAB))
    }
    model = weights.BUNDLED[weights.DEFAULT]
    folder = weights.ensure(model)
    manifest = record.Manifest(
        experiment="classroom",
        command="python tools/record_class.py",
        model={model.name: json.loads((folder / weights.MANIFEST).read_text())["sha256"]},
        dtypes=["float32"],
        device=record.device_info("cpu"),
        versions=record.versions(),
        seed=0,
        created=datetime.date.today().isoformat(),
        seconds=round(time.monotonic() - begin, 1),
    )
    data = {
        "seconds_per_answer": {kind: record.short(statistics.median(times), 3) for kind, times in per_answer.items()},
        "seconds_per_lab": per_lab,
        "resident_gib": {name: record.short(kib / (1 << 20), 3) for name, kib in peak.items()},
        "weights_mib": round(sum(path.stat().st_size for path in folder.iterdir()) / (1 << 20)),
    }
    print(record.Run(manifest, data).save(), json.dumps(data, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
