"""Caught in released software: the tables, the probes' process, the judge on what has misled it, the recorded run, and lab 13."""

import json
import re
import subprocess

import numpy as np
import pytest

from kvlab import compare, probe, record
from kvlab.checks import Wrong
from kvlab.checks import released as checks
from kvlab.errors import KvlabError
from kvlab.experiments import packages, released
from kvlab.experiments import released_cases as cases
from kvlab.experiments import released_results as results
from kvlab.experiments.checkpoint import Checkpoint
from kvlab.show import released as show

EVERY = (*cases.BUGS, cases.NAMED, cases.REAL, cases.ACQUITTED, *cases.OPEN, cases.SOUND)

# ---- the tables -----------------------------------------------------------------------------------------------------------


def test_the_table_of_bugs_is_well_formed():
    assert len(cases.BUGS) >= 15 and len({case.package for case in cases.BUGS}) >= 4
    assert len({case.name for case in EVERY}) == len(EVERY)
    for case in EVERY:
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", thread) for thread in case.threads), case.name
        assert case.family in (*compare.FAMILIES, "none"), case.name
        assert case.fixed is None or cases.numbers(case.broken) < cases.numbers(case.fixed)
    assert [case.name for case in cases.BUGS if not case.threads] == ["longrope-again"], "the chapter says: all but one"


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_each_case_has_a_probe_that_knows_it(case):
    source = (released.PROBES / released.script(case.package, case.what)).read_text()
    scenario, arch = case.what.split()
    assert scenario in source or case.package in ("transformer-lens", "litgpt") or case is cases.REAL or case is cases.NAMED
    assert f'"{arch}"' in source or case.package != "transformers" or case is cases.REAL or case is cases.NAMED
    for version in filter(None, (case.broken, case.fixed)):
        pins = cases.pins(case.package, version)
        assert pins[0] == (case.package, version) and len({name for name, _ in pins}) == len(pins)
        assert all(re.fullmatch(r"[\d.]+", pinned) for _, pinned in pins)


def test_the_calendar_has_one_release_of_each_minor_in_order():
    numbers = [cases.numbers(version) for version in cases.CALENDAR]
    assert numbers == sorted(numbers) and len({number[:2] for number in numbers}) == len(numbers) >= 50


@pytest.mark.parametrize(
    ("version", "tokenizers", "hub", "numpy"),
    [
        ("4.27.4", "0.13.3", "0.36.2", False),
        ("4.35.0", "0.14.1", "0.36.2", False),
        ("4.35.2", "0.15.2", "0.36.2", False),
        ("4.43.4", "0.19.1", "0.36.2", True),
        ("4.45.0", "0.20.3", "0.36.2", False),
        ("5.0.0", "0.22.2", "1.33.0", False),
        ("5.24.0", "0.23.3", "2.4.0", False),
    ],
)
def test_what_a_release_of_transformers_needs(version, tokenizers, hub, numpy):
    pins = dict(cases.pins("transformers", version))
    assert (pins["tokenizers"], pins["huggingface_hub"], "numpy" in pins) == (tokenizers, hub, numpy)


def test_the_probes_are_scripts_that_need_nothing_of_kvlab_but_the_copied_file():
    for path in released.sources():
        assert not re.search(r"^\s*(from|import) kvlab", path.read_text(), re.MULTILINE), path.name
    assert released.sources()[0].name == "probe.py"


def test_another_probe_is_another_part(tmp_path, monkeypatch):
    before = released.part("litgpt", "0.5.11", "window gemma3")
    other = released.part("transformers", "4.40.2", "static llama")
    copy = tmp_path / "probes"
    copy.mkdir()
    for path in released.PROBES.glob("*.py"):
        (copy / path.name).write_text(path.read_text() + ("# changed\n" if path.name == "lit.py" else ""))
    monkeypatch.setattr(released, "PROBES", copy)
    assert released.part("litgpt", "0.5.11", "window gemma3") != before
    assert released.part("transformers", "4.40.2", "static llama") == other


