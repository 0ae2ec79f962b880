"""The zoo: every fault on the real model. On, its detector fires and the symptom is the recorded one; off, all is silent."""

import re

import pytest

from kvlab import cli, record
from kvlab.claims import claims
from kvlab.experiments import clients, zoo
from kvlab.experiments.zoo import SCENES, SIGNS, Scene, Stage, examine, failures, scene
from kvlab.faults import ZOO, fault
from kvlab.show import zoo as show


@pytest.fixture(scope="module")
def stage(loaded):
    return Stage(loaded)


@pytest.fixture(scope="module")
def run():
    return record.load("zoo")


@pytest.mark.model
@pytest.mark.parametrize("name", list(ZOO))
def test_on_it_is_caught_with_its_symptom_and_off_all_is_silent(stage, run, name):
    told, kept = examine(stage, name), run.data["faults"][name]
    sick, off = told["sick"], told["healthy"]
    assert told["caught"] and not told["accused"], (show.speech(sick), show.speech(off))
    if "epsilon" not in sick:
        assert sick["symptom"] == kept["sick"]["symptom"] != off["symptom"]
        return
    assert sick["kind"] == "state fault" and off["kind"] in ("identical", "noise")
    if sick["delta"] is not None:  # None: NaN
        assert sick["delta"] > 1000 * sick["epsilon"] and off["delta"] <= off["epsilon"]
        assert sick["delta"] == pytest.approx(kept["sick"]["delta"], rel=0.02)
    # the symptom: the same other words, from the same token on
    for key in ("first", "said", "meant", "named", "words", "symptom"):
        assert sick[key] == kept["sick"][key], key
    assert told["signs"] == kept["signs"]


def test_every_fault_has_a_scene_and_a_recording(run):
    assert set(SCENES) == set(ZOO) == set(run.data["faults"])
    assert len(ZOO) >= 16


def test_a_user_would_find_every_fault_by_a_symptom(run):
    for name, outcome in run.data["faults"].items():
        assert outcome["signs"] and set(outcome["signs"]) <= set(SIGNS), name


def test_leaks_say_what_somebody_else_said(run):
    """The sign is given by hand: it has to be in the words, and without the fault it must not be."""
    for name, outcome in run.data["faults"].items():
        if "leak" in outcome["signs"]:
            foreign = re.compile("ABCD|KITE|Kite|MOSS|dog")
            assert foreign.search(outcome["sick"]["said"]) and not foreign.search(outcome["sick"]["meant"]), name


# --- the checks can fail -------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_a_fault_that_does_nothing_is_not_caught(stage, monkeypatch):
    from dataclasses import replace

    monkeypatch.setitem(ZOO, "look-writes", replace(ZOO["look-writes"], broken=clients.for_a_look))
    told = examine(stage, "look-writes")
    assert not told["caught"] and not told["seen"]
    assert failures({"look-writes": told}) == ["look-writes is caught by no detector"]


@pytest.mark.model
def test_a_scene_that_is_sick_by_itself_is_accused(stage, monkeypatch):
    def play(stage):
        with fault("look-writes"):
            return SCENES["look-writes"].play(stage)

    monkeypatch.setitem(SCENES, "length-is-live", Scene("length-is-live", "sick", play))
    told = examine(stage, "length-is-live")
    assert told["accused"]
    assert failures({"length-is-live": told}) == ["length-is-live: a healthy run is accused"]


def test_a_fault_that_was_not_played_is_named():
    assert failures({}, ["no-such-scene"]) == ["no-such-scene has no scene yet"]


def test_scenes_have_one_name_each():
    with pytest.raises(ValueError, match="has a scene already"):
        scene("look-writes", "again")(lambda stage: None)
    with pytest.raises(KeyError, match="look-writes"):
        examine(None, "no-such-fault")


# --- what scenes leave behind --------------------------------------------------------------------------------------------


@pytest.mark.model
def test_the_adapter_gives_the_weights_back_even_after_an_error(loaded):
    import torch

    weights = [layer.self_attn.v_proj.weight for layer in loaded.model.model.layers]
    before = [weight.clone() for weight in weights]
    with pytest.raises(RuntimeError), clients.adapter(loaded):
        assert not torch.equal(weights[0], before[0])
        raise RuntimeError
    assert all(torch.equal(a, b) for a, b in zip(weights, before))


