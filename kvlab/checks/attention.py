"""Checks of lab 1, attention, with and without a memory."""

from __future__ import annotations

import torch

from kvlab.checks import Exercise, Mistake
from kvlab.runtime import attention as right


def _draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- attention ---------------------------------------------------------------------------------------------------------


def _scores(q, k):
    return q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5


def _hidden(scores, mask):
    return scores.masked_fill(~mask, float("-inf"))


def _random_mask(seed: int, queries: int, keys: int) -> torch.Tensor:
    """No row without a key it may see; not causal, so that only the mask given tells what is hidden."""
    mask = _draw(seed, queries, keys) > 0
    mask[:, 0] |= ~mask.any(-1)
    return mask


ATTEND = Exercise(
    1,
    "attend",
    right.attend,
    cases=(
        (_draw(1, 1, 4), _draw(2, 1, 4), _draw(3, 1, 4), torch.ones(1, 1, dtype=torch.bool)),
        (_draw(4, 3, 4), _draw(5, 3, 4), _draw(6, 3, 4), torch.ones(3, 3, dtype=torch.bool).tril()),
        (_draw(7, 2, 16), _draw(8, 5, 16), _draw(9, 5, 16), _random_mask(10, 2, 5)),
        (2 * _draw(11, 4, 8), _draw(12, 4, 8), _draw(13, 4, 8), _random_mask(14, 4, 4)),
        (_draw(15, 3, 2, 8), _draw(16, 3, 4, 8), _draw(17, 3, 4, 8), _random_mask(18, 2, 4)),
        (_draw(19, 2, 4), _draw(20, 3, 4), _draw(21, 3, 6), torch.ones(2, 3, dtype=torch.bool)),
    ),
    mistakes=(
        Mistake(
            "It divides by d. The sum of d products grows like √d, so √d brings it back to size; d makes all scores nearly equal.",
            lambda q, k, v, m: _hidden(q @ k.transpose(-1, -2) / q.shape[-1], m).softmax(-1) @ v,
        ),
        Mistake(
            "It does not divide by √d. Without it the scores grow with d, and softmax puts nearly all on one key.",
            lambda q, k, v, m: _hidden(q @ k.transpose(-1, -2), m).softmax(-1) @ v,
        ),
        Mistake(
            "It does not look at the mask: keys that a query may not see are read.",
            lambda q, k, v, m: _scores(q, k).softmax(-1) @ v,
        ),
        Mistake(
            "The mask is the wrong way round. True means: may look.",
            lambda q, k, v, m: _scores(q, k).masked_fill(m, torch.finfo(q.dtype).min).softmax(-1) @ v,
        ),
        Mistake(
            "It masks after the softmax. What is hidden has already taken its share, so the rest no longer adds up to 1.",
            lambda q, k, v, m: _scores(q, k).softmax(-1).masked_fill(~m, 0.0) @ v,
        ),
        Mistake(
            "It sets hidden scores to 0. exp(0) is 1: a key with score 0 still takes weight. It has to be −∞.",
            lambda q, k, v, m: _scores(q, k).masked_fill(~m, 0.0).softmax(-1) @ v,
        ),
        Mistake(
            "It adds the mask to the scores as 0 and 1. That makes what may be seen a little likelier and hides nothing.",
            lambda q, k, v, m: (_scores(q, k) + m.float()).softmax(-1) @ v,
        ),
        Mistake(
            "The softmax runs over the queries. Each query shares out its weight among the keys: over the last axis.",
            lambda q, k, v, m: _hidden(_scores(q, k), m).softmax(-2).nan_to_num(0.0) @ v,
        ),
        Mistake(
            "It gives the weights. Asked for is what they take from the values.",
            lambda q, k, v, m: _hidden(_scores(q, k), m).softmax(-1),
        ),
    ),
)


# ---- causal_mask -------------------------------------------------------------------------------------------------------


def _ones(queries: int, keys: int) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool)


