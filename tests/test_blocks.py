"""The block manager, case by case: what a caller may rely on, the public cases, and bad input."""

import subprocess
import sys
from dataclasses import asdict
from unittest.mock import patch

import pytest

from kvlab.core.blocks import Allocation, BlockCopy, BlockManager, InvariantError, OutOfBlocks, UnknownSequence
from kvlab.core.prefixes import PrefixIndex
from kvlab.core.trace import Trace

SYSTEM = list(range(100, 148))  # 48 tokens: three blocks of 16


def written(m, seq, tokens, **where):
    """Allocate and pretend that the K/V is computed."""
    allocation = m.allocate(seq, tokens, **where)
    m.commit(seq, len(tokens))
    return allocation


def state(m):
    """All a manager knows, as values."""
    return (
        {name: asdict(s) for name, s in m._sequences.items()},
        [(b.ref_count, dict(b.owners), b.prefix and b.prefix.key, b.created, b.last_access) for b in m._blocks],
        (list(m._blank), list(m._evictable), m._clock),
        [(p.key, p.label, list(p.blocks), p.children) for p in m._index],
        (dict(m._pins), m.prefix_stats, m._changes),
    )


# ---- the life of a request ------------------------------------------------------------------------------------------


def test_a_request_from_start_to_end():
    m = BlockManager(8, 4)
    assert m.allocate("a", [1, 2, 3, 4, 5]) == Allocation([0, 1], 0)
    assert m.append_token("a", 6) == [] and m.append("a", [7, 8, 9]) == []
    assert m.tokens("a") == list(range(1, 10)) and m.block_table("a") == [0, 1, 2]
    assert m.num_free_blocks == 5 and m.block(0).ref_count == 1 and m.block(0).owners == ("a",)
    m.truncate("a", 4)
    assert m.block_table("a") == [0] and m.num_free_blocks == 7
    m.free("a")
    assert m.num_free_blocks == 8
    m.check()


def test_what_is_returned_is_a_copy():
    m = BlockManager(8, 4)
    m.allocate("a", [1, 2]).block_table.append(99)
    m.block_table("a").clear(), m.tokens("a").clear()
    assert m.block_table("a") == [0] and m.tokens("a") == [1, 2]


def test_fork_shares_until_one_writes():
    m = BlockManager(8, 4)
    written(m, "a", [1, 2, 3, 4, 5, 6])
    m.fork("a", "b")
    assert m.block_table("b") == [0, 1] and m.block(1).ref_count == 2 and m.block(1).owners == ("a", "b")
    assert m.append_token("b", 7) == [BlockCopy(1, 2)]
    assert m.block_table("a") == [0, 1] and m.block_table("b") == [0, 2]
    assert m.append_token("a", 8) == [], "nobody shares block 1 any more"
    m.check()


def test_fork_at_a_block_boundary_copies_nothing():
    m = BlockManager(8, 4)
    written(m, "a", [1, 2, 3, 4])
    m.fork("a", "b")
    assert m.append_token("b", 5) == [] and m.append_token("a", 5) == []
    assert m.block_table("a") == [0, 2] and m.block_table("b") == [0, 1]


def test_share_prefix_copies_a_partial_block_when_it_is_written():
    m = BlockManager(8, 4)
    written(m, "system", [1, 2, 3, 4, 5, 6])
    m.share_prefix("system", "a", 5)
    assert m.tokens("a") == [1, 2, 3, 4, 5] and m.num_committed("a") == 5
    assert m.append("a", [9, 9]) == [BlockCopy(1, 2)]
    assert m.tokens("system") == [1, 2, 3, 4, 5, 6]
    m.check()


def test_a_shared_block_outlives_who_wrote_it():
    m = BlockManager(8, 4)
    written(m, "a", [1, 2, 3, 4, 5])
    m.fork("a", "b")
    m.free("a")
    assert m.num_free_blocks == 6 and m.block(0).owners == ("b",)
    m.allocate("c", [7] * 24)
    assert not set(m.block_table("c")) & set(m.block_table("b"))
    m.check()


