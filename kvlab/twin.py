"""Name a state fault by its twin: a healthy run with one hypothesis applied, whose logits meet the suspect's within ε.

A verdict says that a run read a wrong state; a twin says which, and how much of it: "20 unwritten slots", where 19 and 21 miss.
The suspect's own tokens are fed again, so that every step can be compared, past a flip too. What a hypothesis may change is what a
forward is given: positions, who may see whom, and the keys and values kept before. All of it lies open in :class:`Bench`.

A wrong name is worse than none. So a hypothesis that moves no logit by more than ε names nothing, all that meet are told, and where
none meets the answer is "none of mine".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvlab.compare import BEYOND, HEADROOM, compare, scores
from kvlab.runtime.models import Loaded

BLOCK = 16  # tokens in a block, where a hypothesis counts in blocks
MOST, SHORT = (
    48,
    64,
)  # numbers tried of one hypothesis at most, of a prompt of up to 64 tokens; of longer ones fewer, as they cost more
WIDEST = 8.0  # a twin's own ε is at most this many times the healthy one

KV = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values of each layer, [1, kv_heads, slots, head_dim]


# ---- the bench: one forward, everything in it by hand --------------------------------------------------------------------


class Bench:
    """One request on one model: its prompt, the tokens it is forced to, and the requests that ran beside it.

    loaded    the model
    prompt    token ids
    tokens    the suspect's tokens; the last is never fed
    others    token ids of other requests, prompt and answer, as far as they are known
    chunk     run every forward in pieces of this many tokens: the same numbers, rounded otherwise

    `own` are the fed tokens, `n` those of the prompt, `steps` the logits' rows. Slots and positions count from 0.
    """

    def __init__(
        self,
        loaded: Loaded,
        prompt: Sequence[int],
        tokens: Sequence[int],
        others: Sequence[Sequence[int]] = (),
        chunk: int | None = None,
    ) -> None:
        self.loaded, self.model, self.chunk = loaded, loaded.model, chunk
        self.prompt, self.tokens = [int(i) for i in prompt], [int(i) for i in tokens]
        self.own, self.n, self.steps = self.prompt + self.tokens[:-1], len(self.prompt), len(self.tokens)
        self.others = [[int(i) for i in ids] for ids in others]
        self.runs = 0
        self._kept: dict[tuple[int, ...], KV] = {}
        config = self.model.config
        kinds = list(getattr(config, "layer_types", None) or [])
        strange = sorted(set(kinds) - {"full_attention", "sliding_attention"})
        if strange:
            raise ValueError(
                f"loaded: {loaded.name} has layers of kind {', '.join(strange)}; a twin knows full and windowed attention only"
            )
        width = getattr(config, "sliding_window", None)
        if not getattr(config, "use_sliding_window", True):
            width = None
        self.window = width if width and ("sliding_attention" in kinds or not kinds) else None
        self.kinds = sorted(set(kinds)) if len(set(kinds)) > 1 else []

    @property
    def rotary(self) -> bool:
        """Keys are rotated: only distances between positions count."""
        return hasattr(self.model.base_model, "rotary_emb")

    @property
    def places(self) -> int:
        """How many positions the model has; with rotary ones there is no end."""
        return 1 << 30 if self.rotary else int(getattr(self.model.config, "max_position_embeddings", 0) or 1 << 30)

    @torch.inference_mode()
    def feed(
        self,
        ids: Sequence[int],
        positions: torch.Tensor,
        sees: torch.Tensor | None = None,
        *,
        past: KV | None = None,
        keep: int | None = None,
        window: torch.Tensor | int | None = None,
        extra: int = 0,
        store: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, KV]:
        """One forward of `ids` `[q]` over the slots of `past`; the new slots come behind them.

        positions  of the ids, `[q]`
        sees       bool `[q, slots]`, where a query may look; None: causally. The model's window is laid over it
        keep       rows of logits to return, the last ones; by default `steps`
        window     its width, or one for each query `[q]`; by default the model's
        extra      this many of the first slots lie outside the window's count: they are seen if `sees` says so
        store      what the cache makes of new keys and values when it takes them up

        Returns logits `[keep, vocab]`, fp32 on the CPU, and the K/V of all slots.
        """
        held = past[0][0].shape[2] if past else 0
        q, device = len(ids), self.model.device
        at, slot = torch.arange(held, held + q), torch.arange(held + q)
        if sees is None:
            sees = slot[None] <= at[:, None]
        within = sees
        width = self.window if window is None else window
        if width is not None:
            near = at[:, None] - slot[None] < torch.as_tensor(width).reshape(-1, 1)
            within = sees & (near | (slot[None] < extra))

        def additive(may: torch.Tensor) -> torch.Tensor:
            least = torch.finfo(self.model.dtype).min
            return torch.where(may, 0.0, least).to(self.model.dtype)[None, None].to(device)

        cache = _Store(store) if store else DynamicCache()
        for layer, (keys, values) in enumerate(past or []):
            DynamicCache.update(cache, keys, values, layer)
        keep, rows = self.steps if keep is None else keep, []
        ahead = bool((sees & (slot[None] > at[:, None])).any())  # a query that looks ahead needs all in one piece
        for begin in range(0, q, q if ahead or not self.chunk else self.chunk):
            end = q if ahead or not self.chunk else min(begin + self.chunk, q)
            cut = slice(begin, end), slice(0, held + end)
            mask = additive(within[cut])
            if self.kinds:
                mask = {kind: additive((within if kind == "sliding_attention" else sees)[cut]) for kind in self.kinds}
            out = self.model(
                input_ids=torch.tensor([list(ids[begin:end])], device=device),
                position_ids=positions[None, begin:end].to(device),
                attention_mask=mask,
                cache=cache,
                use_cache=True,
                logits_to_keep=min(keep, end - begin),
            )
            rows.append(out.logits[0].float().cpu())
            self.runs += 1
        return torch.cat(rows)[-keep:], [(layer.keys, layer.values) for layer in cache.layers]

    def kept(self, ids: Sequence[int]) -> KV:
        """The K/V of `ids` run alone from position 0. Computed once."""
        key = tuple(ids)
        if key not in self._kept:
            if len(ids) > self.places:
                raise ValueError(f"others: a request of {len(ids)} tokens, the model has {self.places} positions")
            self._kept[key] = self.feed(ids, torch.arange(len(ids)), keep=1)[1]
        return self._kept[key]

    @cached_property
    def _healthy(self) -> tuple[torch.Tensor, KV]:
        return self.feed(self.own, torch.arange(len(self.own)))

    @property
    def plain(self) -> torch.Tensor:
        """The healthy run's logits, `[steps, vocab]`."""
        return self._healthy[0]

    @cached_property
    def count(self) -> torch.Tensor:
        """Positions of the own tokens, as they should be."""
        return torch.arange(len(self.own))

    def whole(self, positions: torch.Tensor | None = None, sees: torch.Tensor | None = None, **options) -> torch.Tensor:
        """All own tokens in one forward. Since the tokens are given, mask and positions say all there is."""
        return self.feed(self.own, self.count if positions is None else positions, sees, **options)[0]

    def after(self, slots: int, past: KV, positions: torch.Tensor | None = None, sees=None, **options) -> torch.Tensor:
        """The own tokens from `slots` on, over a past that holds (something in place of) those before. `slots` ≤ n − 1."""
        fed = self.own[slots:]
        return self.feed(fed, self.count[slots:] if positions is None else positions, sees, past=past, **options)[0]

    def later(self, positions: torch.Tensor | None = None, sees=None, *, past: KV | None = None, **options) -> torch.Tensor:
        """The cached steps alone, over the prompt's sound K/V; the first token's logits are the healthy ones.

        positions `[steps − 1]`; sees `[steps − 1, slots]`.
        """
        if self.steps == 1:
            return self.plain
        positions = self.count[self.n :] if positions is None else positions
        past = self.part(0, self.n) if past is None else past
        logits, _ = self.feed(self.own[self.n :], positions, sees, past=past, keep=self.steps - 1, **options)
        return torch.cat([self.plain[:1], logits])

    def part(self, begin: int, end: int, kv: KV | None = None) -> KV:
        """Slots `begin..end` of K/V, by default of the healthy run's."""
        return [(k[:, :, begin:end], v[:, :, begin:end]) for k, v in (self._healthy[1] if kv is None else kv)]

    def causal(self, queries: int, slots: int) -> torch.Tensor:
        """The last `queries` of `slots` slots, each sees itself and what is before it, `[queries, slots]`."""
        at = torch.arange(slots - queries, slots)
        return torch.arange(slots)[None] <= at[:, None]


