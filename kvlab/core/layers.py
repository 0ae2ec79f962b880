"""What each layer of a model keeps of the text: read out of a Hugging Face config, or refused by the key's name.

Most models keep a key and a value per token and K/V head in every layer. Others keep them for a window of tokens, a latent in
their place, a state whose size does not depend on the text, or nothing. Which, a config says under many names, and half of
it is only derived by the config's class. So a reading is trusted for the families in `FAMILIES` alone: for each of them a model
of Transformers has been run and its cache held against the reading (`kvlab.experiments.shapes`, the run `shapes`). What is no
family of these, or carries a key that its family's rule does not read, is refused by name.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

KINDS = ("full", "window", "state", "none")


@dataclass(frozen=True)
class LayerCache:
    """What `count` layers keep, each the same. A layer with both keys and a state is counted in two of these.

    Attributes:
        kind: "full", a key and a value of every token; "window", of the last `window` tokens; "state", numbers that stand for all
            tokens read and do not grow; "none", nothing of the text.
        count: caches of this kind; a layer that is run several times with a cache each counts as often.
        heads: K/V heads of a layer; 1 for a latent that all heads share.
        key_dim, value_dim: numbers of one head's key and of its value, for a token.
        shared: further numbers of a token that belong to no head: an index key.
        window: tokens a "window" layer sees.
        numbers: of the state, kept in the model's dtype.
        numbers32: of the state, kept in float32 whatever the dtype.
        why: the config key that makes these layers differ from keys and values of one shape; "" where they do not.
    """

    kind: str
    count: int
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    shared: int = 0
    window: int | None = None
    numbers: int = 0
    numbers32: int = 0
    why: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {self.kind!r}")
        for name in ("count", "heads", "key_dim", "value_dim", "shared", "numbers", "numbers32"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < (name == "count"):
                raise ValueError(f"{name} must be a whole number of at least {int(name == 'count')}, not {value!r}")
        if self.keeps_tokens != bool(self.heads and self.key_dim):
            raise ValueError(f"heads and key_dim must be above 0 for a {self.kind!r} cache of tokens, and 0 for another")
        if (self.window is not None) != (self.kind == "window"):
            raise ValueError(f"window is {self.window!r} for a cache of kind {self.kind!r}: it belongs to kind 'window' alone")
        if self.window is not None and (not isinstance(self.window, int) or isinstance(self.window, bool) or self.window < 1):
            raise ValueError(f"window must be a whole number of at least 1, not {self.window!r}")

    @property
    def keeps_tokens(self) -> bool:
        """Whether it holds something of each token, all of them or a window's."""
        return self.kind in ("full", "window")


