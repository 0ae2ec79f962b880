"""Lab 4, padding and positions: its checks, its arms on both models, the recorded run, and what is concluded from it."""

import copy
import re
from dataclasses import replace
from pathlib import Path

import plotly.graph_objects as go
import pytest
import torch

from kvlab import claims, record
from kvlab.checks import Wrong
from kvlab.checks import padding as checks
from kvlab.compare import compare
from kvlab.experiments import padding, positions
from kvlab.faults import ZOO
from kvlab.runtime import load
from kvlab.show import lengths
from kvlab.show import padding as show

# ---- the checks: right answers, two ways each, none of them the library's own -------------------------------------------


def positions_by_loop(mask):
    out = torch.zeros_like(mask)
    for r in range(mask.shape[0]):
        n = 0
        for c in range(mask.shape[1]):
            if mask[r, c] == 1:
                out[r, c] = n
                n += 1
    return out


def positions_by_where(mask):
    return torch.where(mask == 1, torch.cumsum(mask, dim=1) - 1, 0)


def see_by_loops(mask, cached):
    batch, columns = mask.shape
    out = torch.zeros(batch, 1, columns - cached, columns, dtype=torch.bool)
    for b in range(batch):
        for q in range(cached, columns):
            for k in range(q + 1):
                out[b, 0, q - cached, k] = bool(mask[b, k]) or k == q
    return out


def see_by_tril(mask, cached):
    n = mask.shape[1]
    square = torch.tril(torch.ones(n, n)).bool()[None] & (mask[:, None] == 1) | torch.eye(n).bool()
    return square[:, cached:].unsqueeze(1)


def last_by_nonzero(mask):
    return torch.stack([row.nonzero().max() for row in mask])


def last_by_list(mask):
    return [max(c for c, bit in enumerate(row) if bit) for row in mask.tolist()]


def next_by_position(mask, step):
    return positions_by_loop(mask).max(dim=1).values + 1 + step


def next_by_list(mask, step):
    return [row.count(1) + step for row in mask.tolist()]


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        (checks.POSITION_IDS, positions_by_loop),
        (checks.POSITION_IDS, positions_by_where),
        (checks.MAY_SEE, see_by_loops),
        (checks.MAY_SEE, see_by_tril),
        (checks.LAST_COLUMN, last_by_nonzero),
        (checks.LAST_COLUMN, last_by_list),
        (checks.NEXT_POSITIONS, next_by_position),
        (checks.NEXT_POSITIONS, next_by_list),
    ],
)
def test_right_answers_pass(exercise, answer, capsys):
    exercise.check(answer)
    assert "right" in capsys.readouterr().out


# ---- wrong answers, written as somebody might ---------------------------------------------------------------------------


def like_generate(mask):
    ids = mask.long().cumsum(-1) - 1
    ids.masked_fill_(mask == 0, 1)
    return ids


def arange(mask):
    return torch.arange(mask.size(1)).repeat(mask.size(0), 1)


def no_pads(mask, cached):
    n = mask.shape[1]
    return torch.tril(torch.ones(n, n)).bool()[cached:].expand(mask.shape[0], 1, -1, -1)


def nan_for_pads(mask, cached):
    n = mask.shape[1]
    return (torch.tril(torch.ones(n, n)).bool()[cached:] & mask[:, None].bool())[:, None]


def tril_of_the_rectangle(mask, cached):
    fed = torch.tril(torch.ones(mask.shape[1] - cached, mask.shape[1])).bool()
    itself = torch.eye(mask.shape[1] - cached, mask.shape[1]).bool()
    return (fed & mask[:, None].bool() | itself)[:, None]


def additive(mask, cached):
    return torch.where(see_by_loops(mask, cached), 0.0, -1e9)