def test_owners_are_tagged_once_per_owner():
    m = BlockManager(8, 4)
    written(m, "r1", [1, 2, 3, 4, 5], owner="ada")
    m.fork("r1", "r2", owner="ada")
    m.fork("r1", "r3")
    assert m.block(0).ref_count == 3 and m.block(0).owners == ("ada", "r3")
    m.free("r1")
    assert m.block(0).owners == ("ada", "r3")
    m.free("r2")
    assert m.block(0).owners == ("r3",)


def test_created_and_last_access_tell_a_leak():
    m = BlockManager(8, 4)
    m.allocate("old", [1])
    m.allocate("new", [2])
    m.append_token("new", 3)
    assert m.block(0).created < m.block(1).created
    assert m.block(0).last_access < m.block(1).last_access
    assert m.block(7) == (0, (), None, None, None)


# ---- sharing a prefix -----------------------------------------------------------------------------------------------


def test_a_prefix_is_found_only_when_it_is_written():
    m = BlockManager(16)
    m.allocate("a", SYSTEM + [1])
    assert m.allocate("b", SYSTEM + [2]).num_cached_tokens == 0
    m.commit("a", 31)
    assert m.allocate("c", SYSTEM + [3]).num_cached_tokens == 16, "31 tokens are one full block and a part"
    m.commit("a", 49)
    assert m.allocate("d", SYSTEM + [4]) == Allocation([*m.block_table("a")[:3], *m.block_table("d")[3:]], 48)
    m.check()


@pytest.mark.parametrize(("length", "hit"), [(15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32)])
def test_a_hit_is_at_most_n_minus_1(length, hit):
    """vllm#11186, vllm#17999, nano-vllm#144."""
    m = BlockManager(16)
    written(m, "a", list(range(length)))
    assert m.allocate("b", list(range(length))).num_cached_tokens == hit


def test_one_changed_token_ends_the_hit_there():
    m = BlockManager(16, 4)
    written(m, "a", list(range(20)))
    changed = list(range(20))
    changed[9] = 99
    assert m.allocate("b", changed).num_cached_tokens == 8


def test_the_same_text_at_another_start_is_no_hit():
    m = BlockManager(32, 4)
    written(m, "a", list(range(16)))
    assert m.allocate("b", [99, *range(16)]).num_cached_tokens == 0
    assert m.allocate("c", [99] * 4 + list(range(16))).num_cached_tokens == 0, "aligned, and still another history"


def test_salt_and_adapter_divide():
    """Same salt hits, another misses: the miss alone would pass with the cache off (vllm#53347)."""
    m = BlockManager(64, 4)
    prompt = list(range(9))
    written(m, "plain", prompt)
    for kind in ("salt", "adapter"):
        assert m.allocate(f"{kind} first", prompt, **{kind: "x"}).num_cached_tokens == 0
        m.commit(f"{kind} first", 9)
        assert m.allocate(f"{kind} again", prompt, **{kind: "x"}).num_cached_tokens == 8
        assert m.allocate(f"{kind} other", prompt, **{kind: "y"}).num_cached_tokens == 0
    assert m.allocate("plain again", prompt).num_cached_tokens == 8
    assert m.allocate("both", prompt, salt="x", adapter="x").num_cached_tokens == 0
    assert m.allocate("empty", prompt, salt="").num_cached_tokens == 0
    m.check()


def test_salt_travels_down_the_chain():
    m = BlockManager(64, 4)
    written(m, "a", [1, 2, 3, 4], salt="x")
    m.append("a", [5, 6, 7, 8, 9])
    m.commit("a", 9)
    hashes = [m.block(i).block_hash for i in m.block_table("a")[:2]]
    written(m, "b", list(range(1, 10)))
    assert not set(hashes) & {m.block(i).block_hash for i in m.block_table("b")}
    m.fork("a", "c")
    assert m.allocate("d", list(range(1, 10)), salt="x").num_cached_tokens == 8