# ---- the families ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """How one family's configs are read.

    Attributes:
        shape: `(read, kind)` → (heads, key_dim, value_dim, shared) of one layer whose Transformers layer type is `kind`.
        state: `read` → (numbers, numbers32) of a layer's state; None: the family has no such layers.
        reads: keys of `TELLTALES` that the rule takes into account.
        needs: keys without which a dict does not say its shape: the class fills in what no rule here knows. None: a dict of this
            family is always read through its class.
    """

    shape: Callable[..., tuple[int, int, int, int]]
    state: Callable[..., tuple[int, int]] | None = None
    reads: frozenset[str] = frozenset()
    needs: tuple[str, ...] | None = None


def _plain(read, kind: str) -> tuple[int, int, int, int]:
    dim = head_dim(read)
    return kv_heads(read), dim, dim, 0


def _latent(read, kind: str) -> tuple[int, int, int, int]:
    """Multi-head latent attention: one latent for all heads, and a rotated key part. DeepSeek-V2, arXiv 2405.04434, 2.1."""
    index = read("index_head_dim") if kind == "indexed_attention" and read("indexer_type") != "shared" else 0
    return 1, need(read, "rank of the latent", "kv_lora_rank"), need(read, "rotated key part", "qk_rope_head_dim"), index or 0


def _narrow_values(read, kind: str) -> tuple[int, int, int, int]:
    """MiMo-V2: values narrower than keys; a windowed layer has twice the K/V heads (its modeling file says so, no key does)."""
    return kv_heads(read) * (2 if kind == "sliding_attention" else 1), head_dim(read), need(read, "v_head_dim", "v_head_dim"), 0


def _mamba(read) -> tuple[int, int]:
    """Mamba (arXiv 2312.00752): the last inputs of a convolution, and a state per channel, in float32."""
    inner = _key(read, "mamba_expand") * size(read, "hidden size")
    return inner * _key(read, "mamba_d_conv"), inner * _key(read, "mamba_d_state")


def _mamba2(heads: str, width: str, groups: str, state: str, conv: str) -> Callable:
    """Mamba-2 (arXiv 2405.21060), by the names its keys have in a family."""

    def numbers(read) -> tuple[int, int]:
        inner = _key(read, heads) * _key(read, width)
        return (inner + 2 * _key(read, groups) * _key(read, state)) * _key(read, conv), inner * _key(read, state)

    return numbers


def _delta(read) -> tuple[int, int]:
    """Gated DeltaNet (arXiv 2412.06464): a convolution over queries, keys and values, and a matrix per head, in float32."""
    key, value = _key(read, "linear_key_head_dim"), _key(read, "linear_value_head_dim")
    keys, values = _key(read, "linear_num_key_heads"), _key(read, "linear_num_value_heads")
    return (2 * keys * key + values * value) * _key(read, "linear_conv_kernel_dim"), values * key * value


def _kda(read) -> tuple[int, int]:
    """Kimi Delta Attention (arXiv 2510.26692): convolutions over queries, keys and values, and a matrix per head, in float32."""
    heads, dim = _key(read, "linear_num_heads"), _key(read, "linear_head_dim")
    return 3 * heads * dim * _key(read, "linear_conv_kernel_dim"), heads * dim * dim


def _conv(read) -> tuple[int, int]:
    return size(read, "hidden size") * _key(read, "conv_L_cache"), 0


def _lightning(read) -> tuple[int, int]:
    """MiniMax's lightning attention (arXiv 2501.08313): a matrix per query head."""
    return size(read, "number of heads") * head_dim(read) ** 2, 0


def _key(read, name: str) -> int:
    return need(read, name, name)


