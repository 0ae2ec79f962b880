"""ModelSpec says what a model's cache really holds, from the config object and from the dict in config.json alike."""

import copy
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvlab.core.cards import MODELS
from kvlab.core.layers import TELLTALES, LayerCache
from kvlab.core.ledger import layer_lines, request_bytes, token_bytes
from kvlab.core.spec import ModelSpec, canonical_dtype

ROPE = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
ROPE |= {"vocab_size": 50, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 50}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
FALCON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
FALCON |= {"max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}

# config class, its arguments, then what must come out: kv_heads, head_dim, positions, window
FAMILIES = {
    "llama": ("LlamaConfig", ROPE | {"num_key_value_heads": 2}, 2, 8, "rope", None),
    "llama, multi-head": ("LlamaConfig", ROPE, 4, 8, "rope", None),
    "llama, head_dim of its own": (
        "LlamaConfig",
        ROPE | {"num_key_value_heads": 2, "head_dim": 16},
        2,
        16,
        "rope",
        None,
    ),
    "qwen2": ("Qwen2Config", ROPE | {"num_key_value_heads": 1}, 1, 8, "rope", None),
    "qwen2, window on": (
        "Qwen2Config",
        ROPE | {"num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
        *(1, 8, "rope", 7),
    ),
    "qwen3": ("Qwen3Config", ROPE | {"num_key_value_heads": 2, "head_dim": 16}, 2, 16, "rope", None),
    "mistral": ("MistralConfig", ROPE | {"num_key_value_heads": 2, "sliding_window": 7}, 2, 8, "rope", 7),
    "mistral, no window": (
        "MistralConfig",
        ROPE | {"num_key_value_heads": 2, "sliding_window": None},
        2,
        8,
        "rope",
        None,
    ),
    "gemma": ("GemmaConfig", ROPE | {"num_key_value_heads": 1, "head_dim": 24}, 1, 24, "rope", None),
    "gemma2": (
        "Gemma2Config",
        ROPE | {"num_key_value_heads": 2, "head_dim": 24, "sliding_window": 7},
        2,
        24,
        "rope",
        7,
    ),
    "phi": ("PhiConfig", ROPE | {"partial_rotary_factor": 0.5}, 4, 8, "rope", None),
    "phi3": ("Phi3Config", ROPE | {"num_key_value_heads": 2, "sliding_window": None}, 2, 8, "rope", None),
    "gpt2": ("GPT2Config", GPT2, 4, 8, "learned", None),
    "gpt_bigcode, multi-query": ("GPTBigCodeConfig", GPT2 | {"multi_query": True}, 1, 8, "learned", None),
    "falcon, multi-query": ("FalconConfig", FALCON | {"multi_query": True}, 1, 8, "rope", None),
    "falcon, multi-head": ("FalconConfig", FALCON | {"multi_query": False}, 4, 8, "rope", None),
    "falcon, alibi": ("FalconConfig", FALCON | {"multi_query": False, "alibi": True}, 4, 8, "other", None),
    "opt": (
        "OPTConfig",
        ROPE | {"ffn_dim": 16, "word_embed_proj_dim": 32},
        *(4, 8, "learned", None),
    ),
    "gpt_neox": ("GPTNeoXConfig", ROPE, 4, 8, "rope", None),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_spec_is_what_the_cache_holds(family):
    import torch
    import transformers

    name, arguments, kv_heads, head_dim, positions, window = FAMILIES[family]
    config = getattr(transformers, name)(**arguments)
    spec = ModelSpec.from_config(config, "float32", family)
    assert replace(spec, mixed=()) == ModelSpec(family, 2, 4, kv_heads, head_dim, "float32", positions, 64, 50, window)
    assert bool(spec.mixed) == (family == "gemma2")  # whose second layer sees everything
    assert ModelSpec.from_config(config.to_dict(), "float32", family) == spec

    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        cache = model(torch.tensor([[3, 4, 5]]), use_cache=True).past_key_values
    assert len(cache.layers) == spec.layers
    for layer in cache.layers:
        assert layer.keys.shape == layer.values.shape == (1, spec.kv_heads, 3, spec.head_dim)


def test_falcons_newer_decoder_is_told_by_the_architecture():
    import torch
    import transformers

    config = transformers.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2)
    assert ModelSpec.from_config(config).kv_heads == 2
    with torch.no_grad():  # Transformers caches what it repeated to all query heads; from_config says so
        cache = transformers.FalconForCausalLM(config)(torch.tensor([[3, 4, 5]]), use_cache=True).past_key_values
    assert cache.layers[0].keys.shape[1] == 4


def test_a_config_json_that_leaves_out_defaults():
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8}
    config |= {"max_position_embeddings": 2048, "vocab_size": 100, "torch_dtype": "float16"}
    assert ModelSpec.from_config(config) == ModelSpec("llama", 3, 8, 8, 8, "float16", "rope", 2048, 100)


def test_a_window_that_is_switched_off_is_none():
    config = ROPE | {"model_type": "qwen2", "num_key_value_heads": 2, "sliding_window": 32768}
    assert ModelSpec.from_config(config | {"use_sliding_window": False}).window is None
    on = config | {"use_sliding_window": True}
    assert ModelSpec.from_config(on).window is None  # max_window_layers is 28, by default: the first of two layers have none
    assert ModelSpec.from_config(on | {"max_window_layers": 0}).window == 32768
    assert ModelSpec.from_config(on | {"max_window_layers": 1}).windowed == 1


@pytest.mark.parametrize("wrap", [dict, lambda **fields: SimpleNamespace(**fields)])
def test_a_multimodal_config_is_read_through_its_text_config(wrap):
    inner = wrap(**ROPE, num_key_value_heads=2, model_type="llama", rope_theta=1e4)
    outer = wrap(model_type="picture-talker", dtype="bfloat16", text_config=inner)
    assert ModelSpec.from_config(outer) == ModelSpec("picture-talker", 2, 4, 2, 8, "bfloat16", "rope", 64, 50)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": None}, "number of layers.*num_hidden_layers"),
        ({"num_attention_heads": None}, "number of heads.*num_attention_heads"),
        ({"hidden_size": None}, "hidden size.*hidden_size"),
        ({"hidden_size": 33}, "head_dim.*33.*4 heads"),
        ({"max_position_embeddings": None}, "longest context.*max_position_embeddings"),
        ({"vocab_size": None}, "vocabulary size.*vocab_size"),
        ({"num_key_value_heads": 3}, r"heads \(4\) must be a multiple of kv_heads \(3\)"),
        ({"dtype": "float7"}, "dtype 'float7' is unknown"),
        ({"kv_lora_rank": 16}, "latent attention.*kv_lora_rank"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers"),
    ],
)
def test_what_is_missing_is_named(change, says):
    with pytest.raises(ValueError, match=says):
        ModelSpec.from_config(ROPE | {"model_type": "llama"} | change)


