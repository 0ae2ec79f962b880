"""The password experiment: its prompts, its recorded run, and what is concluded from it."""

import json
import math

import pytest

from kvlab import record
from kvlab.experiments import confusion, leak, password, prompts
from kvlab.experiments.checkpoint import Checkpoint
from kvlab.experiments.password import ARMS
from kvlab.experiments.places import is_punctuation, repetition_starts


@pytest.fixture(scope="module")
def run():
    return record.load("password")


# --- prompts ------------------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_prompts_come_from_the_seed_and_have_every_shape(loaded):
    some = prompts.make(loaded.tokenizer, 60, seed=1)
    assert some == prompts.make(loaded.tokenizer, 60, seed=1)
    assert some[:20] == prompts.make(loaded.tokenizer, 20, seed=1)
    assert some != prompts.make(loaded.tokenizer, 60, seed=2)
    assert {p.shape for p in some} == set(prompts.SHAPES)
    assert {(p.language, p.style) for p in some} == set(prompts.WORDINGS)
    assert len({p.text for p in some}) == 60 and all(p.password in p.text for p in some)
    with pytest.raises(ValueError, match="count"):
        prompts.make(loaded.tokenizer, 0)


@pytest.mark.model
def test_prompts_without_a_chat_template_are_completions(loaded):
    class Bare:
        chat_template = None

        def __call__(self, text, **options):
            return loaded.tokenizer(text, **options)

    assert {p.style for p in prompts.make(Bare(), 12)} == {"plain"}


# --- the recorded run ---------------------------------------------------------------------------------------------------


def test_the_run_covers_what_it_must(run):
    assert len(run.data["prompts"]) >= 200
    assert set(run.data["arms"]) == {"float32", "bfloat16", "float16"}
    for arms in run.data["arms"].values():
        assert list(arms) == list(ARMS)
        assert all(len(rows) == len(run.data["prompts"]) for rows in arms.values())
    assert run.manifest.command == "kvlab run password"


@pytest.mark.model
def test_the_recorded_run_is_what_the_code_gives(loaded, run):
    """The first prompts again, in every arm that needs no new process: same tokens, same side of ε, same family."""
    count = 3
    chosen = prompts.make(loaded.tokenizer, run.manifest.settings["prompts"], run.manifest.seed)
    rows = [list(p.ids) for p in chosen[:count]]
    assert [len(row) for row in rows] == [p["tokens"] for p in run.data["prompts"][:count]]
    world = password.world_for(loaded, chosen, run.manifest.settings["new_tokens"])
    reference = password._alone(loaded, world, rows)
    assert [t.tokens for t in reference] == run.data["reference"]["tokens"][:count]
    epsilon = confusion.epsilons(run)["float32"]
    for arm in ARMS.values():
        if arm.name == "fresh process":
            continue
        for trace, plain, kept in zip(
            password.run_arm(loaded, arm, world, rows), reference, run.data["arms"]["float32"][arm.name]
        ):
            first, _, deltas, _, family = password.row_of(plain, trace)
            assert (first, family) == (kept[0], kept[4]), arm.name
            if arm.kind == "healthy":
                assert max(deltas) <= 5 * epsilon
            elif arm.name != "stale buffer":  # what is left in the buffer depends on every prompt before
                assert max(deltas) == pytest.approx(max(kept[2]), rel=0.01)


def test_fp32_accuses_no_healthy_run_and_catches_the_sick(run):
    totals = confusion.totals(run)
    assert totals["float32"]["healthy_accused"]["hits"] == 0
    caught = totals["float32"]["sick_accused"]
    assert caught["hits"] / caught["runs"] >= 0.99
    for dtype in ("bfloat16", "float16"):
        after = totals[dtype]["sick_accused_after_replay"]
        assert after["hits"] / after["runs"] >= 0.99


def test_healthy_flips_are_ties(run):
    assert all(flip["margin"] <= 2 * flip["epsilon"] for flip in confusion.tie_flips(run))