_KV = ("num_key_value_heads",)
_BAMBA = _mamba2("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_MAMBA_KEYS = frozenset({"mamba_d_state", "attn_layer_period", "attn_layer_indices", "layers_block_type"})
_DELTA_KEYS = frozenset({"linear_num_value_heads", "full_attention_interval"})
_LATENT_KEYS = frozenset({"kv_lora_rank", "v_head_dim", "index_head_dim"})


def _families() -> dict[str, Family]:
    """Families by `model_type`. With `needs`, a dict that has those keys is read as it is, with no Transformers there."""
    all_of: dict[str, Family] = {}

    def add(names: str, *rule, **more) -> None:
        all_of.update(dict.fromkeys(names.split(), Family(*rule, **more)))

    add("gpt2 gpt_neox opt phi", _plain, needs=())
    add("llama", _plain, needs=())
    add("gpt_bigcode", _plain, needs=("multi_query",))
    add("falcon", _plain, needs=("multi_query",))
    add("mistral", _plain, needs=("num_key_value_heads", "sliding_window"))
    add("phi3 starcoder2", _plain, needs=("num_key_value_heads", "sliding_window"))
    add("qwen2", _plain, needs=("num_key_value_heads", "use_sliding_window"))
    add("qwen3", _plain, needs=("num_key_value_heads", "head_dim"))
    add("gemma", _plain, needs=("num_key_value_heads", "head_dim"))
    add("gemma2 gemma3_text gpt_oss", _plain, needs=(*_KV, "head_dim", "layer_types", "sliding_window"))
    add(
        """afmoe apertus apertus1p5_text arcee aria_text beam bert bert-generation big_bird biogpt bitnet bloom camembert codegen
        cohere cohere2 cohere2_moe cohere_compass_text ctrl cwm data2vec-text diffllama doge dots1 electra emu3_text_model ernie
        ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flex_olmo flint git glm glm4 glm4_moe gpt_neo gpt_neox_japanese gptj granite
        granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3
        iquestcoder jais2 jetmoe kolibri1 laguna llama4_text megatron-bert mellum minimax_m2 ministral ministral3 mixtral
        modernbert-decoder moshi mpt nanochat nemotron olmo olmo2 olmo3 olmoe persimmon phi4_multimodal phimoe qwen2_moe qwen3_moe
        rembert roberta roberta-prelayernorm roc_bert roformer sarvam_moe seed_oss smollm3 solar_open stablelm trocr vaultgemma
        xglm xlm-roberta xlm-roberta-xl xmod""",
        _plain,
    )
    add("minimax_m3_vl_text", _plain, reads=frozenset({"index_head_dim"}))
    add("mllama_text_model", _plain, reads=frozenset({"cross_attention_layers"}))
    add("gemma3n_text gemma4_text gemma4_unified_text", _plain, reads=frozenset({"num_kv_shared_layers"}))
    add("dory", _plain, reads=frozenset({"n_recurrent_loops"}))
    add("hrm_text", _plain, reads=frozenset({"H_cycles"}))
    add(
        "mimo_v2_flash",
        _narrow_values,
        reads=frozenset({"v_head_dim"}),
        needs=(*_KV, "head_dim", "v_head_dim", "layer_types", "sliding_window"),
    )
    add("deepseek_v3", _latent, reads=_LATENT_KEYS, needs=("kv_lora_rank", "qk_rope_head_dim"))
    add(
        "axk1 axk2 deepseek_v2 deepseek_v32 glm4_moe_lite glm_moe_dsa hy_v4 longcat_flash minicpm3 sarvam_mla youtu",
        _latent,
        reads=_LATENT_KEYS,
    )
    period = ("attn_layer_period", "attn_layer_offset")
    add("jamba", _plain, _mamba, reads=_MAMBA_KEYS, needs=(*_KV, *period, "mamba_expand", "mamba_d_conv", "mamba_d_state"))
    add("bamba granitemoehybrid falcon_h1", _plain, _BAMBA, reads=_MAMBA_KEYS)
    add(
        "nemotron_h",
        _plain,
        _mamba2("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
        reads=frozenset({"ssm_state_size", "layers_block_type", "hybrid_override_pattern"}),
    )
    add(
        "zamba2",
        _plain,
        _mamba2("n_mamba_heads", "mamba_headdim", "mamba_ngroups", "mamba_d_state", "mamba_d_conv"),
        reads=_MAMBA_KEYS,
    )
    delta = ("linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim")
    add(
        "qwen3_next",
        _plain,
        _delta,
        reads=_DELTA_KEYS,
        needs=(*_KV, "head_dim", "layer_types", *delta, "linear_conv_kernel_dim"),
    )
    add("qwen3_5_text qwen3_5_moe_text olmo_hybrid lara_mini", _plain, _delta, reads=_DELTA_KEYS)
    add("kimi_linear bailing_hybrid", _latent, _kda, reads=_LATENT_KEYS)
    add("lfm2 lfm2_moe lfm3", _plain, _conv, reads=frozenset({"conv_L_cache"}))
    add("minimax", _plain, _lightning)
    return all_of


FAMILIES: dict[str, Family] = _families()

# Keys that mean a cache other than keys and values of one shape. A family whose rule does not read one is refused if it is set.
TELLTALES = (
    *("attn_layer_indices", "attn_layer_period", "block_configs", "conv_L_cache", "cross_attention_layers"),
    *("full_attention_interval", "H_cycles", "hybrid_override_pattern", "index_head_dim"),
    *("kv_lora_rank", "layers_block_type", "linear_num_value_heads", "mamba_d_state", "n_recurrent_loops"),
    *("num_key_value_heads_per_layer", "num_kv_heads_per_layer", "num_kv_shared_layers", "ssm_state_size", "v_head_dim"),
    *("compress_ratios", "loop_num_passes", "n_loops", "num_loops", "prompt_length", "total_ut_steps", "use_cla", "use_mla"),
)
_LATENT_TELLTALE = "kv_lora_rank"

# Transformers' names of layers: what a layer of that name keeps. Any other name is refused.
_LAYER_KINDS: dict[str, tuple[str, ...]] = {
    "full_attention": ("full",),
    "attention": ("full",),
    "global": ("full",),
    "local": ("full",),
    "indexed_attention": ("full",),
    "sliding_attention": ("window",),
    "chunked_attention": ("window",),
    "linear_attention": ("state",),
    "mamba": ("state",),
    "conv": ("state",),
    "hybrid": ("full", "state"),
    "moe": ("none",),
    "mlp": ("none",),
    "cross_attention": ("none",),
    "shared": ("none",),
}
_LAYER_LISTS = ("layer_types", "layers_block_type", "hybrid_override_pattern")  # a list of layers says their number too
_SIZES = (
    ("number of layers", "num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"),
    ("number of heads", "num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads"),
    ("hidden size", "hidden_size", "n_embd", "d_model"),
    ("longest context", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "model_max_length"),
    ("vocabulary size", "vocab_size"),
)


# ---- reading keys ------------------------------------------------------------------------------------------------------


def reader(config: Any) -> Callable:
    """A function that returns the first of some keys that config has with a value other than None.

    Raises:
        ValueError: config is neither an object nor a dict; or, later, where its layers differ in a key that is asked for.
    """
    if isinstance(config, Mapping):
        get = config.get
    elif isinstance(config, str | int | float | list | tuple | None):
        raise ValueError(f"config must be a config object or the dict in config.json, not {config!r}")
    else:

        def get(key):
            try:
                return getattr(config, key, None)
            except Exception as error:  # Transformers' own, where layers differ
                raise ValueError(f"config gives no single {key} for all its layers") from error

    def read(*keys):
        return next((value for key in keys if (value := get(key)) is not None), None)

    return read


def need(read, what: str, *keys: str) -> int:
    """The first of the keys that is set. Raises ValueError, naming them, where none is, or it is no whole number above 0."""
    value = read(*keys)
    if value is None:
        raise ValueError(f"config does not say its {what}: none of {', '.join(keys)} is set")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config's {what} ({' or '.join(keys)}) must be a whole number of at least 1, not {value!r}")
    return value


def size(read, what: str) -> int:
    """One of the sizes every config has, under any of its names. Raises ValueError, naming them, where it is not set."""
    return next(need(read, *row) for row in _SIZES if row[0] == what)


def kv_heads(read) -> int:
    """K/V heads of a layer."""
    # Falcon and GPT-BigCode: one flag, and num_kv_heads only counts for Falcon's newer decoder.
    if read("multi_query") and not read("new_decoder_architecture"):
        return 1
    keys = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
    return size(read, "number of heads") if read(*keys) is None else need(read, "number of K/V heads", *keys)


def head_dim(read) -> int:
    """Numbers of one head's key. Raises ValueError where the config has neither it nor what it is computed from."""
    if read("head_dim", "kv_channels") is not None:
        return need(read, "numbers in a head", "head_dim", "kv_channels")
    heads, hidden = size(read, "number of heads"), size(read, "hidden size")
    if hidden % heads:
        raise ValueError(f"config has no head_dim, and hidden size {hidden} is no multiple of {heads} heads")
    return hidden // heads


# ---- dicts, and the class that completes them ---------------------------------------------------------------------------


def settle(config: Any) -> Any:
    """A config that says all that is asked of it: the object as it is; a dict as it is where it is enough, else its class's reading.

    Half of what a config.json means stands in the class of its `model_type`: a width it leaves out, a pattern of windows. So a
    dict is read through Transformers' `AutoConfig`, which is imported here and nowhere else in the core. Where Transformers is not
    installed, as in a browser tab, a dict of a family that core knows is read if it has every key the family's rule needs.

    Raises:
        ValueError: the dict's `model_type` is missing or unknown; a key it needs is missing; its class refuses it.
    """
    if not isinstance(config, Mapping):
        reader(config)
        return config
    inner, family = config.get("text_config"), config.get("model_type")
    if isinstance(inner, Mapping):
        if not all(isinstance(part.get("model_type"), str | None) for part in (config, inner)):
            raise ValueError("config's model_type must be a name, and its text_config's too")
        if _lacks(inner) and (whole := _through_class(config)) is not None:
            return whole
        return {**config, "text_config": settle(inner)}
    if inner is not None:
        return config
    if not any(key in config for key in _LAYER_LISTS):
        need(reader(config), *_SIZES[0])
    for row in _SIZES:  # a size that is set to nothing is no default
        if any(key in config for key in row[1:]):
            need(reader(config), *row)
    if not isinstance(family, str | None):
        raise ValueError(f"config's model_type must be a name, not {family!r}")
    lacks = _lacks(config)
    if not lacks:
        return config
    whole = _through_class(config)
    if whole is not None:
        return whole
    if family is None:
        raise ValueError("config names no model_type, and without one its layers' caches are a guess: add it")
    if family not in FAMILIES:
        raise ValueError(unknown(family))
    raise ValueError(
        f"config leaves out {', '.join(lacks)}: its class fills that in (model_type {family!r}), and the Transformers that has "
        "this class is not installed: install it, or write the keys into the dict"
    )


_KNOWN_OTHERWISE: dict[str, str] = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), "it keeps a state and no keys and values"),
    **dict.fromkeys(("openai-gpt", "xlm"), "Transformers keeps no cache for it"),
    "reformer": "it keeps hash buckets and hidden states in place of keys and values",
    "recurrent_gemma": "Transformers keeps its keys and values inside the model, not in a cache",
    "cpmant": "it caches prompt_length tokens of its own before the text",
    "deepseek_v4": "its layers keep several tokens compressed into one (layer_types)",
    "xlnet": "it keeps hidden states (mem_len) in place of keys and values",
}