@pytest.mark.parametrize(
    ("exercise", "answer", "says"),
    [
        (checks.POSITION_IDS, like_generate, "generate"),
        (checks.POSITION_IDS, arange, "counts columns"),
        (checks.POSITION_IDS, lambda m: m.cumsum(-1) * m, "counts from 1"),
        (checks.POSITION_IDS, lambda m: m.cumsum(1) - 1, "negative"),
        (checks.POSITION_IDS, lambda m: [0] * m.shape[1], "gave"),
        (checks.MAY_SEE, no_pads, "Pads are seen"),
        (checks.MAY_SEE, nan_for_pads, "sees nothing at all"),
        (checks.MAY_SEE, tril_of_the_rectangle, "forgets the offset"),
        (checks.MAY_SEE, additive, "gave"),
        (checks.MAY_SEE, lambda m, c: see_by_loops(m, c).squeeze(1), "axis for the heads"),
        (checks.MAY_SEE, lambda m, c: see_by_loops(m, c).int(), "booleans"),
        (checks.LAST_COLUMN, lambda m: [m.shape[1] - 1] * len(m), "reads the last column"),
        (checks.LAST_COLUMN, lambda m: m.sum(1) - 1, "right padding only"),
        (checks.LAST_COLUMN, lambda m: [-1] * len(m), "gave"),
        (checks.NEXT_POSITIONS, lambda m, s: [m.shape[1] + s] * len(m), "number of columns"),
        (checks.NEXT_POSITIONS, lambda m, s: m.sum(1) + s + 1, "one too far"),
        (checks.NEXT_POSITIONS, lambda m, s: m.sum(1), "forgets the step"),
        (checks.NEXT_POSITIONS, lambda m, s: None, "is there a return?"),
    ],
)
def test_wrong_answers_are_told_why(exercise, answer, says):
    with pytest.raises(Wrong, match=re.escape(says)):
        exercise.check(answer)


# ---- the arms, small, on both models ------------------------------------------------------------------------------------

HARMLESS_FOR_ROPE = {"no positions", "both count pads", "both from 1"}
MINE = {
    "position_ids": positions_by_where,
    "may_see": see_by_tril,
    "last_column": last_by_nonzero,
    "next_positions": next_by_position,
}


@pytest.fixture(scope="module")
def benches(loaded):
    bird = load("parrot", device="cpu", dtype="float32")
    return {"rope": padding.bench("rope", loaded, 2), "learned": padding.bench("learned", bird, 3)}


@pytest.fixture(scope="module")
def alone(benches):
    return {kind: padding.alone(bench) for kind, bench in benches.items()}


@pytest.mark.model
@pytest.mark.parametrize("kind", list(padding.KINDS))
@pytest.mark.parametrize("name", list(padding.ARMS))
def test_each_arm_does_what_the_algebra_says(benches, alone, kind, name):
    """With five pads: rounding for the healthy, and for what shifts all positions alike under RoPE; whole units for the rest."""
    arm = padding.ARMS[name]
    [rows] = padding.measure(benches[kind], alone[kind], arm, [5])["rows"]
    fine = arm.healthy or (kind == "rope" and name in HARMLESS_FOR_ROPE)
    deltas = [row[3] for row in rows]
    assert max(deltas) < 3e-4 if fine else min(deltas) > 0.02, deltas
    family = ZOO[arm.faults[0]].family if arm.faults else None
    assert all(row[5] == family for row in rows)


@pytest.mark.model
@pytest.mark.parametrize("kind", list(padding.KINDS))
def test_the_readers_functions_carry_both_models_on_both_sides(benches, alone, kind):
    bench = benches[kind]
    for side in ("left", "right"):
        traces = padding.written(bench.loaded, [*bench.rows, bench.beside(7)], 3, side=side, **MINE)
        assert max(compare(a, b).delta for a, b in zip(alone[kind], traces)) < 3e-4
    for name, wrong in (("last_column", lambda m: m.sum(-1) * 0 + m.shape[1] - 1), ("may_see", no_pads)):
        traces = padding.written(bench.loaded, [*bench.rows, bench.beside(7)], 2, side="right", **MINE | {name: wrong})
        assert min(compare(a, b).delta for a, b in zip(alone[kind], traces)) > 0.02, name


@pytest.mark.model
def test_the_parrots_answers_go_with_its_logits(benches, alone):
    right = padding.measure(benches["learned"], alone["learned"], padding.ARMS["left, masked"], [0, 9])
    wrong = padding.measure(benches["learned"], alone["learned"], padding.ARMS["both count pads"], [0, 9])
    assert right["exact"] == [1.0, 1.0] and wrong["exact"][0] == 1.0 and wrong["exact"][1] < 1.0


