"""Prefill and greedy decode, written out so that every step can be watched.

One loop serves the whole course. What varies is an argument: the cache (a fresh one, one that is handed in, none), the
prefill's chunks, the rows that run together. What a server does between and inside requests is five small functions below
(:func:`reset`, :func:`attention_mask`, :func:`positions`, :func:`step_positions`, :func:`valid_length`); the loop calls them by
name, so that a fault of the zoo can replace exactly one of them and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer, get_layer_types_and_kwargs

from kvlab.compare import Step
from kvlab.runtime.models import Loaded


@dataclass
class Trace:
    """One row of one run. `logits` is `[steps, vocab]`, fp32, on the CPU: what each generated token was chosen from."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    logits: torch.Tensor | None = None

    def margins(self) -> torch.Tensor:
        """Top-1 minus top-2 logit at each step, `[steps]`."""
        return margins(self.logits)


def margins(logits: torch.Tensor) -> torch.Tensor:
    """Top-1 minus top-2 logit along the last axis: how far the greedy choice is from another. `[..., vocab]` → `[...]`."""
    top = logits.topk(2, dim=-1).values
    return top[..., 0] - top[..., 1]


# --- what a server does between and inside requests: each of these can be broken by one fault of the zoo ---------------


def reset(cache: Cache) -> None:
    """Forget the previous request. A static buffer keeps its storage and its old values: only its length goes to 0."""
    length = int(cache.get_seq_length())
    if isinstance(cache, StaticCache):
        if length:
            cache.crop(-length)
    else:
        cache.reset()


def attention_mask(is_token: torch.Tensor) -> torch.Tensor:
    """`[batch, slots]`, 1 where a slot holds a token, 0 where it holds padding."""
    return is_token.long()


def positions(is_token: torch.Tensor, start: int) -> torch.Tensor:
    """Position ids of a prefill, `[batch, seq]`: each row counts its own tokens from `start`, padding does not count."""
    return (is_token.long().cumsum(-1) - 1).clamp(min=0) + start


def step_positions(history: torch.Tensor) -> torch.Tensor:
    """Position id of the next token of each row, `[batch, 1]`: it goes on from that row's own history, `[batch]`."""
    return history[:, None]


def valid_length(written: int, high_water: int) -> int:
    """How many slots of a static buffer hold this request's tokens: what it has written, whatever lay there before."""
    return written


# ----------------------------------------------------------------------------------------------------------------------


def pad_left(rows: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and token mask, both `[batch, longest]`, padding on the left, so that the last column is every row's last token."""
    longest = max(map(len, rows))
    ids = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in rows])
    is_token = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows])
    return ids, is_token