def unknown(family: str) -> str:
    """Why a family that no rule covers is refused, and what to do."""
    why = _KNOWN_OTHERWISE.get(family)
    if why:
        return f"config's model_type is {family!r}: {why}"
    return f"config's model_type {family!r} is none whose cache kvlab knows: give ModelSpec(..., mixed=...) by hand what its layers keep"


def _lacks(config: Mapping) -> tuple[str, ...]:
    """What a dict would have to say for its shape to be read without its class; () if nothing."""
    family = FAMILIES.get(config.get("model_type") or "")
    if family is None or family.needs is None:
        return ("model_type" if family is None else "what its class derives",)
    wanted = [key for key in family.needs if key not in config]
    if config.get("use_sliding_window"):
        wanted += [key for key in ("layer_types", "sliding_window") if key not in config]
    if config.get("sliding_window") and "use_sliding_window" not in config and config["model_type"].startswith("qwen"):
        wanted.append("use_sliding_window")
    if config.get("per_layer_config"):
        wanted.append("per_layer_config")
    wanted += [row[1] for row in _SIZES if row[0] != "hidden size" and not any(key in config for key in row[1:])]
    has_width = "head_dim" in config or "kv_lora_rank" in config
    if not has_width and not any(key in config for key in ("hidden_size", "n_embd", "d_model")):
        wanted.append("hidden_size")
    return tuple(wanted)