@pytest.mark.model
def test_use_cache_false_still_writes_to_a_cache_that_is_passed_in(loaded):
    """What `for_a_look` protects from is Transformers' behaviour, not ours: this fails on the day it changes."""
    import torch

    cache = clients.prefill(loaded, [1, 2, 3])
    with torch.inference_mode():
        loaded.model(input_ids=torch.tensor([[4, 5]]), cache=cache, use_cache=False)
    assert cache.get_seq_length() == 5


@pytest.mark.model
def test_a_static_cache_answers_with_the_tensor_it_counts_with(loaded):
    from kvlab.runtime.decode import static_cache

    cache = clients.prefill(loaded, [1, 2, 3], static_cache(loaded, 8))
    kept, number = cache.get_seq_length(), clients.remember(cache)
    clients.prefill(loaded, [4], cache)
    assert (int(kept), number) == (4, 3)


# --- what is told --------------------------------------------------------------------------------------------------------


def test_cards_have_every_fault_once_and_every_sign_filters(run):
    page = show.cards(run)
    assert "<script" not in page and " onclick" not in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert {f"zoo-{name}" for name in ZOO} <= set(ids)
    for key in SIGNS:
        marked = len(re.findall(rf'<article class="[^"]*\bzoo-is-{key}\b', page))
        assert marked == sum(key in outcome["signs"] for outcome in run.data["faults"].values())
        if marked:
            assert f".zoo:has(#zoo-sign-{key}:checked)" in page and f"({marked})</span>" in page
    for entry in ZOO.values():
        assert all(f'href="{show.issue(case)}"' in page for case in entry.cases)
        assert set(entry.claims) <= set(claims())


def test_the_address_of_a_case():
    assert show.issue("huggingface/transformers#37078") == "https://github.com/huggingface/transformers/issues/37078"


def test_the_table_and_the_facts(run):
    table = show.table(run)
    assert table.count("\n") == len(ZOO) + 1 and "accused" not in table
    facts = show.facts(run)
    assert facts["faults"] == facts["caught"] == str(len(ZOO)) and facts["accused"] == "0"
    assert int(facts["logged"]) + int(facts["blind"]) == int(facts["judged"])


# --- the command ---------------------------------------------------------------------------------------------------------


def test_list_and_show(capsys):
    assert cli.main(["zoo", "list"]) == 0
    assert set(ZOO) == {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert cli.main(["zoo", "show", "look-writes"]) == 0
    said = capsys.readouterr().out
    entry = ZOO["look-writes"]
    for part in (entry.symptom, entry.mechanism, entry.breaks, entry.detector, entry.fix, *entry.cases, "silent"):
        assert part in said


def test_an_unknown_fault_is_wrong_usage(capsys):
    for words in (["zoo", "show", "nothing"], ["zoo", "run", "nothing"]):
        assert cli.main(words) == 2
        assert "there is no fault 'nothing'" in capsys.readouterr().err


@pytest.mark.model
def test_run_says_what_the_detectors_say_and_fails_when_they_fail(loaded, capsys, monkeypatch):
    from dataclasses import replace

    import kvlab.runtime

    monkeypatch.setattr(kvlab.runtime, "load", lambda *_, **__: loaded)
    assert cli.main(["zoo", "run", "query-heads-counted"]) == 0
    assert "1 of 1 faults caught, 0 healthy runs accused" in capsys.readouterr().out
    from kvlab.core import ledger

    monkeypatch.setitem(ZOO, "query-heads-counted", replace(ZOO["query-heads-counted"], broken=ledger.kv_heads))
    assert cli.main(["zoo", "run", "query-heads-counted"]) == 1
    told = capsys.readouterr()
    assert "NOT CAUGHT" in told.out and "query-heads-counted is caught by no detector" in told.err


def test_run_all_plays_every_fault_and_fails_for_one_without_a_scene(capsys, monkeypatch):
    import kvlab.runtime

    monkeypatch.setattr(kvlab.runtime, "load", lambda *_, **__: None)
    kept = record.load("zoo").data["faults"]
    monkeypatch.setattr(zoo, "play_all", lambda loaded, names: {name: kept[name] for name in names})
    assert cli.main(["zoo", "run", "all"]) == 0
    assert f"{len(ZOO)} of {len(ZOO)} faults caught" in capsys.readouterr().out
    monkeypatch.delitem(SCENES, "look-writes")
    assert cli.main(["zoo", "run", "all"]) == 1
    assert "look-writes has no scene yet" in capsys.readouterr().err