def test_generated_tokens_are_found_too():
    m = BlockManager(16, 4)
    written(m, "turn 1", [1, 2, 3])
    for t in (4, 5, 6, 7, 8, 9):
        m.append_token("turn 1", t)
    m.commit("turn 1", 9)
    m.free("turn 1")
    assert m.allocate("turn 2", list(range(1, 12))).num_cached_tokens == 8


def test_without_cache_prefixes_nothing_is_found():
    m = BlockManager(16, 4, cache_prefixes=False)
    written(m, "a", list(range(9)))
    assert m.allocate("b", list(range(9))).num_cached_tokens == 0 and m.block(0).block_hash is None
    m.check()


# ---- public cases ---------------------------------------------------------------------------------------------------


def test_only_full_blocks_have_a_hash_and_a_refilled_one_loses_it():
    m = BlockManager(16, 4)
    written(m, "a", list(range(10)))
    assert [m.block(i).block_hash is not None for i in m.block_table("a")] == [True, True, False]
    m.truncate("a", 6)
    assert m.block(1).block_hash is not None, "nothing is overwritten yet"
    m.append_token("a", 99)
    assert m.block(1).block_hash is None and m.block(0).block_hash is not None
    assert m.allocate("b", list(range(10))).num_cached_tokens == 4
    m.check()


def test_a_hit_is_held_before_new_blocks_are_taken():
    """vllm#10507: the hit is the oldest block of a full pool, and the same call needs a new one."""
    m = BlockManager(3, 4)
    written(m, "a", [1, 2, 3, 4])
    m.free("a")
    written(m, "b", [5] * 8)
    m.free("b")
    assert m.num_evictable_blocks == 3
    table, cached = m.allocate("c", [1, 2, 3, 4, 5])
    assert cached == 4 and len(set(table)) == 2 and m.block(table[0]).block_hash is not None
    m.check()


def test_evict_means_unmap():
    """vllm#4761, vllm#5364, kvcached#362, nano-vllm#163."""
    m = BlockManager(2, 4)
    written(m, "a", list(range(8)))
    m.free("a")
    m.allocate("b", [7] * 8)
    assert m.block(0).block_hash is None and m.block(1).block_hash is None
    m.free("b")
    assert m.allocate("c", list(range(8))).num_cached_tokens == 0
    m.check()


def test_no_block_is_freed_twice():
    """vllm#1556, vllm#3347: forks over-counted. Here a table never names a block twice, and check() says so if it does."""
    m = BlockManager(8, 4)
    written(m, "a", list(range(10)))
    for i in range(5):
        m.fork("a", i)
        m.append_token(i, i)
    for seq in ["a", *range(5)]:
        m.free(seq)
        m.check()
    assert m.num_free_blocks == 8
    m.allocate("a", [1] * 5)
    m._sequences["a"].table[1] = m._sequences["a"].table[0]
    with pytest.raises(InvariantError, match="tables"):
        m.check()


def test_blocks_without_a_hash_go_first_then_the_least_recently_used():
    """vllm#42656."""
    m = BlockManager(4, 4)
    for name in ("a", "b", "c"):
        written(m, name, [ord(name)] * 4)
    written(m, "partial", [1, 2])
    for name in ("b", "partial", "a", "c"):
        m.free(name)
    order = [m.allocate(i, [i]).block_table[0] for i in range(4)]
    assert order == [3, 1, 0, 2]


def test_tails_go_before_heads():
    m = BlockManager(4, 4)
    written(m, "a", list(range(16)))
    m.free("a")
    m.allocate("b", [9])
    assert m.allocate("c", list(range(9))).num_cached_tokens == 8, "the heads are still there"


def test_use_makes_recent():
    m = BlockManager(3, 4)
    for name in ("a", "b"):
        written(m, name, [ord(name)] * 4)
    m.free("a"), m.free("b")
    assert m.allocate("a again", [ord("a")] * 4 + [1]).num_cached_tokens == 4
    m.free("a again")
    m.allocate("new", [5] * 8)
    assert m.block(0).block_hash is not None and m.block(1).block_hash is None, "b went, though a is older"