class _Store(DynamicCache):
    """A cache that alters what it takes up, before anybody reads it."""

    def __init__(self, store) -> None:
        super().__init__()
        self.store = store

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        return super().update(*self.store(key_states, value_states), layer_idx, *args, **kwargs)


def join(*pieces: KV) -> KV:
    """K/V side by side, slot after slot."""
    return [tuple(torch.cat(parts, dim=2) for parts in zip(*layers)) for layers in zip(*pieces)]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


# ---- hypotheses ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hypothesis:
    """One way a state may be wrong, with a number.

    name      how it is called
    families  what it is a case of; more than one where logits cannot tell whose the state is
    says      a sentence with `{n}` for the number
    numbers   of a bench and another request's ids (None without): the numbers to try, the likeliest first
    play      of a bench, a number and another request's ids: the twin's logits, `[steps, vocab]`
    later     it leaves the first token alone
    needs     "" , "others", "window", "rotary" or "learned"
    """

    name: str
    families: tuple[str, ...]
    says: str
    numbers: Callable[[Bench, Any], Iterator]
    play: Callable[[Bench, Any, Any], torch.Tensor]
    later: bool = False
    needs: str = ""

    def sentence(self, number: Any) -> str:
        """What it says of a number."""
        return self.says.format(n=number)


FOREIGN, MASK, POSITION, ALTERED = "foreign state", "mask", "position", "own state altered"


def _gaps(b: Bench) -> list[int]:
    """Differences of length to other requests, and those next to them: pads, and jumps between rows."""
    found = []
    for other in b.others:
        gap = len(other) - b.n
        found += [gap - back for back in (*range(9), -1) if gap - back > 0]
    return list(dict.fromkeys(found))


