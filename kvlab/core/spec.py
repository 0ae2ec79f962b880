"""The shape of a model, as far as its KV cache is concerned."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvlab.core.layers import LayerCache, layer_caches, reader, settle, size

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
    *("smollm3", "starcoder2", "glm", "glm4", "gpt_oss", "qwen3_next", "deepseek_v3", "mimo_v2_flash"),
}
_ROPE_KEYS = ("rope_parameters", "rope_theta", "rope_scaling", "rotary_pct", "rotary_dim", "partial_rotary_factor")


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
        layers: number of layers, each with its own keys and values unless `mixed` says otherwise.
        heads: query heads per layer.
        kv_heads: key/value heads per layer; `heads` is a multiple of it.
        head_dim: numbers per head, of a key and of a value.
        dtype: canonical name of the type keys and values are kept in, see `DTYPES`.
        positions: "rope" (rotated into queries and keys), "learned" (a table added to the input) or "other".
        max_context: longest sequence, in tokens, the model was made for.
        vocab: number of token ids.
        window: sliding window in tokens, of every layer, or of those of `mixed` that have one; None where all see everything.
        mixed: what the layers keep, kind by kind, where they do not all keep the same; () where they do. Then `kv_heads` and
            `head_dim` are those of its first keys. `caches` says it for either case.
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
    mixed: tuple[LayerCache, ...] = ()
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
        if self.mixed:
            _check_mixed(self)

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        """What the layers keep, like layers together: one entry where all keep keys and values of one shape."""
        if self.mixed:
            return self.mixed
        kind = "full" if self.window is None else "window"
        return (LayerCache(kind, self.layers, self.kv_heads, self.head_dim, self.head_dim, window=self.window),)

    @property
    def windowed(self) -> int:
        """Caches that hold a window's tokens only."""
        return sum(cache.count for cache in self.caches if cache.kind == "window")

    def one_shape(self) -> tuple[int, int, int]:
        """(layers, kv_heads, head_dim) of keys and values that have one shape in every layer, as a pool of blocks needs them.

        A window changes no shape: a windowed layer may keep more than it sees.

        Raises:
            ValueError: the layers differ; the message names the kind of layer, or the key, that does.
        """
        for cache in self.caches:
            why = f" ({cache.why})" if cache.why else ""
            if not cache.keeps_tokens:
                what = "a state in place of keys and values" if cache.kind == "state" else "nothing of the text"
                raise ValueError(f"{self.name}: {cache.count} layers keep {what}{why}; one shape for all layers is needed")
            if cache.key_dim != cache.value_dim or cache.shared:
                widths = f"keys of {cache.key_dim} and values of {cache.value_dim} numbers"
                more = f" and {cache.shared} more a token" if cache.shared else ""
                raise ValueError(f"{self.name}: layers keep {widths}{more}{why}; keys and values of one width are needed")
            if (cache.heads, cache.key_dim) != (self.kv_heads, self.head_dim):
                raise ValueError(
                    f"{self.name}: some layers keep {cache.heads} K/V heads of {cache.key_dim}, others {self.kv_heads} of "
                    f"{self.head_dim} (kv_heads, head_dim); one shape for all layers is needed"
                )
        count = sum(cache.count for cache in self.caches)
        if count != self.layers:
            why = next((f" ({cache.why})" for cache in self.caches if cache.why), "")
            raise ValueError(f"{self.name}: {self.layers} layers keep {count} caches{why}; one a layer is needed")
        return self.layers, self.kv_heads, self.head_dim

    @classmethod
    def from_config(cls, config: Any, dtype: object = None, name: str | None = None) -> "ModelSpec":
        """Read the shape out of a Hugging Face config: the object, or the dict that is in `config.json`.

        What each layer keeps is read by the rule of the config's family (`kvlab.core.layers`); a dict that leaves something to its
        class is read through Transformers' `AutoConfig`. The sizes are the architecture's. (Transformers' Falcon of the new kind
        repeats keys and values to all query heads before it caches them, so its cache is larger than this says.)

        Args:
            config: any decoder-only model's config; a multimodal one is read through its `text_config`.
            dtype: type of the keys and values; by default the one the config names, else float32.
            name: what to call it; by default what the config calls itself.

        Raises:
            ValueError: the config lacks something, or is of a family, or has a key, whose cache is not known; it is named.
        """
        config = settle(config)
        read = reader(config)
        inner = read("text_config")
        if inner is not None:
            name = name or read("_name_or_path") or read("model_type")
            dtype = dtype or read("dtype", "torch_dtype")
            config = settle(inner)
            read = reader(config)
        family = read("model_type") or ""
        _refuse_both_directions(read)
        caches = layer_caches(config)
        first = next((cache for cache in caches if cache.keeps_tokens), None)
        if first is None:
            said = ", ".join(sorted({f"{cache.kind} ({cache.why})" for cache in caches}))
            raise ValueError(
                f"config's layers keep no keys and values of their own ({family}: {said}): nothing grows with the text"
            )
        layers, window = size(read, "number of layers"), next((cache.window for cache in caches if cache.window), None)
        uniform = len(caches) == 1 and (first.count, first.value_dim, first.shared) == (layers, first.key_dim, 0)
        return cls(
            name=name or read("_name_or_path") or family or "model",
            layers=layers,
            heads=size(read, "number of heads"),
            kv_heads=first.heads,
            head_dim=first.key_dim,
            dtype=canonical_dtype(dtype or read("dtype", "torch_dtype") or "float32"),
            positions=_positions(read, family),
            max_context=size(read, "longest context"),
            vocab=size(read, "vocabulary size"),
            window=window,
            mixed=() if uniform else caches,
            rope_by_length=_rope_by_length(read),
        )


def _check_mixed(spec: ModelSpec) -> None:
    """Raise ValueError where `mixed` and the fields beside it say different things: neither is silently ignored."""
    if not all(isinstance(cache, LayerCache) for cache in spec.mixed):
        raise ValueError(f"mixed must be LayerCache entries, not {spec.mixed!r}")
    first = next((cache for cache in spec.mixed if cache.keeps_tokens), None)
    if first is None:
        raise ValueError("mixed has no layer that keeps keys and values")
    windows = sorted({cache.window for cache in spec.mixed if cache.window is not None})
    if len(windows) > 1:
        raise ValueError(f"mixed has windows of different sizes ({', '.join(map(str, windows))}); one is supported")
    said = {"kv_heads": spec.kv_heads, "head_dim": spec.head_dim, "window": spec.window}
    found = {"kv_heads": first.heads, "head_dim": first.key_dim, "window": windows[0] if windows else None}
    for field, value in said.items():
        if value != found[field]:
            raise ValueError(f"{field} is {value}, and mixed says {found[field]}: change the layers in mixed with it")


def _positions(read, family: str) -> str:
    if read("alibi") or family in _ALIBI:
        return "other"
    if family in _LEARNED:
        return "learned"
    return "rope" if family in _ROPE or read(*_ROPE_KEYS) is not None else "other"


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
