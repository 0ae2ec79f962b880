"""A Transformers cache whose storage is a block manager's pool.

`PagedPool` is the memory: per layer one tensor of keys and one of values, `[num_blocks, block_size, kv_heads, head_dim]`,
and a `BlockManager` that says which block holds what. `PagedCache` is what a model's forward sees of it: it writes new K/V
into the slots the block tables name and gathers each row's K/V from there again, at every layer of every step. Nothing
is kept beside the pool, so a wrong block shows in the logits at once.

Two ways to use it:

    pool = PagedPool(loaded.spec, num_blocks=64)
    pool.manager.allocate("a", ids)                  # a cached prefix is found here
    logits = model(**pool.inputs(["a", "b"])).logits # feeds what is not in the pool yet, rows of any lengths
    pool.append("a", [token])                        # then inputs() again; fork, truncate, free on pool.manager

    cache = PagedCache(pool)                         # as any other Cache: no token ids, so nothing is found by itself
    model.generate(ids, cache=cache)                 # the next turn takes the same cache; copy.deepcopy(cache) is a fork

A block holds its slots' heads side by side (token-major, as vLLM and FlashAttention's paged kernel do): a gather then moves
whole runs of memory. Head-major blocks cost twelve times as much on a CPU (0.52 ms against 0.04 for 8 rows of 512).
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kvlab.core.blocks import BlockCopy, BlockManager, OutOfBlocks
from kvlab.core.spec import ModelSpec


def may_share(spec: ModelSpec) -> bool:
    """Whether a token's K/V is a function of the tokens before it, so that another request may use it.

    Under `spec.rope_by_length` it is not: the same tokens in a longer request are rotated by other angles. (`fork` and
    `share_prefix` go by the caller's word: they are what a copy of a DynamicCache is, whole or cropped.)
    """
    return spec.rope_by_length is None


class PagedPool:
    """K/V memory for `num_blocks` blocks of `block_size` tokens, and the manager that hands them out.

    Args:
        spec: the model's shape; its `dtype` is the pool's.
        num_blocks, block_size: the pool's size; `num_blocks * block_size` tokens fit.
        device: where the tensors lie.
        manager: bring your own (anything with `BlockManager`'s public face); by default a new one.
        cache_prefixes: whether the new manager finds prefixes; by default where the model allows it (:func:`may_share`).

    Raises:
        ValueError: the layers do not all keep keys and values of one shape; or prefixes are to be found, and the model's K/V
            depends on the request's length.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int = 16,
        *,
        device: str | torch.device = "cpu",
        manager: BlockManager | None = None,
        cache_prefixes: bool | None = None,
    ) -> None:
        if cache_prefixes is None:
            cache_prefixes = may_share(spec)
        self.manager = manager or BlockManager(num_blocks, block_size, cache_prefixes=cache_prefixes)
        if not may_share(spec) and getattr(self.manager, "cache_prefixes", True):
            raise ValueError(
                f"{'manager' if manager else 'cache_prefixes'}: under rope_type {spec.rope_by_length.rope_type!r} a token's K "
                "depends on the request's length, so no request may find another one's; use cache_prefixes=False"
            )
        self._orphans: list[list[Hashable]] = []  # rows of anonymous caches that nobody holds any more
        self.spec, self.num_blocks, self.block_size = spec, num_blocks, block_size
        layers, kv_heads, head_dim = spec.one_shape()
        shape = (layers, num_blocks, block_size, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device)
        self.values = torch.zeros_like(self.keys)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, measured on its tensors."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        return self.nbytes // self.num_blocks

    @property
    def held_nbytes(self) -> int:
        """Bytes of the blocks that sequences hold now; a shared block counts once."""
        return (self.num_blocks - self.manager.num_free_blocks) * self.block_nbytes

    def append(self, seq: Hashable, tokens: Sequence[int]) -> None:
        """`manager.append`, and the copies it asks for."""
        self.copy(self.manager.append(seq, tokens))

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks, all layers."""
        for src, dst in copies:
            self.keys[:, dst] = self.keys[:, src]
            self.values[:, dst] = self.values[:, src]

    def sweep(self) -> None:
        """Free the rows of PagedCaches that are gone. Called before rows are made and by `inputs`, never by the collector."""
        while self._orphans:
            for seq in self._orphans.pop():
                with contextlib.suppress(LookupError):  # freed by hand
                    self.manager.free(seq)

    def __deepcopy__(self, memo: dict) -> PagedPool:
        """Refused, lest the memory is doubled unseen."""
        raise TypeError("a PagedPool is not copied, it is the memory: fork a sequence in pool.manager, or copy a PagedCache")

    def inputs(self, seqs: Sequence[Hashable], *, limit: int | None = None) -> dict[str, Any]:
        """The arguments of one forward: of each sequence the tokens whose K/V is not written yet, `limit` at most.

        Rows are left-padded, so the last column holds every row's last token: with `logits_to_keep=1` the forward returns
        what each row's next token is chosen from. Pads are never stored. When the last layer has run, what was fed is
        committed. The forward must follow at once: a change of these sequences in between is not seen by it.

        Returns:
            input_ids `[rows, q]`, attention_mask `[rows, kv]`, position_ids `[rows, q]`, cache, use_cache.

        Raises:
            ValueError: a sequence has nothing to compute (append a token first), is named twice, or `limit` is below 1; or the
                rows' lengths ask for different angles of RoPE, of which a forward has one set (`spec.rope_by_length`).
        """
        self.sweep()
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1, not {limit}")
        if not seqs or len(set(seqs)) < len(seqs):
            raise ValueError(f"seqs must name one or more different sequences, not {list(seqs)}")
        m = self.manager
        fed, starts = [], []
        for seq in seqs:
            start = m.num_committed(seq)
            new = m.tokens(seq)[start:][:limit]
            if not new:
                raise ValueError(f"seqs: {seq!r} has nothing to compute, all its tokens are in the pool; append one first")
            fed.append(new)
            starts.append(start)
        self._same_angles([start + len(new) for start, new in zip(starts, fed, strict=True)])
        cache = PagedCache(self, seqs)
        plan = cache.plan = _plan(self, seqs, starts, [len(new) for new in fed])
        q, kv = plan.columns, plan.width
        ids = torch.zeros(len(seqs), q, dtype=torch.long)
        positions = torch.zeros(len(seqs), q, dtype=torch.long)
        mask = torch.zeros(len(seqs), kv, dtype=torch.long)
        for r, (start, new) in enumerate(zip(starts, fed, strict=True)):
            ids[r, q - len(new) :] = torch.tensor(new)
            positions[r, q - len(new) :] = torch.arange(start, start + len(new))
            mask[r, kv - start - len(new) :] = 1
        device = self.keys.device
        return {
            "input_ids": ids.to(device),
            "attention_mask": mask.to(device),
            "position_ids": positions.to(device),
            "cache": cache,
            "use_cache": True,
        }

    def _same_angles(self, lengths: list[int]) -> None:
        rope = self.spec.rope_by_length
        if rope is not None and len({rope.angles(length) for length in lengths}) > 1:
            raise ValueError(
                f"seqs: rows of {', '.join(map(str, sorted(set(lengths))))} tokens in one forward, where rope_type "
                f"{rope.rope_type!r} turns all of them by the longest row's angles; run the rows longer than {rope.trained} alone"
            )


@dataclass(frozen=True)
class Plan:
    """Which slots one forward writes and reads; the same for every layer.

    A slot is `block * block_size + offset`. `real` picks the columns that are no pads out of `[rows * columns]`, None
    when all are. `read` is `[rows * width]`, each row's K/V right-aligned. A pad column reads the row's own first token
    once more: finite, nobody else's, and masked.
    """

    columns: int
    width: int
    write: torch.Tensor
    real: torch.Tensor | None
    read: torch.Tensor
    stops: list[int]


def _plan(pool: PagedPool, seqs: Sequence[Hashable], starts: list[int], counts: list[int]) -> Plan:
    columns = max(counts)
    stops = [start + n for start, n in zip(starts, counts, strict=True)]
    width = max(stops)
    read = torch.empty(len(seqs), width, dtype=torch.long)
    offsets = torch.arange(pool.block_size)
    for r, (seq, stop) in enumerate(zip(seqs, stops, strict=True)):
        slots = (torch.tensor(pool.manager.block_table(seq))[:, None] * pool.block_size + offsets).flatten()[:stop]
        read[r, width - stop :] = slots
        read[r, : width - stop] = slots[0]
    new = read[:, width - columns :]
    real = None
    if min(counts) < columns:
        real = (torch.arange(columns) >= columns - torch.tensor(counts)[:, None]).flatten().nonzero().flatten()
        new = new.flatten()[real]
    device = pool.keys.device
    real = None if real is None else real.to(device)
    return Plan(columns, width, new.flatten().to(device), real, read.flatten().to(device), stops)


class PagedLayer(CacheLayerMixin):
    """One layer of a PagedCache, for all that Transformers asks of a cache's layers. It holds nothing of its own.

    The layers share one set of block tables, so what changes those (crop, reorder, …) is for the whole cache only.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False  # all tokens are kept; a sliding window is Transformers' mask over them

    def __init__(self, cache: PagedCache, index: int) -> None:
        self.cache, self.index = cache, index  # a weak reference: a cache, and its pool, go when their last user goes

    @property
    def is_initialized(self) -> bool:
        return bool(self.cache.seqs)

    @property
    def keys(self) -> torch.Tensor | None:
        """This layer's keys, gathered: `[rows, kv_heads, columns, head_dim]`, a copy; None while there are no rows."""
        return self.cache.gather(self.cache.pool.keys, self.index)

    @property
    def values(self) -> torch.Tensor | None:
        """As `keys`."""
        return self.cache.gather(self.cache.pool.values, self.index)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.update(key_states, value_states, self.index)

    def get_seq_length(self) -> int:
        """K/V columns before those of the next forward."""
        return self.cache.before()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """K/V columns of the next forward, and the first one's index."""
        return self.cache.before() + query_length, 0

    def get_max_length(self) -> int:
        """-1: the pool, not the cache, has a limit."""
        return -1

    def _whole_cache_only(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("the layers of a PagedCache share their block tables: call this on the cache, not on a layer")

    reset = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = _whole_cache_only

    def _stays(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("a PagedCache is not offloaded: its pool lies on one device")

    offload = prefetch = _stays


class PagedCache(Cache):
    """What a forward sees of a `PagedPool`: some of its sequences as the rows of a batch.

    `pool.inputs` makes one for each forward over named sequences. Made by hand, without names, it behaves like a
    DynamicCache: the first forward opens one sequence for each row of the batch, later ones extend them, `generate` goes on
    where it ends. Such rows carry no token ids (a Cache is never told any), so they are never committed and nobody finds
    them; pads are stored like tokens, and hidden by the caller's mask as ever. `crop`, `reorder_cache` and
    `batch_select_indices` work on the block tables, so that beams share blocks until they write; `reset` frees the rows,
    and a cache that nobody holds any more gives them back when the next one is filled.

    `copy.copy` and `copy.deepcopy` fork: the copy's rows begin as this one's, in the same blocks, and whoever writes first
    copies the block. So a prefix is computed once and copied for each question. The pool is never copied.

    A sliding window is Transformers' mask over a full cache: right, but the blocks behind the window are kept. K/V are
    detached: nothing is trained through a pool.
    """

    _numbers = count()

    def __init__(self, pool: PagedPool, seqs: Sequence[Hashable] = ()) -> None:
        me = weakref.proxy(self)
        super().__init__(layers=[PagedLayer(me, index) for index in range(pool.spec.layers)])
        self.pool, self.seqs = pool, list(seqs)
        self.plan: Plan | None = None
        self.anonymous = not self.seqs
        self.length = 0  # of anonymous rows, which are all of one length
        if self.anonymous:  # `seqs` is changed in place from here on
            weakref.finalize(self, pool._orphans.append, self.seqs).atexit = False

    def __repr__(self) -> str:
        return f"PagedCache({len(self.seqs)} rows, {self.before()} columns, {len(self)} layers)"

    def __copy__(self) -> PagedCache:
        """A fork of all rows."""
        self._only_anonymous("copy")
        twin = PagedCache(self.pool)
        twin.seqs += self._forks(range(len(self.seqs)))
        twin.length = self.length
        return twin

    def __deepcopy__(self, memo: dict) -> PagedCache:
        return self.__copy__()

    def before(self) -> int:
        """K/V columns before those of the next forward."""
        if self.anonymous:
            return self.length
        return self.plan.width - self.plan.columns if self.plan else 0

    def gather(self, store: torch.Tensor, layer: int) -> torch.Tensor | None:
        """One layer of `pool.keys` or `pool.values` as anonymous rows have it, `[rows, kv_heads, columns, head_dim]`."""
        if not (self.anonymous and self.length):
            return None
        rows = len(self.seqs)
        read = _plan(self.pool, self.seqs, [0] * rows, [self.length] * rows).read
        return store[layer].flatten(0, 1).index_select(0, read).unflatten(0, (rows, self.length)).transpose(1, 2)

    # ---- what attention calls ----

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one layer's new K/V, `[rows, kv_heads, columns, head_dim]`, and return all of the rows' K/V."""
        rows, heads, columns, dim = key_states.shape
        if layer_idx == 0:
            self._check(heads, dim, key_states.dtype)
            if self.anonymous:
                self._extend(rows, columns)
        elif layer_idx >= len(self.layers):
            self._too_many(layer_idx)
        plan = self.plan
        if plan is None or (rows, columns) != (len(self.seqs), plan.columns):
            raise ValueError("this PagedCache is for one forward over the rows it was made for; call pool.inputs() again")
        out = []
        for store, new in ((self.pool.keys, key_states), (self.pool.values, value_states)):
            flat = store[layer_idx].view(-1, heads, dim)
            new = new.detach().transpose(1, 2).reshape(-1, heads, dim)
            flat.index_copy_(0, plan.write, new if plan.real is None else new[plan.real])
            out.append(flat.index_select(0, plan.read).view(rows, plan.width, heads, dim).transpose(1, 2))
        if layer_idx == self.pool.spec.layers - 1:
            self._finish()
        return out[0], out[1]

    def _check(self, heads: int, dim: int, dtype: torch.dtype) -> None:
        spec = self.pool.spec
        if (heads, dim, dtype) != (spec.kv_heads, spec.head_dim, self.pool.keys.dtype):
            raise ValueError(
                f"pool holds K/V of {spec.kv_heads} heads of {spec.head_dim} in {self.pool.keys.dtype}, the model makes "
                f"{heads} of {dim} in {dtype}: make the pool from this model's spec"
            )

    def _too_many(self, layer_idx: int) -> None:
        """The model has more caches than the pool: undo what this forward has reserved, and say so."""
        if self.anonymous and self.plan is not None:
            if self.length > self.plan.columns:
                self.crop(-self.plan.columns)
            else:
                self.reset()
        raise ValueError(
            f"pool has {len(self.layers)} layers, and the model asks for the cache of layer {layer_idx + 1}, as one does that "
            "runs its blocks more than once; make the pool with a spec whose `layers` counts every cache"
        )

    def _extend(self, rows: int, columns: int) -> None:
        """Slots for `columns` more tokens of every row; the first time, the rows."""
        if self.seqs and rows != len(self.seqs):
            raise ValueError(
                f"this PagedCache has {len(self.seqs)} rows, the model feeds {rows}; reset() it first, or give each row its "
                "beams with batch_repeat_interleave()"
            )
        self.pool.sweep()
        self._require(rows, columns)
        if not self.seqs:
            names = self._names(rows)
            for name in names:
                self.pool.manager.allocate(name, [0] * columns, lookup=False, publish=False)
            self.seqs += names
        else:
            for seq in self.seqs:
                self.pool.append(seq, [0] * columns)
        self.plan = _plan(self.pool, self.seqs, [self.length] * rows, [columns] * rows)
        self.length += columns

    def _require(self, rows: int, columns: int) -> None:
        """Room for all rows, or OutOfBlocks before anything is changed."""
        m, size = self.pool.manager, self.pool.block_size
        need = rows * (-(-(self.length + columns) // size) - -(-self.length // size))
        if self.length % size:  # of those who write into one block all take a copy, but for a last and only holder
            for block, writers in Counter(m.block_table(seq)[-1] for seq in self.seqs).items():
                need += writers - (m.block(block).ref_count == writers)
        if need > m.num_free_blocks:
            raise OutOfBlocks(
                f"{need - m.num_free_blocks} blocks short ({m.num_free_blocks} of {m.num_blocks} free): free a sequence, or "
                "reset() a PagedCache that is done"
            )

    def _finish(self) -> None:
        if self.anonymous:
            return
        for seq, stop in zip(self.seqs, self.plan.stops, strict=True):
            self.pool.manager.commit(seq, stop)
        self.plan = None  # its slots may be anyone's from here on

    # ---- what generate() calls, on anonymous rows: done once, on the block tables, not layer by layer ----

    def reset(self) -> None:
        """Free the rows."""
        self._only_anonymous("reset")
        for seq in self.seqs:
            self.pool.manager.free(seq)
        self.seqs.clear()
        self.plan, self.length = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest `-tokens_to_remove` tokens of every row (a negative number, as Transformers gives it)."""
        self._only_anonymous("crop")
        if tokens_to_remove > 0 or -tokens_to_remove > self.length:
            raise ValueError(f"tokens_to_remove must be between {-self.length} and 0, not {tokens_to_remove}")
        self.length += tokens_to_remove
        for seq in self.seqs:
            self.pool.manager.truncate(seq, self.length)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Row `i` becomes what row `indices[i]` was: forks, so nothing is copied until a row writes."""
        self._only_anonymous("batch_select_indices")
        if not self.seqs:
            return
        after = self._forks(torch.arange(len(self.seqs))[indices.cpu()].tolist())  # as a tensor's rows: -1, or a mask
        for seq in self.seqs:
            self.pool.manager.free(seq)
        self.seqs[:] = after

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Beams: see `batch_select_indices`."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self.batch_select_indices(torch.arange(len(self.seqs)).repeat_interleave(repeats))

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Refused: a pool lies on one device."""
        self.layers[layer_idx].prefetch()

    def _names(self, rows: int) -> list[Hashable]:
        return [("row", next(self._numbers)) for _ in range(rows)]

    def _forks(self, sources: Sequence[int]) -> list[Hashable]:
        """New sequences that begin as these rows."""
        names = self._names(len(sources))
        for name, i in zip(names, sources, strict=True):
            self.pool.manager.fork(self.seqs[i], name)
        return names

    def _only_anonymous(self, what: str) -> None:
        if not self.anonymous:
            raise ValueError(f"{what} is for rows without a name; of named sequences use pool.manager")