def test_the_calibration_half_is_not_the_judged_half(run):
    assert {v["prompt"] % 2 for v in confusion.judged(run)} == {1}
    worse = json.loads(json.dumps(run.data))
    for rows in worse["arms"]["float32"].values():
        for row in rows[1::2]:
            row[2] = [9.0]
    assert confusion.epsilons(record.Run(run.manifest, worse)) == confusion.epsilons(run)


def test_confusion_counts_a_planted_miss_and_a_planted_accusation(run):
    planted = json.loads(json.dumps(run.data))
    planted["arms"]["float32"]["repeated"][1][2] = [3.0]
    planted["arms"]["float32"]["cache not reset"][1] = [None, None, [1e-6], 0.0, None]
    totals = confusion.totals(record.Run(run.manifest, planted))
    assert totals["float32"]["healthy_accused"]["hits"] == 1
    assert totals["float32"]["sick_accused"]["hits"] == confusion.totals(run)["float32"]["sick_accused"]["hits"] - 1


@pytest.mark.model
def test_the_recorded_leak_is_what_the_model_says(loaded):
    data = record.load("leak").data
    kept, reset = leak.two_users(loaded, "cache-not-reset"), leak.two_users(loaded)
    assert kept.tokens == data["kept"]["tokens"] and reset.tokens == data["reset"]["tokens"]
    verdict = leak.verdict(loaded, reset, kept)
    assert (
        (verdict.kind, verdict.family)
        == ("state fault", "foreign state")
        == (data["verdict"]["kind"], data["verdict"]["family"])
    )
    assert leak.verdict(loaded, reset, leak.two_users(loaded)).kind == "identical"
    assert leak.SECRET in data["kept"]["text"] and leak.SECRET not in data["reset"]["text"]


# --- statistics ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"), [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0)]
)
def test_wilson(hits, count, low, high):
    assert confusion.wilson(hits, count) == pytest.approx((low, high), abs=1e-3)


def test_numbers_read_well():
    from kvlab.record import number

    assert [number(x) for x in (None, 0.0, 0.000022, 0.00014, 0.035, 14.2, 99.9, 1234.5)] == [
        "–",
        "0",
        "2.2·10⁻⁵",
        "1.4·10⁻⁴",
        "0.035",
        "14",
        "100",
        "1,234",
    ]


def test_wilson_needs_trials():
    with pytest.raises(ValueError):
        confusion.wilson(0, 0)


def made_up(flip_at):
    """A run of 120 texts of 40 tokens whose flips fall where `flip_at(token)` says; margins are alike everywhere."""
    texts, flips = [], []
    for text in range(120):
        margins = [0.1 + ((text * 7 + token * 13) % 29) / 10 for token in range(40)]
        texts.append({"margins": margins, "punctuation": "0010" * 10, "repetition": "0" * 20 + "1" + "0" * 19})
        flips.append("".join("1" if flip_at(text, token) else "0" for token in range(40)))
    return record.Run(None, {"places": {"texts": texts, "flips": {"bfloat16": flips}}})


def test_places_finds_a_planted_effect_and_no_other():
    found = confusion.places(
        made_up(lambda text, token: token % 4 == 2 and (text + token) % 3 == 0 or (text * token) % 31 == 1)
    )
    assert confusion.place_verdict(found["places"]["punctuation"]["flip_ratio"]) == "more"
    assert confusion.place_verdict(found["places"]["punctuation"]["adjusted"]) == "more"
    level = confusion.places(made_up(lambda text, token: (text * 5 + token * 11) % 17 == 0))
    for place in level["places"].values():
        assert confusion.place_verdict(place["flip_ratio"]) == "no difference shown"


def test_place_flags():
    assert [is_punctuation(text) for text in (",", " .\n", "。", "a.", "", " ", "$")] == [
        True,
        True,
        True,
        False,
        False,
        False,
        False,
    ]
    ids = [1, 2, 3, 9, 1, 2, 3, 4, 1, 2, 3]
    assert [i + 3 for i, start in enumerate(repetition_starts(ids, 3)) if start] == [4, 8]
    assert not any(repetition_starts([1, 2, 3, 4], 0))