# ---- fetching -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_HOME", str(tmp_path))
    return tmp_path / "releases"


def pip(monkeypatch, *, code=0, says="", files=("there.py",)):
    """Stand in for pip: writes files into --target, or fails."""
    calls = []

    def run(command, **options):
        calls.append(command)
        target = command[command.index("--target") + 1]
        if code == 0:
            packages.Path(target).mkdir(parents=True)
            for name in files:
                (packages.Path(target) / name).write_text("")
        return subprocess.CompletedProcess(command, code, "", says)

    monkeypatch.setattr(packages.subprocess, "run", run)
    return calls


def test_a_release_is_fetched_once_without_what_it_depends_on(cache, monkeypatch):
    calls = pip(monkeypatch)
    pins = [("transformers", "4.40.2"), ("tokenizers", "0.19.1")]
    assert not packages.have(pins)
    for _ in range(2):
        assert packages.path(pins) == [str(cache / "transformers-4.40.2"), str(cache / "tokenizers-0.19.1")]
    assert len(calls) == 2 and all("--no-deps" in call for call in calls) and packages.have(pins)
    assert not any("://" in word for call in calls for word in call), "where pip looks is pip's own configuration"


def test_what_a_cut_fetch_left_is_started_anew(cache, monkeypatch):
    (cache / "part" / "files").mkdir(parents=True)
    (cache / "part" / "files" / "half.py").write_text("")
    pip(monkeypatch)
    packages.fetch("litgpt", "0.5.11")
    assert [path.name for path in (cache / "litgpt-0.5.11").iterdir()] == ["there.py"] and not (cache / "part").exists()


@pytest.mark.parametrize(
    ("says", "message", "remedy"),
    [
        ("WARNING: Retrying: NewConnectionError\nERROR: No matching distribution found", "no package index", "Connect"),
        ("OSError: [Errno 28] No space left on device", "full", "KVLAB_HOME"),
        ("/usr/bin/python: No module named pip", "no pip", "ensurepip"),
        ("ERROR: something else.", "something else.", "goes on where it was"),
        ("", "pip said nothing", "goes on where it was"),
    ],
)
def test_a_fetch_that_fails_says_what_to_do_and_leaves_nothing(cache, monkeypatch, says, message, remedy):
    pip(monkeypatch, code=1, says=says)
    with pytest.raises(KvlabError) as error:
        packages.path([("transformers", "4.40.2")])
    assert "transformers==4.40.2" in error.value.message and message in error.value.message and remedy in error.value.remedy
    assert not packages.folder("transformers", "4.40.2").exists()


def test_the_running_environment_serves_its_own_release_without_fetching(cache):
    import transformers

    assert packages.here("transformers", transformers.__version__) and not packages.here("no-such-package", "1")
    assert packages.path([("transformers", transformers.__version__)]) == []


@pytest.mark.parametrize("options", [{"device": "cuda"}, {"name": "another/model"}])
def test_another_device_or_model_is_refused_by_name(options):
    with pytest.raises(KvlabError, match="device" if "device" in options else "model"):
        released.run(**options)


# ---- the judge on what has misled it ------------------------------------------------------------------------------------------

PROMPT, TOKENS = [5, 6, 7], [1, 2, 3]
LOGITS = 6.0 * np.random.default_rng(0).standard_normal((3, 11)).astype(np.float32)
LOGITS[range(3), TOKENS] = 20.0


def moved(by, step=2):
    """The logits with one of them `by` further on."""
    out = LOGITS.copy()
    out[step, 7] += by
    return out


def folder(tmp_path, note=None, **logits):
    for name, values in logits.items():
        probe.save(tmp_path / f"{name.replace('__', '.')}.npz", PROMPT, TOKENS, values, dtype="float32", layers=2, engine="e")
    (tmp_path / "note.json").write_text(json.dumps({"outcome": "ran", **(note or {})}))
    return released.read(tmp_path)


