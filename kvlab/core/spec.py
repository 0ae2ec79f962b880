"""The shape of a model, as far as its KV cache is concerned."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

DTYPES = {
    "float64": ("fp64", "double"),
    "float32": ("fp32", "float"),
    "bfloat16": ("bf16",),
    "float16": ("fp16", "half"),
    "int8": (),
    "int4": (),
}
"""Canonical dtype names, each with the short forms people type."""

_DTYPE_NAMES = {alias: name for name, aliases in DTYPES.items() for alias in (name, *aliases)}

# A config object always says how positions work; a config.json may leave the default out, so the family decides.
_LEARNED = {"gpt2", "gpt_neo", "gpt_bigcode", "opt", "openai-gpt", "biogpt", "xglm", "ctrl"}
_ALIBI = {"bloom", "mpt"}
_ROPE = {
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
    *("phi", "phi3", "falcon", "gpt_neox", "gptj", "codegen", "olmo", "olmo2", "stablelm", "cohere", "granite"),
    *("smollm3", "starcoder2", "glm", "glm4"),
}
_ROPE_KEYS = ("rope_parameters", "rope_theta", "rope_scaling", "rotary_pct", "rotary_dim", "partial_rotary_factor")
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention", "global", "local"}


def canonical_dtype(name: object) -> str:
    """The canonical name of a dtype: `"bf16"`, `"torch.bfloat16"` and `torch.bfloat16` all give `"bfloat16"`.

    Raises:
        ValueError: the name is none of `DTYPES` or their short forms.
    """
    text = str(name).lower().removeprefix("torch.")
    if text not in _DTYPE_NAMES:
        known = ", ".join("/".join((full, *short)) for full, short in DTYPES.items())
        raise ValueError(f"dtype {name!r} is unknown; use one of {known}")
    return _DTYPE_NAMES[text]


class LengthRope(NamedTuple):
    """RoPE whose angles depend on how long the request is. `rope_type`: the config's name for it.

    Up to `trained` tokens the angles are the plain ones, and K/V is a function of the tokens before it. Beyond, a forward turns
    all its tokens by angles that are chosen for the longest row (Transformers' `dynamic_rope_update`).
    """

    rope_type: str
    trained: int

    def angles(self, length: int) -> int:
        """Which angles a request of `length` tokens is turned by: two lengths with the same number have the same."""
        if length <= self.trained:
            return self.trained
        return self.trained + 1 if self.rope_type == "longrope" else length  # longrope has one set of factors beyond


@dataclass(frozen=True)
class ModelSpec:
    """What decides how many bytes a token's keys and values take, and which positions they may stand at.

    Attributes:
        name: what the model is called.
        layers: number of layers, each with its own keys and values.
        heads: query heads per layer.
        kv_heads: key/value heads per layer; `heads` is a multiple of it.
        head_dim: numbers per head.
        dtype: canonical name of the type keys and values are kept in, see `DTYPES`.
        positions: "rope" (rotated into queries and keys), "learned" (a table added to the input) or "other".
        max_context: longest sequence, in tokens, the model was made for.
        vocab: number of token ids.
        window: sliding window in tokens, for the layers that have one; None where every layer sees everything.
        rope_by_length: set where RoPE's angles, and with them K, depend on the request's length; None where they do not.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    positions: str
    max_context: int
    vocab: int
    window: int | None = None
    rope_by_length: LengthRope | None = None

    def __post_init__(self) -> None:
        for field in ("layers", "heads", "kv_heads", "head_dim", "max_context", "vocab", "window"):
            value = getattr(self, field)
            if value is None and field == "window":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field} must be a whole number of at least 1, not {value!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.positions not in ("rope", "learned", "other"):
            raise ValueError(f"positions must be rope, learned or other, not {self.positions!r}")

    @classmethod
    def from_config(cls, config: Any, dtype: object = None, name: str | None = None) -> "ModelSpec":
        """Read the shape out of a Hugging Face config: the object, or the dict that is in `config.json`.

        `kv_heads` is the architecture's. (Transformers' Falcon of the new kind repeats keys and values to all query
        heads before it caches them, so its cache is larger than this says.)

        Args:
            config: any decoder-only model's config; a multimodal one is read through its `text_config`.
            dtype: type of the keys and values; by default the one the config names, else float32.
            name: what to call it; by default what the config calls itself.

        Raises:
            ValueError: the config lacks something, or describes a cache that is not keys and values of one shape.
        """
        read = _reader(config)
        inner = read("text_config")
        if inner is not None:
            outer, read = read, _reader(inner)
            name = name or outer("_name_or_path") or outer("model_type")
            dtype = dtype or outer("dtype", "torch_dtype")
        family = read("model_type") or ""
        _refuse_other_caches(read, family)
        _refuse_both_directions(read)

        heads = _need(read, "number of heads", "num_attention_heads", "n_head", "num_heads", "n_heads")
        head_dim = read("head_dim", "kv_channels")
        if head_dim is None:
            hidden = _need(read, "hidden size", "hidden_size", "n_embd", "d_model")
            if hidden % heads:
                raise ValueError(f"config has no head_dim, and hidden size {hidden} is no multiple of {heads} heads")
            head_dim = hidden // heads
        return cls(
            name=name or read("_name_or_path") or family or "model",
            layers=_need(read, "number of layers", "num_hidden_layers", "n_layer", "num_layers", "n_layers"),
            heads=heads,
            kv_heads=_kv_heads(read, heads),
            head_dim=head_dim,
            dtype=canonical_dtype(dtype or read("dtype", "torch_dtype") or "float32"),
            positions=_positions(read, family),
            max_context=_need(
                read, "longest context", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"
            ),
            vocab=_need(read, "vocabulary size", "vocab_size"),
            window=_window(read),
            rope_by_length=_rope_by_length(read),
        )


def _reader(config: Any):
    """A function that returns the first of some keys that config has with a value other than None."""
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


def _need(read, what: str, *keys: str) -> int:
    value = read(*keys)
    if value is None:
        raise ValueError(f"config does not say its {what}: none of {', '.join(keys)} is set")
    return value


def _refuse_other_caches(read, family: str) -> None:
    """A spec describes keys and values of one shape in every layer of a decoder; say so where that is not the case."""
    if read("is_encoder_decoder"):
        raise ValueError(f"config is an encoder-decoder ({family}); kvlab needs a decoder-only model")
    if read("kv_lora_rank"):
        raise ValueError(f"config is latent attention ({family}, kv_lora_rank is set): its K and V differ in shape")
    other = set(read("layer_types", "layers_block_type") or ()) - _ATTENTION_LAYERS
    if other:
        raise ValueError(f"config has layers that do not cache plain keys and values ({', '.join(sorted(other))})")
    if read("num_kv_shared_layers"):
        raise ValueError("config has layers that share another layer's keys and values (num_kv_shared_layers is set)")


def _kv_heads(read, heads: int) -> int:
    # Falcon and GPT-BigCode: one flag, and num_kv_heads only counts for Falcon's newer decoder.
    if read("multi_query") and not read("new_decoder_architecture"):
        return 1
    return read("num_key_value_heads", "num_kv_heads", "n_head_kv") or heads


def _positions(read, family: str) -> str:
    if read("alibi") or family in _ALIBI:
        return "other"
    if family in _LEARNED:
        return "learned"
    return "rope" if family in _ROPE or read(*_ROPE_KEYS) is not None else "other"


def _window(read) -> int | None:
    if read("use_sliding_window") is False:
        return None
    layer_types = read("layer_types")
    if layer_types and "sliding_attention" not in layer_types:
        return None
    return read("sliding_window")


def _rope_by_length(read) -> LengthRope | None:
    """The RoPE whose angles depend on the request's length, of whichever layers have one; None where no layer has."""
    given = read("rope_parameters", "rope_scaling")
    given = given if isinstance(given, Mapping) else {}
    by_layer = [part for part in given.values() if isinstance(part, Mapping)]
    longest = read("max_position_embeddings", "seq_length")
    found = []
    for part in by_layer or [given]:
        kind = str(part.get("rope_type") or part.get("type") or "default")
        if "long_factor" in part:  # longrope; "su" and, in a Phi-3, "yarn" are older names of it
            outside = None if by_layer else read("original_max_position_embeddings")  # Phi-3 has it there, and it goes first
            found.append(LengthRope("longrope", outside or part.get("original_max_position_embeddings") or longest))
        elif "dynamic" in kind and not part.get("alpha"):  # HunYuan's alpha fixes the angles
            found.append(LengthRope(kind, longest))
    if read("use_dynamic_ntk"):  # Qwen 1
        found.append(LengthRope("dynamic", read("seq_length") or longest))
    return min(found, key=lambda rope: rope.trained, default=None)


def _refuse_both_directions(read) -> None:
    """Gemma's embedding models: what is cached of a token would change with every token behind it."""
    if read("use_bidirectional_attention") in (True, "all"):  # "vision": within a picture only
        raise ValueError("config attends in both directions (use_bidirectional_attention is set): there is no K/V to keep")
