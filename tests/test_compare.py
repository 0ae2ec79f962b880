"""The verdict: its arithmetic, on made-up runs where the right answer is known."""

import math

import pytest
import torch

from kvlab.compare import Difference, audit, compare, family_by_onset, first_difference, judge, noise_bound
from kvlab.runtime.decode import Step, Trace


def trace(logits, tokens=None, steps=()):
    logits = torch.tensor(logits, dtype=torch.float32)
    return Trace([1, 2], tokens or logits.argmax(-1).tolist(), list(steps), logits)


PLAIN = trace([[4.0, 1.0, 0.0], [0.0, 3.0, 2.9], [1.0, 0.0, 5.0]])


@pytest.mark.parametrize(
    ("a", "b", "first"),
    [([], [], None), ([1], [1], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [1], 0), ([2, 1], [1, 1], 0)],
)
def test_first_difference(a, b, first):
    assert first_difference(a, b) == first


def test_compare_stops_after_the_first_differing_token():
    other = trace([[4.0, 1.0, 0.5], [0.0, 2.9, 3.0], [90.0, 0.0, 0.0]])
    found = compare(PLAIN, other)
    assert found.first == 1
    assert found.margin == pytest.approx(0.1, abs=1e-6)
    assert found.deltas == pytest.approx((0.5, 0.1), abs=1e-6)
    assert found.delta == pytest.approx(0.5)
    assert found.onset(0.3) == 0 and found.onset(0.7) is None
    assert 0 < found.kl < 1


def test_identical_runs():
    found = compare(PLAIN, PLAIN)
    assert (found.first, found.margin, found.delta, found.kl) == (None, None, 0.0, 0.0)
    assert judge(found, 1e-4).kind == "identical"


def test_other_prompts_and_other_vocabularies_are_refused():
    with pytest.raises(ValueError, match="prompt"):
        compare(PLAIN, Trace([9], PLAIN.tokens, [], PLAIN.logits))
    with pytest.raises(ValueError, match="vocabular"):
        compare(PLAIN, Trace([1, 2], PLAIN.tokens, [], torch.zeros(3, 5)))


def test_not_a_number_is_a_fault():
    broken = trace([[4.0, math.nan, 0.0], [0.0, 3.0, 2.9], [1.0, 0.0, 5.0]], tokens=PLAIN.tokens)
    assert judge(compare(PLAIN, broken), 1e9).kind == "state fault"


def test_the_rule_of_two_epsilon():
    tie = compare(PLAIN, trace([[4.0, 1.0, 0.0], [0.0, 2.9, 3.0], [1.0, 0.0, 5.0]]))
    assert judge(tie, 0.11).kind == "noise"
    assert judge(tie, 0.04).kind == "state fault"
    silent = compare(PLAIN, trace([[4.0, 3.5, 0.0], [0.0, 3.0, 2.9], [1.0, 0.0, 5.0]]))
    assert silent.first is None
    assert judge(silent, 1.0).kind == "state fault", "logits first: no token changed"


def test_replay_finds_what_a_coarse_epsilon_hides():
    small = compare(PLAIN, trace([[4.0, 1.5, 0.0], [0.0, 3.0, 2.9], [1.0, 0.0, 5.0]]))
    assert judge(small, 2.0).kind == "noise"
    verdict = judge(small, 2.0, replay=(small, 1e-3))
    assert (verdict.kind, verdict.replayed, verdict.epsilon) == ("state fault", True, 1e-3)
    assert "fp32" in verdict.sentence
    assert judge(small, 2.0, replay=(compare(PLAIN, PLAIN), 1e-3)).kind == "noise"


def test_epsilon_is_measured_with_headroom():
    wide = compare(PLAIN, trace([[4.0, 1.5, 0.0], [0.0, 3.0, 2.9], [1.0, 0.0, 5.0]]))
    assert noise_bound([wide, compare(PLAIN, PLAIN)]) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="healthy"):
        noise_bound([])


def test_numbers_that_are_none():
    with pytest.raises(ValueError, match="noise_bound"):
        judge(compare(PLAIN, PLAIN), math.nan)
    with pytest.raises(ValueError, match="epsilon is inf"):
        judge(compare(PLAIN, PLAIN), math.inf)
    broken = Difference(None, None, (0.5, math.nan), 0.0)
    assert broken.delta == math.inf and judge(broken, 1e9).kind == "state fault"
    assert judge(Difference(1, math.nan, (0.1, 0.1), 0.0), 1.0).kind == "state fault"
    with pytest.raises(ValueError, match="finite"):
        noise_bound([broken])


def test_a_masked_vocabulary_is_no_difference():
    masked = trace([[4.0, -math.inf, 0.0]])
    assert judge(compare(masked, masked), 1e-4).kind == "identical"
    assert compare(masked, masked).kl == 0
    assert compare(masked, trace([[4.0, -math.inf, 0.1]])).kl < 0.01, "what both runs rule out adds nothing"


def test_empty_and_short_runs_are_refused():
    with pytest.raises(ValueError, match="no tokens"):
        compare(PLAIN, Trace([1, 2], [], [], torch.zeros(0, 3)))
    with pytest.raises(ValueError, match="fewer rows"):
        compare(PLAIN, Trace([1, 2], PLAIN.tokens, [], PLAIN.logits[:1]))


OK = {"own": 5, "position": 4, "visible": 5, "beyond": 0, "held": 0}


@pytest.mark.parametrize(
    ("change", "family"),
    [
        ({}, None),
        ({"held": 3, "visible": 8, "position": 7}, "foreign state"),
        ({"beyond": 2, "visible": 7}, "foreign state"),
        ({"visible": 9}, "mask"),
        ({"visible": 4}, "mask"),
        ({"position": 0}, "position"),
    ],
)
def test_audit_names_the_family(change, family):
    assert audit([Step(**OK), Step(**(OK | change))]) == family


def test_onset_leaves_two_families_open():
    assert family_by_onset(0) == ("foreign state", "mask")
    assert "position" in family_by_onset(1)
    far = compare(PLAIN, trace([[9.0, 1.0, 0.0], [0.0, 3.0, 2.9], [1.0, 0.0, 5.0]]))
    assert judge(far, 1.0).family == "foreign state"
    assert judge(far, 1.0, steps=[Step(5, 4, 9, 0, 0)]).family == "mask"
