"""A class, end to end, through nbgrader's exchange: released, fetched, submitted, collected, graded, told.

Lab 2 in twelve hands. No submission may be lost, and no score may be talked into.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import make_labs
import nbformat
import pytest
import release
from nbformat.v4 import new_code_cell
from nbgrader.api import Gradebook
from nbgrader.auth import Authenticator
from nbgrader.coursedir import CourseDirectory
from nbgrader.exchange.default import ExchangeFetchAssignment, ExchangeFetchFeedback, ExchangeSubmit
from shared_state import lite
from traitlets.config import Config

from kvlab.classroom import sandbox
from kvlab.classroom.samples import SAMPLES

pytestmark = [
    pytest.mark.skipif(not sandbox.supported(), reason="this system has no Landlock; grading refuses to run here"),
    pytest.mark.filterwarnings("ignore"),  # nbgrader's and nbconvert's own
]
LAB = "02-ledger"
SOURCE = make_labs.ROOT / "solutions" / f"{LAB}.md"
POINTS = {"token_bytes": 3, "packed_bytes": 2, "slots": 3, "max_batch": 3}
WORKED = {
    cell.metadata["nbgrader"]["grade_id"].removesuffix("-answer"): cell.source
    for cell in make_labs.worked(SOURCE).cells
    if cell.metadata.get("nbgrader", {}).get("solution")
}
HALF = next(sample.code for sample in SAMPLES if (sample.lab, sample.exercise, sample.share) == (LAB, "token_bytes", 0.5))


# ---- what each student hands in ----------------------------------------------------------------------------------------


def cell(notebook, grade_id):
    return next(c for c in notebook.cells if c.metadata.get("nbgrader", {}).get("grade_id") == grade_id)


def answers(**codes):
    """A student who writes these answers and leaves the others as they came."""

    def write(notebook):
        for name, code in codes.items():
            cell(notebook, f"{name}-answer").source = code

    return write


def right(notebook):
    answers(**WORKED)(notebook)


def in_the_browser(notebook):
    """Worked in JupyterLite and downloaded: another cell at the start, another kernel's name."""
    downloaded = nbformat.reads(lite.notebook(make_labs.ROOT, LAB), as_version=4)
    notebook.cells, notebook.metadata = downloaded.cells, downloaded.metadata
    right(notebook)


def reads(notebook):
    """Answers from where they are written, by path, by import, through the checks, and out of the teacher's course."""
    answers(
        token_bytes=f"text = open({str(SOURCE)!r}).read()\nexec(text.split('### BEGIN SOLUTION')[0].split('[exercise]')[1])\n",
        packed_bytes="from kvlab.checks.ledger import packed_bytes\n",
        slots="from kvlab.checks import ledger\nslots = ledger.SLOTS.right\n",
        max_batch="import glob\nfor path in glob.glob('/**/source/02-ledger/*.ipynb', recursive=True): exec(open(path).read())\n"
        "def max_batch(*a):\n    import kvlab.checks.ledger as l; return l.max_batch(*a)\n",
    )(notebook)


def fakes(notebook):
    """Patches the checks, the notebook's shell, the process, and writes the outputs it would like to have."""
    notebook.cells.insert(
        1,
        new_code_cell(
            "import kvlab.checks, sys\nkvlab.checks.Exercise.check = lambda self, answer: print('right')\n"
            "kvlab.checks.same = lambda a, b: True\nget_ipython().run_cell = lambda *a, **k: None\n"
            "sys.modules['kvlab.checks'] = type(sys)('kvlab.checks')\n"
        ),
    )
    answers(
        token_bytes="class Yes(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def token_bytes(spec, bits):\n    return Yes(7)\n",
        packed_bytes="import os\nprint('Exercise 2 (packed_bytes): right')\nos._exit(0)\n",
        slots="import sys\nsys.modules['kvlab'] = None\nget_ipython().kernel.shell.showtraceback = lambda *a: None\n"
        "def slots(*a):\n    import gc\n    return [o for o in gc.get_objects() if getattr(o, '__name__', '') == 'slots'][1](*a)\n",
        max_batch="def max_batch(*a):\n    import inspect\n    frame = inspect.currentframe().f_back\n    return frame.f_locals['wanted']\n",
    )(notebook)
    for c in notebook.cells:
        if c.metadata.get("nbgrader", {}).get("grade"):
            c.outputs = [nbformat.v4.new_output("execute_result", data={"text/plain": "3"}, execution_count=1)]


