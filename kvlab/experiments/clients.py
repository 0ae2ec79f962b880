"""Short programs as people write them around Transformers' caches: hand one on, fork it, look ahead, roll back, shift a context.

What each of them must get right is a function of its own, so that a fault of the zoo can replace exactly that. The faults
themselves are in `kvlab.faults.transformers`; the programs are run by `kvlab.experiments.zoo`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence

import torch
from transformers import Cache, DynamicCache

from kvlab.experiments.prompts import encode
from kvlab.runtime import Loaded
from kvlab.runtime.decode import Step, Trace, by_generate, static_cache

# --- what must be right: each of these can be broken by one fault of the zoo -------------------------------------------


def hand_on(cache: Cache) -> Cache:
    """A saved prefix for one more request, which will append to it."""
    return copy.deepcopy(cache)


def fork(cache: Cache) -> Cache:
    """A second branch of a static buffer, which will write into it."""
    return copy.deepcopy(cache)


def for_a_look(cache: Cache) -> Cache:
    """A cache to try a continuation on. `use_cache=False` is no protection: a cache that is passed in is written to."""
    return copy.deepcopy(cache)


def remember(cache: Cache) -> int:
    """How long the cache is now, to come back to later. A StaticCache answers with the tensor it counts with."""
    return int(cache.get_seq_length())


def forget(cache: Cache) -> None:
    """The weights have changed: what the old ones computed is of no use."""
    cache.reset()


def turn(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Keys `[batch, kv_heads, seq, head_dim]` rotated on by the angle of `cos` and `sin`, `[1, 1, 1, head_dim]` (RoFormer, eq. 34)."""
    half = keys.shape[-1] // 2
    return keys * cos + torch.cat((-keys[..., half:], keys[..., :half]), dim=-1) * sin


def last_column(is_token: torch.Tensor) -> torch.Tensor:
    """The column of each row's last token, `[batch, columns]` → `[batch]`."""
    columns = torch.arange(is_token.shape[1], device=is_token.device)
    return (columns * is_token).argmax(-1)


def row_positions(is_token: torch.Tensor) -> torch.Tensor | None:
    """Position ids `[batch, columns]`: each row counts its own tokens from 0."""
    return (is_token.long().cumsum(-1) - 1).clamp(min=0)


def token_ids(tokenizer, pieces: Sequence[str]) -> list[int]:
    """The ids of a prompt that is put together from pieces of text."""
    return encode(tokenizer, "".join(pieces))


# --- the programs' one loop --------------------------------------------------------------------------------------------


@torch.inference_mode()
def prefill(loaded: Loaded, ids: Sequence[int], cache: Cache | None = None) -> Cache:
    """`cache`, by default a new DynamicCache, with `ids` in it."""
    cache = DynamicCache(config=loaded.model.config) if cache is None else cache
    loaded.model(input_ids=_row(loaded, ids), cache=cache, use_cache=True, logits_to_keep=1)
    return cache


@torch.inference_mode()
def go_on(
    loaded: Loaded,
    cache: Cache,
    prompt: Sequence[int],
    cached: int,
    new_tokens: int,
    *,
    fed: Sequence[int] | None = None,
    shifted: int = 0,
    hidden: int = 0,
) -> Trace:
    """Feed what of `prompt` is not cached, then decode greedily; positions follow from the cache's length, as by default.

    cached    how many of the prompt's tokens the cache is meant to hold
    fed       token ids to feed instead of `prompt[cached:]`
    shifted   the request begins at this position instead of 0
    hidden    this many of the cache's first slots are masked

    The log says what was passed to the model; positions in it are counted from where the request begins.
    """
    trace, logits = Trace(list(prompt)), []
    fed = list(prompt[cached:] if fed is None else fed)
    began = seen = int(cache.get_seq_length())
    for step in range(new_tokens):
        past = int(cache.get_seq_length())
        position = past + shifted
        options = {}
        if shifted:
            options["position_ids"] = torch.arange(position, position + len(fed), device=loaded.model.device)[None]
        if hidden:
            mask = torch.ones(1, past + len(fed), dtype=torch.long, device=loaded.model.device)
            mask[:, :hidden] = 0
            options["attention_mask"] = mask
        out = loaded.model(input_ids=_row(loaded, fed), cache=cache, use_cache=True, logits_to_keep=1, **options)
        seen += len(fed)
        logits.append(out.logits[0, -1].float().cpu())
        own = len(prompt) + step
        trace.steps.append(Step(own, past + len(fed) - 1 - hidden, seen - hidden, 0, began - cached - hidden))
        trace.tokens.append(int(logits[-1].argmax()))
        fed = [trace.tokens[-1]]
    trace.logits = torch.stack(logits)
    return trace


