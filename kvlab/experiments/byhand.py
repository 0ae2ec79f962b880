"""Lab 5's block manager: five short functions on a `Pool`, and `ByHand`, which turns them into a manager for the real model.

The functions below are the worked answers. `ByHand` takes anybody's: what a reader wrote then carries the model's K/V.
`kvlab.core.blocks.BlockManager` is the same machine grown up (chained hashes, truncate, constant cost at any pool size).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from kvlab.core.blocks import Allocation, BlockCopy, BlockInfo, InvariantError, OutOfBlocks, UnknownSequence
from kvlab.core.trace import Trace


@dataclass(repr=False)
class Pool:
    """What a block manager remembers. Blocks and positions are numbered from 0.

    block_size   tokens a block holds
    ref_count    per block: how many block tables name it
    free         blocks nobody holds and nobody can find; the last one is taken next
    tables       block table per request: its blocks, in order
    lengths      tokens per request
    keys         findable block → what it is found by
    index        the other way round: key → block
    last_access  per block: when it was last taken, written or given back (larger is later)
    """

    block_size: int
    ref_count: list[int]
    free: list[int]
    tables: dict[Hashable, list[int]] = field(default_factory=dict)
    lengths: dict[Hashable, int] = field(default_factory=dict)
    keys: dict[int, tuple] = field(default_factory=dict)
    index: dict[tuple, int] = field(default_factory=dict)
    last_access: list[int] = field(default_factory=list)
    evict: Callable[[Pool], int] | None = None

    def __repr__(self) -> str:
        shown = f"tables={self.tables}, ref_count={self.ref_count}, free={self.free}"
        return f"<pool, {self.block_size} tokens a block, {shown}{f', index={self.index}' if self.index else ''}>"

    @property
    def num_free(self) -> int:
        """Blocks that may be taken: the free ones, and those that can be found but that nobody holds."""
        return len(self.free) + sum(self.ref_count[block] == 0 for block in self.keys)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def take(self) -> int:
        """A block for one request: a free one, else one that is evicted. Its count is 1. There must be one: ask `num_free`."""
        block = self.free.pop() if self.free else (self.evict or evict)(self)
        self.ref_count[block] = 1
        return block


def new_pool(num_blocks: int, block_size: int) -> Pool:
    """An empty pool; block 0 is taken first."""
    return Pool(block_size, [0] * num_blocks, list(reversed(range(num_blocks))), last_access=[0] * num_blocks)


# ---- the five functions of the lab, worked ---------------------------------------------------------------------------


def allocate(pool: Pool, seq: Hashable, num_tokens: int, hits: Sequence[int] = ()) -> None:
    """Give `seq` a table for `num_tokens` tokens: first `hits`, blocks that hold its beginning already, then blocks taken.

    Raises OutOfBlocks, with nothing changed, when too few are free. A hit that nobody holds counts as free until it is held.
    """
    need = pool.blocks_for(num_tokens) - len(hits)
    if need > pool.num_free - sum(pool.ref_count[block] == 0 for block in hits):
        raise OutOfBlocks(f"{seq} needs {need} blocks more than its hits; {pool.num_free} are free")
    for block in hits:  # before anything is taken, or a hit nobody holds may be evicted under us
        pool.ref_count[block] += 1
    pool.tables[seq] = list(hits) + [pool.take() for _ in range(need)]
    pool.lengths[seq] = num_tokens


def share_prefix(pool: Pool, src: Hashable, dst: Hashable, prefix_len: int) -> None:
    """Let `dst` begin with the first `prefix_len` tokens of `src`, in the same blocks."""
    shared = pool.tables[src][: pool.blocks_for(prefix_len)]
    for block in shared:
        pool.ref_count[block] += 1
    pool.tables[dst] = list(shared)
    pool.lengths[dst] = prefix_len


def append_token(pool: Pool, seq: Hashable) -> tuple[int, int] | None:
    """Make room for one more token of `seq`. Returns (from, to) if a block has to be copied before it is written, else None.

    Raises OutOfBlocks, with nothing changed.
    """
    table = pool.tables[seq]
    at_a_boundary = pool.lengths[seq] % pool.block_size == 0
    shared = not at_a_boundary and pool.ref_count[table[-1]] > 1
    if (at_a_boundary or shared) and pool.num_free == 0:
        raise OutOfBlocks(f"{seq} needs a block; none is free")
    copy = None
    if at_a_boundary:
        table.append(pool.take())
    elif shared:
        old, new = table[-1], pool.take()
        pool.ref_count[old] -= 1
        table[-1] = new
        copy = (old, new)
    pool.lengths[seq] += 1
    return copy


def free(pool: Pool, seq: Hashable) -> None:
    """End `seq`, however it ended. A block goes back when the last table that names it is gone, unless it can be found."""
    for block in reversed(pool.tables.pop(seq)):
        pool.ref_count[block] -= 1
        if pool.ref_count[block] == 0 and block not in pool.keys:
            pool.free.append(block)
    del pool.lengths[seq]


def evict(pool: Pool) -> int:
    """Choose the findable block that was used least recently, of those nobody holds; make it unfindable; return it."""
    block = min((b for b in pool.keys if pool.ref_count[b] == 0), key=lambda b: pool.last_access[b])
    del pool.index[pool.keys.pop(block)]
    return block


# ---- the manager around them -----------------------------------------------------------------------------------------


class ByHand:
    """The five functions with the face of a `BlockManager`: what a `PagedPool` needs to run the model on them.

    A block is found by the tokens of its request up to its end, written out (lab 6 makes a chained hash of them). Tables
    only grow: there is no truncate. Events go to `trace` in `BlockManager`'s words, so that the owner scan reads both.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        allocate: Callable = allocate,
        share_prefix: Callable = share_prefix,
        append_token: Callable = append_token,
        free: Callable = free,
        evict: Callable = evict,
        cache_prefixes: bool = True,
        trace: Trace | None = None,
    ) -> None:
        self.pool = new_pool(num_blocks, block_size)
        self.num_blocks, self.block_size, self.cache_prefixes = num_blocks, block_size, cache_prefixes
        self.trace = Trace() if trace is None else trace
        self._allocate, self._share_prefix, self._append_token, self._free = allocate, share_prefix, append_token, free
        self._evict, self.pool.evict = evict, self._logged_evict
        self._tokens: dict[Hashable, list[int]] = {}
        self._written: dict[Hashable, int] = {}
        self._owners: dict[Hashable, Hashable] = {}
        self._clock = 0

    def allocate(
        self, seq: Hashable, tokens: Iterable[int], *, owner=None, salt=None, adapter=None, lookup=True, publish=True
    ) -> Allocation:
        """As `BlockManager.allocate`, without salt and adapter, and what is committed is always findable."""
        tokens = list(tokens)
        if seq in self._tokens:
            raise ValueError(f"sequence {seq!r} exists already; free it first or choose another name")
        hits = self._find(tokens) if lookup else []
        self._allocate(self.pool, seq, len(tokens), tuple(hits))
        self._tokens[seq], self._written[seq] = tokens, len(hits) * self.block_size
        self._owners[seq] = seq if owner is None else owner
        for k, block in enumerate(self.block_table(seq)):
            self._log("hit" if k < len(hits) else "reserve", seq, block, k)
        return Allocation(self.block_table(seq), self._written[seq])

    def can_allocate(self, tokens: Sequence[int]) -> bool:
        """As `BlockManager.can_allocate`."""
        hits = self._find(list(tokens))
        revived = sum(self.pool.ref_count[block] == 0 for block in hits)
        return self.pool.blocks_for(len(tokens)) - len(hits) <= self.pool.num_free - revived

    def _find(self, tokens: list[int]) -> list[int]:
        hits: list[int] = []
        while len(hits) < (len(tokens) - 1) // self.block_size:  # the last token is always left to compute
            block = self.pool.index.get(tuple(tokens[: (len(hits) + 1) * self.block_size]))
            if block is None:
                break
            hits.append(block)
        return hits

    def append(self, seq: Hashable, tokens: Iterable[int]) -> list[BlockCopy]:
        """As `BlockManager.append`."""
        tokens, table, length = list(tokens), self.block_table(seq), len(self.tokens(seq))
        copies = length % self.block_size > 0 and self.pool.ref_count[table[-1]] > 1
        if self.pool.blocks_for(length + len(tokens)) - len(table) + copies > self.pool.num_free:
            raise OutOfBlocks(f"{seq} needs more blocks than the {self.pool.num_free} that are free")
        if length % self.block_size and not copies and table[-1] in self.pool.keys:  # it is about to hold something else
            del self.pool.index[self.pool.keys.pop(table[-1])]
            self._log("unpublish", seq, table[-1])
        made = []
        for token in tokens:
            copy = self._append_token(self.pool, seq)
            self._tokens[seq].append(token)
            if copy is not None:
                made.append(BlockCopy(*copy))
                self._log("copy", seq, copy[1], note=f"of {copy[0]}")
        if tokens:
            for k, block in list(enumerate(self.block_table(seq)))[length // self.block_size :]:
                self._log("append", seq, block, k, first=length)
        return made

    def append_token(self, seq: Hashable, token: int) -> list[BlockCopy]:
        """As `BlockManager.append_token`."""
        return self.append(seq, [token])

    def commit(self, seq: Hashable, num_tokens: int) -> None:
        """The K/V up to `num_tokens` is written: its full blocks can be found from now on."""
        table, tokens = self.pool.tables[seq], self._tokens[seq]
        for k in range(self._written[seq] // self.block_size, num_tokens // self.block_size if self.cache_prefixes else 0):
            key = tuple(tokens[: (k + 1) * self.block_size])
            if table[k] not in self.pool.keys and key not in self.pool.index:  # of equal blocks the first is found
                self.pool.keys[table[k]], self.pool.index[key] = key, table[k]
                self._log("publish", seq, table[k], k)
        self._written[seq] = num_tokens

    def share_prefix(self, src: Hashable, dst: Hashable, prefix_len: int, *, owner=None) -> None:
        """As `BlockManager.share_prefix`."""
        tokens = self.tokens(src)
        if not 0 <= prefix_len <= len(tokens) or dst in self._tokens:
            raise ValueError(f"prefix_len must be 0 to {len(tokens)} and {dst!r} a new name")
        self._share_prefix(self.pool, src, dst, prefix_len)
        self._tokens[dst], self._written[dst] = tokens[:prefix_len], min(self._written[src], prefix_len)
        self._owners[dst] = dst if owner is None else owner
        for block in self.block_table(dst):
            self._log("share", dst, block, note=f"from {src}")

    def fork(self, src: Hashable, dst: Hashable, *, owner=None) -> None:
        """`share_prefix` of all there is."""
        self.share_prefix(src, dst, len(self.tokens(src)), owner=owner)

    def free(self, seq: Hashable) -> None:
        """As `BlockManager.free`."""
        table = self.block_table(seq)
        for block in reversed(table):
            self._log("release", seq, block)
        self._free(self.pool, seq)
        del self._tokens[seq], self._written[seq], self._owners[seq]

    def block_table(self, seq: Hashable) -> list[int]:
        """The sequence's blocks in order (a copy)."""
        self.tokens(seq)
        return list(self.pool.tables[seq])

    def tokens(self, seq: Hashable) -> list[int]:
        """The sequence's token ids (a copy)."""
        if seq not in self._tokens:
            raise UnknownSequence(f"no sequence {seq!r}: it was never allocated, or it is freed already")
        return list(self._tokens[seq])

    def num_committed(self, seq: Hashable) -> int:
        """How many leading tokens have their K/V in the pool."""
        return self._written[seq]

    @property
    def num_free_blocks(self) -> int:
        """Blocks that may be taken now."""
        return self.pool.num_free

    def block(self, i: int) -> BlockInfo:
        """What is known of block `i`; its hash is the key's, short and only good within one process."""
        owners = dict.fromkeys(self._owners[seq] for seq, table in self.pool.tables.items() if i in table)
        key = self.pool.keys.get(i)
        found_by = None if key is None else f"{hash(key):x}"
        return BlockInfo(self.pool.ref_count[i], tuple(owners), found_by, None, self.pool.last_access[i])

    def check(self) -> None:
        """Raise InvariantError unless every count is what the tables say and every block is held, findable or free, once."""
        named = [block for table in self.pool.tables.values() for block in table]
        for block, count in enumerate(self.pool.ref_count):
            if count != named.count(block):
                raise InvariantError("references", f"block {block} counts {count}, {named.count(block)} tables name it")
            if self.pool.free.count(block) != (count == 0 and block not in self.pool.keys):
                raise InvariantError("pool", f"block {block} is lost, or free and in use, or free twice")
        if self.pool.index != {key: block for block, key in self.pool.keys.items()}:
            raise InvariantError("index", "the index and the blocks disagree on what can be found")

    def _logged_evict(self, pool: Pool) -> int:
        block = self._evict(pool)
        self.trace.log("evict", block=block)
        return block

    def _log(
        self, what: str, seq: Hashable, block: int, k: int | None = None, *, first: int = 0, note: str | None = None
    ) -> None:
        """A line about block `k` of `seq`'s table, from token `first` on; without `k`, about the whole block."""
        self._clock += 1
        self.pool.last_access[block] = self._clock
        start = stop = None
        if k is not None:
            start, stop = max(first, k * self.block_size), min((k + 1) * self.block_size, len(self._tokens[seq]))
        self.trace.log(what, seq, self._owners[seq], block, start, stop, note)