def test_identical_arms_leave_the_floor_and_a_rounding_is_no_fault(tmp_path):
    found = folder(tmp_path, reference=LOGITS, healthy__rows2=LOGITS, healthy__rows7=LOGITS, suspect=moved(3e-6))
    assert found["verdict"] == "noise" and found["epsilon"] == found["floor"] > 3e-6 and found["same_text"] is True


def test_a_sick_arm_is_left_out_and_the_fault_is_still_one(tmp_path):
    found = folder(tmp_path, reference=LOGITS, healthy__float64=moved(3e-6), healthy__behind=moved(4.78), suspect=moved(4.13))
    assert found["verdict"] == "state fault" and list(found["left_out"]) == ["behind"] and found["onset"] == 2


def test_a_sick_arm_alone_gives_no_verdict(tmp_path):
    found = folder(tmp_path, reference=LOGITS, healthy__behind=moved(4.78), suspect=moved(4.13))
    assert found["outcome"] == "no verdict" and "no healthy arm can be believed" in found["says"]


def test_a_healthy_run_close_to_epsilon_is_noise_and_one_beyond_is_unclear(tmp_path):
    arms = {"reference": LOGITS, "healthy__float64": moved(2e-5)}
    verdicts = [folder(tmp_path, **arms, suspect=moved(by))["verdict"] for by in (3.8e-5, 6e-5, 7.8e-5, 9e-5)]
    assert verdicts == ["noise", "unclear", "unclear", "state fault"]


def test_a_twin_is_kept_only_where_there_is_something_to_name(tmp_path):
    arms = {"reference": LOGITS, "healthy__float64": LOGITS, "twin__7": moved(2.0), "twin__12": LOGITS}
    found = folder(tmp_path, **arms, suspect=moved(2.0 + 1e-6))
    assert list(found["twins"]) == ["7", "12"] and results.named(found)[0] == "7" and results.nearest_other(found) > 1.9
    assert folder(tmp_path, **arms, suspect=LOGITS)["twins"] == {}
    assert results.named({"twins": {"1": 0.0, "2": 1e-6}, "epsilon": 1e-5}) is None, "two that fit name nothing"
    assert results.named({"twins": {"1": 0.5}, "epsilon": 1e-5}) is None


def test_what_a_release_that_refuses_leaves(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "log.txt").write_text("Traceback\nImportError: cannot import name 'x'\n\n")
    found = released.read(tmp_path / "a")
    assert found["outcome"] == "refused" and "cannot import name 'x'" in found["says"]
    assert results.state(found) == results.REFUSES
    found = folder(tmp_path, note={"outcome": "not there", "says": "no Mamba"})
    assert found == {"outcome": "not there", "says": "no Mamba"} and results.state(found) == results.ABSENT
    unknown = {"outcome": "refused", "says": "ValueError: The following `model_kwargs` are not used by the model: ['x']"}
    assert results.state(unknown) == results.ABSENT and results.state(None) == results.ABSENT
    refuses_a_mask = unknown | {"says": unknown["says"].replace("'x'", "'attention_mask'")}
    assert results.state(refuses_a_mask) == results.REFUSES, "Mamba, 4.42 to 4.44: an honest answer"


def test_of_given_tokens_the_text_is_the_plain_search(tmp_path):
    arms = {"reference": LOGITS, "healthy__float64": LOGITS, "suspect": moved(2.0)}
    for name, values in arms.items():
        path = tmp_path / f"{name.replace('__', '.')}.npz"
        probe.save(path, PROMPT, TOKENS, values, forced=True, dtype="float32", layers=2)
    for plain, same in ((TOKENS, True), ([1, 2, 4], False), (None, None)):
        (tmp_path / "note.json").write_text(json.dumps({"outcome": "ran", "plain": plain}))
        found = released.read(tmp_path)
        assert found["same_text"] is same and "plain" not in found


# ---- the same path, for real: a pair that needs nothing fetched -------------------------------------------------------------------


