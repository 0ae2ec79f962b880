"""The verdict: its arithmetic, on made-up runs where the right answer is known."""

import inspect
import math

import numpy as np
import pytest
import torch

import kvlab.compare
from kvlab.compare import (
    BEYOND,
    FAMILIES,
    Difference,
    audit,
    bound,
    ceiling,
    compare,
    first_difference,
    floor,
    judge,
    judge_runs,
    noise_bound,
    possible,
)
from kvlab.probe import RunFile
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
    assert judge(tie, 0.06).kind == judge(tie, 0.09).kind == "unclear"
    assert judge(tie, 0.01).kind == "state fault"
    silent = compare(PLAIN, trace([[4.0, 3.5, 0.0], [0.0, 3.0, 2.9], [1.0, 0.0, 5.0]]))
    assert silent.first is None
    assert judge(silent, 0.5).kind == "state fault", "logits first: no token changed"


UP = 1 + 1e-9
EDGES = [  # |Δ|, margin of a flip (None: none flips), both in ε; the answer
    (1.0, None, "noise"),
    (UP, None, "unclear"),
    (BEYOND, None, "unclear"),
    (BEYOND * UP, None, "state fault"),
    (0.5, 2.0, "noise"),
    (0.5, 2.0 * UP, "unclear"),
    (0.5, 2.0 * BEYOND, "unclear"),
    (0.5, 2.0 * BEYOND * UP, "state fault"),
    (UP, 1.0, "unclear"),
    (BEYOND * UP, 0.0, "state fault"),
]


@pytest.mark.parametrize("epsilon", [1.0, 6e-5, 2.6])
@pytest.mark.parametrize(("delta", "margin", "kind"), EDGES)
def test_the_rule_is_held_at_its_edges(delta, margin, kind, epsilon):
    """With 4ε in place of 2ε, or any other factor, one of these moves to the other side."""
    first = None if margin is None else 0
    verdict = judge(Difference(first, margin and margin * epsilon, (delta * epsilon,), 0.0), epsilon)
    assert verdict.kind == kind and verdict.sentence.lower().startswith(kind)


@pytest.mark.parametrize("factor", [1.0, 1.9, 2.1, 4.0])
def test_the_edges_see_another_factor(factor, monkeypatch):
    """The detector of the rule above, proven: judge with another margin than 2ε and an edge moves."""
    source = inspect.getsource(kvlab.compare._kind).replace("2 * limit", f"{factor} * limit")
    changed = dict(vars(kvlab.compare))
    exec(source, changed)
    monkeypatch.setattr(kvlab.compare, "_kind", changed["_kind"])
    moved = [
        edge
        for edge in EDGES
        if judge(Difference(None if edge[1] is None else 0, edge[1], (edge[0],), 0.0), 1.0).kind != edge[2]
    ]
    assert moved


def test_unclear_says_what_to_measure_next():
    between = Difference(None, None, (1.9,), 0.0)
    assert "replay it in fp32" in judge(between, 1.0).sentence
    assert "more healthy arms" in judge(Difference(None, None, (1.9e-4,), 0.0), 1e-4).sentence
    settled = judge(between, 1.0, replay=(Difference(None, None, (2.0,), 0.0), 1e-4))
    assert (settled.kind, settled.replayed) == ("state fault", True)
    assert judge(between, 1.0, replay=(Difference(None, None, (1e-5,), 0.0), 1e-4)).kind == "noise"
    assert judge(between, 1.0, replay=(Difference(None, None, (1.9e-4,), 0.0), 1e-4)).kind == "unclear"


def test_replay_finds_what_a_coarse_epsilon_hides():
    small = compare(PLAIN, trace([[4.0, 1.5, 0.0], [0.0, 3.0, 2.9], [1.0, 0.0, 5.0]]))
    assert judge(small, 2.0).kind == "noise" and judge(small, 0.3).kind == "unclear" and judge(small, 0.2).kind == "state fault"
    verdict = judge(small, 2.0, replay=(small, 1e-3))
    assert (verdict.kind, verdict.replayed, verdict.epsilon) == ("state fault", True, 1e-3)
    assert "fp32" in verdict.sentence
    assert judge(small, 2.0, replay=(compare(PLAIN, PLAIN), 1e-3)).kind == "noise"


