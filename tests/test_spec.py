"""ModelSpec says what a model's cache really holds, from the config object and from the dict in config.json alike."""

from types import SimpleNamespace

import pytest

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
    assert spec == ModelSpec(family, 2, 4, kv_heads, head_dim, "float32", positions, 64, 50, window)
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
    assert ModelSpec.from_config(config | {"use_sliding_window": True}).window == 32768


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
        ({"kv_lora_rank": 16}, "latent attention"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers"),
    ],
)
def test_what_is_missing_is_named(change, says):
    with pytest.raises(ValueError, match=says):
        ModelSpec.from_config(ROPE | {"model_type": "llama"} | change)


def test_a_config_whose_layers_differ_is_refused():
    import transformers

    with pytest.raises(ValueError, match="no single head_dim for all its layers"):
        ModelSpec.from_config(transformers.Gemma4TextConfig())


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
