"""A block manager: which block of the KV pool holds which tokens of which request.

The pool is `num_blocks` blocks of `block_size` token slots. Nothing here touches a tensor: a tensor store
(`kvlab.runtime.paged`) follows the tables kept here. The ideas, in the order they matter:

- **Block table.** Tokens 0..15 of a request are in the first block of its table, 16..31 in the second, and so on.
- **Reference count.** How many tables name a block. At zero the block may be used again, and not before.
- **Copy-on-write.** A block that two tables name is read-only. Who wants to write takes a copy first.
- **Prefix index.** A full block whose K/V is written can be found by all tokens up to its end, and shared
  (PagedAttention, arXiv 2309.06180, section 4.4; the chained key is vLLM's).
- **Eviction.** A freed block that can be found stays findable until its slot is needed, least recently used first.

Every call either succeeds or raises and leaves the state as it was. Every call costs the same at any pool size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvlab.core.audit import InvariantError, audit
from kvlab.core.prefixes import Prefix, PrefixIndex, domain_of
from kvlab.core.trace import Trace

__all__ = [
    "Allocation",
    "BlockCopy",
    "BlockInfo",
    "BlockManager",
    "InvariantError",
    "OutOfBlocks",
    "UnknownSequence",
]


class OutOfBlocks(RuntimeError):
    """The pool has too few free blocks for this call."""


class UnknownSequence(LookupError):
    """No sequence of this name: never allocated, or freed already."""


class Allocation(NamedTuple):
    """`block_table`: the sequence's blocks in order. `num_cached_tokens`: leading tokens whose K/V is there already."""

    block_table: list[int]
    num_cached_tokens: int


class BlockCopy(NamedTuple):
    """The tensor store must copy block `src` to block `dst` before it writes anything."""

    src: int
    dst: int


class BlockInfo(NamedTuple):
    """What is known of one block. `created` and `last_access` count the manager's calls, not seconds."""

    ref_count: int
    owners: tuple[Hashable, ...]
    block_hash: str | None
    created: int | None
    last_access: int | None


@dataclass(slots=True, eq=False)
class Block:
    """One block's bookkeeping. `owners` tags who holds it, and how often; `prefix` is what it can be found by."""

    ref_count: int = 0
    owners: dict[Hashable, int] = field(default_factory=dict)
    prefix: Prefix | None = None
    created: int = 0
    last_access: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """One request. The K/V of `tokens[:written]` is in the pool; the slots of the rest are reserved."""

    tokens: list[int]
    table: list[int]
    written: int
    owner: Hashable
    domain: tuple