@pytest.mark.model
def test_a_shorter_run_is_no_difference(benches, alone):
    """A run without a cache makes fewer tokens; that it ends earlier is no flip."""
    rows = padding.measure(benches["learned"], alone["learned"], padding.ARMS["left, anew"], [0])["rows"][0]
    assert all(row[0] is None and row[1] is None for row in rows)


@pytest.mark.model
def test_paddings_end_where_the_table_ends(benches):
    bench = benches["learned"]
    assert max(bench.pads(padding.PADS)) == 64 and bench.length + 64 + bench.new_tokens <= bench.loaded.spec.max_context
    assert {len(row) for row in bench.rows} == {bench.length} and len(bench.beside(9)) == bench.length + 9


@pytest.mark.model
def test_a_quick_run_has_everything_but_size(loaded, tmp_path, monkeypatch):
    """The whole experiment, small, the model lent; its figures and verdicts can be drawn from it."""
    monkeypatch.setattr(padding, "load", lambda name, **options: loaded if name != "parrot" else load("parrot", device="cpu"))
    monkeypatch.setattr(padding, "QUICK_PADS", (0, 1))
    monkeypatch.setattr(padding, "FEW_PADS", (0, 1))
    monkeypatch.setattr(positions, "QUICK", positions.Limits(text=64, long=64, offsets=(64, 4000), chunk=32))
    few = {name: padding.ARMS[name] for name in ("left, masked", "no positions")}
    monkeypatch.setattr(padding, "ARMS", few)
    monkeypatch.setattr(padding, "LAYER_ARMS", ("left, masked",))
    monkeypatch.setattr(padding, "LIBRARY", dict(list(padding.LIBRARY.items())[:1]))
    run = padding.run(quick=True, dtypes=("float32",), progress=False)
    assert set(run.data["grid"]) == {"rope", "learned"} and set(run.data["positions"]) == set(positions.PARTS)
    assert [padding.outcome(run, kind, "left, masked") for kind in padding.KINDS] == ["harmless"] * 2
    assert padding.outcome(run, "learned", "no positions") == "with pads"
    assert run.manifest.command == "kvlab run padding --quick" and len(run.manifest.model) == 2
    assert record.read(run.save(tmp_path)).data == run.data


# ---- the recorded run ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    return record.load("padding")


def test_the_run_covers_what_it_must(run):
    grid = run.data["grid"]
    for kind in padding.KINDS:
        assert list(grid[kind]) == ["float32", "bfloat16"]
        assert all(list(arms) == list(padding.ARMS) for arms in grid[kind].values())
    assert grid["rope"]["float32"]["mask omitted"]["pads"] == list(padding.PADS)
    assert max(grid["rope"]["float32"]["no positions"]["pads"]) == 512
    assert max(grid["learned"]["float32"]["no positions"]["pads"]) >= 64
    assert run.manifest.command == "kvlab run padding" and run.manifest.seconds < 6 * 60
    assert run.data["positions"]["beyond"]["positions"][-1] > run.data["positions"]["beyond"]["made_for"]


def test_the_kinds_differ_where_the_algebra_says(run):
    for name, arm in padding.ARMS.items():
        rope, learned = (padding.outcome(run, kind, name) for kind in padding.KINDS)
        if arm.healthy:
            assert (rope, learned) == ("harmless", "harmless"), name
        elif name in HARMLESS_FOR_ROPE:
            assert rope == "harmless" and learned in ("always", "with pads"), name
        else:
            assert rope in ("always", "with pads") and learned in ("always", "with pads"), (name, rope, learned)


def test_noise_and_fault_lie_apart(run):
    facts = show.facts(run)
    for kind in padding.KINDS:
        assert padding.epsilon(run, kind) < 1e-3
        healthy = max(padding.largest(run, kind, n) for n, arm in padding.ARMS.items() if arm.healthy)
        assert healthy <= padding.epsilon(run, kind), kind
    assert float(facts["sick_least_rope"]) > 0.01 and float(facts["sick_least_learned"]) > 0.01