def test_epsilon_is_measured_with_headroom():
    wide = compare(PLAIN, trace([[4.0, 1.5, 0.0], [0.0, 3.0, 2.9], [1.0, 0.0, 5.0]]))
    assert noise_bound([wide, compare(PLAIN, PLAIN)]) == pytest.approx(1.0)
    assert noise_bound([compare(PLAIN, PLAIN)]) == floor(5.0) > 4e-6, "bit-identical runs measure nothing"
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


def test_onset_leaves_all_families_open():
    assert set(possible(0)) == set(possible(3)) == set(FAMILIES)
    far = compare(PLAIN, trace([[9.0, 1.0, 0.0], [0.0, 3.0, 2.9], [1.0, 0.0, 5.0]]))
    verdict = judge(far, 1.0)
    assert set(verdict.possible) == set(FAMILIES) and "Several families are possible" in verdict.sentence
    logged = judge(far, 1.0, steps=[Step(5, 4, 9, 0, 0)])
    assert logged.family == "mask" and logged.possible == ("mask",) and "By its log it is mask" in logged.sentence


def test_a_log_in_order_does_not_make_it_foreign():
    """K/V rounded to int8 with scale 1.0, the log in order (Model-Optimizer#20): its own state, never foreign state alone."""
    far = compare(PLAIN, trace([[9.0, 1.0, 0.0], [0.0, 3.0, 2.9], [1.0, 0.0, 5.0]]))
    verdict = judge(far, 1.0, steps=[Step(**OK)] * 3)
    assert "own state altered" in verdict.possible and len(verdict.possible) > 1
    assert "Several" in verdict.sentence and "foreign state:" not in verdict.sentence


# ---- ε that can be trusted ----------------------------------------------------------------------------------------------


def arm(delta, size=5.0, first=None, margin=None, kind="logits"):
    return Difference(first, margin, (delta,), 0.0, kind, size)


def test_bit_identical_arms_leave_the_floor():
    """TransformerLens 2.9.0, transformers 4.35.0: arms identical to the bit, ε = 0, and rounding of 1.9e-6 was called a fault."""
    limits = bound({"rows": arm(0.0), "threads": arm(0.0)}, layers=2)
    assert limits.epsilon == limits.floor > 2.9e-6 and "the floor of rounding" in limits.sentence()
    assert judge(arm(1.9e-6), limits.epsilon).kind == judge(arm(2.9e-6), limits.epsilon).kind == "noise"
    assert judge(arm(1.3e-2), limits.epsilon).kind == "state fault"


@pytest.mark.parametrize("sick", [4.78 / 2, 0.167 / 2])
def test_a_sick_arm_is_named_and_left_out(sick):
    """Masked tokens behind a longrope prompt, or a Mamba-2 one: ε became 4.78 and 0.167, and a fault of 4.13 was noise."""
    limits = bound({"rows": arm(2e-6), "masked behind": arm(sick), "pieces": arm(4e-6)}, layers=2)
    assert set(limits.left_out) == {"masked behind"} and set(limits.arms) == {"rows", "pieces"}
    assert "masked behind" in limits.sentence() and "stays under" in limits.left_out["masked behind"]
    assert judge(arm(4.13), limits.epsilon).kind == "state fault"
    with pytest.raises(ValueError, match="no healthy arm can be believed: masked behind"):
        bound({"masked behind": arm(sick)}, layers=2)