CAUSAL_MASK = Exercise(
    2,
    "causal_mask",
    right.causal_mask,
    cases=((4, 0), (1, 0), (1, 5), (3, 2), (2, 7), (5, 1)),
    mistakes=(
        Mistake(
            "It forgets the past: query i stands at position past + i, so it sees past + i + 1 keys. Here a single query after five "
            "tokens sees only the first of them. (PyTorch's is_causal=True does this too.)",
            lambda n, past: _ones(n, past + n).tril(),
        ),
        Mistake(
            "A token does not see itself. It may: its own key and value are there when its query is asked.",
            lambda n, past: _ones(n, past + n).tril(past - 1),
        ),
        Mistake(
            "A token sees the one behind it. That one is not written yet, and is what has to be foretold.",
            lambda n, past: _ones(n, past + n).tril(past + 1),
        ),
        Mistake("It is the wrong way round. True means: may look.", lambda n, past: ~right.causal_mask(n, past)),
        Mistake(
            "It looks into the future: what may be seen lies before, not behind.", lambda n, past: _ones(n, past + n).triu(past)
        ),
        Mistake(
            "It leaves the past out. A key of each earlier token is there too: the mask has past + queries columns.",
            lambda n, past: right.causal_mask(n, 0),
        ),
        Mistake(
            "It hides the past: only the new tokens are seen. Then nothing would be gained by keeping keys.",
            lambda n, past: torch.cat([~_ones(n, past), _ones(n, n).tril()], -1),
        ),
        Mistake("It gives numbers. Asked for is True and False.", lambda n, past: right.causal_mask(n, past).float()),
    ),
)


# ---- repeat_heads ------------------------------------------------------------------------------------------------------

REPEAT_HEADS = Exercise(
    3,
    "repeat_heads",
    right.repeat_heads,
    cases=(
        (_draw(31, 2, 3, 4), 3),
        (_draw(32, 3, 2, 4), 1),
        (_draw(33, 1, 2, 4), 4),
        (_draw(34, 3, 1, 2), 2),
        (_draw(35, 2, 2, 2), 2),
    ),
    mistakes=(
        Mistake(
            "It repeats the heads as a whole: 0 1 0 1. Query heads that follow each other belong to one K/V head: 0 0 1 1.",
            lambda x, g: x.repeat(g, 1, 1),
        ),
        Mistake("It repeats the tokens. The heads are the first axis.", lambda x, g: x.repeat_interleave(g, 1)),
        Mistake("It repeats the numbers of a head. The heads are the first axis.", lambda x, g: x.repeat_interleave(g, 2)),
        Mistake("It repeats nothing: there are still as many heads as before.", lambda x, g: x),
        Mistake(
            "It takes the average instead of repeating. Every query head reads its K/V head as it is.",
            lambda x, g: x.mean(0, keepdim=True).repeat(g * x.shape[0], 1, 1),
        ),
    ),
)


# ---- rotate ------------------------------------------------------------------------------------------------------------


def _turned(x, angle, sign=1.0):
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - sign * b * angle.sin(), b * angle.cos() + sign * a * angle.sin()], -1)


def _angle(x, positions, base, exponent=None):
    half = x.shape[-1] // 2
    exponent = torch.arange(half) / half if exponent is None else exponent
    return positions[:, None].float() * base ** (-exponent)


def _neighbours(x, positions, base):
    angle = _angle(x, positions, base)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).flatten(-2)