@pytest.mark.model
def test_a_small_pair_in_a_process_of_its_own_and_again_from_the_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "run.jsonl"
    run = released.run(quick=True, checkpoint=path, progress=False)
    lent, copied = run.data["runs"]
    assert (lent["verdict"], copied["verdict"]) == ("state fault", "noise")
    assert results.named(lent)[0] == "5", "so many tokens the first request had"
    assert lent["engine"].startswith("transformers ") and set(lent["arms"]) == {
        "rows2",
        "rows7",
        "threads",
        "behind",
        "float64",
    }

    def no_more(*_):
        raise AssertionError("it is in the checkpoint")

    monkeypatch.setattr(released, "play", no_more)
    again = released.run(quick=True, checkpoint=path, progress=False)
    assert again.data["runs"] == run.data["runs"]


@pytest.mark.parametrize("version", [cases.BUGS[2].broken, cases.BUGS[2].fixed])
def test_the_recorded_pair_again_where_its_releases_are_at_hand(version, tmp_path):
    if not packages.have(cases.pins("transformers", version)):
        pytest.skip("its release is not in the cache folder: `kvlab run released` fetches it")
    released.play("transformers", version, ["static llama"], tmp_path)
    found = released.read(tmp_path / "static-llama")
    before = results.table(record.load("released"))["transformers", version, "static llama"]
    assert found["verdict"] == before["verdict"] and found["same_text"] == before["same_text"]
    assert results.named(found) is None or results.named(found)[0] == results.named(before)[0] == "20"


def test_a_process_that_is_cut_leaves_its_other_cases_without_an_answer(tmp_path, monkeypatch):
    script = tmp_path / "probes"
    script.mkdir()
    (script / "hf.py").write_text("import sys\nsys.exit('cannot import name it_needs')\n")
    monkeypatch.setattr(released, "PROBES", script)
    monkeypatch.setattr(packages, "here", lambda *_: True)
    released.play("transformers", "1.0", ["static llama"], tmp_path / "out")
    assert "cannot import name it_needs" in released.read(tmp_path / "out" / "static-llama")["says"]


# ---- the recorded run ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    return record.load("released")


@pytest.mark.parametrize("case", (*cases.BUGS, cases.REAL), ids=lambda case: case.name)
def test_every_bug_is_a_state_fault_where_broken_and_noise_where_fixed(run, case):
    bad, good = results.pair(run, case)
    assert bad["verdict"] == "state fault" and good["verdict"] in ("noise", "identical")
    assert bad["delta"] > 1e4 * bad["epsilon"] and good["delta"] <= good["epsilon"]


def test_nothing_lies_between_noise_and_fault(run):
    found = results.apart(run)
    assert found["between"] == 0 and found["noise"] > 100 and found["faults"] > 50
    assert found["orders"] > 3.5 and results.ratio(found["highest"]) <= 1
    assert not [row for row in run.data["runs"] if row["outcome"] == "no verdict"]


def test_the_stories_are_what_the_run_says(run):
    pair = {case.name: results.pair(run, case) for case in EVERY}
    real = pair["static-cache-real"][0]
    assert real["same_text"] is True and real["steps"] == 12 and real["first"] is None
    assert int(results.named(real)[0]) == run.data["prompt_tokens"] + run.manifest.settings["new_tokens"]
    mistral, litgpt = pair["mistral-window-twin"][0], pair["litgpt-window"][0]
    assert results.named(mistral)[0] == results.named(litgpt)[0] == "64", "no window at all, both"
    assert mistral["delta"] == pair["mistral-window"][0]["delta"]
    assert results.nearest_other(real) > 1000 * real["epsilon"]
    once, again = pair["dynamic-ntk"][0], pair["dynamic-ntk-again"][0]
    assert once["delta"] == again["delta"] and results.named(once)[0] == results.named(again)[0] == "62"
    assert {pair[name][0]["onset"] for name in ("tl-alibi", "xt-alibi")} == {1}
    faults = {case.name: row["delta"] for case, row in results.broken(run)}
    assert max(faults, key=faults.get) == "mamba-beams" and pair["mamba-beams"][0]["same_text"] is True
    assert pair["prompt-lookup"][0]["same_text"] is True and results.named(pair["cache-copied"][0])[0] == "0"
    assert all(results.state(row) == results.RIGHT for row in pair["neox-left-pad"])
    assert results.state(pair["borrowed-cache"][0]) == results.WRONG == results.state(pair["neo-static"][0])
    assert results.state(pair["borrowed-copy"][0]) == results.RIGHT