def tampers(notebook):
    """Rewrites the locked cells and everything nbgrader keeps about them; adds a graded cell of its own."""
    cell(notebook, "token_bytes-check").source = "3.0"
    cell(notebook, "packed_bytes-check").metadata["nbgrader"] |= {"points": 100, "solution": True}
    cell(notebook, "slots-check").metadata["nbgrader"] |= {"locked": False, "grade": False}
    target = cell(notebook, "max_batch-check")
    target.metadata["nbgrader"] = {"grade_id": "max_batch-check", "grade": True}
    target.cell_type, target["attachments"] = "markdown", {}
    del target["outputs"], target["execution_count"]
    extra = new_code_cell("")
    extra.metadata["nbgrader"] = {"grade_id": "bonus", "grade": True, "locked": False, "points": 50, "schema_version": 3}
    odd = new_code_cell("")
    odd.metadata["nbgrader"] = {"grade": True, "solution": False}
    notebook.cells += [extra, odd]


def tables(notebook):
    """Knows the notebook's cases by heart."""
    from kvlab.checks import ledger

    for exercise in ledger.EXERCISES:
        known = [
            (case if exercise.name != "token_bytes" else (case[0].layers, case[1]), exercise.right(*case))
            for case in exercise.cases
        ]
        key = "a" if exercise.name != "token_bytes" else "(a[0].layers, a[1])"
        answers(**{exercise.name: f"def {exercise.name}(*a):\n    return dict({known!r}).get({key}, 0)\n"})(notebook)


def right_but_torn(notebook):
    """The right answers; the checks are gone, an answer stands twice, one was turned into text."""
    right(notebook)
    twice = nbformat.from_dict(json.loads(json.dumps(cell(notebook, "slots-answer"))))
    twice.id = "another"
    position = notebook.cells.index(cell(notebook, "slots-answer"))
    cell(notebook, "slots-answer").source = "def slots(*a):\n    raise NotImplementedError\n"
    notebook.cells.insert(position + 1, twice)
    notebook.cells = [c for c in notebook.cells if not c.metadata.get("nbgrader", {}).get("grade")]
    target = cell(notebook, "token_bytes-answer")
    target.cell_type = "markdown"
    del target["outputs"], target["execution_count"]


@dataclass(frozen=True)
class Student:
    """`writes` changes the fetched notebook; `points` by exercise is what it must get; `told` stands in the feedback."""

    writes: object
    points: dict
    told: str


ALL, NONE = POINTS, dict.fromkeys(POINTS, 0)
STUDENTS = {
    "ann-right": Student(right, ALL, "right, on the notebook"),
    "amy-browser": Student(in_the_browser, ALL, "right, on the notebook"),
    "ben-partly": Student(
        answers(
            token_bytes=HALF,
            packed_bytes="def packed_bytes(numbers, bits, group, scale_bits):\n    return -(-numbers * bits // 8)\n",
            slots=WORKED["slots"],
        ),
        {"token_bytes": 1.5, "packed_bytes": 0, "slots": 3, "max_batch": 0},
        "It leaves the scales out",
    ),
    "cyd-unfinished": Student(lambda notebook: None, NONE, "is not finished yet"),
    "dan-crashes": Student(
        answers(
            token_bytes="def token_bytes(spec, bits):\n    return 1 / 0\n",
            packed_bytes="raise RuntimeError('boom')\n",
            slots=WORKED["slots"],
        ),
        {**NONE, "slots": 3},
        "ZeroDivisionError",
    ),
    "eve-endless": Student(
        answers(
            token_bytes="def token_bytes(spec, bits):\n    while True: pass\n",
            slots="while True: pass\n",
            max_batch=WORKED["max_batch"],
        ),
        {**NONE, "max_batch": 3},
        "is there a loop without an end",
    ),
    "fay-reads": Student(reads, NONE, "Permission denied"),
    "gus-fakes": Student(fakes, NONE, "ended the process"),
    "hal-tampers": Student(tampers, NONE, "is not finished yet"),
    "ivy-tables": Student(tables, NONE, "It does not compute what is asked for"),
    "jon-torn": Student(right_but_torn, ALL, "right, on the notebook"),
    "kim-broken": Student(None, {}, ""),  # a file that is no notebook: nobody can grade it, and nobody else suffers
}