def _jumps(b: Bench, _=None):
    small = [1, -1, *(sign * d for d in range(2, 9) for sign in (1, -1))]
    far = [sign * d for d in [*_gaps(b), *range(9, 49)] for sign in (1, -1)]
    least = -b.places if b.rotary else -b.n
    wanted = dict.fromkeys([*small, -b.n, *far])
    return [d for d in wanted if d >= least and len(b.own) + d <= b.places]


def _steps_shifted(b: Bench, d: int, _=None):
    return b.later(b.count[b.n :] + d)


def _steps_at(b: Bench, p: int, _=None):
    return b.later(torch.full((b.steps - 1,), p))


def _steps_in_bits(b: Bench, bits: int, _=None):
    exact = b.count[b.n :].double()
    unit = 2.0 ** (exact.log2().floor() - (bits - 1)).clamp(min=0)
    return b.later((torch.round(exact / unit) * unit).long())  # half to even, as floats round


def _buffer(b: Bench, slots: int, beyond: KV):
    """Cached steps see a buffer up to slot `slots`: what lies past the write cursor is `beyond`, whose first slot is number n."""
    queries, extra = b.steps - 1, slots - b.n
    sees = torch.cat([torch.zeros(queries, extra, dtype=torch.bool), b.causal(queries, len(b.own))], dim=1)
    for step in range(queries):  # slot n + step is written by this step, and with it is its own
        sees[step, step + 1 : extra] = True
    return b.later(sees=sees, past=join(beyond, b.part(0, b.n)), extra=extra)


def _unwritten(b: Bench, slots: int, _=None):
    empty = [(torch.zeros_like(k[:, :, :1]), torch.zeros_like(v[:, :, :1])) for k, v in b.part(0, 1)]
    return _buffer(b, slots, [(k.expand(-1, -1, slots - b.n, -1), v.expand(-1, -1, slots - b.n, -1)) for k, v in empty])


def _stale(b: Bench, slots: int, other):
    return _buffer(b, slots, b.part(b.n, slots, b.kept(other[:slots])))


def _lengths(b: Bench, other=None):
    if other is None:
        round_up = [next(s for s in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 1 << 30) if s > len(b.own))]
        near = range(len(b.own), len(b.own) + 33)
        return list(dict.fromkeys([s for s in (len(b.own), len(b.own) + 1, *round_up, *near) if b.n < s <= b.n + 4096]))
    return range(len(other), b.n + 1, -1)


def _blind_to_newest(b: Bench, n: int, _=None):
    sees = b.causal(len(b.own), len(b.own))
    for row in range(b.n - 1, len(b.own)):
        sees[row, max(row - n + 1, 0) : row + 1] = False
    for row in range(max(b.n - n, 0), b.n):  # of the prompt, queries before the last one too
        sees[row, b.n - n : b.n] = False
    return b.whole(sees=sees)


def _history_lost(b: Bench, n: int, _=None):
    sees = b.causal(b.steps - 1, len(b.own))
    sees[:, :n] = False
    return b.later(sees=sees)


def _nothing_seen(b: Bench, _n, _=None):
    """Attention gives 0, as it does where a mask hides everything: one slot of zeros is seen, and nothing else."""
    empty = [(torch.zeros_like(k[:, :, :1]), torch.zeros_like(v[:, :, :1])) for k, v in b.part(0, 1)]
    sees = torch.zeros(b.steps - 1, len(b.own) + 1, dtype=torch.bool)
    sees[:, 0] = True
    return b.later(sees=sees, past=join(empty, b.part(0, b.n)), extra=1)


def _newest_lost(b: Bench, n: int, _=None):
    sees = b.causal(b.steps - 1, len(b.own))
    sees[:, b.n - n : b.n] = False
    return b.later(sees=sees)


def _dropped(b: Bench, n: int, _=None):
    """The prompt without its first n tokens, their places left empty."""
    sees = b.causal(len(b.own), len(b.own))
    sees[n:, :n] = False
    return b.whole(sees=sees)


def _not_causal(b: Bench, _n, _=None):
    sees = b.causal(len(b.own), len(b.own))
    sees[: b.n, : b.n] = True
    return b.whole(sees=sees)


def _window(where: str):
    def play(b: Bench, d: int, _=None):
        width = torch.full((len(b.own),), b.window)
        if where != "steps":
            width[: b.n] += d
        if where != "prefill":
            width[b.n :] += d
        return b.whole(window=width)

    return play


def _pads(counted: bool):
    def play(b: Bench, n: int, _=None):
        pad = b.loaded.tokenizer.pad_token_id
        most = max(_pad_numbers(b))
        key = ("pads", counted, most)
        if key not in b._kept:
            at = torch.arange(most) if counted else torch.zeros(most, dtype=torch.long)
            b._kept[key] = b.feed([pad] * most, at, keep=1)[1]
        return b.after(0, b.part(0, n, b._kept[key]), b.count + (n if counted else 0), extra=n)

    return play


def _pad_numbers(b: Bench, _=None):
    return [n for n in dict.fromkeys([*_gaps(b), *range(1, 9 if b.others else 25)]) if n + len(b.own) <= b.places]


def _all_shifted(b: Bench, d: int, _=None):
    return b.whole(b.count + d)


def _prompt_shifted(b: Bench, d: int, _=None):
    return b.whole(torch.cat([b.count[: b.n] + d, b.count[b.n :]]))


def _forward_jumps(b: Bench, _=None):
    return [d for d in dict.fromkeys([*range(1, 9), *_gaps(b), *range(9, 49)]) if len(b.own) + d <= b.places]


