"""Grading one answer: hidden cases, what the process that runs it is kept from, and calibrated answers with their points."""

import importlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir

import make_labs
import pytest

from kvlab import record
from kvlab.checks import LabStop, same
from kvlab.classroom import hidden, sandbox, tables, wire
from kvlab.classroom.grade import find, grade, judge
from kvlab.classroom.remote import Limits, Remote, Stopped
from kvlab.classroom.samples import SAMPLES
from kvlab.errors import KvlabError
from kvlab.experiments import byhand

needs_landlock = pytest.mark.skipif(not sandbox.supported(), reason="this system has no Landlock; grading refuses to run here")
SOLUTIONS = {path.stem: path for path in sorted((make_labs.ROOT / "solutions").glob("[0-9]*.md"))}
EXERCISES = [
    (lab, exercise)
    for lab in SOLUTIONS
    for exercise in importlib.import_module(f"kvlab.checks.{lab.partition('-')[2]}").EXERCISES
]
each_exercise = pytest.mark.parametrize(("lab", "exercise"), EXERCISES, ids=[f"{lab}-{e.name}" for lab, e in EXERCISES])


def cells_before(lab: str, name: str) -> list[tuple[str, bool]]:
    """The worked lab's code cells before the check of an exercise."""
    found = []
    for cell in make_labs.worked(SOLUTIONS[lab]).cells:
        about = cell.metadata.get("nbgrader", {})
        if about.get("grade_id") == f"{name}-check":
            assert any(is_answer for _, is_answer in found), f"the answer cell of {name} has another name than its exercise"
            return found
        if cell.cell_type == "code" and not about.get("grade"):
            found.append((cell.source, about.get("grade_id") == f"{name}-answer"))
    raise AssertionError(f"{lab} has no check of {name}")


def with_answer(lab: str, name: str, code: str) -> list[tuple[str, bool]]:
    return [(code if is_answer else source, is_answer) for source, is_answer in cells_before(lab, name)]


# ---- hidden cases ------------------------------------------------------------------------------------------------------


@each_exercise
def test_hidden_cases_are_others_than_the_notebooks_and_stay_for_one_secret(lab, exercise):
    cases = hidden.cases(lab, exercise, "one")
    assert len(cases) == hidden.COUNT
    assert same([hidden._plain(case) for case in cases], [hidden._plain(case) for case in hidden.cases(lab, exercise, "one")])
    assert not same(
        [hidden._plain(case) for case in cases], [hidden._plain(case) for case in hidden.cases(lab, exercise, "two")]
    )
    assert not any(same(hidden._plain(case), hidden._plain(shown)) for case in cases for shown in exercise.cases)


@each_exercise
def test_hidden_cases_alone_accept_the_right_answer_and_refuse_the_mistakes(lab, exercise):
    seen = set()
    for secret in ("a", "b", "c"):
        alone = replace(exercise, cases=hidden.cases(lab, exercise, secret))
        alone.check(exercise.right)
        for number, mistake in enumerate(exercise.mistakes):
            try:
                replace(alone, mistakes=()).check(mistake.code)
            except LabStop:
                seen.add(number)
    assert seen == set(range(len(exercise.mistakes)))


def test_an_exercise_without_hidden_cases_says_where_to_write_them():
    with pytest.raises(LookupError, match="write a generator"):
        hidden.cases("05-blocks", replace(find("05-blocks", "free-check"), name="another"), "s")


# ---- points ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def graded():
    """Every worked answer and every sample, graded; two at a time."""
    work = {(lab, e.name, "worked"): (lab, e, cells_before(lab, e.name)) for lab, e in EXERCISES}
    for number, sample in enumerate(SAMPLES):
        exercise = find(sample.lab, f"{sample.exercise}-check")
        work[number] = (sample.lab, exercise, with_answer(sample.lab, exercise.name, sample.code))
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(work, pool.map(lambda task: grade(*task, "calibration"), work.values()), strict=True))


@needs_landlock
@each_exercise
def test_a_worked_answer_gets_all_points_with_nothing_but_its_own_notebook(graded, lab, exercise):
    outcome = graded[lab, exercise.name, "worked"]
    assert (outcome.kind, outcome.share) == ("right", 1), outcome.says