@torch.inference_mode()
def greedy(
    loaded: Loaded,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    cache: Cache | None = None,
    use_cache: bool = True,
    chunk: int | None = None,
) -> list[Trace]:
    """Prefill `prompts` (rows of token ids) and decode `new_tokens` greedily; one :class:`Trace` a row.

    cache      None: a fresh DynamicCache. A cache that is handed in is :func:`reset` first, then filled. A StaticCache is
               used as a server uses a buffer: what may be seen is said by a length, not by what the slots contain. Make it
               with :func:`static_cache`: where the model has windows, every layer has to keep all slots.
    use_cache  False: every step computes the whole history again, the control experiment of claim A24.
    chunk      prefill in pieces of this many tokens.

    Generation does not stop at an end-of-text token: every run of an experiment has the same number of steps.
    Raises ValueError for an empty prompt, `new_tokens` or `chunk` below 1, a cache together with `use_cache=False`, or a
    StaticCache with too few slots.
    """
    if not prompts or not all(len(row) for row in prompts):
        raise ValueError("prompts: every row needs at least one token id")
    if new_tokens < 1 or (chunk is not None and chunk < 1):
        raise ValueError("new_tokens and chunk must be at least 1")
    if cache is not None and not use_cache:
        raise ValueError("cache: leave it out when use_cache=False; nothing would be read from it")

    device = loaded.model.device
    ids, own_tokens = (t.to(device) for t in pad_left(prompts, loaded.tokenizer.pad_token_id))
    if use_cache:
        cache = DynamicCache(config=loaded.model.config) if cache is None else cache
        high_water = int(cache.get_seq_length())
        reset(cache)
    held = int(cache.get_seq_length()) if use_cache else 0
    static = isinstance(cache, StaticCache)
    if static:
        high_water = max(high_water, getattr(cache, "high_water", 0))
        slots = _slots(cache, held + ids.shape[1], new_tokens)
        seen_by = windows(loaded)

    rows = len(prompts)
    traces = [Trace(list(prompt)) for prompt in prompts]
    logits_of_step = []
    is_token = torch.cat([torch.ones(rows, held, dtype=torch.bool, device=device), own_tokens], dim=1)
    history = own_tokens.sum(-1) + held  # tokens before the next one, per row
    fed_positions = positions(own_tokens, held)
    start = held  # first slot that is not yet in the cache
    for step in range(new_tokens):
        if not use_cache:
            start, fed_positions = 0, positions(is_token, 0)
        for begin, end in pieces(start, is_token.shape[1], chunk if step == 0 else None):
            mask = fed_mask = attention_mask(is_token[:, :end])
            beyond = 0
            if static:
                beyond = max(0, valid_length(end, high_water) - end) if end - begin == 1 else 0
                see = functools.partial(buffer_mask, mask, begin, slots, beyond, loaded.model.dtype)
                masks = {kind: see(window) for kind, window in seen_by.items()}
                fed_mask = masks if len(masks) > 1 else next(iter(masks.values()))
                mask = see()[:, 0, -1] == 0
            fed = slice(begin - held, end - held)
            logits = forward(loaded, ids[:, fed], fed_mask, fed_positions[:, fed], cache if use_cache else None)
        start = end
        logits_of_step.append(logits.float().cpu())
        chosen = logits_of_step[-1].argmax(-1)
        for row, trace in enumerate(traces):
            own = int(is_token[row].sum()) - held
            trace.steps.append(Step(own, int(fed_positions[row, -1]), int(mask[row].sum()), beyond, held))
            trace.tokens.append(int(chosen[row]))
        ids = torch.cat([ids, chosen[:, None].to(device)], dim=1)
        is_token = torch.cat([is_token, is_token.new_ones(rows, 1)], dim=1)
        fed_positions = torch.cat([fed_positions, step_positions(history).to(device)], dim=1)
        history = history + 1
    if static:
        cache.high_water = max(high_water, start)
    for row, trace in enumerate(traces):
        trace.logits = torch.stack([logits[row] for logits in logits_of_step])
    return traces


def pieces(start: int, end: int, chunk: int | None) -> list[tuple[int, int]]:
    """Slots `start..end` cut into runs of at most `chunk`."""
    size = chunk or max(end - start, 1)
    return [(at, min(at + size, end)) for at in range(start, end, size)]


def buffer_mask(
    mask: torch.Tensor, begin: int, slots: int, beyond: int, dtype: torch.dtype, window: int | None = None
) -> torch.Tensor:
    """The additive mask of a static buffer, `[batch, 1, query, slots]`: 0 where a query may look, the dtype's least elsewhere.

    `mask` is `[batch, written]`; queries fill slots `begin..written`. `beyond` more slots are open to a single query: 0 when
    the buffer's length is right. With a `window` a query sees its own slot and `window` − 1 before it.
    """
    rows, written = mask.shape
    queries = torch.arange(begin, written, device=mask.device)
    slot = torch.arange(slots, device=mask.device)
    may_see = slot[None, :] <= queries[:, None]
    if window is not None:
        may_see &= slot[None, :] > queries[:, None] - window
    may_see = may_see.expand(rows, -1, -1).clone()
    may_see[:, :, :written] &= mask[:, None, :].bool()
    may_see[:, :, written : written + beyond] = True
    return torch.where(may_see, 0.0, torch.finfo(dtype).min).to(dtype)[:, None]


