"""Checks of lab 2, the KV memory ledger."""

from __future__ import annotations

import math

from kvlab.checks import Exercise, Mistake
from kvlab.core import ledger
from kvlab.core.spec import ModelSpec

GIB = ledger.GIB


def _spec(layers: int, heads: int, kv_heads: int, head_dim: int) -> ModelSpec:
    return ModelSpec("m", layers, heads, kv_heads, head_dim, "float16", "rope", 4096, 32000)


MHA = _spec(32, 32, 32, 128)
GQA = _spec(30, 9, 3, 64)
WIDE = _spec(36, 32, 8, 160)
MQA = _spec(18, 8, 1, 256)


# ---- 1: bytes per token ------------------------------------------------------------------------------------------------


def token_bytes(spec: ModelSpec, bits: int) -> int:
    """Bytes of one token's K and V over all layers, each number kept in `bits` bits."""
    return 2 * spec.layers * spec.kv_heads * spec.head_dim * bits // 8


TOKEN_BYTES = Exercise(
    1,
    "token_bytes",
    token_bytes,
    cases=((MHA, 16), (GQA, 32), (WIDE, 16), (MQA, 16), (GQA, 4), (GQA, 8)),
    mistakes=(
        Mistake(
            "It counts query heads. Keys and values are kept for the K/V heads, spec.kv_heads: several query heads read one of them.",
            lambda s, bits: 2 * s.layers * s.heads * s.head_dim * bits // 8,
        ),
        Mistake(
            "It counts one of K and V. Both are kept: a factor of 2.",
            lambda s, bits: s.layers * s.kv_heads * s.head_dim * bits // 8,
        ),
        Mistake(
            "It gives bits. A byte has 8 of them.",
            lambda s, bits: 2 * s.layers * s.kv_heads * s.head_dim * bits,
        ),
        Mistake(
            "It counts one layer. Every layer keeps keys and values of its own.",
            lambda s, bits: 2 * s.kv_heads * s.head_dim * bits // 8,
        ),
        Mistake(
            "It counts one head. Every K/V head has a key and a value.",
            lambda s, bits: 2 * s.layers * s.head_dim * bits // 8,
        ),
        Mistake(
            "It multiplies heads and K/V heads. Query heads keep nothing.",
            lambda s, bits: 2 * s.layers * s.heads * s.kv_heads * s.head_dim * bits // 8,
        ),
        Mistake(
            "It rounds a number up to whole bytes. Two numbers of 4 bits share a byte: multiply first, divide by 8 last.",
            lambda s, bits: 2 * s.layers * s.kv_heads * s.head_dim * max(1, bits // 8),
        ),
        Mistake(
            "It rounds a number down to whole bytes. Two numbers of 4 bits share a byte: multiply first, divide by 8 last.",
            lambda s, bits: 2 * s.layers * s.kv_heads * s.head_dim * (bits // 8),
        ),
    ),
)


# ---- 2: a vector in few bits, with its scales ---------------------------------------------------------------------------


def packed_bytes(numbers: int, bits: int, group: int, scale_bits: int) -> int:
    """Bytes of `numbers` numbers of `bits` bits, with one scale of `scale_bits` bits for every `group` of them."""
    return math.ceil(numbers * bits / 8) + math.ceil(numbers / group) * scale_bits // 8


PACKED_BYTES = Exercise(
    2,
    "packed_bytes",
    packed_bytes,
    cases=(
        (64, 4, 32, 16),
        (64, 8, 32, 16),
        (128, 4, 128, 32),
        (80, 4, 32, 16),
        (96, 8, 64, 32),
        (128, 2, 32, 32),
    ),
    mistakes=(
        Mistake(
            "It leaves the scales out. Without them the small numbers cannot be turned back into keys and values.",
            lambda n, bits, group, scale: math.ceil(n * bits / 8),
        ),
        Mistake(
            "It keeps a scale for every number. A scale serves a whole group.",
            lambda n, bits, group, scale: math.ceil(n * bits / 8) + n * scale // 8,
        ),
        Mistake(
            "It keeps one scale in all. Each group has its own.",
            lambda n, bits, group, scale: math.ceil(n * bits / 8) + scale // 8,
        ),
        Mistake(
            "A last group that is not full has a scale too: round the number of groups up.",
            lambda n, bits, group, scale: math.ceil(n * bits / 8) + n // group * scale // 8,
        ),
        Mistake(
            "It counts the scale in bits and the numbers in bytes. A byte has 8 bits.",
            lambda n, bits, group, scale: math.ceil(n * bits / 8) + math.ceil(n / group) * scale,
        ),
        Mistake(
            "It gives bits. A byte has 8 of them.",
            lambda n, bits, group, scale: n * bits + math.ceil(n / group) * scale,
        ),
        Mistake(
            "It gives every number a whole byte. Two numbers of 4 bits share one.",
            lambda n, bits, group, scale: n * max(1, bits // 8) + math.ceil(n / group) * scale // 8,
        ),
        Mistake(
            "It takes `group` for the number of groups. It is how many numbers share a scale.",
            lambda n, bits, group, scale: math.ceil(n * bits / 8) + group * scale // 8,
        ),
    ),
)


# ---- 3: how many tokens' worth of slots ---------------------------------------------------------------------------------


def slots(tokens: int, block: int, window: int | None, beams: int) -> int:
    """Token slots one layer holds for a request: the window caps, blocks round up, beams multiply.

    Blocks behind the window are freed at once here: the cap comes first, the rounding second.
    """
    seen = tokens if window is None else min(tokens, window)
    return beams * math.ceil(seen / block) * block


SLOTS = Exercise(
    3,
    "slots",
    slots,
    cases=(
        (33, 16, None, 1),
        (32, 16, None, 1),
        (7, 1, None, 1),
        (100, 16, 40, 1),
        (20, 16, 40, 1),
        (33, 16, None, 4),
        (90, 8, 60, 3),
        (21, 5, None, 2),
    ),
    mistakes=(
        Mistake(
            "It rounds down. A block that is begun is held whole.",
            lambda n, block, window, beams: beams * ((n if window is None else min(n, window)) // block) * block,
        ),
        Mistake(
            "It takes one block more when the tokens fill their blocks exactly. 32 tokens fill two blocks of 16, not three.",
            lambda n, block, window, beams: beams * ((n if window is None else min(n, window)) // block + 1) * block,
        ),
        Mistake(
            "It counts tokens, not blocks. Slots come in whole blocks.",
            lambda n, block, window, beams: beams * (n if window is None else min(n, window)),
        ),
        Mistake(
            "It gives blocks. Asked for are slots: each block has `block` of them.",
            lambda n, block, window, beams: beams * math.ceil((n if window is None else min(n, window)) / block),
        ),
        Mistake(
            "It forgets the window. Tokens that have left it are kept no longer.",
            lambda n, block, window, beams: beams * math.ceil(n / block) * block,
        ),
        Mistake(
            "It takes the window for the length even where the request is shorter.",
            lambda n, block, window, beams: beams * math.ceil((window or n) / block) * block,
        ),
        Mistake(
            "It forgets the beams. Each beam has a cache of its own.",
            lambda n, block, window, beams: math.ceil((n if window is None else min(n, window)) / block) * block,
        ),
        Mistake(
            "It rounds all beams together. Each beam has blocks of its own, and a last block that is not full.",
            lambda n, block, window, beams: math.ceil(beams * (n if window is None else min(n, window)) / block) * block,
        ),
        Mistake(
            "It caps after rounding: the window is no multiple of the block, and blocks are held whole.",
            lambda n, block, window, beams: beams * min(math.ceil(n / block) * block, window or 10**9),
        ),
    ),
)


# ---- 4: what fits --------------------------------------------------------------------------------------------------------


def max_batch(memory_gib: float, watermark: float, weights: int, activations: int, request: int) -> int:
    """How many requests of `request` bytes fit on a card of `memory_gib` GiB, of which a share `watermark` may be used."""
    return max(0, int((memory_gib * GIB * watermark - weights - activations) // request))


_NONE_FITS = "It gives a negative number where not even the weights fit. Then no request fits: 0."
_NO_FRACTION = "It gives a fraction. Half a request is none: round down, to a whole number."
_ROUNDED = "It rounds up or to the nearest. Half a request is none."
_WRONG_ROOM = {
    "It takes GB for GiB. This card's memory is in GiB: 2³⁰ bytes each, 7 % more than 10⁹.": (
        lambda m, w, weights, act: m * 10**9 * w - weights - act
    ),
    "It uses the card to the last byte. Only the share under the watermark may be used.": (
        lambda m, w, weights, act: m * GIB - weights - act
    ),
    "It takes the watermark of what is left after the weights. That is TensorRT-LLM's rule; here, as in vLLM, it is a share of "
    "the whole card.": (lambda m, w, weights, act: (m * GIB - weights - act) * w),
    "It forgets the activations.": lambda m, w, weights, act: m * GIB * w - weights,
    "It forgets the weights.": lambda m, w, weights, act: m * GIB * w - act,
}


def _fit(whole, room=lambda m, w, weights, act: m * GIB * w - weights - act):
    """`whole` makes the number of requests out of a quotient."""
    return lambda m, w, weights, act, r: whole(room(m, w, weights, act) / r)


MAX_BATCH = Exercise(
    4,
    "max_batch",
    max_batch,
    cases=(
        (24, 0.9, 16_060_522_496, GIB, 536_870_912),
        (80, 0.9, 16_060_522_496, 2 * GIB, 2 * GIB),
        (24, 0.85, 14_483_464_192, GIB, 131_072 * 4096),
        (12, 0.9, 16_060_522_496, GIB, 536_870_912),
        (16, 1.0, 13_476_831_232, 0, 1_073_741_824),
        (40, 0.9, 13_476_831_232, 3 * GIB, 1_000_000_000),
    ),
    mistakes=(
        *(  # with and without a thought of what does not fit at all
            Mistake(says, _fit(whole, room))
            for says, room in _WRONG_ROOM.items()
            for whole in (lambda n: max(0, math.floor(n)), math.floor, int)
        ),
        Mistake(_ROUNDED, _fit(lambda n: max(0, round(n)))),
        Mistake(_ROUNDED, _fit(lambda n: max(0, math.ceil(n)))),
        Mistake(_NONE_FITS, _fit(math.floor)),
        Mistake(_NONE_FITS, _fit(int)),
        Mistake(_NO_FRACTION, _fit(lambda n: max(0.0, n))),
        Mistake(_NO_FRACTION, _fit(float)),
    ),
)

EXERCISES = (TOKEN_BYTES, PACKED_BYTES, SLOTS, MAX_BATCH)