@needs_landlock
@pytest.mark.parametrize("number", range(len(SAMPLES)), ids=[f"{s.lab}-{s.exercise}-{s.share:g}" for s in SAMPLES])
def test_a_calibrated_answer_gets_its_points(graded, number):
    assert graded[number].share == SAMPLES[number].share, graded[number].says


def test_shares_of_hidden_cases_decide():
    exercise = find("06-prefix", "suffix_positions-check")
    cases = [(20 + n, 10) for n in range(8)]
    for wrong, share in ((0, 1), (1, 0.5), (2, 0.5), (3, 0), (8, 0)):
        refused = list(cases[:wrong])
        outcome = judge(exercise, cases, lambda n, c: [] if (n, c) in refused else list(range(c, n)))  # noqa: B023
        assert outcome.share == share
        assert str(wrong) in outcome.says or wrong == 0


def test_a_mistake_on_hidden_cases_only_is_named():
    exercise = find("06-prefix", "suffix_positions-check")
    outcome = judge(
        exercise, [(900 + n, 800) for n in range(4)], lambda n, c: list(range(c, n)) if n < 600 else list(range(n - c))
    )
    assert outcome.share == 0 and "It does not compute" in outcome.says
    outcome = judge(
        replace(exercise, cases=exercise.cases[:1]),
        [(16, 8), (17, 0), (18, 0), (19, 0)],
        lambda n, c: list(range(n - c)) if n == 16 else list(range(c, n)),
    )
    assert outcome.share == 0.5 and "others" in outcome.says


def test_a_check_cell_without_an_exercise_is_refused():
    with pytest.raises(LookupError, match="no exercise NOTHING"):
        find("05-blocks", "nothing-check")
    with pytest.raises(LookupError, match=r"kvlab\.checks\.nowhere"):
        find("99-nowhere", "free-check")


@pytest.mark.parametrize("lab", SOLUTIONS)
def test_the_teachers_page_shows_every_mistake_and_every_sample(lab):
    notebook = make_labs.ROOT / "labs" / f"{lab}.ipynb"
    shown = tables.mistakes(notebook)
    for _, exercise in (pair for pair in EXERCISES if pair[0] == lab):
        assert all(mistake.says.replace("|", "\\|") in shown for mistake in exercise.mistakes)
    assert len({line.replace("\\|", "").count("|") for line in shown.splitlines()}) == 1
    samples = [sample for sample in SAMPLES if sample.lab == lab]
    assert samples and all(sample.code.rstrip() in tables.samples(notebook) for sample in samples)
    assert tables.plan([notebook]).splitlines()[-1].count("|") == 5


def test_the_teachers_page_takes_its_numbers_from_the_recorded_run():
    facts = tables.facts(record.load("classroom"))
    assert facts["hidden"] == str(hidden.COUNT) and all(facts.values())
    assert 0 < float(facts["grade_plain"]) <= float(facts["grade_tensors"])


# ---- what an answer is kept from ---------------------------------------------------------------------------------------