def test_an_arm_far_off_the_others_is_left_out_below_the_ceiling_too():
    most, least = ceiling(5.0), floor(5.0)
    odd = (APART_TIMES := 31) * least
    assert odd < most
    limits = bound({"a": arm(1e-6), "b": arm(2e-6), "odd": arm(odd)})
    assert set(limits.left_out) == {"odd"} and f"{APART_TIMES} times the others" in limits.left_out["odd"]
    assert set(bound({"a": arm(1e-6), "b": arm(2e-6), "near": arm(29 * least)}).arms) == {"a", "b", "near"}
    wide = bound({"a": arm(1e-6), "flips": arm(1e-6, first=0, margin=3 * most)})
    assert set(wide.left_out) == {"flips"} and "another token" in wide.left_out["flips"]


def test_what_the_floor_and_the_ceiling_depend_on():
    assert floor(10.0) == 2 * floor(5.0) and floor(5.0, layers=4) == 2 * floor(5.0)
    assert floor(5.0, "float64") < floor(5.0) < floor(5.0, "float16") < floor(5.0, "bfloat16") < ceiling(5.0, "bfloat16")
    assert floor(25.0, layers=30) < 2.0e-4 < ceiling(25.0, layers=30), "the bundled model's measured ε in fp32"
    assert floor(25.0, "bfloat16", 30) < 2.6 < ceiling(25.0, "bfloat16", 30)
    with pytest.raises(ValueError, match="int3"):
        floor(5.0, "int3")
    with pytest.raises(ValueError, match="no healthy run"):
        bound({})
    with pytest.raises(ValueError, match="one kind"):
        bound({"a": arm(0.0), "b": arm(0.0, kind="logprobs")})


# ---- kinds of scores ------------------------------------------------------------------------------------------------------

LOGITS = np.array([[4.0, 1.0, 0.0, -2.0], [0.0, 3.0, 2.5, 1.0]], np.float32)
NEAR = LOGITS + np.array([[1e-6, -1e-6, 0, 0], [0, 1e-6, 0, 0]], np.float32)
FAR = LOGITS + np.array([[0, 0, 0, 0], [0, 0, 0.25, 0]], np.float32)


def run(values, kind="logits", ids=None, **more):
    return RunFile([1, 2], [0, 1], values, kind=kind, ids=ids, **more)


def logprobs(values):
    return kvlab.compare.log_softmax(values)


def best(values, k, kind):
    ids = np.argsort(-values, axis=-1)[:, :k]
    return run(np.take_along_axis(values, ids, -1), f"top {kind}", ids, vocab=4)


EXACT = {
    "logits, logits": (run(LOGITS), run(FAR), 0.25),
    "logprobs, logprobs": (run(logprobs(LOGITS), "logprobs"), run(logprobs(FAR), "logprobs"), None),
    "logits, logprobs": (run(LOGITS), run(logprobs(FAR), "logprobs"), None),
    "logprobs, logits": (run(logprobs(LOGITS), "logprobs"), run(FAR), None),
    "logits, top logits": (run(LOGITS), best(FAR, 3, "logits"), 0.25),
    "top logits, top logits": (best(LOGITS, 3, "logits"), best(FAR, 3, "logits"), 0.25),
    "logits, top logprobs": (run(LOGITS), best(logprobs(FAR), 3, "logprobs"), None),
    "top logprobs, logprobs": (best(logprobs(LOGITS), 3, "logprobs"), run(logprobs(FAR), "logprobs"), None),
}


@pytest.mark.parametrize("name", EXACT)
def test_kinds_are_converted_where_that_is_exact(name):
    left, right, delta = EXACT[name]
    expected = delta or float(np.abs(logprobs(LOGITS) - logprobs(FAR)).max())
    found = compare(left, right)
    assert found.delta == pytest.approx(expected, abs=1e-6) and found.onset(1e-3) == 1
    assert ("logprobs" in found.kind) == (delta is None)


def test_a_top_list_in_another_order_is_the_same_list():
    ids = np.array([[0, 1, 2], [1, 2, 3]])
    values = np.take_along_axis(LOGITS, ids, -1)
    assert compare(run(values, "top logits", ids), run(values[:, ::-1], "top logits", ids[:, ::-1])).delta == 0