# --- resuming, and sharing out --------------------------------------------------------------------------------------------


def test_a_cut_run_goes_on_where_it_was(tmp_path, run):
    path = tmp_path / "run.jsonl"
    first = Checkpoint(path, run.manifest)
    assert first.get(["a"], lambda: [1, 2]) == [1, 2]
    first.began -= 100  # as if that had taken so long
    first.keep(["c"], 0)
    with path.open("a") as file:
        file.write('[["b"], [3')  # cut while writing
    second = Checkpoint(path, run.manifest)
    assert ["a"] in second and ["b"] not in second
    assert second.get(["a"], lambda: pytest.fail("computed twice")) == [1, 2]
    assert second.get(["b"], lambda: [4]) == [4]
    third = Checkpoint(path, run.manifest)
    assert third.get(["b"], lambda: pytest.fail("lost")) == [4]
    assert 100 <= third.took() < 200  # counted once, and nothing for the time between


def test_a_checkpoint_of_another_run_is_not_used(tmp_path, run):
    from dataclasses import replace

    path = tmp_path / "run.jsonl"
    Checkpoint(path, run.manifest).get(["a"], lambda: 1)
    assert Checkpoint(path, replace(run.manifest, seed=run.manifest.seed + 1)).get(["a"], lambda: 2) == 2


def test_without_a_file_nothing_is_kept(run):
    assert Checkpoint(None, run.manifest).get(["a"], lambda: 1) == 1
    assert ["a"] not in Checkpoint(None, run.manifest)


@pytest.mark.parametrize("shares", [1, 2, 3, 7])
def test_shares_hold_every_prompt_once_and_keep_batches_whole(shares):
    import random

    r = random.Random(3)
    rows = [[0] * r.randint(20, 40) for _ in range(101)]
    out = password.share_out(rows, shares)
    assert sorted(index for share in out for index in share) == list(range(101))
    whole = {frozenset(group) for group in password._same_length(rows)}
    mine = {frozenset(share[at] for at in group) for share in out for group in password._same_length([rows[i] for i in share])}
    assert mine == whole
    sizes = [sum(len(rows[index]) for index in share) for share in out]
    assert max(sizes) < 1.2 * min(sizes)


def test_more_shares_than_batches_leave_none_empty():
    assert password.share_out([[1], [1]], 4) == [[0, 1]]


# --- the claims ---------------------------------------------------------------------------------------------------------


def test_lab_3_settles_its_claims_once_each():
    from kvlab import claims

    given = [v.claim for v in claims.verdicts(3)]
    assert given == ["A1", "A5", "A8", "A9", "A10", "A12", "A14", "A20", "A24", "B9"]
    assert all("nan" not in v.finding and "inf" not in v.finding for v in claims.verdicts(3))
    assert len(claims.claims()) == 72
    table = claims.table()
    assert table.count("Not yet: lab") == 72 - len({v.claim for v in claims.verdicts()})


def test_a_verdict_must_be_one_of_four():
    from kvlab.claims import Verdict

    with pytest.raises(ValueError, match="none of"):
        Verdict("A1", "perhaps", "", 3, "password")


def test_figures_and_tables_come_from_the_run(run):
    from kvlab.show import password as show

    for figure in (show.heat_map, show.separation, show.margin_against_flips, show.places_figure):
        fig = figure(run)
        assert fig.layout.meta["alt"] and len(fig.data)
    facts = show.facts(run)
    assert all(value and "nan" not in value for value in facts.values())
    assert float(facts["sick_min"]) > 1 and "·10⁻" in facts["noise_max"]
    assert show.confusion_table(run).count("\n") == 1 + len(ARMS)
    assert math.isfinite(float(facts["apart"]))
    html = show.leak_switch(record.load("leak"))
    assert html.count("<mark>") >= 1 and leak.SECRET in html
