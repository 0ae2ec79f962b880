"""Lab 1: its checks, its recorded run, what is concluded from it, and its figures."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from kvlab import record
from kvlab.checks import Wrong
from kvlab.checks import attention as checks
from kvlab.claims import claims, lab01
from kvlab.experiments import attention as measure
from kvlab.experiments import attention_cost as cost
from kvlab.record import Run
from kvlab.show import attention as show

# --- right answers, two ways each, none of them the library's own -------------------------------------------------------


def attend_by_torch(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def attend_by_exp(q, k, v, mask):
    share = torch.exp((q / math.sqrt(q.size(-1))) @ k.mT) * mask
    return (share / share.sum(-1, keepdim=True)) @ v


def mask_by_tril(queries, past):
    return torch.ones(queries, past + queries, dtype=torch.bool).tril(past)


def mask_by_loops(queries, past):
    return torch.tensor([[j <= past + i for j in range(past + queries)] for i in range(queries)])


def repeat_by_expand(x, groups):
    heads, seq, dim = x.shape
    return x[:, None].expand(heads, groups, seq, dim).reshape(heads * groups, seq, dim)


def repeat_by_list(x, groups):
    return torch.stack([head for head in x for _ in range(groups)])


def rotate_half(x, positions, base):
    d = x.shape[-1]
    inverse = 1.0 / base ** (torch.arange(0, d, 2).float() / d)
    angle = torch.outer(positions.float(), inverse)
    angle = torch.cat([angle, angle], -1)
    turned = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1)
    return x * angle.cos() + turned * angle.sin()


def rotate_as_complex(x, positions, base):
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:])
    angle = positions[:, None] * torch.tensor([base ** (-2 * i / (2 * half)) for i in range(half)])
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def step_by_groups(q, k, v, past_k, past_v):
    k, v = torch.cat((past_k, k), 1), torch.cat((past_v, v), 1)
    heads, _, d = q.shape
    grouped = q.view(k.shape[0], -1, 1, d)
    share = (grouped @ k[:, None].mT / d**0.5).softmax(-1)
    return (share @ v[:, None]).view(heads, 1, d), k, v


def step_by_heads(q, k, v, past_k, past_v):
    k, v = torch.cat((past_k, k), 1), torch.cat((past_v, v), 1)
    each = len(q) // len(k)
    out = [((q[h] @ k[h // each].T) / q.shape[-1] ** 0.5).softmax(-1) @ v[h // each] for h in range(len(q))]
    return torch.stack(out), k, v


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        (checks.ATTEND, attend_by_torch),
        (checks.ATTEND, attend_by_exp),
        (checks.CAUSAL_MASK, mask_by_tril),
        (checks.CAUSAL_MASK, mask_by_loops),
        (checks.REPEAT_HEADS, repeat_by_expand),
        (checks.REPEAT_HEADS, repeat_by_list),
        (checks.ROTATE, rotate_half),
        (checks.ROTATE, rotate_as_complex),
        (checks.DECODE_STEP, step_by_groups),
        (checks.DECODE_STEP, step_by_heads),
    ],
)
def test_right_answers_pass(exercise, answer, capsys):
    exercise.check(answer)
    assert "right" in capsys.readouterr().out


# --- wrong answers, written as somebody might ---------------------------------------------------------------------------


def scaled_by_d(q, k, v, mask):
    scores = (q @ k.mT / q.shape[-1]).masked_fill(mask.logical_not(), -1e9)
    return torch.softmax(scores, -1) @ v


def unscaled(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)


def maskless(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v)


def masked_late(q, k, v, mask):
    return (torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) * mask) @ v


def top_left(queries, past):
    return torch.tril(torch.ones((queries, past + queries))).bool()


def not_itself(queries, past):
    return torch.arange(past + queries)[None] < torch.arange(past, past + queries)[:, None]


def tiled(x, groups):
    return torch.cat([x for _ in range(groups)], dim=0)


def interleaved(x, positions, base):
    out = torch.empty_like(x)
    for i in range(x.shape[-1] // 2):
        angle = positions * base ** (-2 * i / x.shape[-1])
        a, b = x[..., 2 * i], x[..., 2 * i + 1]
        out[..., 2 * i], out[..., 2 * i + 1] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return out


def from_zero(x, positions, base):
    return rotate_half(x, torch.arange(x.shape[1]), base)


def causal_by_torch(q, k, v, past_k, past_v):
    k, v = torch.cat((past_k, k), 1), torch.cat((past_v, v), 1)
    groups = len(q) // len(k)
    out = F.scaled_dot_product_attention(
        q[None], k.repeat_interleave(groups, 0)[None], v.repeat_interleave(groups, 0)[None], is_causal=True
    )
    return out[0], k, v


def forgets_itself(q, k, v, past_k, past_v):
    out = step_by_heads(q, k, v, past_k, past_v)[0]
    if past_k.shape[1]:
        out = step_by_heads(q, past_k[:, -1:], past_v[:, -1:], past_k[:, :-1], past_v[:, :-1])[0]
    return out, torch.cat((past_k, k), 1), torch.cat((past_v, v), 1)


def keeps_the_new_ones(q, k, v, past_k, past_v):
    return step_by_heads(q, k, v, past_k, past_v)[0], k, v


@pytest.mark.parametrize(
    ("exercise", "answer", "names"),
    [
        (checks.ATTEND, scaled_by_d, "divides by d"),
        (checks.ATTEND, unscaled, "does not divide"),
        (checks.ATTEND, maskless, "does not look at the mask"),
        (checks.ATTEND, masked_late, "after the softmax"),
        (checks.CAUSAL_MASK, top_left, "forgets the past"),
        (checks.CAUSAL_MASK, not_itself, "does not see itself"),
        (checks.REPEAT_HEADS, tiled, "heads as a whole"),
        (checks.ROTATE, interleaved, "pairs neighbours"),
        (checks.ROTATE, from_zero, "counts positions from 0"),
        (checks.DECODE_STEP, causal_by_torch, "only the oldest"),
        (checks.DECODE_STEP, forgets_itself, "does not see itself"),
        (checks.DECODE_STEP, keeps_the_new_ones, "only the new key"),
    ],
)
def test_wrong_answers_are_named(exercise, answer, names):
    with pytest.raises(Wrong, match=names):
        exercise.check(answer)


# --- what is concluded from times ---------------------------------------------------------------------------------------


def made_up(history, c):
    return [sum(k * t**n for n, k in enumerate(c)) for t in history]


@pytest.mark.parametrize(("c", "degree"), [((3.0,), 0), ((3.0, 0.01), 1), ((0.5, 0.02, 1e-5), 2)])
def test_a_fit_finds_the_coefficients_and_the_degree(c, degree):
    history = cost.HISTORY
    wobble = [1 + 0.004 * (-1) ** i for i in range(len(history))]  # no machine is quiet
    times = [y * w for y, w in zip(made_up(history, c), wobble)]
    assert cost.fit(history, made_up(history, c), degree) == pytest.approx(c, rel=1e-6)
    errors = [cost.held_out(history, times, k) for k in range(4)]
    assert cost.least_degree(errors) == degree
    assert errors[degree] < 0.02


def test_conclusions_of_a_made_up_machine():
    near, far = cost.HISTORY, cost.HISTORY + cost.FARTHER
    rows = [("uncached", near, (1.0, 0.05, 1e-5)), ("cached", far, (2.0, 0.001)), ("append", far, (0.1, 0.0005))]
    steps = [
        {"arm": arm, "past": t, "seconds": y, "spread": 0.0}
        for arm, history, c in rows
        for t, y in zip(history, made_up(history, c))
    ]
    found = cost.conclusions({"steps": steps, "kv_token_bytes": 100, "ceilings": {"flops": 1e6, "bytes": 1e6}})
    assert found["equal_at"] == pytest.approx(2000) and found["append_share"] == pytest.approx(0.5)
    assert found["cached"]["shares"][1] == pytest.approx(1.024 / 3.024)
    assert found["step_ratio"] == pytest.approx((1 + 51.2 + 10.48576) / 3.024)
    assert found["times_moved"] == pytest.approx(10)
    assert sum(found["total_shares"]) == pytest.approx(1)
    assert (found["cached"]["degree"], found["uncached"]["degree"]) == (1, 2)


def test_points_under_the_roof():
    data = {"ceilings": {"flops": 100.0, "bytes": 10.0}, "roofline": [{"flops": 50.0, "bytes": 10.0, "seconds": 2.0}]}
    (point,) = cost.points(data)
    assert cost.ridge(data) == 10 and point["intensity"] == 5
    assert (point["reached"], point["roof"], point["of_roof"]) == (0.25, 0.5, 0.5)


@pytest.mark.model
def test_the_count_of_work_is_torchs_own(loaded):
    assert all(row["counted"] == row["formula"] for row in cost.counted(loaded, [5, 40]))
    assert cost.flops(loaded, 1, 10, rows=3) == 3 * cost.flops(loaded, 1, 10)


def test_rounds_go_on_while_the_least_still_falls():
    assert cost.settled([1.0, 1.2, 1.1]) and cost.settled([2.0, 1.0]) and not cost.settled([1.2, 1.3, 1.0])
    counts = {"steady": 0, "falling": 0}

    def arm(name, wait):
        def take():
            counts[name] += 1
            clock[0] += wait(counts[name])

        return take

    clock = [0.0]
    arms = {"steady": arm("steady", lambda n: 1.0), "falling": arm("falling", lambda n: 1.0 / n if n < 7 else 1.0)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "_now", lambda loaded: clock[0])
        times = cost.take_turns(arms, 3, None)
    assert min(times["falling"]) == pytest.approx(1 / 6) and len(times["steady"]) == len(times["falling"]) == 7
    assert counts["steady"] == 8  # the first round is not counted


@pytest.mark.model
def test_a_timed_step_leaves_its_cache_as_it_was(loaded):
    cache = cost.filled(loaded, 12, rows=2)
    assert cache.get_seq_length() == 12 and cache.layers[3].keys.shape == (2, 3, 12, 64)
    rows = cost.steps(loaded, [8], [16], tries=1)
    assert {(row["arm"], row["past"]) for row in rows} == {
        ("cached", 8),
        ("append", 8),
        ("uncached", 8),
        ("cached", 16),
        ("append", 16),
    }
    assert all(row["seconds"] > 0 and row["spread"] >= 0 for row in rows)


# --- the recorded run -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    return record.load("attention")


def test_the_run_covers_what_it_must(run):
    d = run.data
    assert run.manifest.command == "kvlab run attention" and len(d["layers"]) == 30
    assert max(row["heads"] for row in d["layers"]) <= 1e-5 and max(d["whole"].values()) < 1e-4
    assert min(min(values) for values in d["slips"].values()) > 1e-2
    history = {row["past"] for row in d["cost"]["steps"] if row["arm"] == "uncached"}
    assert max(history) >= 1024 and len(history) >= 6
    assert {row["size"] for row in d["cost"]["roofline"] if row["kind"] == "decode"} == {1, 2, 4, 8, 16, 32, 64}
    assert all(row["counted"] == row["formula"] for row in d["cost"]["counted"])
    readers = d["readers"]
    assert (len(readers["need"]), len(readers["need"][0])) == (30, 9)
    assert readers["curve"][-1] == 0 < readers["curve"][0], "ablate them, and it is gone"
    assert readers["arms"]["none"]["said"] == readers["judged"] and readers["arms"]["all"]["said"] <= readers["judged"] / 8
    blind = [arm["said"] for name, arm in readers["arms"].items() if name.startswith("as many")]
    assert readers["arms"]["the readers"]["said"] < min(blind) and len(blind) >= 3


@pytest.mark.model
def test_parts_of_the_run_again(loaded, run):
    d, ids = run.data, measure.encode(loaded.tokenizer, measure.PROMPT)
    assert d["maps"]["tokens"] == [loaded.tokenizer.decode([token]) for token in ids]
    assert measure.outputs_reused(loaded)["the second"]["said"] == d["outputs"]["the second"]["said"]
    twice = measure.twice(loaded, ids)
    for name, values in twice.items():
        assert values == pytest.approx(d["twice"][name], rel=0.01, abs=1e-3)
    last = measure.maps(loaded, ids)[:, :, -1]
    assert last.flatten().tolist() == pytest.approx(
        [w for layer in d["maps"]["last"] for head in layer for w in head], abs=1e-3
    )


@pytest.mark.model
def test_the_readers_on_two_prompts(loaded, run):
    """Two of the prompts they were found on: the password goes with the recorded heads, and stays without others."""
    some = measure.sayers(loaded, 2)
    taken = [tuple(head) for head in run.data["readers"]["arms"]["the readers"]["heads"]]
    assert measure.still_said(loaded, some, taken) == 0
    blind = [tuple(head) for head in run.data["readers"]["arms"]["as many, blindly (1)"]["heads"]]
    assert measure.still_said(loaded, some, blind) == measure.still_said(loaded, some, []) == 2


# --- the verdicts -----------------------------------------------------------------------------------------------------------


def test_every_claim_of_the_lab_has_one_verdict(run):
    found = {v.claim: v for v in lab01.verdicts()}
    assert list(found) == ["A2", "A3", "B1", "B2", "C2", "C5"]
    assert all(1 in claims()[claim].labs for claim in found)


def changed(data, **parts):
    return copy.deepcopy(data) | parts


def test_the_verdicts_follow_the_data(run):
    d = run.data
    growth = cost.conclusions(d["cost"])
    cached, uncached = growth["cached"], growth["uncached"]
    flat = {**growth, "cached": {**cached, "degree": 0}}
    assert lab01._a2(flat)[0] == "confirmed"
    assert lab01._a2({**growth, "cached": {**cached, "degree": 1}, "uncached": {**uncached, "degree": 2}})[0] == "refined"
    assert lab01._a2({**flat, "uncached": {**uncached, "degree": 0}})[0] == "refuted"
    assert lab01._a3(d["past"], 0.0)[0] == "confirmed" and lab01._a3(d["past"], 0.1)[0] == "refuted"
    assert lab01._b1({**growth, "cached": {**cached, "degree": 2}})[0] == "refuted"
    steep = {**uncached, "degree": 2, "shares": [0.1, 0.2, 0.7]}
    assert lab01._b1({**growth, "cached": {**cached, "degree": 1}, "uncached": steep})[0] == "confirmed"
    assert lab01._b2(d["reads"])[0] == "confirmed" and lab01._b2({**d["reads"], "queries": 0.5})[0] == "refuted"
    assert lab01._c2(d["reads"], d["twice"], d["outputs"])[0] == "refined"
    harmless = changed(d["outputs"], **{"the second": {**d["outputs"]["the second"], "delta": 1e-5}})
    assert lab01._c2(d["reads"], d["twice"], harmless)[0] == "refuted"
    points, ridge = cost.points(d["cost"]), cost.ridge(d["cost"])
    assert lab01._c5(points, ridge * 1e3, d["cost"]["products"])[0] == "refuted"
    wide = [row for row in points if row["size"] in (1, 1024) or row["kind"] == "prefill" and row["size"] > 64]
    on_the_roof = [{**row, "of_roof": 0.9} for row in wide]
    assert lab01._c5(on_the_roof, ridge, d["cost"]["products"])[0] == "confirmed"


# --- figures and tables -----------------------------------------------------------------------------------------------------


FIGURES = [
    show.against_layers,
    show.unchanged,
    show.reading,
    show.heads,
    show.one_head,
    show.steps,
    show.cached_step,
    show.roofline,
    show.batch,
]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.__name__)
def test_a_figure_of_the_run_has_data_and_a_name(run, figure):
    fig = figure(run)
    assert fig.data and len(fig.layout.meta["alt"]) > 60


def test_sliders_have_a_step_for_every_layer_and_head(run):
    (slider,) = show.reading(run).layout.sliders
    assert len(slider.steps) == 30 and slider.steps[7].args[0]["z"] == [run.data["maps"]["last"][7]]
    (slider,) = show.one_head(run).layout.sliders
    assert len(slider.steps) == len(run.data["maps"]["full"]) and slider.steps[0].label.startswith("layer ")


def test_tables_are_well_formed(run):
    for table in (show.readers_table, show.fits_table):
        assert len({line.count("|") for line in table(run).splitlines()}) == 1


def test_facts_are_text_and_of_the_run(run):
    facts = show.facts(run)
    assert all(isinstance(value, str) and value for value in facts.values())
    other = Run(run.manifest, changed(run.data, reads={**run.data["reads"], "keys": 99.0}))
    assert show.facts(other)["read_keys"] == "99" != facts["read_keys"]


def test_every_number_of_the_chapter_is_there(run):
    import re
    from pathlib import Path

    chapter = (Path(record.__file__).parents[1] / "book" / "01-attention.md").read_text(encoding="utf-8")
    wanted = set(re.findall(r"\{glue:text\}`(\w+)`", chapter)) - {"manifest"}
    assert wanted <= set(show.facts(run)), wanted - set(show.facts(run))


def test_guesses_stand_beside_what_was_measured():
    assert "guessed" in show.guesses({"a": 1.0}, {"a": 2.0}) and "2" in show.guesses({"a": 1.0}, {"a": 2.0})