def _through_class(config: Mapping) -> Any:
    """The object of the dict's config class, or None: Transformers is not there, or has no such class.

    Raises:
        ValueError: the class refuses the dict.
    """
    if importlib.util.find_spec("transformers") is None:
        return None
    library, family = importlib.import_module("transformers"), config.get("model_type")
    if not family or family not in library.CONFIG_MAPPING:
        return None
    try:
        return library.AutoConfig.for_model(family, **{key: value for key, value in config.items() if key != "model_type"})
    except Exception as error:  # whatever a class may raise over keys that do not fit together
        first = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"Transformers' config of model_type {family!r} refuses this config: {first}") from error


# ---- the layers --------------------------------------------------------------------------------------------------------


def layer_caches(config: Any) -> tuple[LayerCache, ...]:
    """What the layers of a settled config keep, like layers together, in the order they first come in.

    Raises:
        ValueError: the family is unknown, or a key or a layer's type is none that its rule reads; the message names it.
    """
    read = reader(config)
    name = read("model_type")
    if read("is_encoder_decoder"):
        raise ValueError(f"config is an encoder-decoder ({name}, is_encoder_decoder is set); kvlab needs a decoder-only model")
    family = FAMILIES.get(name or "")
    if family is None:
        raise ValueError(unknown(name) if name else "config names no model_type: its layers' caches would be a guess")
    _refuse(read, name, family)
    found: Counter[LayerCache] = Counter()
    why: dict[LayerCache, str] = {}
    for at, (kind, said) in _repeated(read, _kinds(read, name, family)):
        own = _layer_reader(config, read, at)
        for cache in _caches_of(own, kind, said, family):
            found[cache] += 1
            why[cache] = why.get(cache) or cache.why
    return tuple(replace(cache, count=count, why=why[cache]) for cache, count in found.items())


def _refuse(read, name: str, family: Family) -> None:
    """Say which key makes this no decoder whose cache the family's rule describes."""
    if read("is_decoder") is False and name in ENCODERS:
        raise ValueError(f"config is an encoder ({name}, is_decoder is not set): it keeps no cache; a decoder sets is_decoder")
    for key in TELLTALES:
        if key not in family.reads and read(key) not in (None, 0, [], ()):
            latent = "latent attention, " if key == _LATENT_TELLTALE else ""
            raise ValueError(
                f"config has {latent}{key}, which the family {name!r} is not known to use: its cache would be a guess"
            )


