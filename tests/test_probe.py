"""The run file: written by a process that has numpy alone, read back the same, and refused by name when it is not one."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvlab import cli, probe

LOGITS = np.array([[4.0, 1.0, 0.0], [0.0, 3.0, 2.5]], np.float32)


def test_it_stands_alone_in_a_process_with_numpy_only(tmp_path):
    """A copy of the one file, in a process that sees no kvlab: it writes what this process reads."""
    (tmp_path / "probe.py").write_text(Path(probe.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    code = (
        "import sys, probe, numpy as np; before = set(sys.modules)\n"
        "probe.save('run.npz', (5, 6), [0, 1], np.array([[4.0, 1, 0], [0, 3, 2.5]]), dtype='float32', layers=2)\n"
        "assert not {m.split('.')[0] for m in sys.modules} & {'kvlab', 'torch', 'transformers'}\n"
    )
    subprocess.run([sys.executable, "-S", "-c", f"import sys; sys.path.append({np.__path__[0].rsplit('/', 1)[0]!r})\n{code}"], cwd=tmp_path, check=True)  # fmt: skip
    run = probe.load(tmp_path / "run.npz")
    assert (run.prompt, run.tokens, run.kind, run.vocab, run.forced) == ([5, 6], [0, 1], "logits", 3, False)
    assert np.array_equal(run.scores, LOGITS) and run.manifest["dtype"] == "float32" and run.manifest["layers"] == 2
    assert run.manifest["python"] and not list(tmp_path.glob("*.part"))


def test_everything_comes_back(tmp_path):
    ids = np.array([[0, 2], [1, 0]])
    log = [(2, 1, 2, 0, 0), (3, 2, 3, 0, 0)]
    path = probe.save(
        tmp_path / "a.npz", [5], [0, 1], LOGITS[:, :2], kind="top logprobs", ids=ids, vocab=3, forced=True, log=log, engine="x"
    )
    run = probe.load(path)
    assert (run.kind, run.vocab, run.forced, run.steps) == ("top logprobs", 3, True, log)
    assert np.array_equal(run.ids, ids) and run.manifest["engine"] == "x"
    assert probe.load(probe.save(tmp_path / "b.npz", [5], [0, 1])).kind == "tokens"


BAD = {
    "no prompt": (([], [0], LOGITS[:1]), {}, "prompt and at least one token"),
    "text": (("hello", [0], LOGITS[:1]), {}, "prompt must be token ids in a list, not str"),
    "a float": (([1.5], [0], LOGITS[:1]), {}, "prompt holds 1.5"),
    "a negative token": (([1], [-1], LOGITS[:1]), {}, "tokens holds -1"),
    "missing rows": (([1], [0, 1, 2], LOGITS), {}, "scores have 2 rows for 3 tokens"),
    "one row of scores": (([1], [0], LOGITS[0]), {}, "two-dimensional"),
    "ragged": (([1], [0, 1], [[1.0], [1.0, 2.0]]), {}, "scores are no table"),
    "a masked row": (([1], [0, 1], np.full((2, 3), np.nan)), {}, "a row without a number"),
    "another kind": (([1], [0, 1], LOGITS), {"kind": "probabilities"}, "kind is 'probabilities'"),
    "top without ids": (([1], [0, 1], LOGITS), {"kind": "top logits"}, "ids are missing"),
    "ids of another shape": (([1], [0, 1], LOGITS), {"kind": "top logits", "ids": [[0], [1]]}, "one id for each score"),
    "ids twice": (([1], [0, 1], LOGITS[:, :2]), {"kind": "top logits", "ids": [[0, 0], [0, 1]]}, "a token twice"),
    "kind without scores": (([1], [0, 1]), {"kind": "logits"}, "scores are missing"),
    "another vocabulary": (([1], [0, 1], LOGITS), {"vocab": 5}, "vocab is 5, scores have 3"),
    "a short log": (([1], [0, 1], LOGITS), {"log": [(1, 0, 1, 0, 0)]}, r"log must be \[steps, 5\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_named_and_nothing_is_written(name, tmp_path):
    arguments, options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        probe.save(tmp_path / "a.npz", *arguments, **options)
    assert list(tmp_path.iterdir()) == []


def test_damaged_and_foreign_files_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"none\.npz: there is no such file"):
        probe.load(tmp_path / "none.npz")
    whole = Path(probe.save(tmp_path / "a.npz", [5], [0, 1], LOGITS)).read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut\.npz: not a readable"):
        probe.load(tmp_path / "cut.npz")
    np.savez(tmp_path / "other.npz", prompt=[1])
    with pytest.raises(ValueError, match=r"other\.npz: format is 'none'"):
        probe.load(tmp_path / "other.npz")
    np.savez(tmp_path / "lacks.npz", format=probe.FORMAT, prompt=[1], kind="tokens")
    with pytest.raises(ValueError, match=r"lacks\.npz: lacks manifest, tokens"):
        probe.load(tmp_path / "lacks.npz")


# ---- the tap --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    ).eval()


def test_a_tap_hears_what_generate_chose_from(tiny):
    import torch

    ids = torch.arange(1, 8)[None]
    with probe.Tap(tiny.lm_head) as tap:
        out = tiny.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True)  # fmt: skip
    tokens = out.sequences[0, 7:].tolist()
    assert np.allclose(tap.logits(tokens), torch.cat(out.logits).numpy(), atol=1e-6)
    tiny(ids)
    assert len(tap.calls) == 5, "outside the block nothing is heard"


def test_in_a_batch_the_row_is_found_by_its_token_or_refused(tiny):
    import torch

    rows = torch.tensor([[1, 2, 3, 4], [9, 8, 7, 6]])
    with probe.Tap(tiny.lm_head) as tap:
        logits = tiny(rows).logits[:, -1]
    first, second = logits.argmax(-1).tolist()
    assert first != second
    assert np.allclose(tap.logits([first])[0], logits[0].detach().numpy())
    assert np.allclose(tap.logits([second])[0], logits[1].detach().numpy())
    with pytest.raises(ValueError, match="step 0: no rows chose token"):
        tap.logits([next(t for t in range(31) if t not in (first, second))])
    with pytest.raises(ValueError, match="1 forwards for 2 tokens"):
        tap.logits([first, second])


# ---- kvlab judge ----------------------------------------------------------------------------------------------------


def files(folder, **runs):
    return [
        probe.save(folder / f"{name}.npz", [5, 6], [0, 1], scores, dtype="float32", layers=2) for name, scores in runs.items()
    ]


def says(capsys, *words):
    code = cli.main(["judge", *words])
    return code, *capsys.readouterr()


def test_the_command_gives_the_verdict_and_where_epsilon_comes_from(capsys, tmp_path):
    far = LOGITS + np.array([[0, 0, 0], [0, 0, 0.25]], np.float32)
    reference, rows, sick, noise, fault = files(
        tmp_path, reference=LOGITS, rows=LOGITS + 1e-6, sick=LOGITS + far, noise=LOGITS + 2e-6, fault=far
    )
    code, out, err = says(capsys, reference, rows, noise)
    assert (code, err) == (0, "") and out.startswith("Noise:") and "ε =" in out
    code, out, err = says(capsys, reference, rows, sick, fault)
    assert (code, err) == (3, "") and out.startswith("State fault from token 1 on") and "Left out: sick" in out
    code, out, err = says(capsys, reference, rows, fault, "--json")
    told = __import__("json").loads(out)
    assert code == 3 and told["verdict"]["kind"] == "state fault" and told["verdict"]["delta"] == 0.25
    assert told["bound"]["arms"].keys() == {"rows.npz"} and told["difference"]["deltas"] == [0.0, 0.25]
    tokens = probe.save(tmp_path / "tokens.npz", [5, 6], [0, 1])
    code, out, err = says(capsys, reference, rows, tokens)
    assert (code, err) == (4, "") and out.startswith("Unclear: there are tokens only")


def test_the_command_refuses_in_words(capsys, tmp_path):
    reference, rows = files(tmp_path, reference=LOGITS, rows=LOGITS + 1e-6)
    other = probe.save(tmp_path / "other.npz", [9], [0, 1], LOGITS)
    for words, named in (
        ([reference, rows, str(tmp_path / "no.npz")], "no.npz: there is no such file"),
        ([reference, rows, other], "different prompts"),
        ([reference, other, rows], "other.npz: compare: the two runs have different prompts"),
        ([reference, rows], "at least one healthy run"),
    ):
        code, out, err = says(capsys, *words)
        assert code == 2 and out == "" and named in err and len(err.splitlines()) == 2, err


def test_a_run_of_this_library_is_saved_and_judged(tmp_path, capsys):
    """From a Trace to a file and back, by the Python API."""
    import torch

    from kvlab.compare import compare
    from kvlab.runtime.decode import Step, Trace

    trace = Trace([5, 6], [0, 1], [Step(2, 1, 2, 0, 0), Step(3, 2, 3, 0, 0)], torch.from_numpy(LOGITS))
    run = probe.load(
        probe.save(tmp_path / "t.npz", trace.prompt, trace.tokens, trace.logits, log=[s.log() for s in trace.steps])
    )
    assert compare(trace, run).delta == 0 and [Step(*row) for row in run.steps] == trace.steps
