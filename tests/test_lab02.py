"""Lab 2: its checks, its recorded run, what is concluded from it, and its figures."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from kvlab import record
from kvlab.checks import Wrong
from kvlab.checks import ledger as checks
from kvlab.claims import claims, lab02
from kvlab.core import ledger
from kvlab.core.cards import CARDS, MODELS
from kvlab.experiments import ledger as measure
from kvlab.faults import fault
from kvlab.record import Run
from kvlab.show import ledger as show

# --- right answers, two ways each, none of them the library's own -------------------------------------------------------


def token_by_loops(spec, bits):
    total = 0
    for _ in range(spec.layers):
        for _ in ("key", "value"):
            for _ in range(spec.kv_heads):
                total += spec.head_dim * bits
    return total // 8


def token_by_groups(spec, bits):
    numbers = spec.layers * spec.heads * spec.head_dim // (spec.heads // spec.kv_heads)
    return numbers * bits // 4


def packed_by_ceil(numbers, bits, group, scale_bits):
    return math.ceil(numbers * bits / 8) + math.ceil(numbers / group) * (scale_bits // 8)


def packed_by_loop(numbers, bits, group, scale_bits):
    total = 0
    while numbers > 0:
        total += min(numbers, group) * bits + scale_bits
        numbers -= group
    return (total + 7) // 8


def slots_by_counting(tokens, block, window, beams):
    held, total = min(tokens, window or tokens), 0
    while held > 0:
        total, held = total + block, held - block
    return total * beams


def slots_by_divmod(tokens, block, window, beams):
    if window is not None and window < tokens:
        tokens = window
    whole, rest = divmod(tokens, block)
    return (whole + (rest > 0)) * block * beams


def batch_by_subtraction(memory_gib, watermark, weights, activations, request):
    left, n = memory_gib * 1024**3 * watermark - weights - activations, 0
    while left >= request:
        left, n = left - request, n + 1
    return n


def batch_by_floor(memory_gib, watermark, weights, activations, request):
    n = math.floor((memory_gib * 2**30 * watermark - (weights + activations)) / request)
    return n if n > 0 else 0


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        (checks.TOKEN_BYTES, token_by_loops),
        (checks.TOKEN_BYTES, token_by_groups),
        (checks.PACKED_BYTES, packed_by_ceil),
        (checks.PACKED_BYTES, packed_by_loop),
        (checks.SLOTS, slots_by_counting),
        (checks.SLOTS, slots_by_divmod),
        (checks.MAX_BATCH, batch_by_subtraction),
        (checks.MAX_BATCH, batch_by_floor),
    ],
)
def test_right_answers_pass(exercise, answer, capsys):
    exercise.check(answer)
    assert "right" in capsys.readouterr().out


# --- wrong answers, written as somebody might ---------------------------------------------------------------------------


def query_heads(spec, bits):
    return spec.layers * 2 * spec.heads * spec.head_dim * bits / 8


def keys_only(spec, bits):
    return spec.layers * spec.kv_heads * spec.head_dim * bits / 8


def in_bits(spec, bits):
    return spec.layers * 2 * spec.kv_heads * spec.head_dim * bits


def one_layer(spec, bits):
    return 2 * spec.kv_heads * spec.head_dim * bits / 8


def no_scales(numbers, bits, group, scale_bits):
    return (numbers * bits + 7) // 8


def whole_groups_only(numbers, bits, group, scale_bits):
    return (numbers * bits + 7) // 8 + (numbers // group) * scale_bits // 8


def byte_each(numbers, bits, group, scale_bits):
    return numbers * ((bits + 7) // 8) + -(-numbers // group) * scale_bits // 8


def rounds_down(tokens, block, window, beams):
    return min(tokens, window or tokens) // block * block * beams


def one_more(tokens, block, window, beams):
    return (min(tokens, window or tokens) // block + 1) * block * beams


def beams_together(tokens, block, window, beams):
    seen = min(tokens, window or tokens) * beams
    return -(-seen // block) * block


def decimal(memory_gib, watermark, weights, activations, request):
    return max(0, int((memory_gib * 1e9 * watermark - weights - activations) / request))


def no_watermark(memory_gib, watermark, weights, activations, request):
    return max(0, int((memory_gib * 2**30 - weights - activations) / request))


def of_the_rest(memory_gib, watermark, weights, activations, request):
    return max(0, int((memory_gib * 2**30 - weights - activations) * watermark / request))


def below_zero(memory_gib, watermark, weights, activations, request):
    return int((memory_gib * 2**30 * watermark - weights - activations) // request)


def decimal_and_below_zero(memory_gib, watermark, weights, activations, request):
    return (memory_gib * 1e9 * watermark - weights - activations) // request


@pytest.mark.parametrize(
    ("exercise", "answer", "names"),
    [
        (checks.TOKEN_BYTES, query_heads, "counts query heads"),
        (checks.TOKEN_BYTES, keys_only, "one of K and V"),
        (checks.TOKEN_BYTES, in_bits, "gives bits"),
        (checks.TOKEN_BYTES, one_layer, "one layer"),
        (checks.PACKED_BYTES, no_scales, "leaves the scales out"),
        (checks.PACKED_BYTES, whole_groups_only, "not full has a scale"),
        (checks.PACKED_BYTES, byte_each, "whole byte"),
        (checks.SLOTS, rounds_down, "rounds down"),
        (checks.SLOTS, one_more, "one block more"),
        (checks.SLOTS, beams_together, "rounds all beams together"),
        (checks.MAX_BATCH, decimal, "GB for GiB"),
        (checks.MAX_BATCH, no_watermark, "last byte"),
        (checks.MAX_BATCH, of_the_rest, "what is left after the weights"),
        (checks.MAX_BATCH, below_zero, "negative number"),
        (checks.MAX_BATCH, decimal_and_below_zero, "GB for GiB"),
    ],
)
def test_wrong_answers_are_named(exercise, answer, names):
    with pytest.raises(Wrong, match=names):
        exercise.check(answer)


@pytest.mark.parametrize("exercise", checks.EXERCISES, ids=lambda e: e.name)
def test_a_float_is_no_whole_number_even_with_the_right_value(exercise):
    with pytest.raises(Wrong, match=r"\.0\. The value is right, but it is a float"):
        exercise.check(lambda *arguments: float(exercise.right(*arguments)))


# --- the experiment -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    return record.load("ledger")


def every_row(data):
    return data["caches"] + data["grid"] + data["decoding"] + data["packed"] + data["shapes"] + [data["forked"], data["latent"]]


def test_the_run_covers_what_it_must_and_all_but_falcon_is_equal_to_the_byte(run):
    caches = run.data["caches"]
    assert {row["dtype"] for row in caches} == {"float32", "bfloat16", "float16"}
    assert {row["cache"] for row in caches} == {"DynamicCache", "StaticCache", "pool", "pool, in use"}
    assert len(run.data["grid"]) == 27
    off = measure.mismatches(every_row(run.data))
    assert {row["shape"] for row in off} == {"Falcon's newer decoder"}
    assert all(row["measured"] == row["predicted"] * row["heads"] // row["kv_heads"] for row in off)
    assert run.manifest.command == "kvlab run ledger"


@pytest.mark.model
def test_the_recorded_run_is_what_the_code_gives(loaded, run):
    fresh = measure.on_model(loaded, [(1, 7)])
    assert fresh == [r for r in run.data["caches"] if r["dtype"] == "float32" and (r["rows"], r["tokens"]) == (1, 7)]
    assert measure.forked(loaded) == run.data["forked"]
    assert measure.fill_up(loaded) == run.data["fits"]
    for row, kept in zip(measure.packed(loaded), run.data["packed"], strict=True):
        assert row["error"] == pytest.approx(kept["error"], rel=0.01)
        assert {**row, "error": 0} == {**kept, "error": 0}


def test_the_small_models_again(run):
    assert measure.shapes() == run.data["shapes"]
    assert measure.latent() == run.data["latent"]


@pytest.mark.model
def test_the_detector_catches_the_fault_and_is_quiet_without_it(loaded):
    with fault("query-heads-counted"):
        wrong = measure.on_model(loaded, [(1, 16)])
    assert len(measure.mismatches(wrong)) == len(wrong) and all(r["predicted"] == 3 * r["measured"] for r in wrong)
    assert measure.mismatches(measure.on_model(loaded, [(1, 16)])) == []


def test_the_pool_lets_in_exactly_what_the_plan_says(loaded_spec_only):
    for tokens, requests in [(1, 5), (16, 3), (17, 7), (50, 12), (160, 2)]:
        found = measure.fill_up(loaded_spec_only, tokens, requests)
        assert found["predicted"] == found["admitted"] == requests


@pytest.fixture(scope="module")
def loaded_spec_only():
    """What `fill_up` asks of a loaded model: its spec, and parameters that can be counted."""

    class Small:
        spec = replace(MODELS["SmolLM2-135M"].spec, dtype="float32")
        model = torch.nn.Linear(100, 100)

    return Small()


def test_packing_keeps_the_numbers_and_the_bytes():
    x = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(0))
    for name, bound in (("int8", 0.02), ("int4", 0.3)):
        form = ledger.FORMATS[name]
        numbers, scales = measure.quantise(x, form)
        back = (numbers.unflatten(-1, (-1, form.group)).float() * scales.float()[..., None]).flatten(-2)
        assert float((back - x).abs().max()) < bound
        assert sum(part.nbytes for part in measure.pack(x, form)) == 30 * ledger.stored_bytes(64, form)
    pairs = measure.pack(x, ledger.FORMATS["int4"])[0]
    low, high = (pairs & 15).to(torch.int8) - 8, (pairs >> 4).to(torch.int8) - 8
    assert torch.equal(torch.stack([low, high], -1).flatten(-2), measure.quantise(x, ledger.FORMATS["int4"])[0])
    with pytest.raises(ValueError, match="multiple of the group"):
        measure.pack(x[..., :40], form)


def test_a_slice_holds_the_tensor_it_was_cut_from():
    class Layer:
        whole = torch.zeros(10, 4)
        keys, values = whole[5:], torch.zeros(5, 4)

    cache = type("Cache", (), {"layers": [Layer()]})()
    assert measure.cache_bytes(cache) == 160 and measure.held_bytes(cache) == 240


def test_on_cuda_needs_cuda():
    with pytest.raises(ValueError, match="CUDA"):
        measure.on_cuda(type("L", (), {"device": "cpu", "spec": None})())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_within_the_allocators_rounding():
    from kvlab.runtime import load

    for row in measure.on_cuda(load("smollm2", device="cuda", dtype="float32")):
        assert 0 <= row["measured"] - row["predicted"] <= row["rounding"]


# --- the verdicts -----------------------------------------------------------------------------------------------------------


def test_every_claim_of_the_lab_has_one_verdict(run):
    found = {v.claim: v for v in lab02.verdicts()}
    assert list(found) == ["A4", "B1", "C3", "C4", "C11", "C15", "C20", "C22"]
    assert all(2 in claims()[claim].labs for claim in found)
    assert found["C22"].kind == "refuted" and found["C4"].kind == "confirmed" and found["A4"].kind == "refined"


def changed(data, **parts):
    return copy.deepcopy(data) | parts


def test_the_verdicts_follow_the_data(run):
    d = run.data
    grid = [{**row, "measured": row["measured"] * 2 ** row["beams"]} for row in d["grid"]]
    assert lab02._c22(grid)[0] == "confirmed"
    bent = {**d["growth"], "DynamicCache": [n * n for n in range(1, 41)]}
    assert lab02._b1(bent, d["shapes"])[0] == "refuted"
    assert lab02._c15({**d["fits"], "admitted": 11})[0] == "refuted"
    warm = [{**row, "contents": 0.1 if row["contents"] is not None else None} for row in d["decoding"]]
    assert lab02._c20(warm, d["forked"])[0] == "refuted"
    assert lab02._c20(d["decoding"], {**d["forked"], "measured": d["forked"]["apart"]})[0] == "confirmed"
    assert lab02._c3(500_000, 2 * ledger.GIB, "")[0] == "refuted"


# --- figures and tables -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("figure", [show.growth, show.predicted_against_measured, show.multiply])
def test_a_figure_of_the_run_has_data_and_a_name(run, figure):
    fig = figure(run)
    assert len(fig.data) >= 3 and all(len(trace.x) for trace in fig.data)
    assert len(fig.layout.meta["alt"]) > 40


def test_figures_and_tables_of_public_models():
    fig = show.models()
    assert {y for trace in fig.data for y in trace.y} == {*MODELS, "DeepSeek-V3"}
    s = show.setting(MODELS["Qwen3 32B"], CARDS["A100 80 GB"].memory)
    stack = show.stack(s)
    assert sum(trace.x[0] for trace in stack.data) == pytest.approx(
        (ledger.ledger(s).weights + s.activations + ledger.ledger(s).request) / ledger.GIB
    )
    for table, rows in ((show.models_table(), len(MODELS)), (show.cards_table(), len(CARDS))):
        lines = table.splitlines()
        assert len(lines) == rows + 2 and len({line.count("|") for line in lines}) == 1


def test_tables_of_the_run_are_well_formed(run):
    for table in (show.caches_table, show.shapes_table, show.decoding_table, show.packed_table):
        assert len({line.count("|") for line in table(run).splitlines()}) == 1


def test_facts_are_text_and_of_the_run(run):
    facts = show.facts(run)
    assert all(isinstance(value, str) and value for value in facts.values())
    other = Run(run.manifest, changed(run.data, fits={**run.data["fits"], "admitted": 99}))
    assert show.facts(other)["fits_admitted"] == "99" != facts["fits_admitted"]


def test_the_notebooks_calculator_follows_its_widgets():
    box = show.widgets()
    *controls, says = box.children
    named = {control.description: control for control in controls}
    before = says.value
    assert ledger.sentence(show.setting(MODELS[show.MODEL], CARDS[show.CARD].memory)) in before
    named["Break it: count query heads"].value = True
    assert says.value != before and "524,288 bytes a token" in says.value
    named["Break it: count query heads"].value = False
    assert says.value == before
    named["Model"].value = "Qwen3 4B"
    assert "Qwen3 4B supports" in says.value


def test_the_page_form_has_a_label_for_every_field():
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(show.calculator(), "html.parser")
    fields = soup.find_all(["select", "input"])
    labels = {label["for"] for label in soup.find_all("label")}
    assert len(fields) > 15
    for field in fields:
        assert field.get("id") in labels or field.get("aria-label"), field
    assert len({f["id"] for f in fields if f.get("id")}) == len([f for f in fields if f.get("id")])
