"""nbgrader, so that a score cannot be talked into: what `classroom/nbgrader_config.py` puts in place of nbgrader's own parts.

Restore   in place of DeduplicateIds and OverwriteCells: the cells of the assignment are again what the teacher released
Grade     in place of Execute: nothing a student wrote runs in nbgrader's process or in a kernel of the teacher's
Collect   a submission belongs to whoever owns its files, whatever name it gives
"""

from __future__ import annotations

import os
import pwd
import secrets
from pathlib import Path
from typing import Any

from nbformat.v4 import new_code_cell, new_markdown_cell, new_output
from nbgrader.api import Gradebook
from nbgrader.exchange.default import ExchangeCollect
from nbgrader.preprocessors import NbGraderPreprocessor
from traitlets import Bool, Float, Unicode

from kvlab.classroom.grade import Outcome, find, grade
from kvlab.classroom.remote import Limits


class Restore(NbGraderPreprocessor):
    """Give every cell of the assignment its metadata back, and every locked one its source; add graded cells that were deleted.

    nbgrader's own preprocessors trust some of the metadata a notebook comes with: a submission could end the grading of itself,
    or unlock its checks.
    """

    def preprocess(self, nb: Any, resources: dict) -> tuple[Any, dict]:
        """The last cell of a name counts, as in nbgrader: a copy stands below its original."""
        about = resources["nbgrader"]
        with Gradebook(about["db_url"]) as gradebook:
            released = gradebook.find_notebook(about["notebook"], about["assignment"])
            sources = {cell.name: cell for cell in released.source_cells}
            points = {cell.name: cell.max_score for cell in released.grade_cells}
            answers = {cell.name for cell in released.solution_cells}
            tasks = {cell.name: cell.max_score for cell in released.task_cells}
            missing = dict(sources)
            for index in reversed(range(len(nb.cells))):
                cell = nb.cells[index]
                claimed = cell.metadata.pop("nbgrader", None)
                name = claimed.get("grade_id") if isinstance(claimed, dict) else None
                source = missing.pop(name, None) if isinstance(name, str) else None
                if source is not None:
                    nb.cells[index] = _restored(cell, source, points | tasks, answers, tasks)
            for name, source in missing.items():
                if name in points or name in tasks:
                    nb.cells.append(_restored(None, source, points | tasks, answers, tasks))
        return nb, resources


def _restored(cell: Any, source: Any, points: dict, answers: set, tasks: dict) -> Any:
    if cell is None or cell.cell_type != source.cell_type:
        new = new_code_cell if source.cell_type == "code" else new_markdown_cell
        cell = new(source.source if cell is None else cell.source)
        cell.pop("id")  # a notebook of an older format has none; nbformat gives one where it must
    if source.locked:
        cell.source = source.source
    graded = source.name in points
    cell.metadata["nbgrader"] = {
        "schema_version": 3,
        "grade_id": source.name,
        "solution": source.name in answers,
        "grade": graded and source.name not in tasks,
        "locked": bool(source.locked),
        "task": source.name in tasks,
        "cell_type": source.cell_type,
        "checksum": source.checksum,
        **({"points": points[source.name]} if graded else {}),
    }
    return cell


class Grade(NbGraderPreprocessor):
    """Judge each answer in a process of its own, and write into its check cell what nbgrader reads a score from."""

    secret_file = Unicode("", help="Holds what the hidden cases are drawn from; made if it is not there.").tag(config=True)
    seconds = Float(20.0, help="What the calls of one answer may take together.").tag(config=True)
    memory_gib = Float(6.0, help="What the process of one answer may take.").tag(config=True)
    confined = Bool(True, help="Refuse to grade where files cannot be kept from an answer (Landlock).").tag(config=True)

    def preprocess(self, nb: Any, resources: dict) -> tuple[Any, dict]:
        """Raises LookupError for a check cell without an exercise: a cell without an output would get all its points."""
        lab, limits = resources["nbgrader"]["notebook"], Limits(self.seconds, self.memory_gib, confined=self.confined)
        secret = secret_of(self.secret_file)
        before: list[Any] = []
        for cell in nb.cells:
            about = cell.metadata.get("nbgrader", {})
            if cell.cell_type != "code":
                continue
            if about.get("grade") and not about.get("solution"):
                exercise = find(lab, about["grade_id"])
                own = f"{exercise.name}-answer"
                cells = [(c.source, c.metadata.get("nbgrader", {}).get("grade_id") == own) for c in before]
                outcome = grade(lab, exercise, cells, secret, limits)
                self.log.info("%s, %s: %s", resources["nbgrader"]["student"], exercise.name, outcome.kind)
                cell.outputs = outputs(outcome, about["points"])
            else:
                before.append(cell)
        return nb, resources


def outputs(outcome: Outcome, points: float) -> list[Any]:
    """What nbgrader reads a score from: an error is 0, a number is that many points, neither is all."""
    if outcome.share == 0:
        return [new_output("error", ename=outcome.kind, evalue=outcome.says, traceback=[outcome.says])]
    said = [new_output("stream", name="stdout", text=outcome.says + "\n")]
    if outcome.share < 1:
        said.append(new_output("execute_result", data={"text/plain": f"{outcome.share * points:g}"}))
    return said


def secret_of(path: str) -> str:
    """The secret in a file, which is made (readable by its owner only) if it is not there. Raises ValueError without a path."""
    if not path:
        raise ValueError("say where the secret of the hidden cases is: c.Grade.secret_file, as in classroom/nbgrader_config.py")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return Path(path).read_text(encoding="utf-8").strip()
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(secret := secrets.token_hex(16))
    return secret


class Collect(ExchangeCollect):
    """nbgrader warns of a submission in another student's name and takes it; here it counts for the one who made it.

    One that was put into the exchange by hand has no secret; the release of everybody's feedback would end there. It gets one.
    """

    def _path_to_record(self, path: str) -> dict:
        record = super()._path_to_record(path)
        if self.check_owner:
            owner = pwd.getpwuid(os.stat(path).st_uid).pw_name
            if owner != record["username"]:
                self.log.warning("%s is of %s, in the name of %s: it counts for %s", path, owner, record["username"], owner)
                record["username"] = owner
        return record

    def do_copy(self, src: str, dest: str) -> None:
        """As nbgrader's, and a secret where there is none: only who knows it can fetch the feedback."""
        super().do_copy(src, dest)
        secret = Path(dest) / "submission_secret.txt"
        if not secret.exists():
            secret.write_text(secrets.token_hex(64), encoding="utf-8")
