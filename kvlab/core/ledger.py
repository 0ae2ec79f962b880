"""The KV memory ledger: how many bytes a token, a request and a pool take, and what fits on a card.

The formula of a cache that holds keys and values:

    bytes = 2 · layers · kv_heads · (bytes of one head's vector) · tokens · beams · requests

2 for K and V. It is worked out for each kind of layer a model has (`ModelSpec.caches`): keys and values may differ in width, and
some layers keep a state that does not grow, or nothing. What varies from engine to engine is the number of tokens a layer really
holds: a sliding window caps it, a pool of blocks rounds it up. Every quantity is a whole number of bytes. The page's calculator (`book/assets/js/ledger.js`)
is the same arithmetic; a test keeps the two equal to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvlab.core.layers import LayerCache
from kvlab.core.spec import ModelSpec, canonical_dtype

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
GB = 10**9


@dataclass(frozen=True)
class Format:
    """How numbers are kept.

    Attributes:
        name: what it is called.
        bits: of one number.
        group: how many numbers share a scale; 0: there are no scales.
        scale_bits: what is kept for each group: its scale, and its zero point if it has one.
    """

    name: str
    bits: int
    group: int = 0
    scale_bits: int = 0

    def __post_init__(self) -> None:
        if self.bits < 1 or self.group < 0 or self.scale_bits < 0 or self.scale_bits % 8:
            raise ValueError(
                f"format {self.name!r}: bits must be at least 1, group and scale_bits 0 or more, scales whole bytes"
            )


FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        Format("float64", 64),
        Format("float32", 32),
        Format("bfloat16", 16),
        Format("float16", 16),
        Format("float8", 8),  # one scale for a whole layer, which is not counted
        Format("int8", 8, group=32, scale_bits=16),  # ggml's q8_0: 34 bytes for 32 numbers
        Format("int4", 4, group=32, scale_bits=16),  # ggml's q4_0: 18 bytes for 32 numbers
    )
}


def find_format(form: str | Format) -> Format:
    """A format by its name or a short form of it (`"bf16"`, `"fp8"`). Raises ValueError for an unknown one."""
    if isinstance(form, Format):
        return form
    name = {"fp8": "float8"}.get(str(form).lower(), str(form).lower())
    if name not in FORMATS:
        try:
            name = canonical_dtype(name)
        except ValueError:
            raise ValueError(f"format {form!r} is unknown; use one of {', '.join(FORMATS)}") from None
    return FORMATS[name]


def stored_bytes(numbers: int, form: str | Format) -> int:
    """Bytes of `numbers` numbers with their scales. A last group that is not full has a scale like any other."""
    form = find_format(form)
    scales = _up(numbers, form.group) * form.scale_bits // 8 if form.group else 0
    return _up(numbers * form.bits, 8) + scales


def kv_heads(spec: ModelSpec, cache: LayerCache | None = None) -> int:
    """Heads a layer keeps keys and values for. Query heads keep nothing: in GQA several of them read one K/V head.

    `cache`: the kind of layer, where a model has several; by default the spec's first.
    """
    return spec.kv_heads if cache is None else cache.heads


def layer_token_bytes(spec: ModelSpec, cache: LayerCache, form: str | Format | None = None) -> int:
    """Bytes that one layer of this kind keeps for one token: 0 where it keeps a state or nothing."""
    if not cache.keeps_tokens:
        return 0
    form = form or spec.dtype
    head = stored_bytes(cache.key_dim, form) + stored_bytes(cache.value_dim, form)
    return kv_heads(spec, cache) * head + stored_bytes(cache.shared, form)


def token_bytes(spec: ModelSpec, form: str | Format | None = None) -> int:
    """Bytes of one token over all layers that hold it. `form`: how K and V are kept, by default the spec's dtype.

    Windowed layers are counted: they hold each token, for a while. What a long context adds for each further token is
    `growth_bytes`.
    """
    return sum(cache.count * layer_token_bytes(spec, cache, form) for cache in spec.caches)


def growth_bytes(spec: ModelSpec, form: str | Format | None = None) -> int:
    """Bytes that one more token adds once every window is full: the layers that see the whole context."""
    return sum(cache.count * layer_token_bytes(spec, cache, form) for cache in spec.caches if cache.kind == "full")


def state_bytes(spec: ModelSpec) -> int:
    """Bytes of a request's states: what state-space, linear-attention and convolution layers keep, whatever its length.

    A state is kept in the model's dtype, or in float32 where its family does so (`LayerCache.numbers32`); a format for K and V does
    not apply to it.
    """
    return sum(cache.count * layer_state_bytes(spec, cache) for cache in spec.caches)


def layer_state_bytes(spec: ModelSpec, cache: LayerCache) -> int:
    """Bytes of the state that one layer of this kind keeps for a request."""
    return stored_bytes(cache.numbers, spec.dtype) + stored_bytes(cache.numbers32, "float32")


def layer_lines(spec: ModelSpec, form: str | Format | None = None) -> list[str]:
    """A line for each kind of layer: how many, what it keeps, and the bytes of a token or of its state in one layer."""
    out = []
    for cache in spec.caches:
        many = f"{cache.count} layer{'' if cache.count == 1 else 's'}"
        if cache.kind == "none":
            out.append(f"{many} keep{'s' * (cache.count == 1)} nothing of the text" + (f" ({cache.why})" if cache.why else ""))
        elif cache.kind == "state":
            out.append(f"{many} with a state: {human(layer_state_bytes(spec, cache))} each, whatever the length")
        else:
            out.append(
                f"{many} with {_widths(cache)}: {layer_token_bytes(spec, cache, form):,} bytes a token each{_cap(cache)}"
            )
    return out


def _widths(cache: LayerCache) -> str:
    more = f" and an index key of {cache.shared}" if cache.shared else ""
    if cache.why == "kv_lora_rank":
        return f"a latent of {cache.key_dim} + {cache.value_dim} numbers{more}"
    dim = f"{cache.key_dim}" if cache.key_dim == cache.value_dim else f"{cache.key_dim} (K) and {cache.value_dim} (V)"
    return f"{cache.heads} K/V head{'' if cache.heads == 1 else 's'} of {dim}{more}"


def _cap(cache: LayerCache) -> str:
    return f", of the last {cache.window:,} tokens" if cache.kind == "window" else ""


def windowed_layers(config: Any) -> int:
    """How many layers of a Hugging Face config (object or dict) see a sliding window only. Raises as `ModelSpec.from_config`."""
    return ModelSpec.from_config(config, "bfloat16").windowed  # the dtype bears on nothing here


def blocks(tokens: int, block: int, window: int | None = None) -> int:
    """Blocks of `block` tokens that a sequence of `tokens` holds in one layer, at the most while it grows.

    With a sliding window a block is given back once its last token has left the window. A window of w tokens rarely starts
    at a block's edge: it touches up to ⌈(w − 1) / block⌉ + 1 blocks.
    """
    _at_least("block", block, 1)
    whole = _up(tokens, block)
    return whole if window is None else min(whole, _up(window - 1, block) + 1)


def request_bytes(
    spec: ModelSpec,
    tokens: int,
    *,
    form: str | Format | None = None,
    beams: int = 1,
    block: int = 1,
) -> int:
    """Bytes of one request of `tokens` tokens, prompt and answer together: K and V, and the states.

    Args:
        spec: the model's shape.
        tokens: its length.
        form: how K and V are kept; by default the spec's dtype.
        beams: sequences that are kept beside each other, each with a cache of its own.
        block: tokens are handed out in blocks of this many; 1: singly.

    Raises:
        ValueError: a count below its least value.
    """
    for name, value, least in (("tokens", tokens, 0), ("beams", beams, 1), ("block", block, 1)):
        _at_least(name, value, least)
    kept = sum(
        cache.count * layer_token_bytes(spec, cache, form) * blocks(tokens, block, cache.window) * block
        for cache in spec.caches
    )
    return beams * (kept + state_bytes(spec))


def shared_beams(prompt: int, new: int, beams: int, block: int) -> int:
    """Blocks that `beams` continuations of one prompt hold when they share its blocks: at most, all parting at once.

    The prompt's full blocks are held once. Its last block, if it is not full, is copied by each beam that writes into it.
    """
    full = prompt // block
    return full + beams * (_up(prompt + new, block) - full)


@dataclass(frozen=True)
class Setting:
    """What a ledger is asked for.

    Attributes:
        spec: the model's shape.
        parameters: number of weights.
        memory: of the card, in bytes.
        context: tokens of a request, prompt and answer together.
        batch: requests at once.
        form, weight_form: how K and V, and how the weights, are kept.
        beams, block: see `request_bytes`.
        activations: bytes kept free for everything that is neither weights nor K/V.
        watermark: share of `memory` that may be used at all; the rest is headroom.
    """

    spec: ModelSpec
    parameters: int
    memory: int
    context: int
    batch: int = 1
    form: str = "bfloat16"
    weight_form: str = "bfloat16"
    beams: int = 1
    block: int = 16
    activations: int = GIB
    watermark: float = 0.9

    def __post_init__(self) -> None:
        for name, least in (("parameters", 0), ("memory", 1), ("context", 1), ("batch", 1), ("activations", 0)):
            _at_least(name, getattr(self, name), least)
        if not 0 < self.watermark <= 1:
            raise ValueError(f"watermark is {self.watermark}: give the share of memory that may be used, such as 0.9")


@dataclass(frozen=True)
class Ledger:
    """What fits. All in bytes, but for `requests` and `longest`.

    Attributes:
        token: K/V of one token, in all layers that hold it.
        grows: what one more token adds once every window is full.
        state: of one request's states, which do not grow.
        request, kv: what a request of the setting's length keeps, and the whole batch.
        weights: of the model.
        limit: what may be used of the card, `memory · watermark`.
        room: what is left of it for K/V; below 0 the weights alone do not fit.
        requests: how many requests of the setting's length fit at once.
        longest: the longest context, up to the model's own, at which the setting's batch fits; 0: none.
        longest_alone: the same for one request with the card to itself.
    """

    token: int
    grows: int
    state: int
    request: int
    kv: int
    weights: int
    limit: int
    room: int
    requests: int
    longest: int
    longest_alone: int

    @property
    def fits(self) -> bool:
        """Whether the whole batch fits."""
        return self.kv <= self.room


def ledger(setting: Setting) -> Ledger:
    """Work out a setting: max batch = (memory · watermark − weights − activations) / K/V of a request, rounded down."""
    s = setting

    def request(tokens: int) -> int:
        return request_bytes(s.spec, tokens, form=s.form, beams=s.beams, block=s.block)

    weights = stored_bytes(s.parameters, s.weight_form)
    limit = int(s.memory * s.watermark)
    room = limit - weights - s.activations
    one = request(s.context)
    return Ledger(
        token=token_bytes(s.spec, s.form),
        grows=growth_bytes(s.spec, s.form),
        state=s.beams * state_bytes(s.spec),
        request=one,
        kv=s.batch * one,
        weights=weights,
        limit=limit,
        room=room,
        requests=max(0, room // one),
        longest=_longest(room // s.batch, request, s.spec.max_context),
        longest_alone=_longest(room, request, s.spec.max_context),
    )


def _longest(room: int, request, most: int) -> int:
    """The largest number of tokens up to `most` whose request fits into `room`, by bisection: a request never shrinks."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if request(middle) <= room:
            low = middle
        else:
            high = middle - 1
    return low


def sentence(setting: Setting, found: Ledger | None = None) -> str:
    """The ledger in words: what the model supports, and what fits on this card."""
    found = found or ledger(setting)
    s = setting
    said = f"{s.spec.name} supports {s.spec.max_context:,} tokens; "
    if found.room < 0:
        return said + "on this card its weights alone do not fit."
    if found.longest_alone == 0:
        return said + "on this card its weights fit, and no request beside them."
    said += f"on this card {found.longest_alone:,} fit, for one request. "
    many = "request fits" if found.requests == 1 else "requests fit"
    beyond = " (more than it supports)" if s.context > s.spec.max_context else ""
    return said + f"Of {s.context:,} tokens each{beyond}, {found.requests:,} {many} at once."


def human(size: int) -> str:
    """Bytes as people read them, in powers of 1024: `"1.50 GiB"`."""
    sign, size = ("−", -size) if size < 0 else ("", size)
    for name, unit in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= unit:
            hundredths = int(size / unit * 100 + 0.5)  # not round(): it takes halves to even, which JavaScript does not
            return f"{sign}{hundredths // 100}.{hundredths % 100:02d} {name}"
    return f"{sign}{size} B"


def _up(a: int, b: int) -> int:
    return -(-a // b)


def _at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