RIGHT = next(source for source, is_answer in cells_before("05-blocks", "allocate") if is_answer)
HEAD = "def allocate(pool, seq, num_tokens, hits=()):\n"
SOLUTION, LIBRARY = SOLUTIONS["05-blocks"], byhand.__file__
ATTACKS = {
    "reads the solution": (f"text = open({str(SOLUTION)!r}).read()\n{RIGHT}", "Permission denied"),
    "reads the library": (f"{HEAD}    exec(open({LIBRARY!r}).read(), globals())\n", "Permission denied"),
    "lists the folder": (f"import os\nos.listdir({str(make_labs.ROOT)!r})\n{RIGHT}", "Permission denied"),
    "imports the course's answer": ("from kvlab.experiments.byhand import allocate\n", "not there while grading"),
    "imports the checks": ("from kvlab.checks import blocks\nallocate = blocks.ALLOCATE.right\n", "not there while grading"),
    "finds its way around the import": (
        f"import sys\nsys.meta_path[:] = sys.meta_path[1:]\nsys.path.insert(0, {str(make_labs.ROOT)!r})\n"
        "[sys.modules.pop(name) for name in list(sys.modules) if name.startswith('kvlab')]\n"
        "from kvlab.experiments.byhand import allocate\n",
        "cannot be run",
    ),
    "calls the answer behind an argument": (
        f"{HEAD}    return pool.take.__globals__['allocate'](pool, seq, num_tokens, hits)\n",
        "not there while grading",
    ),
    "looks for a function in memory": (
        f"import gc\n{HEAD}    f = [o for o in gc.get_objects() if getattr(o, '__name__', '') == 'allocate' and o is not allocate]\n"
        "    return f[0](pool, seq, num_tokens, hits)\n",
        "it raised",
    ),
    "equals everything": (
        "class Yes:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
        + HEAD
        + "    pool.tables = Yes()\n    return Yes()\n",
        "not yet",
    ),
    "patches what writes the reply": (f"import json\njson.dumps = lambda *a, **k: '{{}}'\n{RIGHT}", "no value"),
    "writes a reply of its own": (
        "import os\nfor fd in range(3, 1024):\n    try: os.write(fd, b'\\0\\0\\0\\x0c{\"gave\": [1]}')\n    except OSError: pass\n"
        + RIGHT,
        "no value",
    ),
    "ends the process": (f"{HEAD}    import os; os._exit(0)\n", "ended the process"),
    "raises SystemExit": (f"{HEAD}    raise SystemExit(0)\n", "it raised SystemExit"),
    "ends while its cell runs": ("import os; os._exit(0)\n", "ended the process"),
    "never ends": (f"{HEAD}    while True: pass\n", "has not ended"),
    "sleeps": (f"import time\n{HEAD}    time.sleep(1000)\n", "has not ended"),
    "never ends while its cell runs": ("while True: pass\n", "has not ended"),
    "starts processes without end": (f"import os\n{HEAD}    while True: os.fork()\n", "allocate"),
    "kills its parent": (f"import os\n{HEAD}    os.kill(os.getppid(), 9)\n", "allocate"),
    "takes all memory": (f"{HEAD}    return [0] * 10**11\n", "MemoryError"),
    "writes a file": (f"open({str(Path(gettempdir()) / 'kvlab-grading-was-here')!r}, 'w')\n{RIGHT}", "cannot be run"),
    "talks to the network": ("import socket\nsocket.create_connection(('127.0.0.1', 22), 1)\n" + RIGHT, "cannot be run"),
    "gives something without end": (f"{HEAD}    x = []\n    for _ in range(10**6): x = [x]\n    return x\n", "allocate"),
    "raises one of our own": (
        f"class LabStop(Exception): pass\n{HEAD}    raise LabStop('Exercise 1: right')\n",
        "it raised LabStop",
    ),
    "is no function": ("allocate = 3\n", "it is int"),
    "is not there": ("x = 1\n", "no such name"),
    "does not parse": ("def allocate(:\n", "SyntaxError"),
    "is not written": (f"{HEAD}    raise NotImplementedError\n", "not finished"),
}


@pytest.fixture(scope="module")
def attacked():
    exercise, limits = find("05-blocks", "allocate-check"), Limits(seconds=2)
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(
            lambda attack: grade(
                "05-blocks", exercise, [("from kvlab.core.blocks import OutOfBlocks", False), (attack[0], True)], "s", limits
            ),
            ATTACKS.values(),
        )
        return dict(zip(ATTACKS, done, strict=True))


@needs_landlock
@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_gets_a_point_and_each_is_told_what_it_did(attacked, name):
    outcome = attacked[name]
    assert outcome.share == 0 and ATTACKS[name][1] in outcome.says, outcome


@needs_landlock
def test_the_attacks_would_work_on_an_open_process():
    """What is denied there is there to be had here: otherwise the tests above would pass with the doors open."""
    assert "BEGIN SOLUTION" in SOLUTION.read_text(encoding="utf-8")
    assert callable(byhand.Pool.take.__globals__["allocate"])
    with Remote([(RIGHT, True)], "allocate", samples=[(byhand.new_pool(4, 4), "ada", 6)]) as answer:
        pool = byhand.new_pool(4, 4)
        answer(pool, "ada", 6)
        assert pool.tables == {"ada": [0, 1]} and pool.free == [3, 2]


@needs_landlock
def test_one_list_in_two_tables_is_one_list_here_too():
    exercise = find("05-blocks", "share_prefix-check")
    code = (
        "def share_prefix(pool, src, dst, prefix_len):\n    table = pool.tables[src][: pool.blocks_for(prefix_len)]\n"
        "    for block in table: pool.ref_count[block] += 1\n"
        "    pool.tables[dst] = pool.tables[src] if prefix_len == pool.lengths[src] else table\n    pool.lengths[dst] = prefix_len\n"
    )
    outcome = grade("05-blocks", exercise, [(code, True)], "s")
    assert outcome.share == 0 and "same list as their table" in outcome.says