def windows(loaded: Loaded) -> dict[str, int | None]:
    """The kinds of layers a model has, by Transformers' name, and how many tokens each sees; None: all.

    Raises ValueError where a layer sees by another rule than a sliding window, or two of a kind have different windows.
    """
    kinds, options = get_layer_types_and_kwargs(loaded.model.config.get_text_config(decoder=True))
    found: dict[str, int | None] = {}
    for kind, given in zip(kinds, options):
        window = given.get("sliding_window")
        if (given and kind != "sliding_attention") or found.setdefault(kind, window) != window:
            raise ValueError(f"cache: a static buffer has no mask for layers of type {kind!r} ({given}); leave out the cache")
    return found


def _slots(cache: StaticCache, prompt: int, new_tokens: int) -> int:
    """How many tokens the buffer keeps, or ValueError when it is too few. The last new token is never stored."""
    sizes = {layer.max_cache_len for layer in cache.layers}
    slots, need = min(sizes), prompt + new_tokens - 1
    if any(cache.is_sliding) and (need > slots or len(sizes) > 1):
        raise ValueError(
            f"cache: its layers with a sliding window keep {slots} slots, and the request needs {need} in every layer; make "
            f"the buffer with static_cache(loaded, {max(need, *sizes)})"
        )
    if need > slots:
        raise ValueError(f"cache: {slots} slots are too few for {prompt} prompt and {new_tokens} new tokens")
    return slots


def forward(
    loaded: Loaded,
    ids: torch.Tensor,
    mask: torch.Tensor | dict[str, torch.Tensor],
    position_ids: torch.Tensor,
    cache: Cache | None,
) -> torch.Tensor:
    """Logits of the last column, `[batch, vocab]`; the cache, if any, takes up the new keys and values."""
    out = loaded.model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=position_ids,
        cache=cache,
        use_cache=cache is not None,
        logits_to_keep=1,
    )
    return out.logits[:, -1]


@torch.inference_mode()
def score(loaded: Loaded, ids: Sequence[int]) -> torch.Tensor:
    """Logits `[len(ids), vocab]` of one forward over `ids`: row t is what token t+1 is chosen from. fp32, on the CPU."""
    out = loaded.model(input_ids=torch.tensor([list(ids)], device=loaded.model.device), use_cache=False)
    return out.logits[0].float().cpu()


@torch.inference_mode()
def by_generate(loaded: Loaded, ids: torch.Tensor, new_tokens: int, mask: torch.Tensor | None, **options):
    """Transformers' own `generate` on `ids`, `[batch, seq]`: greedy, exactly `new_tokens` tokens, with the logits of each step.

    `options` go to `generate` as they are. Returns what it returns.
    """
    return loaded.model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=loaded.tokenizer.pad_token_id,
        **options,
    )


def static_cache(loaded: Loaded, slots: int) -> StaticCache:
    """A buffer of `slots` tokens a row, allocated once and meant to be used again.

    Transformers' own keeps a window's worth of slots in layers with a sliding window, and moves tokens about in them. Here
    every layer keeps all, and the window is in the mask (:func:`buffer_mask`): a slot is a token's for as long as it lives.
    """
    cache = StaticCache(config=loaded.model.config, max_cache_len=slots)
    cache.layers = [StaticLayer(slots) if type(layer) is StaticSlidingWindowLayer else layer for layer in cache.layers]
    return cache


@contextlib.contextmanager
def attention_kernel(loaded: Loaded, name: str) -> Iterator[None]:
    """Run with another attention implementation (`"sdpa"`, `"eager"`) and go back."""
    before = loaded.model.config._attn_implementation
    loaded.model.set_attn_implementation(name)
    try:
        yield
    finally:
        loaded.model.set_attn_implementation(before)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with `count` CPU threads and go back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