def a_hole():
    """Block 0 of a cached prompt is refilled; block 1, freed before, is still cached."""
    m = BlockManager(8, 4)
    written(m, "a", list(range(9)))
    m.truncate("a", 2)
    m.append("a", [77, 77])
    return m


def test_a_hole_ends_the_hit():
    """LMCache#443."""
    m = a_hole()
    assert m.num_evictable_blocks == 1 and m.block(1).block_hash is not None
    assert m.allocate("b", list(range(9))).num_cached_tokens == 0
    m.commit("b", 4)
    assert m.allocate("c", list(range(9))).num_cached_tokens == 8, "filled again, the block behind it is of use again"
    m.check()


def test_the_hole_test_can_fail():
    def past_the_hole(self, chain, most=None):
        hits, prefix = [], None
        for k in range(self.most_hits(len(chain.tokens))):
            prefix = self.find(prefix, chain, k)
            if prefix is None:
                break
            hits += list(prefix.blocks)[:1]
        return hits

    with patch.object(PrefixIndex, "match", past_the_hole):
        assert a_hole().allocate("b", list(range(9))).num_cached_tokens == 4


def test_one_of_two_equal_blocks_evicted_leaves_the_other():
    m = BlockManager(3, 4)
    m.allocate("a", [1, 2, 3, 4])
    m.allocate("b", [1, 2, 3, 4])
    m.commit("a", 4), m.commit("b", 4)
    assert m.block(0).block_hash == m.block(1).block_hash
    m.free("a")
    m.allocate("c", [5] * 8)
    assert m.block(0).block_hash != m.block(1).block_hash
    m.free("c")
    assert m.allocate("d", [1, 2, 3, 4, 5]).num_cached_tokens == 4
    m.check()


def test_preempted_and_resumed():
    """vllm#16832, vllm#25780: freed, and allocated again with what it had generated."""
    m = BlockManager(4, 4)
    written(m, "a", [1, 2, 3])
    for t in (4, 5):
        m.append_token("a", t)
    tokens = m.tokens("a")
    m.commit("a", 4)
    m.free("a")
    written(m, "b", [8] * 16)
    assert not m.can_allocate(tokens)
    m.free("b")
    assert m.allocate("a", tokens).num_cached_tokens == 0, "b took its block; what is recomputed is no hit"
    assert m.tokens("a") == tokens
    m.check()


def test_available_evictable_and_held_add_up():
    """sglang#35270, sglang-jax#982; the walk in test_blocks_state.py asks this at every step."""
    m = BlockManager(8, 4)
    written(m, "a", list(range(10)))
    written(m, "b", list(range(10)))
    assert m.num_free_blocks == 4 and m.num_evictable_blocks == 0, "two blocks shared, one each"
    m.free("a")
    assert m.num_free_blocks == 5 and m.num_evictable_blocks == 0
    m.free("b")
    assert m.num_free_blocks == 8 and m.num_evictable_blocks == 2


def test_the_hash_is_the_same_in_every_process():
    """vllm#12621, vllm-mlx#444."""
    code = "from kvlab.core.blocks import *; m = BlockManager(2, 4); m.allocate('a', [70000, 2, 3, 4], salt='x'); "
    code += "m.commit('a', 4); print(m.block(0).block_hash)"
    out = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert out[0] == out[1] and len(out[0].strip()) == 32


def test_token_ids_that_agree_in_a_byte_do_not_collide():
    m = BlockManager(8, 4)
    written(m, "a", [1, 2, 3, 4, 5])
    assert m.allocate("b", [257, 2, 3, 4, 5]).num_cached_tokens == 0
    assert m.allocate("c", [1, 2, 3, 4, 6]).num_cached_tokens == 4
    assert m.allocate("d", [12, 3, 4, 5, 6]).num_cached_tokens == 0, "1,2 is not 12"


def test_reset_is_refused_while_in_use():
    m = BlockManager(8, 4)
    written(m, "a", list(range(9)))
    before = state(m)
    assert m.reset() is False and state(m) == before
    m.free("a")
    assert m.reset() is True
    assert all(m.block(i).block_hash is None for i in range(8)) and m.num_free_blocks == 8
    assert m.allocate("b", list(range(9))).num_cached_tokens == 0
    m.check()