def test_the_calendar_says_when_each_bug_came_and_went(run):
    releases, rows, states = results.calendar(run)
    assert releases == list(cases.CALENDAR), "a release that was not run is not in the figure; the chapter says how many were"
    assert all(results.spans(run, case.what) for case in rows), "each is wrong somewhere"
    assert len(results.spans(run, "after_long llama_dyn")) == 2, "gone, and back"
    assert set(states.values()) <= {results.RIGHT, results.WRONG, results.REFUSES, results.ABSENT}


def test_the_sick_arms_of_this_run_were_left_out(run):
    found = {(row["what"], arm) for row, arm, _ in results.left_out(run)}
    assert {("cached phi3_long", "behind"), ("cached mamba2", "behind")} <= found


def test_the_run_keeps_small_numbers_only(run):
    assert max(len(row.get("deltas", [])) for row in run.data["runs"]) <= 12
    assert (record.results_folder() / "released-cpu.json.gz").stat().st_size < 200_000
    assert not [row for row in run.data["runs"] if re.search(r"/(tmp|home|root)/", row.get("says", ""))], "no path of a machine"


def test_figures_and_tables_say_in_words_what_they_show(run):
    axis, calendar = show.one_axis(run), show.calendar(run)
    assert "0 runs lie between" in axis.layout.meta["alt"]
    assert len({trace.marker.symbol for trace in calendar.data}) == len(calendar.data) >= 3, "colour alone tells nothing"
    assert all(case.symptom in show.calendar_key(run) for case in cases.swept())
    for text in (show.bugs_table(run), show.twins_table(run), show.left_out_table(run), show.calendar_key(run)):
        widths = {line.replace("\\|", "").count("|") for line in text.splitlines()}
        assert len(widths) == 1 and len(text.splitlines()) > 2
    assert int(show.facts(run)["twins"]) >= 9


def test_every_number_the_chapter_asks_for_is_there(run):
    text = (released.PROBES.parents[2] / "book" / "13-released.md").read_text(encoding="utf-8")
    asked = set(re.findall(r"\{glue:text\}`(\w+)`", text))
    assert asked <= {*show.facts(run), "manifest"} and len(asked) > 30


# ---- lab 13 -------------------------------------------------------------------------------------------------------------------


def test_the_labs_files_are_small_of_one_prompt_and_do_not_say_where_they_are_from():
    paths = [released.unnamed(name) for name in ("reference", "rows2", "behind", "suspect")]
    assert sum(path.stat().st_size for path in paths) < 4 << 20
    runs = [probe.load(path) for path in paths]
    assert len({tuple(run.prompt) for run in runs}) == 1 and len({tuple(run.tokens) for run in runs}) == 1
    assert all(run.manifest["engine"] == "a release" and not run.manifest["packages"] for run in runs)
    reference, rows2, behind, suspect = runs
    found = compare.judge_runs(reference, {"rows2": rows2, "behind": behind}, suspect)
    assert found.verdict.kind == "state fault" and found.verdict.step == 1


@pytest.mark.model
def test_the_labs_number_is_found_by_its_twin_and_by_no_other(loaded):
    reference, suspect = (probe.load(released.unnamed(name)) for name in ("reference", "suspect"))
    right = len(reference.prompt) + released.LAB_NEW
    near = {
        n: compare.compare(released.twin(loaded, reference.prompt, 4, n), suspect).delta
        for n in (0, right - 1, right, right + 1)
    }
    assert checks.named_number(near, 1.4e-4) == right
    off = {by: compare.compare(released.twin(loaded, reference.prompt, 4, by=by), suspect).delta for by in (-1, 0, 1)}
    assert checks.named_number(off, 1.4e-4) is None
    healthy = compare.compare(reference, released.twin(loaded, reference.prompt, 4))
    assert healthy.delta < 1.4e-4, "and both hypotheses are gone afterwards"


