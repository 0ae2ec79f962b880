"""Every causal language model of the installed Transformers, tiny: what the ledger says its cache takes, and what it takes.

For each class a config is made small, read by `ModelSpec.from_config`, and a model of it is run: on PyTorch's meta device, which
computes shapes and no numbers, or on the CPU where it cannot. The cache that the forward pass returns is weighed at four lengths.
Three numbers have to be equal: what a token adds while every window has room, what it adds beyond, and the whole. Or the config is
refused, and the refusal names a key.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import cycle, islice
from typing import Any
from unittest import mock

import torch

from kvlab import record
from kvlab.core import layers as readings
from kvlab.core import ledger
from kvlab.core.spec import ModelSpec
from kvlab.experiments.ledger import narrower
from kvlab.runtime.weights import quiet

SEED = 7
LAYERS, WINDOW = 4, 8
LENGTHS = (4, 6, 20, 23)  # two inside the window, two beyond it
DTYPE = "bfloat16"  # not float32: what a family keeps in float32 anyway has to show

# Sizes that make a config small, by the names configs give them. A key is set where the class has it and its default is a number.
SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim_model", "emb_dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("n_inner", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), 96),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "global_head_dim", "dim_head"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"), 128),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "bos_token_id"), 1),
    "pad_token_id": 0,
    "eos_token_id": 2,
    "rotary_dim": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "index_head_dim": 5,
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size"), WINDOW),
}


def _mamba2(prefix: str = "mamba_") -> dict[str, int]:
    return {f"{prefix}n_heads": 8, f"{prefix}d_head": 8, f"{prefix}d_state": 4, f"{prefix}n_groups": 1}


def _types(*names: str) -> dict[str, Any]:
    return {"layer_types": list(islice(cycle(names), LAYERS))}


_DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 6}
_KDA = {"linear_num_heads": 3, "linear_head_dim": 10}
_FULL, _NEAR, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_ALL_HEADS = {"num_key_value_heads": 4}  # latent attention is computed with as many K/V heads as query heads
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_ASSISTANT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": LAYERS}
_DECODER = {"is_decoder": True}

# What a class demands beside `SIZES`, or what makes every kind of layer it has appear among four.
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3"), _ALL_HEADS),
    **dict.fromkeys(("sarvam_mla", "youtu"), _ALL_HEADS),
    "deepseek_v2": {**_ALL_HEADS, "num_experts_per_tok": 2},
    "longcat_flash": {**_ALL_HEADS, "head_dim": 4},
    "hy_v4": {"indexer_types": ["full", "shared", "full", "shared"]},
    "bamba": {**_mamba2(), "attn_layer_indices": [1]},
    "granitemoehybrid": {**_mamba2(), **_types("mamba", "attention")},
    "falcon_h1": {**_mamba2(), "mamba_d_ssm": 64},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 4,
        "n_groups": 1,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "num_mem_blocks": 1,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "mamba_d_state": 4,
        "num_key_value_heads": 2,
    },
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _DELTA),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), {**_ALL_HEADS, **_types(_LINEAR, _FULL), **_KDA}),
    "olmo_hybrid": {**_DELTA, **_types(_LINEAR, _FULL)},
    "lara_mini": {**_DELTA, **_types(_LINEAR, _NEAR, _FULL)},
    "lfm2": _types("conv", _FULL),
    "lfm2_moe": {**_types("conv", _FULL), "num_dense_layers": 1},
    "lfm3": _types("conv", _FULL, _NEAR),
    "minimax": _types(_FULL, _LINEAR),
    **dict.fromkeys(("gemma2", "gemma3_text", "kolibri1", "vaultgemma", "mellum"), _types(_NEAR, _FULL)),
    **dict.fromkeys(("laguna", "granite_swa", "granitemoe_swa", "olmo3", "cwm"), _types(_NEAR, _FULL)),
    "gemma3n_text": {**_types(_NEAR, _FULL), "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * LAYERS},
    "mimo_v2_flash": _types(_FULL, _NEAR),
    "llama4_text": _types("chunked_attention", _FULL),
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1, **_types(_NEAR, _FULL)},
    "helium": {"head_dim": 8},
    "hrm_text": {"num_hidden_layers": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mllama_text_model": {"cross_attention_layers": [2]},
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "nemotron"), {"num_key_value_heads": 2, "head_dim": 8}),
    "modernbert-decoder": {"local_attention": 2 * WINDOW, "global_attn_every_n_layers": 3},
    "ministral": {**_types(_NEAR, _FULL), "head_dim": 8},
    "zaya": {"num_experts_per_tok": 1},
    "dots1": {**_types(_NEAR, _FULL), "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "cohere_compass_text": {**_types(_NEAR, _FULL), "rope_parameters": {_NEAR: dict(_ROPE), _FULL: dict(_ROPE)}},
    "gemma4_assistant": {"text_config": _ASSISTANT},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "dots3_note_text": {"num_key_value_heads": 4},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": WINDOW},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": WINDOW},
}

# The same class with another setting, a line of its own.
MORE: dict[str, dict[str, dict[str, Any]]] = {
    **dict.fromkeys(sorted(readings.ENCODERS), {"is_decoder": _DECODER}),
    "bloom": {"seq_length": {"seq_length": 128}},
    "falcon": {"multi-head": {"multi_query": False}},
    "gpt_bigcode": {"multi-head": {"multi_query": False}},
    "dory": {"last_loop": {"recurrent_kv_cache_mode": "last_loop"}},
    "qwen2": {"window off": {"use_sliding_window": False}},
    "phi3": {"window": {"sliding_window": WINDOW}},
}


# ---- a small config -----------------------------------------------------------------------------------------------------


def tiny(config_class: type, changes: Mapping[str, Any] | None = None) -> Any:
    """A config of the class with `SIZES`, what `CHANGES` has for it, and `changes`; its parts likewise.

    Raises:
        Exception: whatever the class raises over sizes that it does not bear.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    known = {f.name for f in fields(config_class)} if is_dataclass(config_class) else set()
    default = _default(config_class)
    wanted: dict[str, Any] = {}
    for key, value in SIZES.items():
        there = getattr(default, key, None) if key in known else None
        if (isinstance(there, int) and not isinstance(there, bool)) or (key in known and key == "num_key_value_heads"):
            wanted[key] = value
    changes = {**CHANGES.get(config_class.model_type, {}), **(changes or {})}
    part = (getattr(config_class, "sub_configs", None) or {}).get("text_config")
    if part is AutoConfig:
        usual = getattr(config_class, "sub_configs_defaults", {}).get("text_config")
        part = CONFIG_MAPPING[usual.model_type] if usual else None
    if part is not None:
        wanted["text_config"] = tiny(part, changes.pop("text_config", None)).to_dict()
    return config_class(**{**wanted, **changes})