def test_a_config_whose_layers_differ_is_read_layer_by_layer_or_refused():
    import transformers

    gemma4 = ModelSpec.from_config(transformers.Gemma4TextConfig(), "bfloat16")
    assert {(c.kind, c.count, c.heads, c.key_dim) for c in gemma4.caches} == {("window", 25, 4, 256), ("full", 5, 4, 512)}
    heads = {1: {"num_key_value_heads": 1}}
    mixed = ModelSpec.from_config(transformers.LlamaConfig(**ROPE, num_key_value_heads=2, per_layer_config=heads))
    assert [(c.count, c.heads) for c in mixed.caches] == [(1, 2), (1, 1)]
    queries = transformers.LlamaConfig(**ROPE, num_key_value_heads=2)
    queries.per_layer_config = {1: {"num_attention_heads": 2}}
    with pytest.raises(ValueError, match="no single num_attention_heads for all its layers"):
        ModelSpec.from_config(queries)


@pytest.mark.parametrize("config", ["llama", None, 3, ["llama"]])
def test_what_is_no_config_is_refused(config):
    with pytest.raises(ValueError, match="config must be"):
        ModelSpec.from_config(config)


@pytest.mark.parametrize(
    ("field", "value"), [("layers", 0), ("head_dim", 2.0), ("vocab", True), ("window", 0), ("positions", "alibi")]
)
def test_a_wrong_field_is_named(field, value):
    right = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "dtype": "float32", "positions": "rope"}
    right |= {"max_context": 9, "vocab": 9}
    with pytest.raises(ValueError, match=field):
        ModelSpec("x", **(right | {field: value}))


def test_dtypes_go_by_many_names():
    import torch

    for name in ("bf16", "bfloat16", "torch.bfloat16", torch.bfloat16, "BF16"):
        assert canonical_dtype(name) == "bfloat16"
    assert [canonical_dtype(name) for name in ("fp32", "half", "double")] == ["float32", "float16", "float64"]
    with pytest.raises(ValueError, match="fp16"):
        canonical_dtype("fp61")


# ---- what the layers keep, kind by kind --------------------------------------------------------------------------------


def numbers(config, dtype="bfloat16"):
    spec = ModelSpec.from_config(config, dtype)
    return token_bytes(spec), spec.windowed