def epsilon_by_loop(healthy, floor, ceiling):
    largest = None
    for name in healthy:
        if healthy[name] <= ceiling:
            largest = healthy[name] if largest is None else max(largest, healthy[name])
    return None if largest is None else max(floor, largest + largest)


def verdict_by_ratio(delta, margin, epsilon):
    size = max(delta / epsilon, 0 if margin is None else margin / (2 * epsilon))
    return "noise" if size <= 1 else "unclear" if size <= 2 else "state fault"


def begins_by_while(deltas, epsilon):
    step = 0
    while step < len(deltas) and deltas[step] <= epsilon:
        step += 1
    return step if step < len(deltas) else None


def number_by_pop(distances, epsilon):
    fits = {n for n in distances if distances[n] <= epsilon}
    return fits.pop() if len(fits) == 1 else None


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        (checks.EPSILON, epsilon_by_loop),
        (checks.VERDICT, verdict_by_ratio),
        (checks.BEGINS, begins_by_while),
        (checks.NAMED_NUMBER, number_by_pop),
    ],
)
def test_right_answers_pass(exercise, answer, capsys):
    exercise.check(answer)
    assert "right" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("exercise", "answer", "says"),
    [
        (checks.EPSILON, lambda h, low, high: max(low, 2 * max(h.values())), "believes every arm"),
        (checks.EPSILON, lambda h, low, high: 2 * max(d for d in h.values() if d < high), "gave 0, and should give 0.00014"),
        (checks.VERDICT, lambda d, m, e: "noise" if d <= e else "state fault", "gave"),
        (checks.VERDICT, lambda d, m, e: verdict_by_ratio(0, m, e), "looks at the tokens only"),
        (checks.BEGINS, lambda d, e: d.index(max(d)), "gave"),
        (checks.NAMED_NUMBER, lambda d, e: min(d, key=d.get) if d else None, "nearest twin is not yet a finding"),
    ],
)
def test_wrong_answers_are_told_why(exercise, answer, says):
    with pytest.raises(Wrong, match=re.escape(says)):
        exercise.check(answer)


def test_the_labs_rules_are_the_librarys():
    assert checks.UNCLEAR == compare.BEYOND
    for delta, margin in ((0.9, None), (1.1, None), (1.9, None), (2.1, None), (0.5, 1.9), (0.5, 2.1), (0.5, 3.9), (0.5, 4.1)):
        first = None if margin is None else 1
        difference = compare.Difference(first, margin, (0.0, delta), 0.0)
        assert compare.judge(difference, 1.0).kind == checks.verdict(delta, margin, 1.0)
        assert difference.onset(1.0) == checks.begins([0.0, delta], 1.0)
    arms = {
        "a": compare.Difference(None, None, (3e-6,), 0.0, size=9.0),
        "b": compare.Difference(None, None, (5.0,), 0.0, size=9.0),
    }
    bound = compare.bound(arms, layers=2)
    assert bound.epsilon == checks.epsilon({"a": 3e-6, "b": 5.0}, bound.floor, bound.ceiling)


def test_a_checkpoint_of_a_cut_run_is_taken_up(tmp_path, monkeypatch, run):
    kept = Checkpoint(tmp_path / "c", run.manifest)
    kept.keep(released.part("litgpt", "0.5.11", "window gemma3"), {"outcome": "refused", "says": ""})
    with (tmp_path / "c").open("a") as file:
        file.write('[["transformers", "4.4')
    assert released.part("litgpt", "0.5.11", "window gemma3") in Checkpoint(tmp_path / "c", run.manifest)
