"""Twins: the right hypothesis and number meet, wrong ones miss, and what is outside, healthy or of another model gets no name."""

import json
import re

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from kvlab import cli, compare, probe, record, twin
from kvlab.experiments import twins, zoo
from kvlab.experiments.prompts import encode
from kvlab.faults import ZOO, fault
from kvlab.faults.twins import OUTSIDE, TWINS
from kvlab.runtime import decode, load, parrot
from kvlab.runtime.decode import greedy, static_cache

BY_NAME = {one.name: one for one in twin.HYPOTHESES}
STEPS = 6


@pytest.fixture(scope="module")
def bird():
    return load("parrot", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def rows(bird):
    """A short prompt and a longer one."""
    made = sorted((encode(bird.tokenizer, row.prompt) for row in parrot.prompts(8, 5, lengths=(45, 70))), key=len)
    return made[0], made[-1]


@pytest.fixture(scope="module")
def epsilon(bird, rows):
    reference = greedy(bird, [rows[0]], STEPS)[0]
    return compare.bound(twin.own_arms(bird, reference), layers=2).epsilon


def searched(bird, rows, epsilon, suspect, **options):
    reference = greedy(bird, [rows[0]], STEPS)[0]
    return twin.search(bird, reference, suspect, epsilon, progress=False, **options)


def names(found):
    return [(one.hypothesis, one.number) for one in found.met]


# ---- planted faults, by code that knows nothing of twins ----------------------------------------------------------------


def _kept(bird, short, long):
    cache = DynamicCache(config=bird.model.config)
    greedy(bird, [long[:30]], 1, cache=cache)
    return greedy(bird, [short], STEPS, cache=cache)[0]


def _buffered(bird, short, long):
    cache = static_cache(bird, len(long) + STEPS)
    greedy(bird, [long], STEPS, cache=cache)
    return greedy(bird, [short], STEPS, cache=cache)[0]


def _alone(bird, short, long):
    return greedy(bird, [short], STEPS)[0]


def _batched(bird, short, long):
    return greedy(bird, [short, long], STEPS)[0]


PLANTED = {
    "cache-not-reset": (_kept, "foreign-before", lambda s, n: 30),
    "stale-buffer": (_buffered, "stale-slots", lambda s, n: n + STEPS - 1),
    "pads-not-masked": (_batched, "pads-seen", lambda s, n: n - s),
    "positions-restarted": (_alone, "steps-at", lambda s, n: 0),
    "position-one-too-far": (_alone, "steps-shifted", lambda s, n: 1),
    "prefill-from-one": (_alone, "prompt-shifted", lambda s, n: 1),
    "conventions-mixed": (_batched, "prompt-shifted", lambda s, n: n - s),
    "steps-count-pads": (_batched, "steps-shifted", lambda s, n: n - s),
    "mask-one-short": (_alone, "newest-hidden", lambda s, n: 1),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_right_one_meets_with_its_number_and_the_next_numbers_miss(bird, rows, epsilon, name):
    play, hypothesis, number = PLANTED[name]
    with fault(name):
        suspect = play(bird, *rows)
    beside = [rows[1] + greedy(bird, [rows[1]], STEPS)[0].tokens]
    if name == "cache-not-reset":
        beside = [rows[1][:30]]
    found = searched(bird, rows, epsilon, suspect, others=beside)
    assert found.kind == "named", found.sentence
    assert names(found) == [(hypothesis, number(len(rows[0]), len(rows[1])))], found.sentence
    assert found.met[0].miss <= found.met[0].within <= twin.WIDEST * epsilon < found.distance / 100
    assert all(miss > 10 * epsilon for miss in found.neighbours.values())
    assert found.nearest.miss > 10 * epsilon and found.runs > 10
    assert hypothesis in found.sentence and ZOO[name].family in found.met[0].families


@pytest.mark.parametrize("slots", [70, 71])
def test_unwritten_slots_are_counted(bird, rows, epsilon, monkeypatch, slots):
    monkeypatch.setattr(decode, "valid_length", lambda written, high_water: slots)
    suspect = greedy(bird, [rows[0]], STEPS, cache=static_cache(bird, slots))[0]
    found = searched(bird, rows, epsilon, suspect)
    assert names(found) == [("unwritten-slots", slots)], found.sentence
    assert {near for _, near in found.neighbours} == {slots - 1, slots + 1}
    assert min(found.neighbours.values()) > 100 * epsilon


class _Rounding(DynamicCache):
    """A cache that keeps keys, or values, or both in bf16."""

    what = "keys and values"

    def update(self, key_states, value_states, *args, **kwargs):
        if self.what != "values":
            key_states = key_states.bfloat16().float()
        if self.what != "keys":
            value_states = value_states.bfloat16().float()
        return super().update(key_states, value_states, *args, **kwargs)


@pytest.mark.parametrize("what", ["keys and values", "keys", "values"])
def test_fewer_bits_are_named(bird, rows, epsilon, what):
    cache = _Rounding(config=bird.model.config)
    cache.what = what
    suspect = greedy(bird, [rows[0]], STEPS, cache=cache)[0]
    found = searched(bird, rows, epsilon, suspect)
    assert names(found) == [("stored-in", ("bfloat16", what))], found.sentence
    assert found.met[0].families == ("own state altered",)


def test_past_a_flip_every_step_is_compared(bird, rows, epsilon):
    with fault("positions-restarted"):
        suspect = _alone(bird, *rows)
    reference = _alone(bird, *rows)
    assert compare.first_difference(reference.tokens, suspect.tokens) < STEPS - 1
    suspect.logits = suspect.logits.clone()
    suspect.logits[-1, 0] += 100 * epsilon  # a last step that is not what the hypothesis says
    assert searched(bird, rows, epsilon, suspect).kind == "none"


# ---- no name where there is none ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("play", [_alone, _batched, lambda b, s, n: greedy(b, [s], STEPS, chunk=3)[0]])
def test_a_healthy_run_needs_no_twin(bird, rows, epsilon, play):
    found = searched(bird, rows, epsilon, play(bird, *rows))
    assert found.kind == "nothing to explain" and not found.met and not found.tried
    assert found.sentence.startswith("Nothing to explain")


def test_a_run_too_near_to_the_healthy_one_gets_no_name(bird, rows, epsilon):
    suspect = _alone(bird, *rows)
    suspect.logits = suspect.logits + 1.5 * epsilon
    assert searched(bird, rows, epsilon, suspect).kind == "unclear"


@pytest.mark.parametrize("size", [0.001, 1.0])
def test_what_is_in_no_hypothesis_is_none_of_mine(bird, rows, epsilon, size):
    suspect = _alone(bird, *rows)
    draw = torch.Generator().manual_seed(1)
    suspect.logits = suspect.logits + size * torch.randn(suspect.logits.shape, generator=draw)
    found = searched(bird, rows, epsilon, suspect, others=[rows[1]])
    assert found.kind == "none" and not found.met and found.sentence.startswith("None of mine")
    assert found.nearest.sentence in found.sentence


def test_no_number_is_met_by_nothing(bird, rows, epsilon):
    suspect = _alone(bird, *rows)
    suspect.logits = suspect.logits.clone()
    suspect.logits[2] = float("nan")
    assert searched(bird, rows, epsilon, suspect).kind == "no number"


def test_two_that_meet_are_both_told(bird, rows, epsilon):
    """With one cached step, position 0 may be a constant or a jump: nobody can tell."""
    with fault("positions-restarted"):
        suspect = greedy(bird, [rows[0]], 2)[0]
    reference = greedy(bird, [rows[0]], 2)[0]
    found = twin.search(bird, reference, suspect, epsilon, progress=False)
    assert found.kind == "several" and {("steps-at", 0), ("steps-shifted", -len(rows[0]))} == set(names(found))
    assert "may be any of them" in found.sentence and "steps-at" in found.sentence and "steps-shifted" in found.sentence
    one = twin.search(bird, reference, suspect, epsilon, progress=False, first=True)
    assert one.kind == "named" and len(one.tried) == 1


def test_a_hypothesis_that_changes_nothing_names_nothing(bird, rows, epsilon):
    """Eight bits write every whole number up to 256: on a short request the hypothesis is the healthy run."""
    bench = twin.Bench(bird, rows[0], greedy(bird, [rows[0]], STEPS)[0].tokens)
    same = BY_NAME["steps-in-bits"].play(bench, 8, None)
    assert float((same - bench.plain).abs().max()) <= epsilon
    with fault("position-one-too-far"):
        suspect = _alone(bird, *rows)
    found = searched(bird, rows, epsilon, suspect, hypotheses=[BY_NAME["steps-in-bits"]])
    assert not found.met and all(one.moves > epsilon for one in found.tried)


def test_what_a_hypothesis_needs_is_said(bird, rows, epsilon):
    with fault("cache-not-reset"):
        suspect = _kept(bird, *rows)
    found = searched(bird, rows, epsilon, suspect)
    assert found.kind == "none" and "foreign-before" in found.sentence and "others" in found.left_out["foreign-before"]
    assert "no window" in found.left_out["window"] and "leaves the first token alone" in found.left_out["steps-shifted"]


# ---- refusals -----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_by_name(bird, rows, epsilon):
    right = _alone(bird, *rows)
    other = greedy(bird, [rows[1]], STEPS)[0]
    tokens = probe.RunFile(rows[0], right.tokens)
    wide = probe.RunFile(rows[0], right.tokens, np.zeros((STEPS, 70), np.float32))
    foreign = probe.RunFile(rows[0], right.tokens, right.logits.numpy() + 1)

    def search(reference, suspect, **options):
        return twin.search(bird, reference, suspect, options.pop("epsilon", epsilon), progress=False, **options)

    for words, call in (
        ("suspect: its prompt is not the reference's", lambda: search(right, other)),
        ("suspect: it has tokens only", lambda: search(right, tokens)),
        ("reference: it has tokens only", lambda: search(tokens, right)),
        ("suspect: its vocabulary has 70 tokens", lambda: search(right, wide)),
        ("reference: parrot in float32 gives it back with", lambda: search(foreign, right)),
        ("epsilon is 0", lambda: search(right, right, epsilon=0.0)),
        ("others: a request without tokens", lambda: search(right, right, others=[[]])),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            call()


def test_a_model_with_other_layers_is_refused(bird, rows):
    from dataclasses import replace
    from types import SimpleNamespace

    odd = SimpleNamespace(config=SimpleNamespace(layer_types=["full_attention", "linear_attention"]))
    with pytest.raises(ValueError, match="has layers of kind linear_attention"):
        twin.Bench(replace(bird, model=odd), rows[0], [1])


# ---- kvlab twin ---------------------------------------------------------------------------------------------------------


def saved(folder, name, trace):
    return probe.save(folder / f"{name}.npz", trace.prompt, trace.tokens, trace.logits, dtype="float32", layers=2)


def test_the_command_names_it(bird, rows, tmp_path, capsys):
    files = [saved(tmp_path, "reference", _alone(bird, *rows))]
    with fault("pads-not-masked"):
        files.append(saved(tmp_path, "suspect", _batched(bird, *rows)))
    files.append(saved(tmp_path, "pieces", greedy(bird, [rows[0]], STEPS, chunk=3)[0]))
    other = saved(tmp_path, "other", greedy(bird, [rows[1]], STEPS)[0])
    gap = len(rows[1]) - len(rows[0])
    assert cli.main(["twin", *files, "--others", other, "--model", "parrot", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"mask, pads-seen: {gap} pads before the prompt are seen, and not counted.") and "misses" in out
    assert cli.main(["twin", *files[:2], "--others", other, "--model", "parrot", "--device", "cpu", "--json", "--first"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kind"] == "named" and told["met"][0]["number"] == gap and told["bound"]["epsilon"] > 0
    assert cli.main(["twin", files[0], files[2], "--model", "parrot", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("Nothing to explain")


def test_the_command_refuses_in_words(bird, rows, tmp_path, capsys):
    right = _alone(bird, *rows)
    reference, other = saved(tmp_path, "reference", right), saved(tmp_path, "other", greedy(bird, [rows[1]], STEPS)[0])
    tokens = probe.save(tmp_path / "tokens.npz", right.prompt, right.tokens)
    right.logits = right.logits + 1
    foreign = saved(tmp_path, "foreign", right)
    for words, named in (
        ([reference, str(tmp_path / "no.npz")], "no.npz: there is no such file"),
        ([reference, other], "SUSPECT: its prompt is not REFERENCE's"),
        ([reference, tokens], "SUSPECT: it has tokens only"),
        ([foreign, reference], "no healthy arm can be believed"),
        ([foreign, reference, foreign], "this is not the model that made the run"),
    ):
        assert cli.main(["twin", *words, "--model", "parrot", "--device", "cpu"]) == 2, words
        out, err = capsys.readouterr()
        assert out == "" and named in err, err


# ---- against the zoo ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    return record.load("twins")


def test_every_fault_that_moves_logits_has_a_hypothesis_or_a_reason():
    assert set(TWINS) | set(OUTSIDE) == set(twins.faults()) and not set(TWINS) & set(OUTSIDE)
    assert set(TWINS.values()) <= set(BY_NAME)
    for name, hypothesis in TWINS.items():
        assert ZOO[name].family in BY_NAME[hypothesis].families, name


def test_the_recorded_run_names_every_one_and_no_wrong_one(run):
    told = run.data["faults"]
    assert list(told) == twins.faults() and run.manifest.settings["faults"] == len(told) > 30
    for name, outcome in told.items():
        sick, off = outcome["sick"], outcome["healthy"]
        assert twins.right(name, sick), (name, sick["sentence"])
        assert all(set(one["families"]) & {ZOO[name].family} for one in sick["met"]), name  # and no wrong one beside it
        for one in sick["tried"]:
            if one["hypothesis"] not in {met["hypothesis"] for met in sick["met"]}:
                assert one["miss"] is None or one["miss"] > 20 * sick["epsilon"], (name, one)
        if name != "shift-without-rotation":  # sound, and yet not what its prompt alone would give
            assert off["kind"] == "nothing to explain", name


@pytest.mark.model
@pytest.mark.parametrize("name", ["position-one-too-far", "cache-not-reset", "window-caps-the-length", "masked-row-is-nan"])
def test_rows_of_it_come_out_again(loaded, run, name):
    kept = run.data["faults"][name]["sick"]
    again = twins.plain(twins.examine(zoo.Stage(loaded), name))
    assert (again["kind"], [(one["hypothesis"], one["number"]) for one in again["met"]]) == (
        kept["kind"],
        [(one["hypothesis"], one["number"]) for one in kept["met"]],
    )