# Families of encoders that are decoders where `is_decoder` is set
_BERTS = """bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta roberta-prelayernorm
roc_bert roformer xlm-roberta xlm-roberta-xl xmod"""
ENCODERS = frozenset(_BERTS.split())


def _kinds(read, name: str, family: Family) -> list[tuple[str, str]]:
    """Each layer's type in Transformers' words, and the config key that says so."""
    layers = size(read, "number of layers")
    crossing = set(_listed(read, "cross_attention_layers") or ()) if "cross_attention_layers" in family.reads else set()
    sharing = _listed(read, "kv_sharing_modes", length=layers)
    types = _listed(read, "layer_types", "layers_block_type", length=layers)
    if types is None and read("attn_layer_period"):  # Jamba: one layer of attention in so many
        period, offset = need(read, "period of attention", "attn_layer_period"), read("attn_layer_offset")
        types = ["full_attention" if at % period == offset else "linear_attention" for at in range(layers)]
    if types is None:
        if read("num_kv_shared_layers"):
            raise ValueError("config sets num_kv_shared_layers and not layer_types: which layers share is not said")
        types = [_only_kind(read)] * layers
    known = {kind for kind, keeps in _LAYER_KINDS.items() if "state" not in keeps or family.state}
    other = sorted({str(kind) for kind in types} - known)
    if other:
        raise ValueError(f"config has layer_types whose cache kvlab does not know in {name!r}: {', '.join(other)}")
    out = [(kind, "layer_types") for kind in types]
    for at in range(layers):
        if at in crossing:
            out[at] = ("cross_attention", "cross_attention_layers")
        elif sharing is not None and sharing[at] == "reuse":
            out[at] = ("shared", "num_kv_shared_layers")
    return out


def _listed(read, *keys: str, length: int | None = None) -> list | None:
    """A list that one of the keys holds, or None. Raises ValueError, naming them, for what is no list, or not one entry a layer."""
    value = read(*keys)
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise ValueError(f"config's {' or '.join(keys)} must be a list, not {value!r}")
    if length is not None and len(value) != length:
        raise ValueError(f"config has {len(value)} {keys[0]} for {length} layers")
    return list(value)


def _only_kind(read) -> str:
    """The type of every layer of a config without `layer_types`, as Transformers' caches decide it."""
    if read("use_sliding_window") is not False and read("sliding_window"):
        return "sliding_attention"
    return "chunked_attention" if read("attention_chunk_size") else "full_attention"


def _repeated(read, kinds: list[tuple[str, str]]) -> list[tuple[int, tuple[str, str]]]:
    """The layers with their index, those that are run several times with a cache of their own each time as often (Dory)."""
    out = list(enumerate(kinds))
    loops = read("n_recurrent_loops") or 1
    if loops > 1 and read("recurrent_kv_cache_mode") != "last_loop":
        start = read("n_input_layers")
        looped = out[start : start + read("n_recurrent_layers")]
        out += [(at, (kind, "n_recurrent_loops")) for at, (kind, _) in looped] * (loops - 1)
    return out


def _layer_reader(config: Any, read, at: int):
    """Reads the keys of one layer: a config whose layers differ has a config for each."""
    own = read
    if getattr(config, "is_heterogeneous", False):
        own = reader(config.per_layer_config[at])
    indexers = _listed(read, "indexer_types", length=size(read, "number of layers"))
    if indexers is None:
        return own
    return lambda *keys: indexers[at] if keys == ("indexer_type",) else own(*keys)


def _caches_of(read, kind: str, said: str, family: Family) -> list[LayerCache]:
    """What one layer keeps."""
    out = []
    for keeps in _LAYER_KINDS[kind]:
        if keeps == "none":
            out.append(LayerCache("none", 1, why=said))
        elif keeps == "state":
            numbers, numbers32 = family.state(read)
            out.append(LayerCache("state", 1, numbers=numbers, numbers32=numbers32, why=said))
        else:
            heads, key, value, shared = family.shape(read, kind)
            key_name = "attention_chunk_size" if kind == "chunked_attention" else "sliding_window"
            window = need(read, "window", key_name) if keeps == "window" else None
            why = said if said == "n_recurrent_loops" else "kv_lora_rank" if family.shape is _latent else ""
            out.append(LayerCache(keeps, 1, heads, key, value, shared, window, why=why))
    return out