def test_there_is_no_null_block_to_hand_out():
    """Others keep block 0 for a window's dropped tokens. Here every block is a plain one, and all of them can be had."""
    m = BlockManager(4, 4)
    assert sorted(m.allocate("a", [1] * 16).block_table) == [0, 1, 2, 3]


def test_can_allocate_counts_hits_that_are_free_now():
    """A hit revived from the free blocks is not there to take any more."""
    m = BlockManager(2, 4)
    written(m, "a", [1, 2, 3, 4])
    m.free("a")
    m.allocate("b", [5])
    assert not m.can_allocate([1, 2, 3, 4, 5])
    with pytest.raises(OutOfBlocks):
        m.allocate("c", [1, 2, 3, 4, 5])
    assert m.can_allocate([1, 2, 3])


# ---- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "named"),
    [((0,), "num_blocks"), ((-1,), "num_blocks"), ((8, 0), "block_size"), ((8, 2.0), "block_size"), (("8",), "num_blocks")],
)
def test_a_pool_that_cannot_be(args, named):
    with pytest.raises(ValueError, match=named):
        BlockManager(*args)


BAD = {
    "unknown sequence: append": (UnknownSequence, "nobody", lambda m: m.append("nobody", [1])),
    "unknown sequence: append_token": (UnknownSequence, "nobody", lambda m: m.append_token("nobody", 1)),
    "unknown sequence: commit": (UnknownSequence, "nobody", lambda m: m.commit("nobody", 1)),
    "unknown sequence: fork": (UnknownSequence, "nobody", lambda m: m.fork("nobody", "x")),
    "unknown sequence: share_prefix": (UnknownSequence, "nobody", lambda m: m.share_prefix("nobody", "x", 1)),
    "unknown sequence: truncate": (UnknownSequence, "nobody", lambda m: m.truncate("nobody", 0)),
    "unknown sequence: block_table": (UnknownSequence, "nobody", lambda m: m.block_table("nobody")),
    "double free": (UnknownSequence, "freed", lambda m: m.free("gone")),
    "append after free": (UnknownSequence, "freed", lambda m: m.append_token("gone", 1)),
    "duplicate allocate": (ValueError, "'a' exists", lambda m: m.allocate("a", [1])),
    "fork onto a live one": (ValueError, "'b' exists", lambda m: m.fork("a", "b")),
    "fork onto itself": (ValueError, "'a' exists", lambda m: m.fork("a", "a")),
    "name not hashable": (ValueError, "seq must be hashable", lambda m: m.allocate([], [1])),
    "name not hashable: append_token": (ValueError, "seq must be hashable", lambda m: m.append_token([], 1)),
    "owner not hashable": (ValueError, "owner must be hashable", lambda m: m.allocate("x", [1], owner=[])),
    "no tokens": (ValueError, "tokens is empty", lambda m: m.allocate("x", [])),
    "tokens not a list": (ValueError, "tokens", lambda m: m.allocate("x", 5)),
    "tokens are text": (ValueError, "tokens", lambda m: m.allocate("x", "hello")),
    "a float": (ValueError, "tokens holds 2.0", lambda m: m.append("a", [1, 2.0])),
    "a bool": (ValueError, "tokens holds True", lambda m: m.append_token("a", True)),
    "a negative id": (ValueError, "tokens holds -1", lambda m: m.append("a", [1, -1])),
    "tokens to look up": (ValueError, "tokens", lambda m: m.can_allocate([None])),
    "salt of another kind": (ValueError, "salt", lambda m: m.allocate("x", [1], salt=["x"])),
    "adapter of another kind": (ValueError, "adapter", lambda m: m.can_allocate([1], adapter=1.5)),
    "more tokens than the pool": (OutOfBlocks, "short", lambda m: m.allocate("x", [1] * 1000)),
    "more appended than is free": (OutOfBlocks, "short", lambda m: m.append("a", [1] * 1000)),
    "prefix_len past the source": (ValueError, "prefix_len", lambda m: m.share_prefix("a", "x", 11)),
    "prefix_len negative": (ValueError, "prefix_len", lambda m: m.share_prefix("a", "x", -1)),
    "commit past the end": (ValueError, "past the end", lambda m: m.commit("a", 11)),
    "commit backwards": (ValueError, "truncate", lambda m: m.commit("a", 5)),
    "commit of a float": (ValueError, "num_tokens", lambda m: m.commit("a", 10.0)),
    "truncate to more": (ValueError, "past the end", lambda m: m.truncate("a", 11)),
    "truncate below nothing": (ValueError, "num_tokens", lambda m: m.truncate("a", -1)),
    "no such block": (ValueError, "0 to 7", lambda m: m.block(8)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_changes_nothing(name):
    kind, message, call = BAD[name]
    m = BlockManager(8, 4)
    written(m, "a", list(range(10)))
    m.fork("a", "b")
    written(m, "gone", list(range(20, 29)))
    m.free("gone")
    before = state(m)
    with pytest.raises(kind, match=message):
        call(m)
    assert state(m) == before
    m.check()


def test_no_room_for_the_copy():
    """A write into a shared block needs one block more than the tokens say."""
    m = BlockManager(2, 4)
    written(m, "a", [1, 2])
    m.fork("a", "b")
    m.allocate("c", [9])
    before = state(m)
    with pytest.raises(OutOfBlocks):
        m.append_token("b", 3)
    assert state(m) == before


# ---- the log --------------------------------------------------------------------------------------------------------


def test_the_log_tells_a_blocks_story():
    trace = Trace()
    m = BlockManager(2, 4, trace=trace)
    m.allocate("a", [1, 2, 3], owner="ada")
    m.append_token("a", 4)
    m.commit("a", 4)
    m.fork("a", "b")
    m.free("a"), m.free("b")
    m.allocate("c", [5] * 8)
    story = [(e.what, e.request_id) for e in trace.where(block=0)]
    assert story == [
        ("reserve", "a"),
        ("append", "a"),
        ("publish", "a"),
        ("share", "b"),
        ("release", "a"),
        ("release", "b"),
        ("evict", None),
        ("reserve", "c"),
    ]
    append = trace.where(what="append")[0]
    assert (append.owner, append.start, append.stop) == ("ada", 3, 4) and "block=0 [3:4]" in str(append)


def test_a_short_log_keeps_the_newest():
    trace = Trace(limit=2)
    for i in range(5):
        trace.log("tick", block=i)
    assert [e.block for e in trace] == [3, 4] and len(trace) == 2
    with pytest.raises(ValueError, match="limit"):
        Trace(limit=0)
    with pytest.raises(ValueError, match="colour"):
        trace.where(colour=1)


# ---- cost -----------------------------------------------------------------------------------------------------------


def lines_run(call):
    """How many lines of the library a call executes: a cost that no other process, and no garbage collection, can change."""
    count = 0

    def tracer(frame, event, arg):
        nonlocal count
        count += event == "line" and "kvlab" in frame.f_code.co_filename
        return tracer

    sys.settrace(tracer)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


@pytest.mark.parametrize("full", [False, True])
def test_no_call_costs_more_in_a_larger_pool(full):
    def costs(num_blocks):
        m = BlockManager(num_blocks, 4)
        written(m, "first", list(range(9)))
        m.free("first")
        if full:  # every block findable, so that each new one evicts
            for i in range(num_blocks // 4):
                written(m, i, [i + 50] * 16)
                m.free(i)
        return [
            lines_run(lambda: m.allocate("a", [*range(8), 9])),
            lines_run(lambda: m.append("a", [1, 2, 3, 4])),
            lines_run(lambda: m.append_token("a", 5)),
            lines_run(lambda: m.commit("a", 13)),
            lines_run(lambda: m.fork("a", "b")),
            lines_run(lambda: m.append_token("b", 6)),
            lines_run(lambda: m.truncate("b", 6)),
            lines_run(lambda: m.free("a")),
        ]

    assert costs(64) == costs(4096)