def _from_zero_behind(b: Bench, k: int, _=None):
    return b.after(k, b.part(0, k), b.count[k:] - k)


def _behind(b: Bench, _=None):
    shared = [common(b.prompt, other) for other in b.others]
    blocks = [k // BLOCK * BLOCK for k in shared]
    every = range((b.n - 1) // BLOCK * BLOCK, 0, -BLOCK)
    return [
        k
        for k in dict.fromkeys([*blocks, *shared, *every, *range(1, 17), *(k + d for k in blocks for d in (-1, 1))])
        if 0 < k < b.n
    ]


def _fed_twice(b: Bench, n: int, _=None):
    again = torch.arange(b.n, len(b.own) + n)
    return b.feed(b.own[b.n - n :], again, past=b.part(0, b.n))[0]


def _foreign_before(b: Bench, n: int, other):
    return b.after(0, b.part(0, n, b.kept(other)), b.count + n)


def _left_over(b: Bench, other):
    return _last_first(min(len(other), b.places - len(b.own)))


def _last_first(most: int) -> list[int]:
    """All of it, a little less (of an answer's last token there is no K/V), or the first few."""
    return [n for n in dict.fromkeys([*range(most, max(most - 16, 0), -1), 1, 2, 3]) if 0 < n <= most]


def _foreign_behind(b: Bench, n: int, other):
    k = _prefix(b, other)
    return b.after(k, b.part(0, k + n, b.kept(other)), b.count[k:] + n)


def _prefix(b: Bench, other) -> int:
    return min(common(b.prompt, other), b.n - 1)


def _left_behind(b: Bench, other):
    k = _prefix(b, other)
    return _last_first(min(len(other) - k, b.places - len(b.own))) if k else []


def _slots_of_another(b: Bench, k: int, other):
    return b.after(k, b.part(0, k, b.kept(other)))


def _slots(b: Bench, other):
    most, shared = min(b.n - 1, len(other)), common(b.prompt, other)
    if b.loaded.spec.rope_by_length:  # the same tokens in a longer request have other keys
        shared = 0
    blocks = range(most // BLOCK * BLOCK, 0, -BLOCK)
    return [k for k in dict.fromkeys([*blocks, *range(shared + 1, most + 1), most]) if shared < k <= most]


def _overwritten(b: Bench, number, other):
    begin, end, seen = number
    past = join(b.part(0, begin), b.part(begin, end, b.kept(other)), b.part(end, seen))
    return b.after(seen, past)


def _regions(b: Bench, other):
    """(begin, end, seen): slots another request has written, in blocks or to its end, and the first token that reads them."""
    most, shared = min(len(other), b.n - 1), common(b.prompt, other)
    ends = dict.fromkeys([most, *range(most // BLOCK * BLOCK, 0, -BLOCK)])
    out = []
    for end in ends:
        seen = dict.fromkeys([*range(end, min(end + 9, b.n)), *range((b.n - 1) // BLOCK * BLOCK, end, -BLOCK)])
        for begin in [0, *(at for at in range(BLOCK, end, BLOCK) if at > shared)]:  # up to `shared` both hold the same
            changes = b.prompt[:end] != other[:end]
            out += [(begin, end, t) for t in seen if changes and (begin or t > end)]
    return sorted(out, key=lambda number: number[2] - number[1])


def _found_at(b: Bench, other):
    """(distance, tokens): where the prompt's beginning stands elsewhere in the other request, and how much of it, in blocks too."""
    spots = []
    for at in range(1, len(other)):
        length = min(common(b.prompt, other[at:]), b.n - 1)
        if length >= 4:
            spots.append((at, length))
    spots.sort(key=lambda spot: -spot[1])
    out = []
    for at, length in spots[:4]:
        out += [(at, k) for k in dict.fromkeys([length // BLOCK * BLOCK, length, length - 1, length - BLOCK]) if k > 0]
    return out


def _moved(turned: bool):
    def play(b: Bench, number, other):
        at, k = number
        past = b.part(at, at + k, b.kept(other))
        return b.after(k, [(_turn(b, keys, -at), values) for keys, values in past] if turned else past)

    return play


def _turn(b: Bench, keys: torch.Tensor, by: int) -> torch.Tensor:
    """Rotated keys, rotated on by `by` positions (RoFormer, eq. 34)."""
    cos, sin = (part[:, None] for part in b.model.base_model.rotary_emb(keys, torch.tensor([[by]], device=keys.device)))
    half = keys.shape[-1] // 2
    return keys * cos + torch.cat((-keys[..., half:], keys[..., :half]), dim=-1) * sin


def _pad_read(b: Bench, _n, _=None):
    """The logits of a pad that stands behind the tokens, at the last one's position, and does not see itself."""
    pads, own = b.steps, len(b.own)
    sees = torch.zeros(own + pads, own + pads, dtype=torch.bool)
    sees[:own, :own] = b.causal(own, own)
    for step in range(pads):
        sees[own + step, : b.n + step] = True
    positions = torch.cat([b.count, torch.arange(b.n - 1, own)])
    return b.feed(b.own + [b.loaded.tokenizer.pad_token_id] * pads, positions, sees)[0]


FORMATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bfloat16": lambda x: x.to(torch.bfloat16).to(x.dtype),
    "float16": lambda x: x.to(torch.float16).to(x.dtype),
    "fp8 (e4m3)": lambda x: x.to(torch.float8_e4m3fn).to(x.dtype),
    "int8, scale 1": lambda x: x.round().clamp(-128, 127),
    "int8 by token": lambda x: _whole_numbers(x, 127),
    "int4 by token": lambda x: _whole_numbers(x, 7),
}


def _whole_numbers(x: torch.Tensor, most: int) -> torch.Tensor:
    """Whole numbers up to `most`, with a scale for each token and head."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / most
    return (x / scale).round() * scale


def _rounded(number: tuple[str, str], k: torch.Tensor, v: torch.Tensor):
    form, what = FORMATS[number[0]], number[1]
    return (form(k) if what != "values" else k), (form(v) if what != "keys" else v)


def _formats(b: Bench, _=None):
    return [(form, what) for form in FORMATS for what in ("keys and values", "keys", "values")]


def _stored(b: Bench, number, _=None):
    return b.whole(store=lambda k, v: _rounded(number, k, v))


def _kept_in(b: Bench, number, _=None):
    """Each forward reads its own K/V as computed, and everybody later reads it rounded."""
    logits, past = [b.plain[:1]], b.part(0, b.n)
    done = 0
    for step in range(b.steps - 1):
        sound = b.part(0, done, past) if done else None
        new = [_rounded(number, k, v) for k, v in b.part(done, b.n + step, past)]
        past, done = join(sound, new) if sound else new, b.n + step
        row, past = b.feed([b.own[b.n + step]], b.count[b.n + step :][:1], past=past, keep=1)
        logits.append(row)
    return torch.cat(logits)


def _up_to(most: int):
    return lambda b, _=None: range(1, min(most, b.n - 1) + 1)


def _once(b: Bench, _=None):
    return [None]


def _widths(b: Bench, _=None):
    return [d for d in (1, -1, 2, -2) if b.window + d > 0]


HYPOTHESES: tuple[Hypothesis, ...] = (
    # cached steps alone, over the prompt's sound K/V: a few tokens each
    Hypothesis(
        "steps-shifted",
        (POSITION,),
        "cached steps stand {n:+d} places from where the prompt puts them",
        _jumps,
        _steps_shifted,
        True,
    ),
    Hypothesis(
        "steps-at",
        (POSITION,),
        "every cached step stands at position {n}",
        lambda b, _=None: dict.fromkeys([0, 1, *([b.window - 1, b.window] if b.window else []), b.n - 1]),
        _steps_at,
        True,
    ),
    Hypothesis(
        "steps-in-bits",
        (POSITION,),
        "the positions of cached steps are counted in {n} bits",
        lambda b, _=None: (8, 11, 7, 9, 10, 4, 5, 6),
        _steps_in_bits,
        True,
    ),
    Hypothesis(
        "unwritten-slots",
        (MASK,),
        "cached steps see a buffer of {n} slots to its end, and nobody has written what is past the cursor",
        _lengths,
        _unwritten,
        True,
    ),
    Hypothesis(
        "stale-slots",
        (FOREIGN,),
        "cached steps see a buffer up to slot {n}, and past the cursor lies another request",
        _lengths,
        _stale,
        True,
        "others",
    ),
    Hypothesis(
        "history-lost",
        (ALTERED, MASK),
        "cached steps do not see the first {n} tokens",
        lambda b, _=None: dict.fromkeys([b.n, *range(1, min(b.n, 33)), b.n - 1]),
        _history_lost,
        True,
    ),
    Hypothesis(
        "prompt-end-lost",
        (ALTERED, MASK),
        "cached steps do not see the last {n} tokens of the prompt",
        _up_to(8),
        _newest_lost,
        True,
    ),
    Hypothesis(
        "nothing-seen",
        (MASK, POSITION),
        "cached steps see nothing, not even themselves: a mask counted from a wrong position hides all",
        _once,
        _nothing_seen,
        True,
    ),
    Hypothesis(
        "window-in-steps", (MASK,), "in cached steps the window is {n:+d} tokens", _widths, _window("steps"), True, "window"
    ),
    # from some slot on, over a past that holds something else
    Hypothesis("fed-twice", (ALTERED, FOREIGN), "the prompt's last {n} tokens are fed, and kept, twice", _up_to(4), _fed_twice),
    Hypothesis(
        "foreign-before",
        (FOREIGN,),
        "{n} tokens of another request are kept before the request's own",
        _left_over,
        _foreign_before,
        needs="others",
    ),
    Hypothesis(
        "foreign-behind-prefix",
        (FOREIGN,),
        "behind the prefix that both requests have, {n} tokens of the other one are kept",
        _left_behind,
        _foreign_behind,
        needs="others",
    ),
    Hypothesis(
        "slots-of-another",
        (FOREIGN,),
        "the first {n} slots hold another request's keys and values",
        _slots,
        _slots_of_another,
        needs="others",
    ),
    Hypothesis(
        "found-elsewhere",
        (FOREIGN, POSITION),
        "the first {n[1]} tokens are read as they were computed {n[0]} places further on, behind other tokens, and not turned back",
        _found_at,
        _moved(False),
        needs="others",
    ),
    Hypothesis(
        "found-elsewhere-turned",
        (FOREIGN, ALTERED),
        "the first {n[1]} tokens are read as they were computed {n[0]} places further on, behind other tokens, their keys turned back",
        _found_at,
        _moved(True),
        needs="others and rotary",
    ),
    Hypothesis(
        "slots-overwritten",
        (FOREIGN,),
        "another request has written slots {n[0]} to {n[1]}, and the tokens from {n[2]} on read them",
        _regions,
        _overwritten,
        needs="others",
    ),
    Hypothesis("pads-seen", (MASK,), "{n} pads before the prompt are seen, and not counted", _pad_numbers, _pads(False)),
    Hypothesis(
        "pads-seen-and-counted", (MASK, POSITION), "{n} pads before the prompt are seen, and counted", _pad_numbers, _pads(True)
    ),
    Hypothesis(
        "from-zero-behind-prefix",
        (POSITION,),
        "behind a prefix of {n} tokens positions begin at 0 again",
        _behind,
        _from_zero_behind,
    ),
    # the whole request
    Hypothesis(
        "newest-hidden",
        (MASK,),
        "each forward hides its newest {n} columns: a mask too short",
        _up_to(4),
        _blind_to_newest,
    ),
    Hypothesis("not-causal", (MASK,), "the prompt's tokens see those behind them", _once, _not_causal),
    Hypothesis("window", (MASK,), "the window is {n:+d} tokens", _widths, _window("all"), needs="window"),
    Hypothesis(
        "window-in-prefill", (MASK,), "in the prefill the window is {n:+d} tokens", _widths, _window("prefill"), needs="window"
    ),
    Hypothesis(
        "pad-read",
        (POSITION,),
        "the next token is read from a pad behind the last token",
        _once,
        _pad_read,
    ),
    Hypothesis(
        "all-shifted",
        (POSITION,),
        "every token stands {n:+d} places from its own",
        _forward_jumps,
        _all_shifted,
        needs="learned",
    ),
    Hypothesis(
        "prompt-shifted",
        (POSITION,),
        "the prompt's tokens stand {n:+d} places from their own, the steps do not",
        _forward_jumps,
        _prompt_shifted,
        needs="learned",
    ),
    Hypothesis(
        "oldest-dropped",
        (ALTERED,),
        "the first {n} tokens are missing, and their places stay empty",
        _up_to(8),
        _dropped,
    ),
    Hypothesis("stored-in", (ALTERED,), "{n[1]} are stored as {n[0]}, and read so by all", _formats, _stored),
    # step by step
    Hypothesis(
        "kept-in", (ALTERED,), "{n[1]} are kept as {n[0]}: each forward reads its own exactly", _formats, _kept_in, True
    ),
)


# ---- the search ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Try:
    """The best a hypothesis did. `miss`: max |Δ| from the suspect over all steps; `moves`: from the healthy run.

    `within`: what counts as met. ε; or, where the wrong state magnifies rounding, `HEADROOM` times what the twin itself moves when it is
    run in pieces, up to `WIDEST` ε.

    `other` is the index of the other request it was tried with; `tried` how many of its numbers were.
    """

    hypothesis: str
    families: tuple[str, ...]
    number: Any
    miss: float
    moves: float
    tried: int = 1
    other: int | None = None
    sentence: str = ""
    within: float = 0.0


@dataclass(frozen=True)
class Twin:
    """What a search found.

    kind        "named" (one hypothesis meets; of its numbers perhaps more than one), "several" (more than one hypothesis meets),
                "none", "nothing to explain" (the suspect is within ε of the healthy run), "unclear" (too near to it to name
                anything, or a twin nearly meets), or "no number" (NaN: nothing can meet it)
    met         what meets within ε, closest first
    neighbours  of what meets: (hypothesis, number next to it) → how far it misses
    tried       the best of every hypothesis that was tried, in that order
    left_out    hypotheses that were not, and why
    distance    max |Δ| of the suspect from the healthy run with its tokens
    runs        forwards
    """

    kind: str
    met: tuple[Try, ...]
    neighbours: dict[tuple, float]
    tried: tuple[Try, ...]
    left_out: dict[str, str]
    distance: float
    epsilon: float
    runs: int
    seconds: float
    sentence: str = field(default="")

    @property
    def nearest(self) -> Try | None:
        """Of those that do not meet, the one that misses least."""
        names = {one.hypothesis for one in self.met}
        return min((one for one in self.tried if one.hypothesis not in names), key=lambda one: one.miss, default=None)


def search(
    loaded: Loaded,
    reference: Any,
    suspect: Any,
    epsilon: float,
    *,
    others: Sequence[Sequence[int]] = (),
    hypotheses: Sequence[Hypothesis] | None = None,
    first: bool = False,
    progress: bool = True,
) -> Twin:
    """The hypothesis whose twin meets `suspect` within `epsilon`, cheapest first.

    reference   a healthy run of the prompt; the model must reproduce it. None: the model's own run is trusted
    suspect     the run to explain: `prompt`, `tokens`, and scores of every step (see `kvlab.compare.scores`)
    epsilon     measured on healthy runs (`kvlab.compare.bound`), in fp32
    others      token ids of other requests, prompt and answer: what foreign state may come from
    first       stop at the first that meets. By default all are tried, so that a second one that meets is not missed
    progress    show a bar

    Raises ValueError, naming the argument, for runs of other prompts, of tokens only, of another vocabulary, or of another model.
    """
    began = time.perf_counter()
    if not 0 < epsilon < float("inf"):
        raise ValueError(f"epsilon is {epsilon}; measure it on healthy runs with kvlab.compare.bound")
    _check(loaded, suspect, "suspect")
    if any(not len(other) for other in others):
        raise ValueError("others: a request without tokens; leave it out")
    if reference is not None:
        _check(loaded, reference, "reference")
        if list(map(int, reference.prompt)) != list(map(int, suspect.prompt)):
            raise ValueError("suspect: its prompt is not the reference's; only runs of one prompt can be compared")
        again = Bench(loaded, reference.prompt, reference.tokens)
        off = max(_deltas(again, again.plain, reference))
        if not off <= epsilon:
            raise ValueError(
                f"reference: {loaded.name} in {loaded.dtype} gives it back with |Δ| {off:.3g}, ε is {epsilon:.3g}: this is not the model "
                "that made the run, or the run is not healthy; name the model with --model"
            )
    bench = Bench(loaded, suspect.prompt, suspect.tokens, others)
    rough = [Bench(loaded, suspect.prompt, suspect.tokens, others, chunk=size) for size in (3, max(5, bench.n // 8))]
    start = _deltas(bench, bench.plain, suspect)
    distance = max(start)

    def done(kind: str, met=(), neighbours=None, tried=(), left_out=None) -> Twin:
        seconds = round(time.perf_counter() - began, 1)
        found = Twin(
            kind,
            tuple(met),
            neighbours or {},
            tuple(tried),
            left_out or {},
            distance,
            epsilon,
            bench.runs + sum(one.runs for one in rough),
            seconds,
        )
        return Twin(**{**found.__dict__, "sentence": _sentence(found)})

    if distance <= epsilon:
        return done("nothing to explain")
    if not distance < float("inf"):
        return done("no number")
    if distance <= BEYOND * epsilon:
        return done("unclear")

    from tqdm.auto import tqdm

    met, neighbours, tried, left_out = [], {}, [], {}
    bar = tqdm(HYPOTHESES if hypotheses is None else hypotheses, unit="hypothesis", disable=not progress, leave=False)
    for one in bar:
        bar.set_description(one.name)
        why = _not_for(one, bench, start[0], epsilon)
        if why:
            left_out[one.name] = why
            continue
        best = []
        for index, other in enumerate(bench.others) if "others" in one.needs else [(None, None)]:
            best += _try(one, bench, rough, suspect, epsilon, index, other, met, neighbours)
        if best:
            closest = min(best, key=lambda a: a.miss)
            tried.append(Try(**{**closest.__dict__, "tried": sum(a.tried for a in best)}))
        else:
            left_out[one.name] = "none of its numbers fits this request, or none changes it"
        if first and met:
            break
    met.sort(key=lambda a: a.miss)
    names = {made.hypothesis for made in met}
    nearly = any(made.miss <= BEYOND * epsilon for made in tried)
    kind = ("unclear" if nearly else "none") if not met else "named" if len(names) == 1 else "several"
    return done(kind, met, neighbours, tried, left_out)


def own_arms(loaded: Loaded, reference: Any, chunks: Sequence[int | None] = (None, 1, 3)) -> dict[str, Any]:
    """The model's own healthy runs of `reference`, in one forward and in pieces, as differences from it: what ε is measured on.

    For `kvlab.compare.bound`, where no other healthy runs are at hand. Raises ValueError as `search` does.
    """
    _check(loaded, reference, "reference")
    arms = {}
    for chunk in chunks:
        bench = Bench(loaded, reference.prompt, reference.tokens, chunk=chunk)
        run = SimpleNamespace(prompt=bench.prompt, tokens=bench.tokens, logits=bench.plain.numpy())
        arms[f"{loaded.name} in pieces of {chunk}" if chunk else f"{loaded.name} in one forward"] = compare(reference, run)
    return arms


def _check(loaded: Loaded, run: Any, name: str) -> None:
    kind, values, ids = scores(run)
    if kind == "tokens" or values is None:
        raise ValueError(f"{name}: it has tokens only; a twin is compared by logits: record them (kvlab.probe.Tap)")
    if len(values) < len(run.tokens) or not len(run.tokens) or not len(run.prompt):
        raise ValueError(f"{name}: it needs a prompt, and a row of scores for every token")
    vocab = int(loaded.model.config.vocab_size)
    width = vocab if kind.startswith("top") else values.shape[-1]
    if width != vocab or max([*map(int, run.prompt), *map(int, run.tokens)]) >= vocab:
        raise ValueError(f"{name}: its vocabulary has {width} tokens, that of {loaded.name} {vocab}: it is another model's run")


def _deltas(bench: Bench, logits: torch.Tensor, run: Any) -> tuple[float, ...]:
    """max |Δ| of each step between a twin and a run with the same tokens; NaN counts as infinite."""
    kind, values, _ = scores(run)
    if kind == "logits":
        gap = np.abs(logits.numpy() - values[: len(logits)]).max(-1)
        return tuple(float("inf") if g != g else float(g) for g in gap)
    mine = SimpleNamespace(prompt=bench.prompt, tokens=list(map(int, run.tokens)), logits=logits.numpy())
    return compare(mine, run).deltas


def _not_for(one: Hypothesis, bench: Bench, at_once: float, epsilon: float) -> str:
    if "others" in one.needs and not bench.others:
        return "it needs other requests' tokens (others), and none are given"
    if "window" in one.needs and not bench.window:
        return "the model has no window"
    if "rotary" in one.needs and not bench.rotary:
        return "the model's positions are not rotated"
    if "learned" in one.needs and bench.rotary:
        return "with rotary positions only distances count: steps-shifted says it"
    if one.later and at_once > epsilon:
        return f"it leaves the first token alone, and there the suspect is {at_once:.2g} off"
    if one.later and bench.steps < 2:
        return "the suspect has no cached step"
    return ""


def _try(one, bench, rough, suspect, epsilon, index, other, met, neighbours) -> list[Try]:
    """The best try of one hypothesis (with one other request); what meets goes into `met`, those next to it into `neighbours`."""
    found: dict[Any, Try] = {}

    def play(number) -> Try:
        if number not in found:
            logits = one.play(bench, number, other)
            miss = max(_deltas(bench, logits, suspect))
            moves = float(np.nan_to_num(np.abs(logits.numpy() - bench.plain.numpy()).max(), nan=np.inf))
            within = epsilon
            if epsilon < miss <= WIDEST * epsilon:
                own = max(float((one.play(pieces, number, other) - logits).abs().max()) for pieces in rough)
                within = min(max(epsilon, HEADROOM * own), WIDEST * epsilon)
            found[number] = Try(one.name, one.families, number, miss, moves, 1, index, one.sentence(number), within)
        return found[number]

    def meets(made: Try) -> bool:
        return made.miss <= made.within and made.moves > BEYOND * made.within

    most = MOST if bench.n <= SHORT else max(8, MOST * SHORT // bench.n)
    numbers = list(one.numbers(bench, other))[:most]
    for number in numbers:
        made = play(number)
        if meets(made):
            met.append(made)
            for near in _next_to(one, bench, number, other):
                beside = play(near)
                neighbours[one.name, near] = beside.miss
                if meets(beside):
                    met.append(beside)
            break
    moving = [made for made in found.values() if made.moves > epsilon]
    if not moving:
        return []
    closest = min(moving, key=lambda made: made.miss)
    return [Try(**{**closest.__dict__, "tried": len(found)})]


def _next_to(one: Hypothesis, bench: Bench, number: Any, other) -> list:
    if not isinstance(number, int):
        return []
    allowed = set(one.numbers(bench, other))
    return [near for near in (number - 1, number + 1) if near in allowed]


def _sentence(t: Twin) -> str:
    if t.kind == "nothing to explain":
        return f"Nothing to explain: the suspect is within ε = {t.epsilon:.3g} of the healthy run ({t.distance:.3g})."
    if t.kind == "no number":
        return "No twin: the suspect has a logit that is no finite number; find out where it comes from first (a row fully masked?)."
    if t.kind == "unclear" and t.tried:
        near = t.nearest
        return (
            f"Unclear: {near.hypothesis} ({near.sentence}) comes to {near.miss:.3g}, a little beyond ε = {t.epsilon:.3g}; the healthy run "
            f"misses by {t.distance:.3g}. Measure ε on more healthy arms of this prompt."
        )
    if t.kind == "unclear":
        return (
            f"No twin: the suspect is {t.distance:.3g} from the healthy run, between ε = {t.epsilon:.3g} and {BEYOND * t.epsilon:.3g}; "
            "a twin that near would meet it too. Measure more healthy arms, or replay in fp32."
        )
    absent = [name for name, why in t.left_out.items() if "none are given" in why]
    hint = f" Not tried for want of other requests' tokens: {', '.join(absent)}." if absent else ""
    missed = t.nearest and f"{t.nearest.hypothesis} ({t.nearest.sentence}) misses by {t.nearest.miss:.3g}"
    if t.kind == "none":
        near = f" The nearest, {missed}; the healthy run by {t.distance:.3g}." if missed else ""
        return f"None of mine: {len(t.tried)} hypotheses tried, none meets the suspect within ε = {t.epsilon:.3g}.{near}{hint}"
    if t.kind == "several":
        each = "; ".join(f"{one.hypothesis}: {one.sentence} ({one.miss:.2g})" for one in t.met)
        return f"Several meet the suspect within ε = {t.epsilon:.3g}; it may be any of them: {each}.{hint}"
    one = t.met[0]
    numbers = [made.number for made in t.met]
    beside = ", ".join(f"{near} misses by {miss:.2g}" for (_, near), miss in t.neighbours.items() if near not in numbers)
    if len(numbers) > 1:
        beside = f"{' and '.join(map(str, numbers))} meet alike" + ("; " + beside if beside else "")
    families = " or ".join(one.families)
    limit = f"ε = {t.epsilon:.2g}" + (f", of this twin {one.within:.2g}" if one.within > t.epsilon else "")
    return (
        f"{families}, {one.hypothesis}: {one.sentence}. It meets the suspect to {one.miss:.2g} ({limit}; the healthy run "
        f"misses by {t.distance:.2g}{'; ' + beside if beside else ''}{'; of the others the nearest, ' + missed if missed else ''}).{hint}"
    )
