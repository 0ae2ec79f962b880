"""Checks of lab 5, a hand-written block manager: five functions that change a pool."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

from kvlab.checks import Exercise, Mistake
from kvlab.core.blocks import OutOfBlocks
from kvlab.experiments import byhand
from kvlab.experiments.byhand import Pool


@dataclass(frozen=True)
class OnAPool(Exercise):
    """An exercise whose first argument is a `Pool` and is meant to be changed: judged by what is returned or raised and what
    the pool is afterwards. The order of the free list does not matter, how often a block stands in it does."""

    def _play(self, function: Callable, case: tuple) -> dict:
        pool, *arguments = copy.deepcopy(case)
        raised = returned = None
        try:
            returned = function(pool, *arguments)
        except OutOfBlocks:
            raised = OutOfBlocks
        tables = pool.tables
        return {
            "raised": raised,
            "returned": returned,
            "tables": dict(tables),
            "tables that are one list object": [a for a in tables if any(tables[a] is tables[b] for b in tables if b != a)],
            "ref_count": list(pool.ref_count),
            "free (sorted)": sorted(pool.free),
            "lengths": dict(pool.lengths),
            "index": dict(pool.index),
            "keys": dict(pool.keys),
        }

    def _raised(self, error: Exception, case: tuple, wanted: dict) -> str:
        says = super()._raised(error, case, wanted)
        return f"{says}\nToo few blocks are free here: {_RAISE_IT}" if wanted["raised"] else says


_RAISE_IT = "OutOfBlocks has to be raised, before anything is changed and before take() is called."


def _pool(num_blocks: int, *steps: tuple) -> Pool:
    """A pool of blocks of 4 tokens, after these steps of the worked functions: ("allocate", "ada", 6), …"""
    pool = byhand.new_pool(num_blocks, 4)
    for name, *arguments in steps:
        if name == "findable":
            block, key = arguments
            pool.keys[block], pool.index[key] = key, block
        elif name == "used":
            pool.last_access = list(arguments)
        else:
            getattr(byhand, name)(pool, *arguments)
    return pool


# ---- 1: allocate -----------------------------------------------------------------------------------------------------

_CACHED = (
    ("allocate", "before", 8),
    ("findable", 0, (1,) * 4),
    ("findable", 1, (1,) * 8),
    ("free", "before"),
    ("used", 1, 2, 0, 0),
)


def _allocate(*, rounded=Pool.blocks_for, ask="rightly", hits_count=True, hold="first"):
    """The worked answer with one thing, or two, done otherwise.

    rounded      how many blocks the tokens need
    ask          for room: rightly; never; all of num_free (as if no hit were among them)
    hits_count   whether the hits' reference counts are raised
    hold         the hits: first; after taking; before asking for room
    """

    def allocate(pool, seq, num_tokens, hits=()):
        need = rounded(pool, num_tokens) - len(hits)
        revived = sum(pool.ref_count[block] == 0 for block in hits) if ask == "rightly" else 0
        room = pool.num_free - revived
        if hits_count and hold == "before asking":
            _hold(pool, hits)
        if ask != "never" and need > room:
            raise OutOfBlocks
        if hits_count and hold == "first":
            _hold(pool, hits)
        new = [pool.take() for _ in range(need)]
        if hits_count and hold == "after taking":
            _hold(pool, hits)
        pool.tables[seq] = list(hits) + new
        pool.lengths[seq] = num_tokens

    return allocate


def _hold(pool, blocks):
    for block in blocks:
        pool.ref_count[block] += 1


def _allocate_without_hits(pool, seq, num_tokens, hits=()):
    byhand.allocate(pool, seq, num_tokens)


def _allocate_uncounted_hits(pool, seq, num_tokens, hits=()):
    before = list(pool.ref_count)
    byhand.allocate(pool, seq, num_tokens, hits)
    for block in hits:
        pool.ref_count[block] = before[block]


def _allocate_unasked(first: str):
    """Takes block by block, until none is left. `first`: whether table or length are written before that, and whether it asks."""

    def allocate(pool, seq, num_tokens, hits=()):
        _hold(pool, hits)
        table = list(hits)
        if "table" in first:
            pool.tables[seq] = table
        if "length" in first:
            pool.lengths[seq] = num_tokens
        need = pool.blocks_for(num_tokens) - len(hits)
        if "asks" in first and need > pool.num_free:
            raise OutOfBlocks
        for _ in range(need):
            if not pool.num_free:
                raise OutOfBlocks
            table.append(pool.take())
        pool.tables[seq], pool.lengths[seq] = table, num_tokens

    return allocate


def _allocate_counts_taken(pool, seq, num_tokens, hits=()):
    byhand.allocate(pool, seq, num_tokens, hits)
    _hold(pool, pool.tables[seq][len(hits) :])


def _allocate_no_length(pool, seq, num_tokens, hits=()):
    byhand.allocate(pool, seq, num_tokens, hits)
    del pool.lengths[seq]


_UNCOUNTED = "It puts the hits into the table and does not count them. Their next owner to end would free them under us."
_TAKES_FIRST = (
    "It takes new blocks before it holds the hits. A hit that nobody holds may be the very block that is evicted for "
    "them (vllm#10507). Hold first, take second."
)

ALLOCATE = OnAPool(
    1,
    "allocate",
    byhand.allocate,
    cases=(
        (_pool(4), "ada", 6),
        (_pool(4), "ada", 8),
        (_pool(4), "ada", 1),
        (_pool(6, ("allocate", "ben", 5)), "ada", 16),
        (_pool(2), "ada", 9),
        (_pool(3, ("allocate", "ben", 5)), "ada", 6),
        (_pool(6, ("allocate", "ben", 9), ("findable", 0, (1,) * 4)), "ada", 10, (0,)),
        (_pool(4, *_CACHED), "ada", 10, (0, 1)),
        (_pool(2, *_CACHED[:4], ("used", 1, 2)), "ada", 6, (0,)),
        (_pool(3, *_CACHED[:4], ("allocate", "ben", 2), ("used", 1, 2, 3)), "ada", 9, (0, 1)),
    ),
    mistakes=(
        Mistake(
            "It throws the last, half-filled block away: 6 tokens in blocks of 4 need two blocks. Round up.",
            _allocate(rounded=lambda pool, n: n // pool.block_size),
        ),
        Mistake(
            "It always takes one block more, also when the last one is exactly full.",
            _allocate(rounded=lambda pool, n: n // pool.block_size + 1),
        ),
        Mistake(
            "It takes one block per token. A block holds block_size tokens.",
            _allocate(rounded=lambda pool, n: n),
        ),
        Mistake(
            "It does not use the hits. Their K/V is there already: put them at the front of the table, and take only the rest.",
            _allocate_without_hits,
        ),
        Mistake(_UNCOUNTED, _allocate_uncounted_hits),
        Mistake(_UNCOUNTED, _allocate(hits_count=False)),
        Mistake(_UNCOUNTED, _allocate(hits_count=False, ask="all of num_free")),
        Mistake(_TAKES_FIRST, _allocate(hold="after taking")),
        Mistake(_TAKES_FIRST, _allocate(hold="after taking", ask="all of num_free")),
        *(
            Mistake(
                "It stops half way when the pool runs out, and leaves what it has done. Ask num_free first, then change the pool.",
                _allocate_unasked(first),
            )
            for first in ("", "table", "table, length", "table, asks", "table, length, asks")
        ),
        Mistake("It counts the new blocks twice: take() has set their count to 1 already.", _allocate_counts_taken),
        Mistake(
            "It holds the hits, then finds too few blocks free, raises OutOfBlocks and leaves the counts of the hits raised. Ask "
            "num_free first, then change the pool.",
            _allocate(hold="before asking"),
        ),
        Mistake(f"It never raises OutOfBlocks. When too few blocks are free, {_RAISE_IT}", _allocate(ask="never")),
        Mistake(
            "It counts a hit that nobody holds as free, and then holds it: one block is promised twice. Subtract those hits.",
            _allocate(ask="all of num_free"),
        ),
        Mistake("It does not write down how long the request is: pool.lengths[seq].", _allocate_no_length),
    ),
)

# ---- 2: share_prefix -------------------------------------------------------------------------------------------------


def _share_uncounted(pool, src, dst, prefix_len):
    pool.tables[dst] = pool.tables[src][: pool.blocks_for(prefix_len)]
    pool.lengths[dst] = prefix_len


def _share_full_only(pool, src, dst, prefix_len):
    byhand.share_prefix(pool, src, dst, prefix_len // pool.block_size * pool.block_size)
    pool.lengths[dst] = prefix_len


def _share_whole_table(pool, src, dst, prefix_len):
    byhand.share_prefix(pool, src, dst, pool.lengths[src])
    pool.lengths[dst] = prefix_len


def _share_same_list(counted=lambda pool, src, prefix_len: pool.tables[src][: pool.blocks_for(prefix_len)]):
    """One list in both tables, with the counts of these blocks raised."""

    def share_prefix(pool, src, dst, prefix_len):
        _hold(pool, counted(pool, src, prefix_len))
        pool.tables[dst] = pool.tables[src]
        pool.lengths[dst] = prefix_len

    return share_prefix


def _share_same_list_when_whole(pool, src, dst, prefix_len):
    byhand.share_prefix(pool, src, dst, prefix_len)
    if prefix_len == pool.lengths[src]:
        pool.tables[dst] = pool.tables[src]


def _share_source_length(pool, src, dst, prefix_len):
    byhand.share_prefix(pool, src, dst, prefix_len)
    pool.lengths[dst] = pool.lengths[src]


def _share_by_copy(pool, src, dst, prefix_len):
    byhand.allocate(pool, dst, prefix_len)


def _share_all_counts(pool, src, dst, prefix_len):
    byhand.share_prefix(pool, src, dst, prefix_len)
    for block in pool.tables[src][pool.blocks_for(prefix_len) :]:
        pool.ref_count[block] += 1


_SAME_LIST = (
    "Both requests have the same list as their table (dst has the very same list object as src): when one grows, the other "
    "grows. Copy the list, as a slice does, not the blocks."
)

SHARE_PREFIX = OnAPool(
    2,
    "share_prefix",
    byhand.share_prefix,
    cases=(
        (_pool(6, ("allocate", "ben", 10)), "ben", "ada", 8),
        (_pool(6, ("allocate", "ben", 10)), "ben", "ada", 10),
        (_pool(6, ("allocate", "ben", 10)), "ben", "ada", 5),
        (_pool(6, ("allocate", "ben", 10), ("share_prefix", "ben", "cyd", 8)), "ben", "ada", 3),
        (_pool(6, ("allocate", "ben", 10)), "ben", "ada", 0),
    ),
    mistakes=(
        Mistake(
            "It does not raise ref_count. The table says two requests use the block, the count says one: when the first ends, "
            "the block is handed to a stranger.",
            _share_uncounted,
        ),
        Mistake(
            "It shares full blocks only. A half-filled block is shared too; it is copied when somebody writes it.",
            _share_full_only,
        ),
        Mistake("It shares the whole table. Only the blocks that the first prefix_len tokens lie in.", _share_whole_table),
        Mistake(_SAME_LIST, _share_same_list_when_whole),
        Mistake(_SAME_LIST, _share_same_list()),
        Mistake(_SAME_LIST, _share_same_list(lambda pool, src, prefix_len: pool.tables[src])),
        Mistake(_SAME_LIST, _share_same_list(lambda pool, src, prefix_len: ())),
        Mistake("The length of dst is prefix_len, not the length of its source.", _share_source_length),
        Mistake("It takes new blocks. That is a copy, not sharing: the same blocks go into both tables.", _share_by_copy),
        Mistake("It raises the count of blocks that dst does not name.", _share_all_counts),
    ),
)

# ---- 3: append_token -------------------------------------------------------------------------------------------------


def _append_no_copy(pool, seq):
    if pool.lengths[seq] % pool.block_size == 0:
        return byhand.append_token(pool, seq)
    pool.lengths[seq] += 1
    return None


def _append_always_copies(pool, seq):
    table = pool.tables[seq]
    if pool.lengths[seq] % pool.block_size == 0:
        return byhand.append_token(pool, seq)
    old, new = table[-1], pool.take()
    pool.ref_count[old] -= 1
    table[-1] = new
    pool.lengths[seq] += 1
    return (old, new)


def _append_keeps_reference(pool, seq):
    copy_ = byhand.append_token(pool, seq)
    if copy_ is not None:
        pool.ref_count[copy_[0]] += 1
    return copy_


def _append_turned(pool, seq):
    copy_ = byhand.append_token(pool, seq)
    return None if copy_ is None else (copy_[1], copy_[0])


def _append_silent(pool, seq):
    byhand.append_token(pool, seq)


def _append_copies_full(pool, seq):
    table = pool.tables[seq]
    if pool.lengths[seq] % pool.block_size == 0 and pool.ref_count[table[-1]] > 1:
        old, new = table[-1], pool.take()
        pool.ref_count[old] -= 1
        table[-1] = new
        pool.lengths[seq] += 1
        return (old, new)
    return byhand.append_token(pool, seq)


def _append_late(pool, seq):
    if pool.lengths[seq] % pool.block_size == pool.block_size - 1:
        pool.tables[seq].append(pool.take())
        pool.lengths[seq] += 1
        return None
    if pool.lengths[seq] % pool.block_size == 0:
        pool.lengths[seq] += 1
        return None
    return byhand.append_token(pool, seq)


def _append_no_length(pool, seq):
    copy_ = byhand.append_token(pool, seq)
    pool.lengths[seq] -= 1
    return copy_


def _append_counts_first(pool, seq):
    try:
        return byhand.append_token(pool, seq)
    except OutOfBlocks:
        pool.lengths[seq] += 1
        raise


def _append_lowers_first(pool, seq):
    old = pool.tables[seq][-1]
    shared = pool.lengths[seq] % pool.block_size and pool.ref_count[old] > 1
    try:
        return byhand.append_token(pool, seq)
    except OutOfBlocks:
        pool.ref_count[old] -= bool(shared)
        raise


def _append_always_asks(counts_first: bool):
    def append_token(pool, seq):
        if not pool.num_free:
            pool.lengths[seq] += counts_first
            raise OutOfBlocks
        return byhand.append_token(pool, seq)

    return append_token


def _append_never_asks(append: Callable):
    def append_token(pool, seq):
        try:
            return append(pool, seq)
        except OutOfBlocks:
            return pool.take()  # fails, as there is nothing to take

    return append_token


_KEEPS_REFERENCE = (
    "It leaves the old block's count as it was. This request no longer names it: lower the count, or it never comes back."
)
_ASKS_ALWAYS = "It raises OutOfBlocks although no block is needed: a token may go into the free part of a block of one's own."
_FORKED = (("allocate", "ben", 6), ("share_prefix", "ben", "ada", 6))

APPEND_TOKEN = OnAPool(
    3,
    "append_token",
    byhand.append_token,
    cases=(
        (_pool(4, ("allocate", "ada", 6)), "ada"),
        (_pool(4, ("allocate", "ada", 8)), "ada"),
        (_pool(4, ("allocate", "ada", 7)), "ada"),
        (_pool(6, *_FORKED), "ada"),
        (_pool(6, *_FORKED), "ben"),
        (_pool(6, ("allocate", "ben", 8), ("share_prefix", "ben", "ada", 8)), "ada"),
        (_pool(6, *_FORKED, ("append_token", "ada")), "ben"),
        (_pool(2, ("allocate", "ada", 8)), "ada"),
        (_pool(2, *_FORKED), "ada"),
        (_pool(2, ("allocate", "ada", 6)), "ada"),
    ),
    mistakes=(
        Mistake(
            "It writes into a block that another table names. This one line is where requests begin to say each other's words: if "
            "ref_count is above 1, take a block of your own first.",
            _append_no_copy,
        ),
        Mistake(
            "It copies although nobody else has the block. Above 1, not from 1 on: a block of one's own is written in place.",
            _append_always_copies,
        ),
        Mistake(_KEEPS_REFERENCE, _append_keeps_reference),
        Mistake("The pair is turned round: (from, to), the shared block first.", _append_turned),
        Mistake(
            "It takes a block and does not say what to copy into it. The new block holds nobody's tokens; return (from, to).",
            _append_silent,
        ),
        Mistake(
            "It copies a full block. Nothing is written into that one any more: the token goes into a new block, and the full "
            "one stays shared.",
            _append_copies_full,
        ),
        Mistake(
            "It is off by one at the block's edge. A new block is needed when the length before the token is a multiple of "
            "block_size.",
            _append_late,
        ),
        Mistake("It does not count the token: pool.lengths[seq] goes up by one.", _append_no_length),
        Mistake(
            "When no block is free it has already changed the request's length. Ask num_free first, then change the pool.",
            _append_counts_first,
        ),
        Mistake(
            "When no block is free it has already lowered the shared block's count. Ask num_free first, then change the pool.",
            _append_lowers_first,
        ),
        Mistake(
            f"It never raises OutOfBlocks. When a block is needed and none is free, {_RAISE_IT}",
            _append_never_asks(byhand.append_token),
        ),
        Mistake(_KEEPS_REFERENCE, _append_never_asks(_append_keeps_reference)),
        Mistake(_ASKS_ALWAYS, _append_always_asks(counts_first=False)),
        Mistake(_ASKS_ALWAYS, _append_always_asks(counts_first=True)),
    ),
)

# ---- 4: free ---------------------------------------------------------------------------------------------------------


def _free(*, count="lowered", back="at 0", findable="stay"):
    """The worked answer with one thing, or two, done otherwise.

    count     of each block: lowered; set to 0; left; lowered for blocks of one's own only
    back      the block goes to the free list: at 0; always; never
    findable  blocks: stay; go too; are made unfindable and go
    """

    def free(pool, seq):
        for block in reversed(pool.tables.pop(seq)):
            if count == "set to 0":
                pool.ref_count[block] = 0
            elif count == "lowered" or (count == "own only" and pool.ref_count[block] == 1):
                pool.ref_count[block] -= 1
            goes = back == "always" or (back == "at 0" and pool.ref_count[block] == 0)
            if goes and findable == "unmapped" and block in pool.keys:
                del pool.index[pool.keys.pop(block)]
            if goes and (findable == "go too" or block not in pool.keys):
                pool.free.append(block)
        del pool.lengths[seq]

    return free


def _free_keeps_table(pool, seq):
    table = list(pool.tables[seq])
    length = pool.lengths[seq]
    byhand.free(pool, seq)
    pool.tables[seq], pool.lengths[seq] = table, length


def _free_keeps_length(pool, seq):
    length = pool.lengths[seq]
    byhand.free(pool, seq)
    pool.lengths[seq] = length


FREE = OnAPool(
    4,
    "free",
    byhand.free,
    cases=(
        (_pool(4, ("allocate", "ada", 6)), "ada"),
        (_pool(6, *_FORKED), "ada"),
        (_pool(6, *_FORKED, ("append_token", "ada")), "ada"),
        (_pool(6, *_FORKED, ("free", "ben")), "ada"),
        (_pool(6, *_FORKED, ("share_prefix", "ben", "cyd", 4)), "ben"),
        (_pool(6, ("allocate", "ada", 9), ("findable", 0, (1,) * 4), ("findable", 1, (1,) * 8)), "ada"),
    ),
    mistakes=(
        *(
            Mistake(says, _free(**otherwise, findable=findable))
            for findable in ("stay", "go too")
            for says, otherwise in (
                (
                    "It sets the count to 0 whatever it was. Another request still names the block; it would be handed out under "
                    "it. Lower the count by one.",
                    {"count": "set to 0"},
                ),
                (
                    "It lowers the count and frees the block in any case. Only a count of 0 means that nobody names it.",
                    {"back": "always"},
                ),
                (
                    "It leaves shared blocks alone. Its own reference has to go too, or the count never reaches 0 and the block "
                    "is lost.",
                    {"count": "own only"},
                ),
                (
                    "It frees the blocks and leaves their counts as they were. Lower each by one; only what reaches 0 is free.",
                    {"count": "left", "back": "always"},
                ),
            )
        ),
        Mistake("It lowers the counts and gives no block back: those that reach 0 go to pool.free.", _free(back="never")),
        Mistake(
            "It puts a findable block (one in pool.keys) into the free list. It would be handed out while the index still points "
            "to it. Leave it where it can be found: evict takes it when it is needed.",
            _free(findable="go too"),
        ),
        Mistake(
            "It makes the findable blocks unfindable and frees them. The next request with the same beginning would find nothing: "
            "leave them in pool.keys and pool.index, evict takes them when they are needed.",
            _free(findable="unmapped"),
        ),
        Mistake("It leaves the request's table and length behind. A request that ended has neither.", _free_keeps_table),
        Mistake("It leaves the request's length behind.", _free_keeps_length),
    ),
)

# ---- 5: evict --------------------------------------------------------------------------------------------------------


def _evict_where(choose, unmap: str = "both"):
    def evict(pool):
        block = choose(pool)
        if unmap == "both":
            del pool.index[pool.keys.pop(block)]
        elif unmap == "keys":
            del pool.keys[block]
        elif unmap == "index":
            del pool.index[pool.keys[block]]
        return block

    return evict


def _least(pool):
    return min((b for b in pool.keys if pool.ref_count[b] == 0), key=lambda b: pool.last_access[b])


def _evict_returns_key(pool):
    key = pool.keys.pop(_least(pool))
    del pool.index[key]
    return key


def _evict_frees_too(returns: bool):
    def evict(pool):
        block = byhand.evict(pool)
        pool.free.append(block)
        return block if returns else None

    return evict


def _evict_returns_nothing(pool):
    byhand.evict(pool)


def _evict_pool(*used: int, held: str | None = None) -> Pool:
    """Three findable blocks of three requests that ended, except `held`; `used`: their last accesses."""
    names = ("ada", "ben", "cyd")
    pool = _pool(3, *(("allocate", name, 4) for name in names), *(("findable", i, (i + 1,) * 4) for i in range(3)))
    for name in names:
        if name != held:
            byhand.free(pool, name)
    pool.last_access = list(used)
    return pool


EVICT = OnAPool(
    5,
    "evict",
    byhand.evict,
    cases=(
        (_evict_pool(5, 3, 4),),
        (_evict_pool(1, 2, 3),),
        (_evict_pool(9, 8, 7),),
        (_evict_pool(1, 2, 3, held="ada"),),
        (_evict_pool(6, 2, 4, held="ben"),),
    ),
    mistakes=(
        Mistake(
            "It may take a block that a request holds. Only blocks with a ref_count of 0, however long ago they were used.",
            _evict_where(lambda pool: min(pool.keys, key=lambda b: pool.last_access[b])),
        ),
        Mistake(
            "It takes the block that was used last. The one not used for the longest time is the least likely to be asked for.",
            _evict_where(lambda pool: max((b for b in pool.keys if not pool.ref_count[b]), key=lambda b: pool.last_access[b])),
        ),
        Mistake(
            "It takes the oldest entry, not the one used least recently. A prompt that is asked for all day is old too.",
            _evict_where(lambda pool: next(b for b in pool.keys if pool.ref_count[b] == 0)),
        ),
        Mistake(
            "It leaves the block findable. The next request with the old prompt would be given whatever is written into it now: "
            "evict means unmap, in pool.keys and in pool.index.",
            _evict_where(_least, unmap="none"),
        ),
        Mistake(
            "It forgets pool.index: the old prompt still finds the block.",
            _evict_where(_least, unmap="keys"),
        ),
        Mistake(
            "It forgets pool.keys: the block is taken for findable once more, and evicted a second time while somebody has it.",
            _evict_where(_least, unmap="index"),
        ),
        *(
            Mistake(
                "It puts the block into pool.free as well. The caller takes what evict returns at once: from the free list it "
                "would be handed out a second time.",
                _evict_frees_too(returns),
            )
            for returns in (True, False)
        ),
        Mistake("It returns nothing. The caller needs the block's number.", _evict_returns_nothing),
        Mistake("It returns the key. The caller needs the block's number.", _evict_returns_key),
    ),
)

EXERCISES = (ALLOCATE, SHARE_PREFIX, APPEND_TOKEN, FREE, EVICT)
