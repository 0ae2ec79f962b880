"""Checks of lab 5, a hand-written block manager: five functions that change a pool."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvlab.checks import Exercise, Mistake, Wrong
from kvlab.core.blocks import OutOfBlocks
from kvlab.experiments import byhand
from kvlab.experiments.byhand import Pool


@dataclass(frozen=True)
class OnAPool(Exercise):
    """An exercise whose first argument is a `Pool` and is meant to be changed: judged by what is returned and what the pool
    is afterwards. The order of the free list does not matter, how often a block stands in it does."""

    def check(self, answer: Callable) -> None:
        """As `Exercise.check`, on copies of the pool."""
        if not callable(answer):
            raise Wrong(f"{self._title}: the name {self.name} should be a function, it is {type(answer).__name__}.")
        mistakes = tuple(replace(mistake, code=_played(mistake.code)) for mistake in self.mistakes)
        Exercise(self.number, self.name, _played(self.right), self.cases, mistakes).check(_played(answer))


def _played(function: Callable) -> Callable:
    def play(pool: Pool, *arguments) -> dict:
        pool = copy.deepcopy(pool)
        try:
            result = function(pool, *copy.deepcopy(arguments))
        except OutOfBlocks:
            result = "OutOfBlocks"
        return {
            "returned": result,
            "tables": list(map(list, pool.tables.items())),
            "ref_count": list(pool.ref_count),
            "free": sorted(pool.free),
            "lengths": list(map(list, pool.lengths.items())),
            "index": sorted(pool.index.items()),
            "keys": sorted(pool.keys.items()),
        }

    return play


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


def _allocate_without_hits(pool, seq, num_tokens, hits=()):
    byhand.allocate(pool, seq, num_tokens)


def _allocate_uncounted_hits(pool, seq, num_tokens, hits=()):
    before = list(pool.ref_count)
    byhand.allocate(pool, seq, num_tokens, hits)
    for block in hits:
        pool.ref_count[block] = before[block]


def _allocate_takes_first(pool, seq, num_tokens, hits=()):
    need = pool.blocks_for(num_tokens) - len(hits)
    if need > pool.num_free - sum(pool.ref_count[b] == 0 for b in hits):
        raise OutOfBlocks
    new = [pool.take() for _ in range(need)]
    for block in hits:
        pool.ref_count[block] += 1
    pool.tables[seq] = list(hits) + new
    pool.lengths[seq] = num_tokens


def _allocate_rounding(blocks_for):
    def allocate(pool, seq, num_tokens, hits=()):
        need = blocks_for(pool, num_tokens) - len(hits)
        if need > pool.num_free - sum(pool.ref_count[b] == 0 for b in hits):
            raise OutOfBlocks
        for block in hits:
            pool.ref_count[block] += 1
        pool.tables[seq] = list(hits) + [pool.take() for _ in range(need)]
        pool.lengths[seq] = num_tokens

    return allocate


def _allocate_unasked(pool, seq, num_tokens, hits=()):
    for block in hits:
        pool.ref_count[block] += 1
    pool.tables[seq] = list(hits)
    for _ in range(pool.blocks_for(num_tokens) - len(hits)):
        if not pool.num_free:
            raise OutOfBlocks
        pool.tables[seq].append(pool.take())
    pool.lengths[seq] = num_tokens


def _allocate_counts_revived(pool, seq, num_tokens, hits=()):
    need = pool.blocks_for(num_tokens) - len(hits)
    if need > pool.num_free:
        raise OutOfBlocks
    for block in hits:
        pool.ref_count[block] += 1
    pool.tables[seq] = list(hits) + [pool.take() for _ in range(need)]
    pool.lengths[seq] = num_tokens


def _allocate_no_length(pool, seq, num_tokens, hits=()):
    byhand.allocate(pool, seq, num_tokens, hits)
    del pool.lengths[seq]


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
            _allocate_rounding(lambda pool, n: n // pool.block_size),
        ),
        Mistake(
            "It always takes one block more, also when the last one is exactly full.",
            _allocate_rounding(lambda pool, n: n // pool.block_size + 1),
        ),
        Mistake(
            "It takes one block per token. A block holds block_size tokens.",
            _allocate_rounding(lambda pool, n: n),
        ),
        Mistake(
            "It does not use the hits. Their K/V is there already: put them at the front of the table, and take only the rest.",
            _allocate_without_hits,
        ),
        Mistake(
            "It puts the hits into the table and does not count them. Their next owner to end would free them under us.",
            _allocate_uncounted_hits,
        ),
        Mistake(
            "It takes new blocks before it holds the hits. A hit that nobody holds may be the very block that is evicted for "
            "them (vllm#10507). Hold first, take second.",
            _allocate_takes_first,
        ),
        Mistake(
            "It stops half way when the pool runs out, and leaves what it has done. Ask num_free first, then change the pool.",
            _allocate_unasked,
        ),
        Mistake(
            "It counts a hit that nobody holds as free, and then holds it: one block is promised twice. Subtract those hits.",
            _allocate_counts_revived,
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


def _share_same_list(pool, src, dst, prefix_len):
    if prefix_len != pool.lengths[src]:
        return byhand.share_prefix(pool, src, dst, prefix_len)
    for block in pool.tables[src]:
        pool.ref_count[block] += 1
    pool.tables[dst] = pool.tables[src]
    pool.lengths[dst] = prefix_len
    return None


def _share_source_length(pool, src, dst, prefix_len):
    byhand.share_prefix(pool, src, dst, prefix_len)
    pool.lengths[dst] = pool.lengths[src]


def _share_by_copy(pool, src, dst, prefix_len):
    byhand.allocate(pool, dst, prefix_len)


def _share_all_counts(pool, src, dst, prefix_len):
    byhand.share_prefix(pool, src, dst, prefix_len)
    for block in pool.tables[src][pool.blocks_for(prefix_len) :]:
        pool.ref_count[block] += 1


@dataclass(frozen=True)
class _OnTwoTables(OnAPool):
    """`OnAPool`, and afterwards the source's table is grown by hand, to see whether the two are one list."""

    def check(self, answer: Callable) -> None:
        """As `OnAPool.check`."""
        if not callable(answer):
            return super().check(answer)
        grown = tuple(replace(mistake, code=_then_grow(mistake.code)) for mistake in self.mistakes)
        OnAPool(self.number, self.name, _then_grow(self.right), self.cases, grown).check(_then_grow(answer))
        return None