@pytest.mark.model
@pytest.mark.parametrize("kind", list(padding.KINDS))
def test_the_recorded_arms_are_what_the_code_gives(run, loaded, kind):
    bench = padding.bench(kind, loaded if kind == "rope" else load("parrot", device="cpu", dtype="float32"))
    bench = replace(bench, rows=bench.rows[:1], answers=None)
    reference = padding.alone(bench)
    for name in ("left, masked", "mask omitted", "prefill counts pads", "both count pads"):
        kept = run.data["grid"][kind]["float32"][name]
        at = kept["pads"].index(8)
        [[row]] = padding.measure(bench, reference, padding.ARMS[name], [8])["rows"]
        recorded = kept["rows"][at][0]
        if recorded[3] < 1e-3:
            assert row[3] <= 5 * padding.epsilon(run, kind)
        else:
            assert row[3] == pytest.approx(recorded[3], rel=0.02) and row[0] == recorded[0] and row[5] == recorded[5]


def test_every_claim_of_the_lab_has_a_verdict():
    given = {v.claim: v for v in claims.verdicts(4)}
    assert list(given) == ["A6", "A7", "A9", "A11", "A18", "B10"]
    assert all(4 in claims.claims()[claim].labs and v.run == "padding" for claim, v in given.items())
    assert all("nan" not in v.finding and "inf" not in v.finding for v in given.values())


def test_verdicts_follow_the_run(run, monkeypatch):
    """A run in which the faults had done nothing, and cached and uncached had parted, would say so."""
    other = copy.deepcopy(run.data)
    for kind in padding.KINDS:
        arms = other["grid"][kind]["float32"]
        for name in ("steps from 0", "mask omitted", "steps one too far", "one offset for all"):
            arms[name] = arms["left, masked"]
        other["library"][kind] = dict.fromkeys(other["library"][kind], other["library"][kind]["`generate`, left, mask given"])
    for rows in other["positions"]["moved"]["variants"]["angles in bf16"]:
        rows[3] = 5.0
    monkeypatch.setattr(record, "load", lambda name: replace(run, data=other))
    kinds = {v.claim: v.kind for v in claims.verdicts(4)}
    assert kinds == {"A6": "refuted", "A7": "refuted", "A9": "refuted", "A11": "confirmed", "A18": "refuted", "B10": "refuted"}


# ---- figures and the chapter --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("figure", ["kl_by_pads", "by_layer", "angle_errors", "moved", "turned", "beyond", "learning"])
def test_figures_have_a_name_and_something_in_them(run, figure):
    fig = getattr(show, figure)(run)
    assert isinstance(fig, go.Figure) and len(fig.layout.meta["alt"]) > 40 and len(fig.data)


def test_switches_show_one_setting_at_a_time(run):
    for figure, at_once in (("kl_by_pads", 1), ("by_layer", 2)):
        fig = getattr(show, figure)(run)
        assert sum(trace.visible is not False for trace in fig.data) == at_once
        for button in fig.layout.updatemenus[0].buttons:
            assert sum(button.args[0]["visible"]) == at_once and len(button.args[0]["visible"]) == len(fig.data)


@pytest.mark.parametrize("table", ["outcomes_table", "sixteen_bits_table", "library_table", "counted_table"])
def test_tables_are_whole(run, table):
    lines = getattr(show, table)(run).splitlines()
    assert len(lines) > 3 and len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1


def test_what_hides_in_16_bits_is_counted(run):
    counted = show.sixteen_bits(run, "rope")
    assert counted["faults"] == counted["caught"] + sum(counted["missed"].values()) > 50


def test_guesses_beside_what_was_measured():
    table = show.guesses({"a": ("wrong", "harmless")}, {"a": ("wrong", "wrong")})
    assert "wrong ✓" in table and "wrong ✗" in table


def test_the_chapter_uses_what_there_is(run):
    text = (Path(__file__).parents[1] / "book" / "04-padding.md").read_text(encoding="utf-8")
    wanted = set(re.findall(r"\{glue:text\}`(\w+)`", text))
    facts = show.facts(run) | lengths.facts(record.load("lengths"))
    assert wanted - {"manifest"} <= set(facts)
    assert all(value and "nan" not in value for value in facts.values())
    assert {f for f in re.findall(r"show\.(\w+)\(", text)} <= set(dir(show))  # noqa: C416