SIZED = {"vocab_size": 1000, "max_position_embeddings": 8192}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
MLLAMA = {"num_hidden_layers": 40, "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38], **HEADS, **SIZED}
DICTS = {  # a config.json, bytes a token in 16 bits, layers with a window
    "jamba": ({"num_hidden_layers": 32, "attn_layer_period": 8, "attn_layer_offset": 4, **HEADS, **SIZED}, 16_384, 0),
    "nemotron_h": ({"hybrid_override_pattern": NEMOTRON, "head_dim": 128, **HEADS, **SIZED}, 16_384, 0),
    "qwen3_next": (
        {
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "hidden_size": 2048,
            **SIZED,
        },
        *(24_576, 0),
    ),
    "bamba": ({"num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27], **HEADS, **SIZED}, 12_288, 0),
    "gemma2": ({"num_hidden_layers": 42, "head_dim": 256, "sliding_window": 4096, **HEADS, **SIZED}, 42 * 8192, 21),
    "gemma3_text": ({"num_hidden_layers": 26, "head_dim": 256, "sliding_window": 512, **HEADS, **SIZED}, 26 * 8192, 22),
    "cohere2": ({"num_hidden_layers": 32, "sliding_window": 4096, **HEADS, **SIZED}, 32 * 4096, 24),
    "qwen2": (
        {
            "num_hidden_layers": 28,
            "max_window_layers": 28,
            "use_sliding_window": True,
            "sliding_window": 4096,
            **HEADS,
            **SIZED,
        },
        *(28 * 4096, 0),
    ),
    "mistral": ({"num_hidden_layers": 32, **HEADS, **SIZED}, 32 * 4096, 32),  # its class has a window where the dict names none
    "qwen3": (
        {"num_hidden_layers": 2, **HEADS, **SIZED, "hidden_size": 2560},
        2 * 4096,
        0,
    ),  # its class's head_dim is 128, not 80
    "mllama": ({"text_config": {"model_type": "mllama_text_model", **MLLAMA}}, 131_072, 0),
}


@pytest.mark.parametrize("family", DICTS)
def test_a_dict_says_what_its_class_says(family):
    config, size, windowed = DICTS[family]
    assert numbers({"model_type": family, **config}) == (size, windowed)


@pytest.mark.parametrize("family", DICTS)
def test_without_transformers_a_dict_says_the_same_or_names_what_it_leaves_out(family, monkeypatch):
    config, size, windowed = DICTS[family]
    monkeypatch.setattr("kvlab.core.layers.importlib.util.find_spec", lambda _: None)
    try:
        assert numbers({"model_type": family, **config}) == (size, windowed)
    except ValueError as error:
        assert "config leaves out" in str(error) and "is not installed" in str(error)


def test_layers_that_attend_to_a_picture_keep_nothing_of_the_text():
    import transformers

    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "num_hidden_layers": 5}
    config = transformers.MllamaTextConfig(**sizes, cross_attention_layers=[3])
    assert numbers(config, "float32") == (512, 0)
    spec = ModelSpec.from_config(config)
    assert {(c.kind, c.count, c.why) for c in spec.caches} == {("full", 4, ""), ("none", 1, "cross_attention_layers")}


@pytest.mark.parametrize(("mode", "size"), [("per_loop", 1024), ("last_loop", 512)])
def test_blocks_that_are_run_twice_keep_two_caches(mode, size):
    import transformers

    sizes = {
        "num_hidden_layers": 4,
        "n_input_layers": 0,
        "n_output_layers": 0,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    layers = {"head_dim": 8, "layer_types": ["full_attention"] * 4, "recurrent_kv_cache_mode": mode}
    assert numbers(transformers.DoryConfig(**sizes, **layers), "float32") == (size, 0)


DECI = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "num_key_value_heads_per_layer": [8] + [4] * 31,
}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "deci", **DECI, **SIZED}, "model_type 'deci'"),
        ({"model_type": "llama", **DECI, **SIZED}, "num_key_value_heads_per_layer"),
        ({**DECI, **SIZED}, "names no model_type"),
        ({"model_type": "mamba", "num_hidden_layers": 2}, "'mamba'.*keeps a state"),
        ({"model_type": "deepseek_v4", "num_hidden_layers": 2}, "'deepseek_v4'.*layer_types"),
        ({"model_type": "bart", "num_hidden_layers": 2}, "encoder-decoder.*is_encoder_decoder"),
        ({"model_type": "bert", "num_hidden_layers": 2}, "encoder.*is_decoder"),
        ({"model_type": "llama", "num_hidden_layers": "two", **HEADS, **SIZED}, "layers|num_hidden_layers"),
        ({"model_type": "cohere2", "num_hidden_layers": 3, "layer_types": ["full_attention"] * 2}, "layer_types"),
        (
            {"model_type": "llama", "num_hidden_layers": 2, "layer_types": ["full_attention"], **HEADS, **SIZED},
            "1 layer_types for 2",
        ),
        (
            {"model_type": "llama", "num_hidden_layers": 1, "layer_types": ["minimax_m3_sparse"], **HEADS, **SIZED},
            "minimax_m3_sparse",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_its_name(config, says):
    before = copy.deepcopy(config)
    with pytest.raises(ValueError, match=says):
        ModelSpec.from_config(config)
    assert config == before


def test_a_dict_without_its_class_is_refused_not_guessed(monkeypatch):
    monkeypatch.setattr("kvlab.core.layers.importlib.util.find_spec", lambda _: None)
    gemma = {"model_type": "gemma2", "num_hidden_layers": 42, "head_dim": 256, "sliding_window": 4096, **HEADS, **SIZED}
    with pytest.raises(ValueError, match="leaves out layer_types.*gemma2.*not installed"):
        ModelSpec.from_config(gemma)
    assert ModelSpec.from_config(gemma | {"layer_types": ["sliding_attention", "full_attention"] * 21}).windowed == 21
    with pytest.raises(ValueError, match="what its class derives.*cohere2"):
        ModelSpec.from_config({"model_type": "cohere2", "num_hidden_layers": 2})


def test_mixed_and_the_fields_beside_it_must_agree():
    import transformers

    spec = ModelSpec.from_config(transformers.Gemma2Config(**ROPE, num_key_value_heads=2, head_dim=24, sliding_window=7))
    assert spec.caches == spec.mixed and spec.windowed == 1
    for change in ({"kv_heads": 4}, {"head_dim": 8}, {"window": None}):
        with pytest.raises(ValueError, match=next(iter(change))):
            replace(spec, **change)
    with pytest.raises(ValueError, match="windows of different sizes"):
        replace(spec, mixed=(*spec.mixed, LayerCache("window", 1, 2, 24, 24, window=9)))
    with pytest.raises(ValueError, match="keeps keys and values"):
        replace(spec, mixed=(LayerCache("none", 2),))


@pytest.mark.parametrize(
    ("field", "value", "names"),
    [
        ("kind", "half", "kind"),
        ("count", 0, "count"),
        ("heads", 0, "heads"),
        ("value_dim", -1, "value_dim"),
        ("window", 5, "window"),
    ],
)
def test_a_wrong_layer_is_named(field, value, names):
    right = {"kind": "full", "count": 1, "heads": 2, "key_dim": 4, "value_dim": 4}
    with pytest.raises(ValueError, match=names):
        LayerCache(**{**right, field: value})


def test_one_shape_for_all_layers_or_the_reason_why_not():
    import transformers

    uniform = ModelSpec("u", 2, 4, 2, 8, "float32", "rope", 64, 50)
    assert uniform.one_shape() == replace(uniform, window=7).one_shape() == (2, 2, 8)
    gemma = ModelSpec.from_config(transformers.Gemma2Config(**ROPE, num_key_value_heads=2, head_dim=24, sliding_window=7))
    assert gemma.one_shape() == (2, 2, 24)
    for family, says in (
        ("Jamba v0.1", "28 layers keep a state"),
        ("DeepSeek-V3", "keys of 512 and values of 64.*kv_lora_rank"),
        ("MiMo-V2-Flash", "keys of 192 and values of 128"),
    ):
        with pytest.raises(ValueError, match=f"{family}.*{says}"):
            MODELS[family].spec.one_shape()
    for config, says in (
        (transformers.MllamaConfig(), "nothing of the text.*cross_attention_layers"),
        (transformers.Gemma4TextConfig(), "K/V heads of 512"),
        (transformers.DoryConfig(), "36 layers keep 56 caches.*n_recurrent_loops"),
    ):
        with pytest.raises(ValueError, match=says):
            ModelSpec.from_config(config).one_shape()


BAD = [None, 0, -1, 1.5, "x", "", [], [1], ["x"], {}, {"a": 1}, True, object()]


def test_whatever_stands_in_a_dict_it_is_read_or_refused_with_a_sentence():
    """A thousand dicts with one or two keys gone wrong: a spec whose sizes can be worked out, or a ValueError, and nothing else."""
    r = random.Random(4)
    for _ in range(1000):
        config = dict(r.choice(list(MODELS.values())).config)
        config[r.choice(list(config))] = r.choice(BAD)
        if r.random() < 0.4:
            config[r.choice([*TELLTALES, "layer_types", "text_config", "per_layer_config", "kv_sharing_modes"])] = r.choice(BAD)
        try:
            spec = ModelSpec.from_config(config, "bfloat16")
        except ValueError as error:
            assert len(str(error)) > 15
        else:
            assert request_bytes(spec, 100) > 0 and layer_lines(spec)