class BlockManager:
    """Tables, references, copy-on-write, prefix index and eviction for a pool of `num_blocks` blocks.

    `seq` is any hashable name, token ids are ints of 0 and more. With `cache_prefixes=False` nothing is ever found.
    With a `trace`, every change of a block is logged.
    """

    def __init__(
        self, num_blocks: int, block_size: int = 16, *, cache_prefixes: bool = True, trace: Trace | None = None
    ) -> None:
        self.num_blocks = _count("num_blocks", num_blocks, 1)
        self.block_size = _count("block_size", block_size, 1)
        self.cache_prefixes, self.trace = cache_prefixes, trace
        self._clock = 0
        self._sequences: dict[Hashable, Sequence] = {}
        self._clear()

    def _clear(self) -> None:
        self._blocks: list[Block] = []  # a block is made when it is first used: a large pool costs nothing up front
        self._blank: list[int] = []  # free, and nothing in it worth finding
        self._evictable: OrderedDict[int, None] = OrderedDict()  # free but findable; least recently used first
        self._index = PrefixIndex(self.block_size)

    # ---- a request's life -------------------------------------------------------------------------------------------

    def allocate(
        self,
        seq: Hashable,
        tokens: Iterable[int],
        *,
        owner: Hashable | None = None,
        salt: str | None = None,
        adapter: str | None = None,
    ) -> Allocation:
        """Start a sequence: share what is cached of `tokens`, reserve blocks for the rest.

        `owner` tags its blocks (default: `seq` itself). Only sequences of the same `salt` and `adapter` share.
        At least the last token is left to compute: without a query there are no logits.
        """
        tokens = _prompt(tokens)
        domain = domain_of(salt, adapter)
        owner = self._new_name(seq, owner)
        hits = self._index.match(tokens, domain)
        self._require(self._missing(len(tokens), hits))
        self._clock += 1
        table = self._claim(hits, self._blocks_for(len(tokens)) - len(hits), owner)
        cached = len(hits) * self.block_size
        self._sequences[seq] = Sequence(tokens, table, cached, owner, domain)
        if self.trace is not None:
            for k, i in enumerate(table):
                start = k * self.block_size
                stop = min(start + self.block_size, len(tokens))
                self._log("hit" if k < len(hits) else "reserve", seq, owner, i, start, stop)
        return Allocation(list(table), cached)

    def can_allocate(self, tokens: Iterable[int], *, salt: str | None = None, adapter: str | None = None) -> bool:
        """Whether `allocate` with these arguments would find room now. The same count, so the answer holds."""
        tokens = _prompt(tokens)
        return self._missing(len(tokens), self._index.match(tokens, domain_of(salt, adapter))) <= 0

    def append_token(self, seq: Hashable, token: int) -> list[BlockCopy]:
        """`append` for one token. The common case, room in a block of one's own, is short-cut here."""
        try:
            s = self._sequences.get(seq)
        except TypeError:  # not hashable: `append` says so
            s = None
        if s is not None and type(token) is int and token >= 0:
            position = len(s.tokens)
            if position % self.block_size:
                tail = self._blocks[s.table[-1]]
                if tail.ref_count == 1 and tail.prefix is None:
                    s.tokens.append(token)
                    self._clock = tail.last_access = self._clock + 1
                    if self.trace is not None:
                        self.trace.log("append", seq, s.owner, s.table[-1], position, position + 1)
                    return []
        return self.append(seq, (token,))

    def append(self, seq: Hashable, tokens: Iterable[int]) -> list[BlockCopy]:
        """Reserve slots for more tokens. Make the returned copies before writing their K/V."""
        s = self._sequence(seq)
        tokens = _token_ids(tokens)
        start, stop = len(s.tokens), len(s.tokens) + len(tokens)
        into_tail = bool(tokens) and start % self.block_size > 0
        copy = into_tail and self._must_copy(s.table[-1])
        grow = self._blocks_for(stop) - len(s.table)
        self._require(grow + copy - self.num_free_blocks)
        self._clock += 1
        copies = [self._copy_on_write(seq, s)] if copy else []
        if into_tail:
            self._unpublish(s.table[-1])  # it is about to hold something else
            self._blocks[s.table[-1]].last_access = self._clock
        s.table += self._claim([], grow, s.owner)
        s.tokens += tokens
        if self.trace is not None and tokens:
            for k in range(start // self.block_size, len(s.table)):
                first = k * self.block_size
                self._log("append", seq, s.owner, s.table[k], max(start, first), min(stop, first + self.block_size))
        return copies

    def commit(self, seq: Hashable, num_tokens: int) -> None:
        """The K/V of the first `num_tokens` tokens is written: only now do their full blocks become findable."""
        s = self._sequence(seq)
        _count("num_tokens", num_tokens, 0)
        if num_tokens > len(s.tokens):
            raise ValueError(f"num_tokens is {num_tokens}, past the end of {seq!r}, which has {len(s.tokens)} tokens")
        if num_tokens < s.written:
            raise ValueError(f"num_tokens is {num_tokens}, but {s.written} tokens are committed; truncate to go back")
        self._clock += 1
        if self.cache_prefixes:
            for k in range(s.written // self.block_size, num_tokens // self.block_size):
                self._publish(seq, s, k)
        s.written = num_tokens

    def share_prefix(self, src: Hashable, dst: Hashable, prefix_len: int, *, owner: Hashable | None = None) -> None:
        """Start `dst` with the first `prefix_len` tokens of `src`, in the same blocks, a partial one included."""
        s = self._sequence(src)
        if _count("prefix_len", prefix_len, 0) > len(s.tokens):
            raise ValueError(f"prefix_len is {prefix_len}, past the end of {src!r}, which has {len(s.tokens)} tokens")
        owner = self._new_name(dst, owner)
        self._clock += 1
        table = s.table[: self._blocks_for(prefix_len)]
        self._share(table, owner)
        self._sequences[dst] = Sequence(s.tokens[:prefix_len], table, min(s.written, prefix_len), owner, s.domain)
        for i in table:
            self._log("share", dst, owner, i, note=f"from {src}")

    def fork(self, src: Hashable, dst: Hashable, *, owner: Hashable | None = None) -> None:
        """Start `dst` as all of `src`; the first to write a block they share takes a copy."""
        self.share_prefix(src, dst, len(self._sequence(src).tokens), owner=owner)

    def truncate(self, seq: Hashable, num_tokens: int) -> None:
        """Keep only the first `num_tokens` tokens, and give back the blocks behind them."""
        s = self._sequence(seq)
        if _count("num_tokens", num_tokens, 0) > len(s.tokens):
            raise ValueError(f"num_tokens is {num_tokens}, past the end of {seq!r}, which has {len(s.tokens)} tokens")
        self._clock += 1
        keep = self._blocks_for(num_tokens)
        self._give_back(seq, s, s.table[keep:])
        del s.table[keep:], s.tokens[num_tokens:]
        s.written = min(s.written, num_tokens)

    def free(self, seq: Hashable) -> None:
        """End a sequence, on whatever path: finished, cancelled, timed out, failed."""
        s = self._sequence(seq)
        self._clock += 1
        del self._sequences[seq]
        self._give_back(seq, s, s.table)

    def reset(self) -> bool:
        """Forget every cached prefix. Refused (False, nothing changes) while any sequence lives."""
        if self._sequences:
            return False
        self._clear()
        self._log("reset")
        return True

    # ---- looking ----------------------------------------------------------------------------------------------------

    def block_table(self, seq: Hashable) -> list[int]:
        """The sequence's blocks in order (a copy)."""
        return list(self._sequence(seq).table)

    def tokens(self, seq: Hashable) -> list[int]:
        """The sequence's token ids (a copy)."""
        return list(self._sequence(seq).tokens)

    def num_committed(self, seq: Hashable) -> int:
        """How many leading tokens have their K/V in the pool."""
        return self._sequence(seq).written

    @property
    def sequences(self) -> list[Hashable]:
        """The names of all live sequences."""
        return list(self._sequences)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that may be taken now, the findable (evictable) ones included."""
        return self.num_blocks - len(self._blocks) + len(self._blank) + len(self._evictable)

    @property
    def num_evictable_blocks(self) -> int:
        """Free blocks that still hold a findable prefix."""
        return len(self._evictable)

    def block(self, i: int) -> BlockInfo:
        """What is known of block `i`."""
        if _count("i", i, 0) >= self.num_blocks:
            raise ValueError(f"i is {i}; the pool's blocks are 0 to {self.num_blocks - 1}")
        if i >= len(self._blocks):
            return BlockInfo(0, (), None, None, None)
        b = self._blocks[i]
        return BlockInfo(b.ref_count, tuple(b.owners), b.prefix and b.prefix.key.hex(), b.created, b.last_access)

    def check(self) -> None:
        """Raise InvariantError naming the first broken rule. It reads everything: for tests and audits."""
        audit(self)

    # ---- references -------------------------------------------------------------------------------------------------

    def _claim(self, hits: list[int], grow: int, owner: Hashable) -> list[int]:
        """Touch before allocate: hits are held first, or taking new blocks might evict them."""
        for i in hits:
            self._hold(i, owner)
        return hits + [self._take(owner) for _ in range(grow)]

    def _share(self, table: list[int], owner: Hashable) -> None:
        """A second table names these blocks: each counts it."""
        for i in table:
            self._hold(i, owner)

    def _hold(self, i: int, owner: Hashable) -> None:
        block = self._blocks[i]
        if block.ref_count <= 0:  # only then can it be there, and a look into a large table is not free
            self._evictable.pop(i, None)
        block.ref_count += 1
        block.owners[owner] = block.owners.get(owner, 0) + 1
        block.last_access = self._clock

    def _release(self, i: int, owner: Hashable) -> None:
        block = self._blocks[i]
        block.ref_count -= 1
        block.owners[owner] = block.owners.get(owner, 0) - 1
        if block.owners[owner] < 1:
            del block.owners[owner]
        block.last_access = self._clock
        if block.ref_count == 0:
            self._reclaim(i)

    def _give_back(self, seq: Hashable, s: Sequence, table: list[int]) -> None:
        for i in reversed(table):  # tails first, so that they are evicted before the heads they hang on
            self._release(i, s.owner)
            self._log("release", seq, s.owner, i)

    def _reclaim(self, i: int) -> None:
        self._blocks[i].owners = {}  # a dict that was emptied keeps its size
        if self._blocks[i].prefix is None:
            self._blank.append(i)
        else:
            self._evictable[i] = None

    def _take(self, owner: Hashable) -> int:
        """A free block: a blank one, else one never used, else the least recently used findable one."""
        if self._blank:
            i = self._blank.pop()
        elif len(self._blocks) < self.num_blocks:
            i = len(self._blocks)
            self._blocks.append(Block())
        else:
            i = self._victim()
            self._unpublish(i)
            self._log("evict", block=i)
        self._hold(i, owner)
        self._blocks[i].created = self._clock
        return i

    def _victim(self) -> int:
        return next(iter(self._evictable))

    def _must_copy(self, i: int) -> bool:
        return self._blocks[i].ref_count > 1

    def _copy_on_write(self, seq: Hashable, s: Sequence) -> BlockCopy:
        src, dst = s.table[-1], self._take(s.owner)
        self._release(src, s.owner)
        s.table[-1] = dst
        self._log("copy", seq, s.owner, dst, note=f"of {src}")
        return BlockCopy(src, dst)

    # ---- what can be found ------------------------------------------------------------------------------------------

    def _publish(self, seq: Hashable, s: Sequence, k: int) -> None:
        """Make the `k`-th block of `s` findable: it is full and its K/V is written."""
        i = s.table[k]
        if self._blocks[i].prefix is None:
            parent = self._blocks[s.table[k - 1]].prefix if k else None
            self._blocks[i].prefix = self._index.add(i, parent, self._index.label(s.tokens, k, s.domain))
            self._log("publish", seq, s.owner, i, k * self.block_size, (k + 1) * self.block_size)

    def _unpublish(self, i: int) -> None:
        """Block `i` is about to hold something else: nobody may find it by what it held before."""
        prefix, self._blocks[i].prefix = self._blocks[i].prefix, None
        if prefix is not None:
            self._index.remove(i, prefix)

    # ---- small change -----------------------------------------------------------------------------------------------

    def _sequence(self, seq: Hashable) -> Sequence:
        _hashable("seq", seq)
        try:
            return self._sequences[seq]
        except KeyError:
            raise UnknownSequence(f"no sequence {seq!r}: it was never allocated, or it is freed already") from None

    def _new_name(self, seq: Hashable, owner: Hashable | None) -> Hashable:
        _hashable("seq", seq)
        if seq in self._sequences:
            raise ValueError(f"sequence {seq!r} exists already; free it first or choose another name")
        _hashable("owner", owner)  # now, not after half the work
        return seq if owner is None else owner

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _missing(self, num_tokens: int, hits: list[int]) -> int:
        """How many blocks an allocation lacks. A hit that is free now is no longer there to take."""
        revived = sum(self._blocks[i].ref_count == 0 for i in hits)
        return self._blocks_for(num_tokens) - len(hits) - (self.num_free_blocks - revived)

    def _require(self, missing: int) -> None:
        if missing > 0:
            free = self.num_free_blocks
            raise OutOfBlocks(f"{missing} blocks short ({free} of {self.num_blocks} free): free a sequence, or wait")

    def _log(self, what: str, seq=None, owner=None, block=None, start=None, stop=None, note=None) -> None:
        if self.trace is not None:
            self.trace.log(what, seq, owner, block, start, stop, note)


def _count(name: str, value: int, least: int) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be an int of at least {least}, not {value!r}")
    return value


def _hashable(name: str, value: Hashable) -> None:
    try:
        hash(value)
    except TypeError:
        raise ValueError(f"{name} must be hashable, like a str or an int; got {type(value).__name__}") from None


def _token_ids(tokens: Iterable[int]) -> list[int]:
    try:
        ids = list(tokens)
    except TypeError:
        raise ValueError(f"tokens must be a list of token ids, not {type(tokens).__name__}") from None
    for t in ids:
        if type(t) is not int or t < 0:
            raise ValueError(f"tokens holds {t!r}; ids are ints of 0 and more (of a tensor or array pass .tolist())")
    return ids


def _prompt(tokens: Iterable[int]) -> list[int]:
    ids = _token_ids(tokens)
    if not ids:
        raise ValueError("tokens is empty; a sequence starts with at least one token")
    return ids