REFUSED = {
    "top lists of different tokens": (best(LOGITS, 3, "logits"), best(LOGITS[:, ::-1].copy(), 3, "logits"), "step 0"),
    "top lists of different length": (best(LOGITS, 3, "logits"), best(LOGITS, 2, "logits"), "different tokens"),
    "top logits against logprobs": (best(LOGITS, 3, "logits"), run(logprobs(LOGITS), "logprobs"), "do not tell their sum"),
    "another vocabulary": (run(LOGITS), run(LOGITS[:, :3]), "4 and 3 tokens"),
    "a top list of another vocabulary": (run(LOGITS[:, :2]), best(LOGITS, 3, "logits"), "has 2 tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_refused_by_name(name):
    left, right, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        compare(left, right)


def test_tokens_only_can_convict_and_never_acquit():
    reference, silent = run(LOGITS), RunFile([1, 2], [0, 1])
    assert judge(compare(reference, silent), 1e-4).kind == "unclear"
    assert "tokens only" in judge(compare(reference, silent), 1e-4).sentence
    assert judge(compare(reference, RunFile([1, 2], [0, 2])), 1e-4).kind == "state fault", "a flip at a margin of 0.5"
    assert judge(compare(reference, RunFile([1, 2], [0, 2])), 1.0).kind == "unclear"
    assert compare(silent, RunFile([1, 2], [0, 2])).margin is None


def test_a_prompt_may_be_a_tuple_and_logits_an_array():
    class Theirs:
        prompt, tokens, logits = (1, 2), (0, 1), LOGITS

    assert compare(Theirs, run(NEAR)).delta < 2e-6


# ---- whole sets of runs ---------------------------------------------------------------------------------------------------


def test_runs_are_judged_with_the_manifests_dtype_and_depth():
    manifest = {"dtype": "float32", "layers": 4}
    found = judge_runs(run(LOGITS, manifest=manifest), {"rows": run(NEAR)}, run(FAR))
    assert found.verdict.kind == "state fault" and found.bound.floor == floor(4.0, layers=4)
    assert judge_runs(run(LOGITS, manifest=manifest), {"rows": run(NEAR)}, run(NEAR)).verdict.kind == "noise"
    assert (
        judge_runs(run(LOGITS, manifest={"dtype": "bfloat16"}), {"rows": run(NEAR)}, run(FAR), layers=100).verdict.kind
        == "noise"
    )
    with pytest.raises(ValueError, match="int4"):
        judge_runs(run(LOGITS, manifest={"dtype": "int4"}), {"rows": run(NEAR)}, run(FAR))


def test_epsilon_is_of_the_suspects_kind():
    lp = run(logprobs(FAR), "logprobs")
    found = judge_runs(run(LOGITS), {"rows": run(NEAR)}, lp)
    assert found.difference.kind == "logprobs" and found.bound.arms["rows"] < 3e-6
    assert judge_runs(run(LOGITS), {"rows": run(NEAR)}, best(logprobs(FAR), 3, "logprobs")).verdict.kind == "state fault"
    few = best(logprobs(NEAR), 3, "logprobs")
    with pytest.raises(ValueError, match="rows: it is compared in top logprobs, the suspect in logprobs"):
        judge_runs(run(LOGITS), {"rows": few}, lp)
    with pytest.raises(ValueError, match="rows: compare: the two runs have different prompts"):
        judge_runs(run(LOGITS), {"rows": RunFile([9], [0, 1], LOGITS)}, run(FAR))


def test_the_suspects_own_log_is_read():
    log = [(2, 1, 2, 0, 0), (3, 2, 5, 2, 0)]
    assert judge_runs(run(LOGITS), {"rows": run(NEAR)}, run(FAR, log=log)).verdict.possible == ("foreign state",)
