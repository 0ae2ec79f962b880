"""One forward over many requests without a pad: their new tokens in one row, each attending to its own K/V in the pool.

`PagedPool.inputs` puts requests side by side as the rows of a batch, padded to the longest. That is right, and a waste where one
row brings a prompt of 200 tokens and the others one token each. Here all new tokens stand in one row, `[1, tokens]`: the linear layers
see them at once, and only attention, which is registered with Transformers under the name `NAME`, looks at requests one by one: those
with one new token together, padded in their K/V alone, each longer piece by itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, Cache

from kvlab.runtime.models import Loaded
from kvlab.runtime.paged import PagedPool

NAME = "kvlab_packed"


@dataclass(frozen=True)
class Piece:
    """`count` new tokens of a sequence, the first of which stands at position `start`. (A scheduler's pieces are such, too.)"""

    seq: Hashable
    start: int
    count: int


@dataclass(frozen=True)
class Packed:
    """What one forward writes and reads. Slots are `block * block_size + offset`; `first` is each piece's place in the row."""

    pool: PagedPool
    pieces: list[Piece]
    first: list[int]
    write: torch.Tensor  # [tokens]
    single: list[int]  # pieces of one token: decode steps
    read: torch.Tensor  # [single pieces, longest]: their slots, left-aligned
    beyond: torch.Tensor  # [single pieces, longest]: True past the end
    long: list[tuple[int, torch.Tensor]]  # every other piece, and its slots up to its last new token


class PackedCache(Cache):
    """Writes new K/V into the pool. What attention reads, it takes from the pool itself."""

    def __init__(self, packed: Packed) -> None:
        super().__init__(layers=[])
        self.packed = packed

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Write one layer's K/V, `[1, kv_heads, tokens, head_dim]`; they are returned as they came."""
        for store, new in ((self.packed.pool.keys, key_states), (self.packed.pool.values, value_states)):
            store[layer_idx].flatten(0, 1).index_copy_(0, self.packed.write, new[0].transpose(0, 1))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def plan(pool: PagedPool, pieces: Sequence[Piece]) -> Packed:
    """Where each piece's K/V goes, and what its queries may read."""
    size, device = pool.block_size, pool.keys.device
    first, at, write, slots = [], 0, [], []
    for piece in pieces:
        stop = piece.start + piece.count
        blocks = torch.tensor(pool.manager.block_table(piece.seq)[: -(-stop // size)])
        own = (blocks[:, None] * size + torch.arange(size)).flatten()[:stop]
        slots.append(own)
        write.append(own[piece.start :])
        first.append(at)
        at += piece.count
    single = [n for n, piece in enumerate(pieces) if piece.count == 1]
    widest = max((len(slots[n]) for n in single), default=0)
    read = torch.zeros(len(single), widest, dtype=torch.long)
    beyond = torch.ones(len(single), widest, dtype=torch.bool)
    for row, n in enumerate(single):
        read[row, : len(slots[n])] = slots[n]
        read[row, len(slots[n]) :] = slots[n][0]  # masked, and the row's own
        beyond[row, : len(slots[n])] = False
    long = [(n, slots[n].to(device)) for n, piece in enumerate(pieces) if piece.count > 1]
    return Packed(
        pool, list(pieces), first, torch.cat(write).to(device), single, read.to(device), beyond.to(device), long
    )  # fmt: skip


def fed(pool: PagedPool, piece: Piece) -> list[int]:
    """The ids of a piece's tokens."""
    return pool.manager.tokens(piece.seq)[piece.start : piece.start + piece.count]


def attention(module, query, key, value, attention_mask, *, packed: Packed, scaling=None, sliding_window=None, **kwargs):
    """Attention of a packed row: `query` `[1, heads, tokens, head_dim]`; keys and values are read from the pool.

    Returns `[1, tokens, heads, head_dim]` and no weights. Raises ValueError for what it does not do: capped scores, sinks.
    """
    unknown = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if unknown:
        raise ValueError(f"packed attention does not know {unknown[0]}, which this model needs")
    heads, dim = query.shape[1], query.shape[3]
    keys, values = (store[module.layer_idx].flatten(0, 1) for store in (packed.pool.keys, packed.pool.values))
    groups = heads // keys.shape[1]
    out = torch.empty(query.shape[2], heads, dim, dtype=query.dtype, device=query.device)
    if packed.single:
        at = torch.tensor([packed.first[n] for n in packed.single], device=query.device)
        rows, width = packed.read.shape
        k, v = (store.index_select(0, packed.read.flatten()).view(rows, width, -1, dim) for store in (keys, values))
        hidden = packed.beyond
        if sliding_window is not None:
            position = torch.tensor([packed.pieces[n].start for n in packed.single], device=query.device)
            hidden = hidden | (torch.arange(width, device=query.device) <= position[:, None] - sliding_window)
        mask = None if not hidden.any() else ~hidden[:, None, None, :]
        # the query heads of a group become its rows: [rows, kv_heads, groups, dim] against [rows, kv_heads, width, dim]
        q = query[0, :, at].transpose(0, 1).reshape(rows, heads // groups, groups, dim)
        got = F.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scaling)
        out[at] = got.reshape(rows, heads, dim)
    for n, slots in packed.long:
        piece, at = packed.pieces[n], packed.first[n]
        q = query[:, :, at : at + piece.count]
        k, v = (store.index_select(0, slots).transpose(0, 1)[None] for store in (keys, values))
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        mask, causal = None, piece.start == 0 and sliding_window is None
        if not causal:
            own = torch.arange(piece.start, piece.start + piece.count, device=query.device)[:, None]
            there = torch.arange(len(slots), device=query.device)
            mask = there <= own
            if sliding_window is not None:
                mask &= there > own - sliding_window
        got = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scaling)
        out[at : at + piece.count] = got[0].transpose(0, 1)
    return out[None], None


AttentionInterface.register(NAME, attention)


@torch.inference_mode()
def forward(loaded: Loaded, pool: PagedPool, pieces: Sequence[Piece]) -> torch.Tensor:
    """Logits behind each piece's last token, `[pieces, vocab]`, on the model's device; the K/V of what was fed is committed.

    The model must have been switched to `NAME` (`kvlab.runtime.decode.attention_kernel`). A piece begins where the sequence's
    committed tokens end. Raises ValueError for a piece that does not, or that reaches past its sequence.
    """
    for piece in pieces:
        written, length = pool.manager.num_committed(piece.seq), len(pool.manager.tokens(piece.seq))
        if piece.start != written or not 0 < piece.count <= length - written:
            raise ValueError(
                f"piece {piece} does not go on where {piece.seq!r} is: {written} of its {length} tokens are in the pool"
            )
    packed = plan(pool, pieces)
    tokens = [token for piece in pieces for token in fed(pool, piece)]
    positions = torch.cat([torch.arange(p.start, p.start + p.count) for p in pieces])
    device = pool.keys.device
    last = torch.tensor([first + piece.count - 1 for first, piece in zip(packed.first, pieces, strict=True)], device=device)
    logits = loaded.model(
        input_ids=torch.tensor([tokens], device=device),
        position_ids=positions[None].to(device),
        cache=PackedCache(packed),
        use_cache=True,
        logits_to_keep=last,
        packed=packed,
    ).logits[0]
    for piece in pieces:
        pool.manager.commit(piece.seq, piece.start + piece.count)
    return logits
