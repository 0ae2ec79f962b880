"""A block manager: which block of the KV pool holds which tokens of which request.

The pool is `num_blocks` blocks of `block_size` token slots. Nothing here touches a tensor: a tensor store
(`kvlab.runtime.paged`) follows the tables kept here. The ideas, in the order they matter:

- **Block table.** Tokens 0..15 of a request are in the first block of its table, 16..31 in the second, and so on.
- **Reference count.** How many tables name a block. At zero the block may be used again, and not before.
- **Copy-on-write.** A block that two tables name is read-only. Who wants to write takes a copy first.
- **Prefix index.** A full block whose K/V is written can be found by all tokens up to its end, and shared
  (PagedAttention, arXiv 2309.06180, section 4.4; the chained key is vLLM's).
- **Eviction.** A freed block that can be found stays findable until its slot is needed, least recently used first.

Every call either succeeds or raises and leaves the state as it was. Every call but `drop` and `reset` costs the same at any pool
size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from kvlab.core.audit import InvariantError, audit
from kvlab.core.prefixes import Chain, Extra, Prefix, PrefixIndex, Tag, chain_of, domain_of, extra_of, token_ids
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


@dataclass
class PrefixStats:
    """Counters of `allocate`, ever growing: requests that looked up, tokens they asked for, tokens that were there.

    Requests that come back after a preemption are counted apart: what they find they have mostly written themselves.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def count(self, queries: int, hits: int, preempted: bool) -> None:
        """One more request, of `queries` tokens of which `hits` were there."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += queries
            self.preempted_hits += hits
        else:
            self.requests += 1
            self.queries += queries
            self.hits += hits


NOBODY: dict[Hashable, int] = {}  # the owners of every block that nobody holds; never written to


@dataclass(slots=True, eq=False)
class Block:
    """One block's bookkeeping. `owners` tags who holds it, and how often; `prefix` is what it can be found by."""

    ref_count: int = 0
    owners: dict[Hashable, int] = field(default_factory=lambda: NOBODY)
    prefix: Prefix | None = None
    created: int = 0
    last_access: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence(Chain):
    """One request. The K/V of `tokens[:written]` is in the pool; the slots of the rest are reserved.

    `publish`: whether its full blocks become findable.
    """

    table: list[int]
    written: int
    owner: Hashable
    publish: bool