_AT = torch.tensor
ROTATE = Exercise(
    4,
    "rotate",
    right.rotate,
    cases=(
        (_draw(41, 2, 3, 8), _AT([0, 1, 2]), 100.0),
        (_draw(42, 1, 1, 8), _AT([5]), 100.0),
        (_draw(43, 3, 2, 4), _AT([3, 4]), 10.0),
        (_draw(44, 2, 4, 16), _AT([6, 1, 1, 0]), 1000.0),
        (_draw(45, 1, 2, 2), _AT([1, 2]), 50.0),
    ),
    mistakes=(
        Mistake(
            "It pairs neighbours: 0 with 1, 2 with 3. This model pairs the halves: number i with number i + d/2.",
            _neighbours,
        ),
        Mistake(
            "It turns the other way. The first of a pair becomes first·cos − second·sin.",
            lambda x, p, base: _turned(x, _angle(x, p, base), -1.0),
        ),
        Mistake(
            "It counts positions from 0. The tokens stand where `positions` says: in a cached step, behind the past.",
            lambda x, p, base: _turned(x, _angle(x, torch.arange(len(p)), base)),
        ),
        Mistake(
            "The exponent is i/d. Pair i of d/2 turns by position / base^(2i/d).",
            lambda x, p, base: _turned(x, _angle(x, p, base, torch.arange(x.shape[-1] // 2) / x.shape[-1])),
        ),
        Mistake(
            "All pairs turn at one speed. Pair i turns by position / base^(2i/d), each slower than the one before.",
            lambda x, p, base: _turned(x, _angle(x, p, base, torch.zeros(x.shape[-1] // 2))),
        ),
        Mistake(
            "The exponent's sign is wrong: the angle grows from pair to pair, and should shrink.",
            lambda x, p, base: _turned(x, _angle(x, p, base, -torch.arange(x.shape[-1] // 2) / (x.shape[-1] // 2))),
        ),
        Mistake(
            "Only one half of each pair is turned: the second number needs second·cos + first·sin.",
            lambda x, p, base: torch.cat(
                [_turned(x, _angle(x, p, base))[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]], -1
            ),
        ),
        Mistake("It rotates nothing.", lambda x, p, base: x),
    ),
)


# ---- decode_step -------------------------------------------------------------------------------------------------------


def _read(q, k, v, mask=None):
    groups = q.shape[0] // k.shape[0]
    mask = torch.ones(1, k.shape[1], dtype=torch.bool) if mask is None else mask
    return right.attend(q, right.repeat_heads(k, groups), right.repeat_heads(v, groups), mask)


def _joined(k, v, past_k, past_v):
    return torch.cat([past_k, k], 1), torch.cat([past_v, v], 1)


def _first_key_only(q, k, v, past_k, past_v):
    k, v = _joined(k, v, past_k, past_v)
    return _read(q, k, v, torch.ones(1, k.shape[1], dtype=torch.bool).tril()), k, v


def _without_itself(q, k, v, past_k, past_v):
    out = _read(q, past_k, past_v) if past_k.shape[1] else _read(q, k, v)
    return out, *_joined(k, v, past_k, past_v)


def _in_front(q, k, v, past_k, past_v):
    k, v = torch.cat([k, past_k], 1), torch.cat([v, past_v], 1)
    return _read(q, k, v), k, v


def _tiled(q, k, v, past_k, past_v):
    k, v = _joined(k, v, past_k, past_v)
    groups = q.shape[0] // k.shape[0]
    return right.attend(q, k.repeat(groups, 1, 1), v.repeat(groups, 1, 1), torch.ones(1, k.shape[1], dtype=torch.bool)), k, v


def _keys_only(q, k, v, past_k, past_v):
    k, stale = _joined(k, v, past_k, past_v)
    return _read(q, k, stale), k, past_v


def _repeated_kept(q, k, v, past_k, past_v):
    k, v = _joined(k, v, past_k, past_v)
    groups = q.shape[0] // k.shape[0]
    return _read(q, k, v), right.repeat_heads(k, groups), right.repeat_heads(v, groups)


def _step(seed: int, heads: int, kv_heads: int, past: int, dim: int = 8) -> tuple:
    shapes = ((heads, 1), (kv_heads, 1), (kv_heads, 1), (kv_heads, past), (kv_heads, past))
    return tuple(_draw(seed + i, *shape, dim) for i, shape in enumerate(shapes))


DECODE_STEP = Exercise(
    5,
    "decode_step",
    right.decode_step,
    cases=(_step(51, 2, 2, 3), _step(61, 6, 2, 4), _step(71, 3, 1, 1), _step(81, 4, 2, 0), _step(91, 9, 3, 6, 4)),
    mistakes=(
        Mistake(
            "The new token sees only the oldest one. A single query stands behind all the past and sees everything: its mask has "
            "past + 1 times True.",
            _first_key_only,
        ),
        Mistake("The new token does not see itself. Append its key and value first, then read.", _without_itself),
        Mistake(
            "The new key and value stand in front. The output is the same, since attention does not care for order, but what you "
            "return has to be in the order of the tokens.",
            _in_front,
        ),
        Mistake(
            "The past is not read: the new token sees only itself.",
            lambda q, k, v, past_k, past_v: (_read(q, k, v), *_joined(k, v, past_k, past_v)),
        ),
        Mistake(
            "It returns only the new key and value. The next step needs those of all tokens.",
            lambda q, k, v, past_k, past_v: (_read(q, *_joined(k, v, past_k, past_v)), k, v),
        ),
        Mistake("Keys are appended, values are not. They belong together.", _keys_only),
        Mistake("It repeats the K/V heads as a whole. Query heads that follow each other belong to one K/V head.", _tiled),
        Mistake(
            "It returns the repeated heads. Keep what the model made, and repeat when reading: that is what grouped heads save.",
            _repeated_kept,
        ),
        Mistake(
            "It returns what it was given. The new key and value must be kept, or the next step will not see this token.",
            lambda q, k, v, past_k, past_v: (_read(q, *_joined(k, v, past_k, past_v)), past_k, past_v),
        ),
    ),
)

EXERCISES = (ATTEND, CAUSAL_MASK, REPEAT_HEADS, ROTATE, DECODE_STEP)
