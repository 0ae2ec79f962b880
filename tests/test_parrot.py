"""The parrot: it does the one thing it was trained for, from prompts it has not seen; its files, its loading, its training."""

import json
import random
import shutil

import pytest
import torch

from kvlab.errors import KvlabError
from kvlab.runtime import load, parrot
from kvlab.runtime.decode import greedy
from kvlab.runtime.parrot import train


@pytest.fixture(scope="module")
def bird():
    return load("parrot", device="cpu", dtype="float32")


def test_it_repeats_held_out_passwords_at_trained_lengths(bird):
    """At least 99 % exact, on prompts that neither training nor the manifest's own examination drew."""
    rows = list(parrot.prompts(400, seed=77))
    assert {len(row.text) for row in rows} >= {50, 75, 100, 125}
    assert train.exact(bird.model, rows) >= 0.99


def test_each_length_for_itself(bird):
    for lengths in ((40, 60), (75, 95), (110, 128)):
        assert train.exact(bird.model, list(parrot.prompts(60, seed=78, lengths=lengths))) >= 0.95, lengths


def test_greedy_decoding_says_what_the_examination_counts(bird):
    right = 0
    for row in parrot.prompts(12, seed=79):
        ids = bird.tokenizer(row.prompt, add_special_tokens=False)["input_ids"]
        said = bird.tokenizer.decode(greedy(bird, [ids], len(row.password) + 1)[0].tokens)
        right += said == row.password + parrot.END
        assert (said == row.password + parrot.END) == (train.exact(bird.model, [row]) == 1.0)
    assert right >= 11


def test_the_examination_can_fail(bird):
    """Another password in the place of the answer, and an untrained model."""
    rows = list(parrot.prompts(20, seed=80))
    wrong = [parrot.Row(row.text[:-2] + ("0" if row.text[-2] != "0" else "1") + ".", row.password, row.answers) for row in rows]
    assert train.exact(bird.model, wrong) == 0
    torch.manual_seed(1)
    assert train.exact(train.make_model().eval(), rows) == 0


# --- what it is -----------------------------------------------------------------------------------------------------------


def test_its_shape_and_its_manifest(bird):
    spec = bird.spec
    assert (spec.name, spec.positions, spec.layers, spec.heads, spec.head_dim) == ("parrot", "learned", 2, 4, 32)
    assert spec.max_context == parrot.LONGEST and spec.vocab == len(parrot.ALPHABET)
    told = parrot.manifest()
    assert told["parameters"] == sum(p.numel() for p in bird.model.parameters()) < 500_000
    assert told["sha256"] == bird.sha256 == parrot.verify()
    assert told["held_out"]["exact"] >= 0.99 and told["held_out"]["prompts"] >= 500
    assert told["settings"] == {**told["settings"], "seed": train.Settings.seed, "steps": train.Settings.steps}
    loss = [value for _, value in told["loss"]]
    assert loss[0] > 3 and loss[-1] < 0.1 and told["loss"][-1][0] == told["settings"]["steps"]
    assert (parrot.FOLDER / "model.safetensors").stat().st_size < 4_000_000


def test_damaged_weights_are_refused(tmp_path, monkeypatch):
    folder = shutil.copytree(parrot.FOLDER, tmp_path / "weights")
    monkeypatch.setattr(parrot, "FOLDER", folder)
    told = json.loads((folder / parrot.MANIFEST).read_text())
    (folder / parrot.MANIFEST).write_text(json.dumps(told | {"sha256": "0" * 64}))
    with pytest.raises(KvlabError, match="not those its manifest speaks of"):
        load("parrot", device="cpu")


def test_the_tokenizer_has_a_token_for_each_character_and_no_others(bird):
    text = "ab Zx-09:." + parrot.PAD
    ids = bird.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == train.encode(text) == bird.tokenizer(text)["input_ids"] and len(ids) == len(text)
    assert bird.tokenizer.decode(ids) == text
    assert bird.tokenizer.pad_token_id == parrot.ALPHABET.index(parrot.PAD) and bird.tokenizer.padding_side == "left"
    both = bird.tokenizer(["abc", "a"], padding=True, return_tensors="pt")
    assert both["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    with pytest.raises(Exception, match="UNK"):
        bird.tokenizer("é")


def test_it_has_no_place_beyond_its_table(bird):
    ids = train.encode(parrot.filler(random.Random(1), parrot.LONGEST + 1))
    with pytest.raises(IndexError):
        bird.model(torch.tensor([ids]))


# --- what it is trained on ------------------------------------------------------------------------------------------------


def test_rows_are_as_long_as_asked_and_say_the_password_where_they_claim():
    draw = random.Random(3)
    for length in range(parrot.SHORTEST, parrot.LONGEST + 1, 2):
        row = parrot.row(draw, length)
        assert len(row.text) == length and set(row.text) <= set(parrot.ALPHABET) - {parrot.PAD}
        assert all(row.text[a:b] == row.password + parrot.END for a, b in row.answers)
        assert row.text.count(parrot.CUE + row.password + parrot.END) == len(row.answers) + 1
        assert row.prompt.endswith(parrot.CUE) and row.text.startswith(parrot.CUE + row.password)
    assert [row.text for row in parrot.prompts(5, 1)] == [row.text for row in parrot.prompts(5, 1)]


@pytest.mark.parametrize(
    ("length", "repeats", "says"), [(39, None, "40 to 128"), (129, None, "40 to 128"), (60, 9, "room for 1 to")]
)
def test_rows_that_cannot_be(length, repeats, says):
    with pytest.raises(ValueError, match=says):
        parrot.row(random.Random(1), length, repeats=repeats)


def test_training_learns_and_is_the_same_twice(tmp_path, capsys, monkeypatch):
    """A few steps from the script's own code: the loss falls, the seed decides, what is saved is loadable by its folder."""
    monkeypatch.setattr(train, "LOG_EVERY", 10)
    small = train.Settings(steps=30, characters=800, warmup=5)
    (one, told), (two, again) = (train.train(small, progress=False, held_out=10) for _ in range(2))
    assert told["loss"] == again["loss"] and told["loss"][-1][1] < told["loss"][0][1]
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
    train.save(one, told, tmp_path)
    loaded = load(tmp_path, device="cpu")
    assert loaded.spec.positions == "learned" and loaded.tokenizer.decode(loaded.tokenizer("pw")["input_ids"]) == "pw"
    assert json.loads((tmp_path / parrot.MANIFEST).read_text())["settings"]["steps"] == 30