def _row(loaded: Loaded, ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor([list(ids)], device=loaded.model.device)


# --- the programs ------------------------------------------------------------------------------------------------------


def two_on_a_prefix(loaded: Loaded, prefix: Sequence[int], first: Sequence[int], second: Sequence[int], new: int) -> Trace:
    """A saved prefix serves one request, then another. Returns the second."""
    saved = prefill(loaded, prefix)
    go_on(loaded, hand_on(saved), [*prefix, *first], len(prefix), 1)
    return go_on(loaded, hand_on(saved), [*prefix, *second], len(prefix), new)


def two_branches(
    loaded: Loaded, prefix: Sequence[int], one: Sequence[int], other: Sequence[int], more: Sequence[int], new: int
) -> Trace:
    """A buffer is forked; one branch says `one`, then the other says `other`; the first goes on with `more`. Returns it."""
    trunk = prefill(loaded, prefix, static_cache(loaded, len(prefix) + len(one) + len(more) + new))
    branch, twin = fork(trunk), fork(trunk)
    prefill(loaded, one, branch)
    prefill(loaded, other, twin)
    said = [*prefix, *one]
    return go_on(loaded, branch, [*said, *more], len(said), new)


@torch.inference_mode()
def look_ahead(loaded: Loaded, prompt: Sequence[int], candidate: Sequence[int], new: int) -> Trace:
    """Before the request goes on, a continuation is tried on its cache, with `use_cache=False`. Returns the request."""
    cache = prefill(loaded, prompt[:-1])
    loaded.model(input_ids=_row(loaded, candidate), cache=for_a_look(cache), use_cache=False, logits_to_keep=1)
    return go_on(loaded, cache, prompt, len(prompt) - 1, new)


def roll_back(loaded: Loaded, prefix: Sequence[int], first: Sequence[int], second: Sequence[int], new: int) -> Trace:
    """One static buffer: after each request it is rolled back to the prefix. Returns the second request."""
    cache = prefill(loaded, prefix, static_cache(loaded, len(prefix) + len(first) + len(second) + new))
    mark = remember(cache)
    prefill(loaded, first, cache)
    cache.crop(int(mark) - int(cache.get_seq_length()))
    return go_on(loaded, cache, [*prefix, *second], len(prefix), new)


@torch.inference_mode()
def one_buffer(loaded: Loaded, first: Sequence[int], second: Sequence[int], new: int) -> Trace:
    """One StaticCache, reset between two requests. Returns the second."""
    cache = prefill(loaded, first, static_cache(loaded, len(first) + len(second) + new))
    cache.reset()
    return go_on(loaded, cache, second, 0, new)


def updated(loaded: Loaded, prefix: Sequence[int], question: Sequence[int], new: int) -> Trace:
    """A prefix is cached, then the weights are updated. Returns a request on that prefix under the new weights."""
    cache = prefill(loaded, prefix)
    with adapter(loaded):
        forget(cache)
        return go_on(loaded, cache, [*prefix, *question], int(cache.get_seq_length()), new)


@contextlib.contextmanager
def adapter(loaded: Loaded, strength: float = 0.15, seed: int = 4) -> Iterator[None]:
    """Other weights for a while: noise merged into every value projection, as a low-rank adapter would be; then the old ones."""
    layers = [layer.self_attn.v_proj.weight for layer in loaded.model.model.layers]
    before = [weight.detach().clone() for weight in layers]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in layers:
            weight += (torch.randn(weight.shape, generator=generator) * weight.std().cpu() * strength).to(weight)
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, old in zip(layers, before):
                weight.copy_(old)


@torch.inference_mode()
def shift_context(loaded: Loaded, ids: Sequence[int], dropped: int, question: Sequence[int], new: int) -> Trace:
    """A context that is full: its first tokens are dropped, the rest is renumbered from 0. Returns what is said after it."""
    cache = prefill(loaded, ids)
    at = torch.tensor([[-dropped]], device=loaded.model.device)
    cos, sin = (angle[:, None] for angle in loaded.model.model.rotary_emb(cache.layers[0].keys, at))
    for layer in cache.layers:
        layer.keys = turn(layer.keys[:, :, dropped:], cos, sin)
        layer.values = layer.values[:, :, dropped:]
    kept = list(ids[dropped:])
    return go_on(loaded, cache, [*kept, *question], len(kept), new)


def from_afar(loaded: Loaded, prompt: Sequence[int], position: int, new: int) -> Trace:
    """A request whose first token stands at `position`, as after a long history that has been dropped."""
    return go_on(loaded, DynamicCache(config=loaded.model.config), prompt, 0, new, shifted=position)


@torch.inference_mode()
def padded(loaded: Loaded, rows: Sequence[Sequence[int]], new: int, *, side: str) -> list[Trace]:
    """Rows of different lengths as one batch, padded on the `side`, without a cache: every step computes all anew."""
    rows, traces = [list(row) for row in rows], [Trace(list(row)) for row in rows]
    logits = []
    for _ in range(new):
        longest = max(map(len, rows))
        at = [longest - len(row) if side == "left" else 0 for row in rows]
        ids = torch.full((len(rows), longest), loaded.tokenizer.pad_token_id)
        is_token = torch.zeros(len(rows), longest, dtype=torch.bool)
        for r, row in enumerate(rows):
            ids[r, at[r] : at[r] + len(row)] = torch.tensor(row)
            is_token[r, at[r] : at[r] + len(row)] = True
        positions = row_positions(is_token)
        out = loaded.model(
            input_ids=ids.to(loaded.model.device),
            attention_mask=is_token.long().to(loaded.model.device),
            position_ids=None if positions is None else positions.to(loaded.model.device),
            use_cache=False,
        )
        read = last_column(is_token)
        logits.append(out.logits[torch.arange(len(rows)), read].float().cpu())
        given = torch.arange(longest).expand(len(rows), -1) if positions is None else positions
        for r, (row, trace) in enumerate(zip(rows, traces)):
            column = int(read[r])
            shown = int(is_token[r, : column + 1].sum())
            # a pad reads the row's tokens, and stands past the last of them
            position = int(given[r, column]) + (0 if is_token[r, column] else column - len(row) + 1)
            trace.steps.append(Step(len(row), position, shown, 0, 0))
            trace.tokens.append(int(logits[-1][r].argmax()))
            row.append(trace.tokens[-1])
    for r, trace in enumerate(traces):
        trace.logits = torch.stack([step[r] for step in logits])
    return traces


@torch.inference_mode()
def beams(loaded: Loaded, prompt: Sequence[int], new: int, count: int = 4) -> Trace:
    """Beam search by Transformers' `generate`. Returns the best text with the logits each of its tokens was weighed by."""
    ids = _row(loaded, prompt)
    out = by_generate(loaded, ids, new, torch.ones_like(ids), num_beams=count, output_scores=True)
    tokens = out.sequences[0, len(prompt) :].tolist()
    rows = out.beam_indices[0, : len(tokens)].tolist()
    logits = torch.stack([step[row] for step, row in zip(out.logits, rows)]).float().cpu()
    return Trace(list(prompt), tokens, [], logits)


@torch.inference_mode()
def forced(loaded: Loaded, trace: Trace) -> Trace:
    """The same tokens once more, in one forward without a cache: the logits each of them should have been weighed by."""
    ids = [*trace.prompt, *trace.tokens]
    out = loaded.model(input_ids=_row(loaded, ids[:-1]), use_cache=False)
    return Trace(list(trace.prompt), list(trace.tokens), [], out.logits[0, len(trace.prompt) - 1 :].float().cpu())


def assembled(loaded: Loaded, pieces: Sequence[str], new: int) -> Trace:
    """A prompt put together from pieces of text. Its trace carries the ids of the joined text, whatever was fed."""
    trace = go_on(loaded, DynamicCache(config=loaded.model.config), token_ids(loaded.tokenizer, pieces), 0, new)
    trace.prompt = encode(loaded.tokenizer, "".join(pieces))
    return trace