@needs_landlock
def test_an_answer_may_use_its_notebooks_definitions_and_constants_but_nothing_that_runs():
    cells = [
        ("import math\n%matplotlib inline\nloaded = load()\nROUND = 2\nup = lambda x: ceil(x)", False),
        ("def ceil(x):\n    return math.ceil(x)\nraise SystemExit", False),
        ("%%bash\nrm -rf /", False),
        ("def slots(tokens, block, window, beams):\n    return up(tokens / block) * ROUND", True),
    ]
    with Remote(cells, "slots") as answer:
        assert answer(33, 16, None, 1) == 6
    with Remote(cells, "loaded") as answer, pytest.raises(Stopped, match="no such name"):
        answer()


@needs_landlock
def test_an_error_is_raised_here_as_what_it_was_there():
    cells = [
        ("def f(n):\n    raise [ValueError('a'), KeyError('b'), NotImplementedError(), KeyboardInterrupt(), Own('c')][n]", True)
    ]
    cells.insert(0, ("class Own(Exception): pass", False))
    with Remote(cells, "f") as answer:
        for n, kind in enumerate((ValueError, KeyError, NotImplementedError)):
            with pytest.raises(kind):
                answer(n)
        for n, name in ((3, "KeyboardInterrupt"), (4, "Own")):
            with pytest.raises(Exception) as raised:
                answer(n)
            assert type(raised.value).__name__ == name and not isinstance(raised.value, KeyboardInterrupt)


def test_a_system_that_cannot_confine_grades_nothing(monkeypatch):
    monkeypatch.setattr(sandbox, "supported", lambda: False)
    with pytest.raises(KvlabError, match="Landlock"):
        grade("05-blocks", find("05-blocks", "allocate-check"), [(RIGHT, True)], "s")


# ---- values ------------------------------------------------------------------------------------------------------------


def test_values_come_back_as_they_were():
    import torch

    for value in (None, True, -3, 10**30, 0.1, float("inf"), "é", [1, [2]], (1, (2,)), {"a": [1], 2: None}, {1, 2}):
        assert wire.decode(wire.encode(value)) == value and type(wire.decode(wire.encode(value))) is type(value)
    for tensor in (
        torch.randn(2, 3),
        torch.ones(2, 2, dtype=torch.bool),
        torch.arange(3),
        torch.zeros(0, 4),
        torch.tensor(1.5).bfloat16(),
    ):
        back = wire.decode(wire.encode(tensor))
        assert back.dtype == tensor.dtype and back.shape == tensor.shape and torch.equal(back, tensor)
    twice = [1]
    a, b = wire.decode(wire.encode([twice, twice]))
    assert a is b
    endless = []
    endless.append(endless)
    assert (back := wire.decode(wire.encode(endless)))[0] is back
    assert wire.decode(wire.encode(lambda: 1)) != wire.decode(wire.encode(lambda: 1))


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff", b"[1]", b'{"again": 3}', b'{"list": 3, "n": 0}', b'{"list": [1]}', b'{"dict": [[1]], "n": 0}', b"[" * 100000,
        b'{"dict": [[{"list": [], "n": 1}, 1]], "n": 0}', b'{"tensor": ["float32", [99], ""], "n": 0}', b'{"tensor": [1], "n": 0}',
        b'{"tensor": ["float32", [-1], "AAAA"], "n": 0}', b'{"array": ["O", [1], "AAAAAAAAAAA="], "n": 0, "x": 1}1',
        b'{"fields": [1], "n": 0}', b"1" * 5000,
    ],
)  # fmt: skip
def test_what_encode_did_not_write_is_garbled(content):
    with pytest.raises(wire.Garbled):
        wire.decode(content)


def test_arrays_of_objects_are_nothing():
    assert isinstance(wire.decode(b'{"array": ["O", [1], "AAAAAAAAAAA="], "n": 0}'), wire.Opaque)
    assert isinstance(wire.decode(b'{"tensor": ["os", [1], ""], "n": 0}'), wire.Opaque)