# ---- the class -----------------------------------------------------------------------------------------------------------


class Class:
    """A course's folder, an exchange, and a home for each student."""

    def __init__(self, root: Path) -> None:
        self.course, self.exchange, self.homes = root / "course", root / "exchange", root / "homes"
        self.exchange.mkdir(parents=True)
        self.exchange.chmod(0o777)
        release.release(self.course, [SOURCE], self.exchange)
        (self.course / ".grading-secret").write_text("calibration")
        self.nbgrader = release.api(self.course)
        self.nbgrader.config.Grade.seconds = 2.0
        self.nbgrader.config.ExchangeCollect.check_owner = False  # here all students are one user

    def as_student(self, name: str, kind: type) -> None:
        """Fetch or submit, as the student's own nbgrader would."""
        home = self.homes / name
        home.mkdir(parents=True, exist_ok=True)
        config = Config(
            CourseDirectory={"course_id": "shared-state", "assignment_id": LAB, "root": str(home), "student_id": name},
            Exchange={"root": str(self.exchange), "assignment_dir": str(home), "cache": str(home / ".cache")},
        )
        kind(coursedir=CourseDirectory(config=config), authenticator=Authenticator(config=config), config=config).start()

    def hand_in(self, name: str, student: Student) -> None:
        self.as_student(name, ExchangeFetchAssignment)
        path = self.homes / name / LAB / f"{LAB}.ipynb"
        if student.writes is None:
            path.write_text("this is no notebook")
        else:
            notebook = nbformat.read(path, as_version=4)
            student.writes(notebook)
            path.write_text(json.dumps(notebook))  # as it is: nbformat would repair it
        self.as_student(name, ExchangeSubmit)

    def scores(self, name: str) -> dict:
        with Gradebook(f"sqlite:///{self.course}/gradebook.db", "shared-state") as gradebook:
            notebook = gradebook.find_submission_notebook(LAB, LAB, name)
            return {grade.name.removesuffix("-check"): grade.score for grade in notebook.grades}


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    before = dict(os.environ)
    made = Class(tmp_path_factory.mktemp("class"))
    for name, student in STUDENTS.items():
        made.hand_in(name, student)
    made.collected = made.nbgrader.collect(LAB)
    made.graded = {name: made.nbgrader.autograde(LAB, name) for name in STUDENTS}
    made.feedback = [made.nbgrader.generate_feedback(LAB, name) for name in STUDENTS if name != "kim-broken"]
    made.published = made.nbgrader.release_feedback(LAB)
    yield made
    os.environ.clear()
    os.environ.update(before)


def test_what_students_get_is_the_published_lab(room):
    given = nbformat.read(room.course / "release" / LAB / f"{LAB}.ipynb", as_version=4)
    lab = nbformat.read(make_labs.ROOT / "labs" / f"{LAB}.ipynb", as_version=4)
    assert [(c.source, c.cell_type, c.id) for c in given.cells] == [(c.source, c.cell_type, c.id) for c in lab.cells]


def test_no_submission_is_lost(room):
    assert room.collected["success"], room.collected
    assert {path.name for path in (room.course / "submitted").iterdir()} == set(STUDENTS)
    for name in STUDENTS:
        sent = (room.homes / name / LAB / f"{LAB}.ipynb").read_bytes()
        assert (room.course / "submitted" / name / LAB / f"{LAB}.ipynb").read_bytes() == sent