class BlockManager:
    """Tables, references, copy-on-write, prefix index and eviction for a pool of `num_blocks` blocks.

    `seq` is any hashable name, token ids are ints of 0 and more. With `cache_prefixes=False` nothing is ever found.
    With a `trace`, every change of a block is logged. `watermark`, a share of the pool, is kept free when requests are
    admitted (`allocate`), so that those that run find room to grow (`append`).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        cache_prefixes: bool = True,
        trace: Trace | None = None,
        watermark: float = 0.0,
    ) -> None:
        self.num_blocks = _count("num_blocks", num_blocks, 1)
        self.block_size = _count("block_size", block_size, 1)
        if not isinstance(watermark, int | float) or isinstance(watermark, bool) or not 0 <= watermark < 1:
            raise ValueError(f"watermark must be a share of the pool, at least 0 and below 1, not {watermark!r}")
        if trace is not None and not hasattr(trace, "log"):
            raise ValueError(f"trace must be a kvlab.core.trace.Trace, or None; got {type(trace).__name__}")
        self.cache_prefixes, self.trace = cache_prefixes, trace
        self.watermark_blocks = int(watermark * num_blocks + 1e-9)  # 0.29 of 100 is 29
        self._clock = 0
        self._changes = 0  # of what can be found, and of who holds it
        self._stats = PrefixStats()
        self._sequences: dict[Hashable, Sequence] = {}
        self._pins: dict[Hashable, tuple[list[int], tuple]] = {}  # name -> its blocks, its domain
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
        tokens: Iterable[int] | Chain,
        *,
        owner: Hashable | None = None,
        salt: Tag | None = None,
        adapter: Tag | None = None,
        extra: Extra | None = None,
        lookup: bool = True,
        publish: bool = True,
        preempted: bool = False,
    ) -> Allocation:
        """Start a sequence: share what is cached of `tokens`, reserve blocks for the rest.

        At least the last token is left to compute: without a query there are no logits.

        Args:
            owner: tags its blocks; by default `seq` itself.
            salt, adapter: only sequences of the same salt and adapter share.
            extra: position -> what stands behind the token there, such as a picture's hash. From that block on only
                sequences with the same one share.
            lookup: False: compute everything, for a request that needs the logits of all its prompt.
            publish: False: leave nothing behind; none of its blocks can ever be found.
            preempted: it ran before and comes back; its hits are counted apart.
        """
        chain = self._chain(tokens, salt, adapter, extra)
        owner = self._new_name(seq, owner)
        hits = self._match(chain) if lookup else []
        self._require(self._missing(len(chain.tokens), self._held(hits)), len(chain.tokens), self.watermark_blocks)
        self._clock += 1
        table = self._claim(hits, self._blocks_for(len(chain.tokens)) - len(hits), owner)
        cached = len(hits) * self.block_size
        s = self._sequences[seq] = Sequence(
            *chain.parts(), table=table, written=cached, owner=owner, publish=publish and self.cache_prefixes
        )
        if lookup and self.cache_prefixes:
            self._stats.count(len(s.tokens), cached, preempted)
        if self.trace is not None:
            for k, i in enumerate(table):
                start = k * self.block_size
                stop = min(start + self.block_size, len(s.tokens))
                self._log("hit" if k < len(hits) else "reserve", seq, owner, i, start, stop)
        return Allocation(list(table), cached)

    def can_allocate(
        self,
        tokens: Iterable[int] | Chain,
        *,
        salt: Tag | None = None,
        adapter: Tag | None = None,
        extra: Extra | None = None,
        lookup: bool = True,
    ) -> bool:
        """Whether `allocate` with these arguments would find room now. The same count, so the answer holds.

        Asked with a `chain` it costs nothing to ask again while no block is published, taken or given back.
        """
        chain = self._chain(tokens, salt, adapter, extra)
        if self._missing(len(chain.tokens), 0) <= 0:
            return True  # there is room even if it shares nothing
        if not lookup:
            return False
        if chain.seen[:2] != (self, self._changes):
            chain.seen = self, self._changes, self._held(self._match(chain))
        return self._missing(len(chain.tokens), chain.seen[2]) <= 0

    def chain(
        self, tokens: Iterable[int], *, salt: Tag | None = None, adapter: Tag | None = None, extra: Extra | None = None
    ) -> Chain:
        """What `allocate` and `can_allocate` take in place of tokens: a request that waits is checked and hashed once."""
        return chain_of(tokens, self.block_size, salt=salt, adapter=adapter, extra=extra)

    def history(self, seq: Hashable, more: Iterable[int] = ()) -> Chain:
        """A sequence's tokens, and `more`, as a `chain` with the keys that are known: to allocate it again after a preemption."""
        tokens, size, domain, extra, keys, labels = self._sequence(seq).parts()
        return Chain(tuple(tokens + token_ids(more)), size, domain, MappingProxyType(extra), keys, labels)

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

    def append(self, seq: Hashable, tokens: Iterable[int], *, extra: Extra | None = None) -> list[BlockCopy]:
        """Reserve slots for more tokens. Make the returned copies before writing their K/V. `extra`: as in `allocate`."""
        s = self._sequence(seq)
        tokens = token_ids(tokens)
        start, stop = len(s.tokens), len(s.tokens) + len(tokens)
        extra = extra_of(extra, start, stop)
        into_tail = bool(tokens) and start % self.block_size > 0
        copy = into_tail and self._must_copy(s.table[-1])
        grow = self._blocks_for(stop) - len(s.table)
        self._require(grow + copy - self.num_free_blocks, stop)
        self._clock += 1
        copies = [self._copy_on_write(seq, s)] if copy else []
        if into_tail:
            self._forget(s.table[-1], "unpublish", seq, s.owner)  # it is about to hold something else
            self._blocks[s.table[-1]].last_access = self._clock
        s.table += self._claim([], grow, s.owner)
        s.tokens += tokens
        s.extra.update(extra)
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
        if s.publish:
            for k in range(s.written // self.block_size, num_tokens // self.block_size):
                self._publish(seq, s, k)
        s.written = num_tokens

    def share_prefix(self, src: Hashable, dst: Hashable, prefix_len: int, *, owner: Hashable | None = None) -> None:
        """Start `dst` with the first `prefix_len` tokens of `src`, in the same blocks, a partial one included."""
        s = self._sequence(src)
        if _count("prefix_len", prefix_len, 0) > len(s.tokens):
            raise ValueError(f"prefix_len is {prefix_len}, past the end of {src!r}, which has {len(s.tokens)} tokens")
        owner = self._new_name(dst, owner)
        note = None if self.trace is None else f"from {src}"
        self._clock += 1
        table = s.table[: self._blocks_for(prefix_len)]
        self._share(table, owner)
        self._sequences[dst] = Sequence(
            *s.parts(prefix_len), table=table, written=min(s.written, prefix_len), owner=owner, publish=s.publish
        )
        for i in table:
            self._log("share", dst, owner, i, note=note)

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
        self._give_back(seq, s.table[keep:], s.owner)
        del s.table[keep:]
        s.tokens, _, _, s.extra, s.keys, s.labels = s.parts(num_tokens)
        s.written = min(s.written, num_tokens)

    def free(self, seq: Hashable) -> None:
        """End a sequence, on whatever path: finished, cancelled, timed out, failed."""
        s = self._sequence(seq)
        self._clock += 1
        del self._sequences[seq]
        self._give_back(seq, s.table, s.owner)

    # ---- what stays, and what goes ------------------------------------------------------------------------------------

    def pin(
        self,
        name: Hashable,
        tokens: Iterable[int] | Chain,
        *,
        salt: Tag | None = None,
        adapter: Tag | None = None,
        extra: Extra | None = None,
    ) -> int:
        """Keep what is cached of `tokens` from eviction until `unpin(name)`; says of how many tokens. At 0 nothing is pinned.

        Its blocks are tagged with the owner `("pin", name)`.
        """
        _hashable("name", name)
        if name in self._pins:
            raise ValueError(f"pin {name!r} exists already; unpin it first or choose another name")
        chain = self._chain(tokens, salt, adapter, extra)
        table = self._match(chain, len(chain.tokens) // self.block_size)
        if table:
            self._clock += 1
            self._share(table, ("pin", name))
            self._pins[name] = table, chain.domain
            for i in table:
                self._log("pin", None, ("pin", name), i)
        return len(table) * self.block_size

    def unpin(self, name: Hashable) -> None:
        """End a pin: its blocks stay cached like any others."""
        _hashable("name", name)
        if name not in self._pins:
            raise UnknownSequence(f"no pin {name!r}: it was never made, or it is gone already")
        self._clock += 1
        self._give_back(None, self._pins.pop(name)[0], ("pin", name))

    def drop(self, *, salt: Tag | None = None, adapter: Tag | None = None) -> int:
        """Forget what is cached under a salt, an adapter, or both; says of how many blocks. Requests that live go on.

        For an adapter loaded anew under its old name, or a tenant that leaves. Nobody finds a block of theirs afterwards, nor
        any that its live requests write yet; its pins end. It looks at every block of the pool.
        """
        wanted = set(domain_of(salt, adapter))
        if not wanted:
            raise ValueError("drop needs a salt or an adapter; reset() forgets everything")
        self._clock += 1
        for name in [name for name, (_, domain) in self._pins.items() if wanted <= set(domain)]:
            self.unpin(name)
        for s in self._sequences.values():
            s.publish = s.publish and not wanted <= set(s.domain)
        gone = [i for i, b in enumerate(self._blocks) if b.prefix is not None and wanted <= set(b.prefix.domain)]
        for i in gone:
            self._forget(i, "unpublish")
            if i in self._evictable:
                del self._evictable[i]
                self._blank.append(i)
        return len(gone)

    def reset(self) -> bool:
        """Forget every cached prefix. Refused (False, nothing changes) while any sequence lives or a prefix is pinned."""
        if self._sequences or self._pins:
            return False
        self._clear()
        self._changes += 1
        self._log("reset")
        return True

    # ---- looking ----------------------------------------------------------------------------------------------------

    def block_table(self, seq: Hashable) -> list[int]:
        """The sequence's blocks in order (a copy)."""
        return list(self._sequence(seq).table)

    def tokens(self, seq: Hashable) -> list[int]:
        """The sequence's token ids (a copy)."""
        return list(self._sequence(seq).tokens)

    def num_tokens(self, seq: Hashable) -> int:
        """How many tokens the sequence has."""
        return len(self._sequence(seq).tokens)

    def num_committed(self, seq: Hashable) -> int:
        """How many leading tokens have their K/V in the pool."""
        return self._sequence(seq).written

    @property
    def sequences(self) -> list[Hashable]:
        """The names of all live sequences."""
        return list(self._sequences)

    @property
    def pins(self) -> dict[Hashable, int]:
        """The pinned prefixes, and how many tokens of each are held."""
        return {name: len(table) * self.block_size for name, (table, _) in self._pins.items()}

    @property
    def prefix_stats(self) -> PrefixStats:
        """How often prefixes were looked up and found so far (a copy). A reset does not set the counters back."""
        return replace(self._stats)

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
        if block.ref_count <= 0:
            if block.prefix is not None:  # only then can it be there, and a look into a large table is not free
                self._evictable.pop(i, None)
                self._changes += 1
            block.owners = {owner: 1}
        else:
            block.owners[owner] = block.owners.get(owner, 0) + 1
        block.ref_count += 1
        block.last_access = self._clock

    def _release(self, i: int, owner: Hashable) -> None:
        block = self._blocks[i]
        block.ref_count -= 1
        left = block.owners.get(owner, 0) - 1
        if left > 0:
            block.owners[owner] = left
        else:
            block.owners.pop(owner, None)
        block.last_access = self._clock
        if block.ref_count == 0:
            self._reclaim(i)

    def _give_back(self, seq: Hashable, table: list[int], owner: Hashable) -> None:
        for i in reversed(table):  # tails first, so that they are evicted before the heads they hang on
            self._release(i, owner)
            self._log("release", seq, owner, i)

    def _reclaim(self, i: int) -> None:
        self._blocks[i].owners = NOBODY
        if self._blocks[i].prefix is None:
            self._blank.append(i)
        else:
            self._evictable[i] = None
            self._changes += 1

    def _take(self, owner: Hashable) -> int:
        """A free block: a blank one, else one never used, else the least recently used findable one."""
        if self._blank:
            i = self._blank.pop()
        elif len(self._blocks) < self.num_blocks:
            i = len(self._blocks)
            self._blocks.append(Block())
        else:
            i = self._victim()
            self._evictable.pop(i, None)
            self._forget(i, "evict")
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

    def _match(self, chain: Chain, most: int | None = None) -> list[int]:
        return self._index.match(chain, most) if self.cache_prefixes else []

    def _publish(self, seq: Hashable, s: Sequence, k: int) -> None:
        """Make the `k`-th block of `s` findable: it is full and its K/V is written."""
        i = s.table[k]
        if self._blocks[i].prefix is None:
            parent = self._blocks[s.table[k - 1]].prefix if k else None
            prefix = self._blocks[i].prefix = self._index.add(i, parent, s, k)
            self._changes += 1
            if self.trace is not None:
                entry = prefix.key.hex(), parent and parent.key.hex(), prefix.tokens, dict(s.domain).get("adapter")
                self._log("publish", seq, s.owner, i, k * self.block_size, (k + 1) * self.block_size, entry=entry)

    def _unpublish(self, i: int) -> None:
        """Block `i` is about to hold something else: nobody may find it by what it held before."""
        prefix, self._blocks[i].prefix = self._blocks[i].prefix, None
        if prefix is not None:
            self._index.remove(i, prefix)
            self._changes += 1

    def _forget(self, i: int, why: str, seq: Hashable = None, owner: Hashable = None) -> None:
        """Unpublish block `i`, if it can be found, and say so in the log."""
        prefix = self._blocks[i].prefix
        if prefix is not None:
            self._unpublish(i)
            self._log(why, seq, owner, i, entry=(prefix.key.hex(),))

    # ---- small change -----------------------------------------------------------------------------------------------

    def _sequence(self, seq: Hashable) -> Sequence:
        try:
            return self._sequences[seq]
        except TypeError:
            _hashable("seq", seq)
            raise
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

    def _chain(self, tokens: Iterable[int] | Chain, salt, adapter, extra) -> Chain:
        if not isinstance(tokens, Chain):
            return chain_of(tokens, self.block_size, salt=salt, adapter=adapter, extra=extra)
        if tokens.block_size != self.block_size:
            raise ValueError(f"the chain is of blocks of {tokens.block_size}, the pool of {self.block_size}: make it anew")
        if (salt, adapter, extra) != (None, None, None):
            raise ValueError("salt, adapter and extra are the chain's own; give them when you make it")
        if not tokens.tokens:
            raise ValueError("tokens is empty; a sequence starts with at least one token")
        return tokens

    def _held(self, hits: list[int]) -> int:
        """Hits that somebody holds. A hit that is free now is shared, too, and no longer there to take: it saves no block."""
        return sum(self._blocks[i].ref_count > 0 for i in hits)

    def _missing(self, num_tokens: int, held: int) -> int:
        """How many blocks an allocation lacks of which `held` are shared with somebody who lives."""
        return self._blocks_for(num_tokens) - held + self.watermark_blocks - self.num_free_blocks

    def _require(self, missing: int, num_tokens: int, kept: int = 0) -> None:
        if missing > 0:
            never = self._blocks_for(num_tokens) + kept > self.num_blocks
            remedy = f"{num_tokens} tokens never fit this pool; shorten them" if never else "free a sequence, or wait"
            kept_for = f", {kept} kept for those that run" if kept else ""
            raise OutOfBlocks(f"{missing} blocks short ({self.num_free_blocks} of {self.num_blocks} free{kept_for}): {remedy}")

    def _log(self, what: str, seq=None, owner=None, block=None, start=None, stop=None, note=None, entry=()) -> None:
        if self.trace is not None:
            self.trace.log(what, seq, owner, block, start, stop, note, entry)


def _count(name: str, value: int, least: int) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be an int of at least {least}, not {value!r}")
    return value


def _hashable(name: str, value: Hashable) -> None:
    try:
        hash(value)
    except TypeError:
        raise ValueError(f"{name} must be hashable, like a str or an int; got {type(value).__name__}") from None