class _Plain:
    """Reads the defaults a dataclass's fields have, where the class has no valid default of its own."""

    def __init__(self, config_class: type) -> None:
        self.__dict__.update({f.name: f.default for f in fields(config_class)})


def _default(config_class: type) -> Any:
    return _Plain(config_class) if is_dataclass(config_class) else config_class()


# ---- weighing a cache ---------------------------------------------------------------------------------------------------


def tensors(kept: Any, depth: int = 0, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Every tensor of numbers a cache object holds, wherever it stands. Whole numbers (positions, a window's size) are no state."""
    seen = set() if seen is None else seen
    if isinstance(kept, torch.Tensor):
        if kept.is_floating_point() and id(kept) not in seen:
            seen.add(id(kept))
            yield kept
        return
    if id(kept) in seen or depth > 6:
        return
    seen.add(id(kept))
    if isinstance(kept, Mapping):
        parts = list(kept.values())
    elif isinstance(kept, list | tuple):
        parts = list(kept)
    elif type(kept).__module__.startswith("transformers.") and hasattr(kept, "__dict__") and not hasattr(kept, "model_type"):
        parts = list(vars(kept).values())
    else:
        return
    for part in parts:
        yield from tensors(part, depth + 1, seen)


def weigh(model: Any, tokens: int, device: str) -> int:
    """Bytes of the cache that a forward pass over `tokens` tokens returns. Raises ValueError where it returns none."""
    with torch.device(device), torch.inference_mode():
        out = model(input_ids=torch.full((1, tokens), 5), use_cache=True)
    for key in ("cache", "past_key_values"):
        if getattr(out, key, None) is not None:
            return sum(tensor.nbytes for tensor in tensors(getattr(out, key)))
    raise ValueError("the forward pass returns no cache")


def build(model_class: type, config: Any, device: str) -> Any:
    """The model with random weights, in `DTYPE`, on a device; a language model is made of its part of a larger config."""
    if type(config) is not model_class.config_class and getattr(config, "text_config", None) is not None:
        config = config.get_text_config(decoder=True)
    torch.manual_seed(SEED)
    with torch.device(device):
        return model_class._from_config(config, dtype=getattr(torch, DTYPE)).eval()


def _causal(config_class: type) -> type:
    import transformers

    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config_class]


def measured(model_class: type, config: Any) -> tuple[list[int], str]:
    """The cache's bytes at each of `LENGTHS`, and the device: meta, else the CPU.

    Raises:
        Exception: whatever the model raises on the CPU.
    """
    with contextlib.suppress(Exception):
        model = build(model_class, config, "meta")
        return [weigh(model, tokens, "meta") for tokens in LENGTHS], "meta"
    try:
        model = build(model_class, config, "cpu")
    except ImportError:  # of a part for pictures or sound: its language model alone
        config = config.get_text_config(decoder=True)
        return measured(_causal(type(config)), config)
    if hasattr(model, "set_default_language"):
        model.set_default_language("en_XX")
    return [weigh(model, tokens, "cpu") for tokens in LENGTHS], "cpu"


# ---- one line of the sweep ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Bytes that a token adds inside the windows and beyond them, and of the whole cache at the last of `LENGTHS`."""

    token: int
    grows: int
    whole: int


def predicted(spec: ModelSpec) -> Sizes:
    """What the ledger says of Transformers' cache."""
    return Sizes(ledger.token_bytes(spec), ledger.growth_bytes(spec), ledger.request_bytes(narrower(spec), LENGTHS[-1]))


def found(weights: list[int]) -> Sizes:
    """The same of a measured cache. Sizes that are no whole number a token would be wrong anyway: they are rounded down."""
    a, b, c, d = weights
    return Sizes((b - a) // (LENGTHS[1] - LENGTHS[0]), (d - c) // (LENGTHS[3] - LENGTHS[2]), d)


def kinds(spec: ModelSpec) -> str:
    """The layers in words: "1 full, 2 window, 1 none"."""
    return ", ".join(f"{cache.count} {cache.kind}" for cache in spec.caches)


def _reading(config: Any) -> ModelSpec | str:
    try:
        return ModelSpec.from_config(config, DTYPE, "tiny")
    except ValueError as error:
        return str(error)


def _against(read: ModelSpec | str, spec: ModelSpec) -> str:
    return "refused" if isinstance(read, str) else "same" if read == spec else "differs"


def line(model_class: type, config: Any, label: str = "") -> dict[str, Any]:
    """One class held against the ledger.

    `outcome` is "equal", "refused", "differs" (a number, or the reading of the config's dict, with Transformers there or without) or
    "not run" (the config is read, and no model of it could be run to prove it).
    """
    row: dict[str, Any] = {"type": config.model_type, "class": model_class.__name__, "setting": label}
    spec = _reading(config)
    if isinstance(spec, str):
        return row | {"outcome": "refused", "why": spec}
    as_dict = config.to_dict()
    row["dict"] = _against(_reading(as_dict), spec)
    with mock.patch.object(readings, "_through_class", return_value=None):
        row["alone"] = _against(_reading(as_dict), spec)
    said = predicted(spec)
    row |= {"layers": kinds(spec), "predicted": vars(said), "state": ledger.state_bytes(spec)}
    try:
        weights, row["device"] = measured(model_class, config)
    except Exception as error:  # whatever a class raises over a config of this size
        return row | {"outcome": "not run", "why": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    row["measured"] = vars(found(weights))
    right = row["measured"] == row["predicted"] and "differs" not in (row["dict"], row["alone"])
    return row | {"outcome": "equal" if right else "differs", "why": ""}


def classes() -> list[tuple[type, type]]:
    """Every config class that Transformers has a causal language model for, with the model's class, each once."""
    import transformers

    return [
        (config_class, _causal(config_class)) for config_class in dict.fromkeys(transformers.MODEL_FOR_CAUSAL_LM_MAPPING.keys())
    ]


def sweep(only: tuple[str, ...] = (), progress: bool = False) -> list[dict[str, Any]]:
    """A line for every class, or for those of the model types `only`."""
    from tqdm.auto import tqdm

    rows = []
    with quiet():
        chosen = [pair for pair in classes() if not only or pair[0].model_type in only]
        for config_class, model_class in tqdm(chosen, disable=not progress):
            for label, changes in {"": {}, **MORE.get(config_class.model_type, {})}.items():
                try:
                    config = tiny(config_class, changes)
                except (
                    Exception
                ):  # a class that does not bear these sizes: at its own it can be read and refused, and not be run
                    config, label = config_class(), "its own sizes"
                rows.append(line(model_class, config, label))
    return rows


def findings(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The detector: every line that is neither equal nor refused."""
    return [row for row in rows if row["outcome"] not in ("equal", "refused")]


# ------------------------------------------------------------------------------------------------------------------------


def run(
    name: str | None = None, *, device: str | None = None, quick: bool = False, checkpoint=None, progress: bool = True
) -> record.Run:
    """The whole sweep. Under a minute, on the meta device and the CPU: `name`, `device`, `quick` and `checkpoint` change nothing."""
    began = time.perf_counter()
    settings = {"layers": LAYERS, "window": WINDOW, "lengths": list(LENGTHS)}
    manifest = record.manifest("shapes", _Tiny(), dtypes=[DTYPE], seed=SEED, settings=settings)
    rows = sweep(progress=progress)
    return record.Run(replace(manifest, seconds=round(time.perf_counter() - began, 1)), {"rows": rows})


class _Tiny:
    """What a manifest names in place of one loaded model: as many tiny ones as there are classes."""

    name, sha256, device = "random weights", "tiny", "cpu"