@pytest.mark.parametrize("name", [name for name in STUDENTS if name != "kim-broken"])
def test_each_gets_the_score_it_should(room, name):
    assert room.graded[name]["success"], room.graded[name]
    assert room.scores(name) == STUDENTS[name].points


def test_a_file_that_is_no_notebook_is_reported_and_kept(room):
    assert not room.graded["kim-broken"]["success"]
    assert (room.course / "submitted" / "kim-broken" / LAB / f"{LAB}.ipynb").read_text() == "this is no notebook"


def test_every_student_reads_in_words_why(room):
    assert all(told["success"] for told in room.feedback) and room.published["success"], room.published
    for name, student in STUDENTS.items():
        if name == "kim-broken":
            continue
        room.as_student(name, ExchangeFetchFeedback)
        (page,) = (room.homes / name / LAB / "feedback").rglob("*.html")
        assert student.told in page.read_text(encoding="utf-8"), name


def test_grading_again_gives_the_same_scores(room):
    assert room.nbgrader.autograde(LAB, "ben-partly")["success"]
    assert room.scores("ben-partly") == STUDENTS["ben-partly"].points


def test_releasing_again_keeps_what_was_submitted(room):
    assert release.release(room.course, [SOURCE], room.exchange) == [LAB]
    assert {path.name for path in (room.course / "submitted").iterdir()} == set(STUDENTS)


def test_the_secret_is_the_teachers_alone(tmp_path):
    from kvlab.classroom.nbgrader import secret_of

    made = secret_of(str(tmp_path / "secret"))
    assert len(made) == 32 and secret_of(str(tmp_path / "secret")) == made
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0
    with pytest.raises(ValueError, match="secret_file"):
        secret_of("")


def test_a_submission_in_anothers_name_counts_for_whoever_made_it(tmp_path):
    import pwd

    from kvlab.classroom.nbgrader import Collect

    forged = tmp_path / "somebody+02-ledger+2026-11-29 12:00:00.0 UTC+x"
    forged.mkdir()
    collect = Collect(coursedir=CourseDirectory())
    assert collect._path_to_record(str(forged))["username"] == pwd.getpwuid(os.getuid()).pw_name
    collect.check_owner = False
    assert collect._path_to_record(str(forged))["username"] == "somebody"


def test_a_submission_made_by_hand_does_not_stop_the_feedback_of_all(tmp_path):
    from kvlab.classroom.nbgrader import Collect

    (tmp_path / "made").mkdir()
    Collect(coursedir=CourseDirectory()).do_copy(str(tmp_path / "made"), str(tmp_path / "collected"))
    assert len((tmp_path / "collected" / "submission_secret.txt").read_text()) == 128


def test_what_a_hub_needs_is_pinned_beside_what_the_course_needs():
    def pins(name):
        lines = (make_labs.ROOT / name).read_text(encoding="utf-8").splitlines()
        return dict(line.split("==") for line in lines if line and not line.startswith("#"))

    assert "jupyterhub" in pins("requirements-classroom.txt")
    assert not pins("requirements-classroom.txt").keys() & pins("requirements.txt").keys()


def test_the_oldest_versions_are_those_of_the_package():
    import versions

    from kvlab.doctor import requirements

    assert [pin.replace("==", ">=") for pin in versions.lower_bounds()] == [
        f"{n}{requirements()[n][0]}" for n in versions.HEAVY
    ]
    with pytest.raises(SystemExit, match="no such thing"):
        versions.run("sh", "-c", "echo no such thing; exit 3")


def test_release_says_what_is_wrong(tmp_path, capsys):
    assert release.main(["99-nothing", "--course", str(tmp_path)]) == 1
    assert "there are 0" in capsys.readouterr().err
    assert release.main([LAB, "--course", str(tmp_path), "--exchange", str(tmp_path / "nowhere")]) == 1
    assert "chmod 777" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