def _then_grow(function: Callable) -> Callable:
    def run(pool, src, dst, prefix_len):
        result = function(pool, src, dst, prefix_len)
        pool.tables[src].append(99)
        return result

    return run


SHARE_PREFIX = _OnTwoTables(
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
        Mistake(
            "Both requests have the same list as their table: when one grows, the other grows. Copy the list, not the blocks.",
            _share_same_list,
        ),
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
        Mistake(
            "It leaves the old block's count as it was. This request no longer names it: lower the count, or it never comes back.",
            _append_keeps_reference,
        ),
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
    ),
)

# ---- 4: free ---------------------------------------------------------------------------------------------------------


def _free_whatever_the_count(pool, seq):
    for block in reversed(pool.tables.pop(seq)):
        pool.ref_count[block] = 0
        if block not in pool.keys:
            pool.free.append(block)
    del pool.lengths[seq]


def _free_returns_all(pool, seq):
    for block in reversed(pool.tables.pop(seq)):
        pool.ref_count[block] -= 1
        if block not in pool.keys:
            pool.free.append(block)
    del pool.lengths[seq]


def _free_only_unshared(pool, seq):
    for block in reversed(pool.tables.pop(seq)):
        if pool.ref_count[block] == 1:
            pool.ref_count[block] = 0
            if block not in pool.keys:
                pool.free.append(block)
    del pool.lengths[seq]


def _free_never_returns(pool, seq):
    for block in pool.tables.pop(seq):
        pool.ref_count[block] -= 1
    del pool.lengths[seq]


def _free_findable_too(pool, seq):
    for block in reversed(pool.tables.pop(seq)):
        pool.ref_count[block] -= 1
        if pool.ref_count[block] == 0:
            pool.free.append(block)
    del pool.lengths[seq]


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
        Mistake(
            "It sets the count to 0 whatever it was. Another request still names the block; it would be handed out under it. "
            "Lower the count by one.",
            _free_whatever_the_count,
        ),
        Mistake(
            "It lowers the count and frees the block in any case. Only a count of 0 means that nobody names it.",
            _free_returns_all,
        ),
        Mistake(
            "It leaves shared blocks alone. Its own reference has to go too, or the count never reaches 0 and the block is lost.",
            _free_only_unshared,
        ),
        Mistake("It lowers the counts and gives no block back: those that reach 0 go to pool.free.", _free_never_returns),
        Mistake(
            "It puts a findable block (one in pool.keys) into the free list. It would be handed out while the index still points "
            "to it. Leave it where it can be found: evict takes it when it is needed.",
            _free_findable_too,
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
        Mistake("It returns the key. The caller needs the block's number.", _evict_returns_key),
    ),
)

EXERCISES = (ALLOCATE, SHARE_PREFIX, APPEND_TOKEN, FREE, EVICT)
