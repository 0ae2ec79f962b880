"""What a request may ask of the block manager besides room: how it looks up, what it leaves, what stays and what goes.

Each comes as a pair: with it and without. The walk of test_blocks_state.py drives all of it together.
"""

import random
from enum import StrEnum
from unittest.mock import patch

import pytest
from test_blocks import lines_run, state, written

from bench import replay
from kvlab.core.blocks import BlockManager, OutOfBlocks, PrefixStats, UnknownSequence
from kvlab.core.mirror import Mirror
from kvlab.core.prefixes import PrefixIndex, block_hashes
from kvlab.core.scan import FOUND, owner_scan
from kvlab.core.trace import Trace

PROMPT = list(range(100, 197))  # 97 tokens: six blocks of 16, and one to compute


def ask(m, seq, tokens, **how):
    """A whole request; how many tokens it found."""
    cached = written(m, seq, tokens, **how).num_cached_tokens
    m.free(seq)
    return cached


# ---- counted --------------------------------------------------------------------------------------------------------


def test_queries_and_hits_are_counted_and_the_preempted_apart():
    m = BlockManager(32)
    ask(m, "a", PROMPT)
    ask(m, "b", PROMPT)
    assert m.prefix_stats == PrefixStats(requests=2, queries=194, hits=96)
    written(m, "c", PROMPT)
    history = m.history("c")
    m.free("c")
    m.allocate("c", history, preempted=True)
    assert m.prefix_stats == PrefixStats(3, 291, 192, preempted_requests=1, preempted_queries=97, preempted_hits=96)
    m.prefix_stats.hits = 0
    assert m.prefix_stats.hits == 192, "what is returned is a copy"


def test_what_is_refused_or_never_looks_up_is_not_counted():
    m = BlockManager(8)
    ask(m, "a", PROMPT)
    before = m.prefix_stats
    m.can_allocate(PROMPT)
    with pytest.raises(OutOfBlocks):
        m.allocate("b", PROMPT * 3)
    ask(m, "c", PROMPT, lookup=False)
    m.pin("p", PROMPT)
    assert m.prefix_stats == before
    m.unpin("p")
    assert m.reset() and m.prefix_stats == before, "a counter never goes back"
    off = BlockManager(8, cache_prefixes=False)
    ask(off, "a", PROMPT)
    assert off.prefix_stats == PrefixStats()


# ---- looks up, publishes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lookup", "found"), [(True, 96), (False, 0)])
def test_a_request_that_needs_all_its_logits_computes_all_and_publishes(lookup, found):
    """vllm#3251, #3914, #8268: the log-probabilities of all prompt tokens."""
    m = BlockManager(32)
    ask(m, "a", PROMPT)
    m.reset()
    assert ask(m, "first", PROMPT, lookup=lookup) == 0
    assert ask(m, "second", PROMPT, lookup=lookup) == found
    assert ask(m, "after", PROMPT) == 96, "what it computed is there for others"


def test_what_looks_up_nothing_is_counted_as_nothing_when_asked_for_room():
    m = BlockManager(13)
    written(m, "a", PROMPT)
    assert m.can_allocate(PROMPT) and not m.can_allocate(PROMPT, lookup=False)
    assert m.allocate("b", PROMPT).num_cached_tokens == 96
    m.free("b")
    with pytest.raises(OutOfBlocks):
        m.allocate("b", PROMPT, lookup=False)


@pytest.mark.parametrize("publish", [True, False])
def test_a_request_that_leaves_nothing(publish):
    m = BlockManager(32)
    written(m, "a", PROMPT, publish=publish)
    m.append("a", range(15)), m.commit("a", 112)
    m.fork("a", "b")
    m.append("b", range(16)), m.commit("b", 128)
    m.check()
    m.free("a"), m.free("b")
    assert m.num_evictable_blocks == (8 if publish else 0)
    assert ask(m, "c", PROMPT) == (96 if publish else 0)


def test_it_may_read_what_others_left():
    m = BlockManager(32)
    ask(m, "a", PROMPT[:49])
    assert ask(m, "private", PROMPT, publish=False) == 48
    assert ask(m, "b", PROMPT) == 48
    m.check()


# ---- what stands behind a token ---------------------------------------------------------------------------------------


def test_two_pictures_behind_one_placeholder():
    """LMCache#690, sglang-omni#146: the text before the picture is shared, the picture and what follows are not."""
    m = BlockManager(64)
    placeholder = [*PROMPT[:33], 7, *PROMPT[34:]]
    assert ask(m, "cat", placeholder, extra={33: "cat"}) == 0
    assert ask(m, "dog", placeholder, extra={33: "dog"}) == 32
    assert ask(m, "cat again", placeholder, extra={33: "cat"}) == 96
    assert ask(m, "no picture", placeholder) == 32
    assert ask(m, "one token on", placeholder, extra={34: "cat"}) == 32, "another place is another prompt"
    m.check()


def test_a_picture_in_a_later_turn():
    m = BlockManager(64)
    for name, picture in (("a", "cat"), ("b", "dog")):
        written(m, name, PROMPT[:20])
        m.append(name, PROMPT[20:], extra={40: picture})
        m.commit(name, 97)
        m.check()
    shared = [x == y for x, y in zip(m.block_table("a"), m.block_table("b"), strict=True)]
    assert shared == [True] + [False] * 6, "the text before is found; later blocks were not looked up"
    assert ask(m, "c", PROMPT, extra={40: "dog"}) == 96 and ask(m, "d", PROMPT) == 32
    m.truncate("b", 40)
    m.append("b", PROMPT[40:])
    m.commit("b", 97)
    assert m.history("b").extra == {} and ask(m, "e", PROMPT) == 96, "the picture went with its token"
    m.check()


def test_a_fork_and_its_parent_have_pictures_of_their_own():
    m = BlockManager(20, 4)
    written(m, "a", [0, 1, 2, 3])
    m.fork("a", "b")
    m.append("b", [9] * 4, extra={4: "cat"})
    m.append("a", [9] * 4)
    m.commit("a", 8)
    m.check()
    assert ask(m, "c", [0, 1, 2, 3, 9, 9, 9, 9, 1], extra={4: "cat"}) == 4
    assert m.history("a").extra == {} and m.history("b").extra == {4: "cat"}
    given = {0: "cat"}
    m.allocate("d", [1] * 5, extra=given)
    given[0] = "dog"
    assert m.history("d").extra == {0: "cat"}, "what the caller does with his mapping afterwards is his own affair"


def test_a_picture_is_no_salt_and_no_token():
    m = BlockManager(64)
    ask(m, "salt", PROMPT, salt="x")
    assert ask(m, "picture", PROMPT, extra={0: "x"}) == 0
    assert ask(m, "both", PROMPT, salt="x", extra={0: "x"}) == 0
    assert ask(m, "again", PROMPT, extra={0: "x"}) == 96
    assert ask(m, "number", PROMPT, extra={0: 120}) == 0


# ---- asked again ------------------------------------------------------------------------------------------------------


@pytest.fixture
def hashes():
    """Counts the blocks that are hashed."""
    count, key = [0], PrefixIndex.key

    def counted(self, parent, label):
        count[0] += 1
        return key(self, parent, label)

    with patch.object(PrefixIndex, "key", counted):
        yield count


def test_every_block_is_hashed_once(hashes):
    m = BlockManager(32)
    chain = m.chain(PROMPT)
    for _ in range(3):
        assert m.can_allocate(chain)
    m.allocate("a", chain)
    m.commit("a", 97)
    m.append("a", range(15)), m.commit("a", 112)
    assert hashes == [7]
    history = m.history("a")
    m.free("a")
    m.allocate("a", history, preempted=True)
    m.fork("a", "b")
    m.append("b", range(16)), m.commit("b", 128)
    assert hashes == [8], "a resumed request and a fork know the keys"
    m.check()


def test_the_trace_of_the_benchmark_hashes_every_block_once(hashes):
    requests = replay.trace(requests=60)
    replay.replay(BlockManager(replay.BLOCKS), requests)
    assert hashes[0] == replay.nano_vllm_counts(requests)["hashes"] == replay.our_hashes(requests)


def test_a_chain_may_be_used_twice_and_is_not_changed():
    m = BlockManager(64)
    chain = m.chain(PROMPT, salt="x")
    m.allocate("a", chain), m.commit("a", 97)
    m.append("a", [1, 2, 3]), m.truncate("a", 20)
    assert m.allocate("b", chain).num_cached_tokens == 96 and m.tokens("b") == PROMPT == list(chain.tokens)
    with pytest.raises(TypeError):
        chain.tokens[0] = 77
    with pytest.raises(TypeError):
        chain.extra[0] = "cat"
    assert ask(m, "other", PROMPT) == 0 and ask(m, "same", PROMPT, salt="x") == 96
    m.check()


def test_asking_again_costs_the_same_for_any_prompt():
    """A waiting request: the first question walks the prompt, the next ones do not."""

    def costs(blocks):
        m = BlockManager(2 * blocks, 4)
        tokens = list(range(4 * blocks))
        written(m, "a", tokens)
        m.allocate("b", [1] * 4 * blocks)
        chain = m.chain([*tokens, 1])
        m.can_allocate(chain)
        return lines_run(lambda: m.can_allocate(chain))

    assert costs(4) == costs(400)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.free("a"),  # held hits become free ones
        lambda m: m.free("room"),
        lambda m: (m.truncate("a", 1), m.append("a", [5])),  # a hole
    ],
)
def test_an_answer_is_not_kept_too_long(change):
    m = BlockManager(9, 4)
    written(m, "a", list(range(20)))
    m.allocate("room", [9] * 12)
    asked = list(range(21))
    chain = m.chain(asked)
    assert m.can_allocate(chain) == m.can_allocate(asked)
    change(m)
    assert m.can_allocate(chain) == m.can_allocate(asked)


def test_an_answer_of_another_manager_is_no_answer():
    chain = BlockManager(2, 4).chain(range(9))
    one, two = BlockManager(4, 4), BlockManager(2, 4)
    written(one, "a", list(range(9)))
    two.allocate("a", [1])
    assert one.can_allocate(chain) and not two.can_allocate(chain) and one.can_allocate(chain)


# ---- what goes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["salt", "adapter"])
def test_one_tenants_or_adapters_blocks_can_be_dropped_while_others_live(kind):
    """vllm#30931, #42125: an adapter is loaded anew under its old name while requests live."""
    m = BlockManager(64)
    ask(m, "plain", PROMPT)
    written(m, "live", PROMPT, **{kind: "x"})
    ask(m, "other", PROMPT, **{kind: "y"})
    assert m.reset() is False
    m.append("live", range(15))
    assert m.drop(**{kind: "x"}) == 6
    m.check()
    m.commit("live", 112)
    m.check()
    assert ask(m, "new weights", PROMPT, **{kind: "x"}) == 0, "not even what the live request wrote afterwards"
    assert ask(m, "again", PROMPT, **{kind: "x"}) == 96, "the new ones are shared"
    assert ask(m, "plain again", PROMPT) == 96 and ask(m, "other again", PROMPT, **{kind: "y"}) == 96
    m.free("live")
    assert m.num_free_blocks == 64
    m.check()


def test_drop_takes_what_has_both_or_one_of_them():
    m = BlockManager(64)
    for n, domain in enumerate(({"salt": "s"}, {"adapter": "a"}, {"salt": "s", "adapter": "a"})):
        ask(m, n, PROMPT[:17], **domain)
    assert m.drop(salt="s", adapter="a") == 1
    assert m.drop(salt="s") == 1 and m.drop(adapter="a") == 1 and m.drop(adapter="a") == 0
    before = state(m)
    with pytest.raises(ValueError, match="salt or an adapter"):
        m.drop()
    assert state(m) == before


# ---- what stays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pinned", [True, False])
def test_a_pinned_prefix_outlives_a_full_pool(pinned):
    m = BlockManager(8)
    ask(m, "a", PROMPT)
    if pinned:
        assert m.pin("system", PROMPT) == 96 and m.pins == {"system": 96}
        assert m.block(0).owners == (("pin", "system"),) and m.sequences == []
        assert m.num_free_blocks == 2 and m.reset() is False
    for n in range(8):
        m.allocate(n, [n] * 32)
        m.free(n)
    m.check()
    written(m, "big", [5] * 32), m.free("big")
    if not pinned:
        m.allocate("bigger", [6] * 128), m.free("bigger")
    assert ask(m, "again", PROMPT) == (96 if pinned else 0)
    if pinned:
        m.unpin("system")
        assert m.num_free_blocks == 8 and ask(m, "still", PROMPT) == 96 and m.reset()
        with pytest.raises(UnknownSequence, match="system"):
            m.unpin("system")
    m.check()


def test_a_pinned_block_is_copied_before_it_is_written():
    m = BlockManager(8, 4)
    written(m, "a", list(range(8)))
    m.pin("p", list(range(8)))
    m.truncate("a", 6)
    assert [copy.src for copy in m.append("a", [99])] == [1]
    m.free("a")
    assert m.pins == {"p": 8} and ask(m, "b", list(range(9))) == 8
    m.check()


def test_nothing_there_pins_nothing_and_dropped_domains_lose_their_pins():
    m = BlockManager(16)
    assert m.pin("p", PROMPT) == 0 and m.pins == {}
    ask(m, "a", PROMPT, salt="x")
    assert m.pin("p", PROMPT) == 0 and m.pin("p", PROMPT, salt="x") == 96
    before = state(m)
    with pytest.raises(ValueError, match="'p' exists"):
        m.pin("p", PROMPT, salt="x")
    assert state(m) == before
    assert m.drop(salt="x") == 6 and m.pins == {} and m.num_free_blocks == 16 and m.num_evictable_blocks == 0
    m.check()


# ---- a watermark ----------------------------------------------------------------------------------------------------------


def test_a_watermark_is_kept_free_of_new_requests_and_open_to_those_that_run():
    m = BlockManager(10, 4, watermark=0.2)
    assert m.watermark_blocks == 2
    m.allocate("a", [1] * 28)
    assert m.num_free_blocks == 3 and m.can_allocate([2] * 4) and not m.can_allocate([2] * 5)
    before = state(m)
    with pytest.raises(OutOfBlocks, match="1 blocks short .3 of 10 free, 2 kept"):
        m.allocate("b", [2] * 5)
    assert state(m) == before
    m.append("a", [1] * 12)
    assert m.num_free_blocks == 0
    for bad in (-0.1, 1, "0.1", None):
        with pytest.raises(ValueError, match="watermark"):
            BlockManager(10, watermark=bad)


# ---- the log, read elsewhere -------------------------------------------------------------------------------------------


def test_a_key_that_goes_with_an_append_is_logged():
    """Allocate 16, commit 16, truncate 8, append one: the key goes, and a line says so."""
    m = BlockManager(8, trace=Trace())
    m.allocate("a", PROMPT[:16], owner="ada", adapter="lora"), m.commit("a", 16)
    (published,) = m.trace.where(what="publish")
    assert (published.key, published.parent, published.tokens) == (m.block(0).block_hash, None, tuple(PROMPT[:16]))
    assert (published.owner, published.adapter) == ("ada", "lora")
    mirror = Mirror().read(m.trace)
    assert mirror.keys == {0: published.key}
    m.truncate("a", 8), m.append("a", [1])
    (gone,) = m.trace.where(what="unpublish")
    assert (gone.block, gone.key, gone.request_id, gone.owner) == (0, published.key, "a", "ada")
    assert mirror.read([gone]).keys == {}


def test_a_mirror_answers_as_the_manager_would():
    m = BlockManager(64, trace=Trace())
    ask(m, "a", PROMPT, salt="x")
    second = m.trace.where(what="publish")[1]
    assert second.parent == m.trace.where(what="publish")[0].key
    mirror = Mirror().read(m.trace)
    assert mirror.hits(block_hashes(PROMPT, salt="x")) == 6 and mirror.hits(block_hashes(PROMPT)) == 0
    assert mirror.hits(block_hashes(PROMPT[:40] + PROMPT, salt="x")) == 2
    assert mirror.hits(block_hashes(PROMPT, salt="x", extra={20: "cat"})) == 1
    assert block_hashes([1]) == [] and len(block_hashes(PROMPT)) == 6
    m.reset()
    assert mirror.read(m.trace).hits(block_hashes(PROMPT, salt="x")) == 0


def test_the_scan_knows_what_is_no_longer_findable():
    m = BlockManager(8, 4, trace=Trace())
    written(m, "a", [1, 2, 3, 4])
    m.pin("p", [1, 2, 3, 4])
    m.truncate("a", 2), m.append("a", [9])
    assert owner_scan(m.trace) == []
    m.trace.log("unpublish", block=0)
    m.trace.log("hit", "b", "b", 0)
    (finding,) = owner_scan(m.trace)
    assert finding.rule == FOUND and finding.others == (("pin", "p"),)


# ---- bad input ------------------------------------------------------------------------------------------------------------

BAD = {
    "extra at no token": ("position 97", lambda m: m.allocate("x", PROMPT, extra={97: "cat"})),
    "extra at a word": ("position 'cat'", lambda m: m.can_allocate(PROMPT, extra={"cat": 1})),
    "extra that is no mapping": ("extra must map", lambda m: m.chain(PROMPT, extra=["cat"])),
    "extra that is no name": ("at 3 must be", lambda m: m.pin("x", PROMPT, extra={3: 1.5})),
    "extra of older tokens": ("position 5; these tokens stand at 97 to 98", lambda m: m.append("a", [1, 2], extra={5: "cat"})),
    "extra of no tokens": ("position 97", lambda m: m.append("a", [], extra={97: "cat"})),
    "a chain of other blocks": ("of blocks of 4", lambda m: m.allocate("x", BlockManager(4, 4).chain(PROMPT))),
    "a chain and a salt": ("the chain's own", lambda m: m.can_allocate(m.chain(PROMPT), salt="x")),
    "a pin of no tokens": ("empty", lambda m: m.pin("x", [])),
    "a pin with no name": ("name must be hashable", lambda m: m.pin([], PROMPT)),
    "unpin with no name": ("name must be hashable", lambda m: m.unpin([])),
    "drop of another kind": ("salt must be", lambda m: m.drop(salt=["x"])),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_changes_nothing(name):
    message, call = BAD[name]
    m = BlockManager(16)
    written(m, "a", PROMPT)
    before = state(m)
    with pytest.raises(ValueError, match=message):
        call(m)
    assert state(m) == before


def test_what_never_fits_is_said_and_what_may_fit_later_too():
    m = BlockManager(4, 4, watermark=0.5)
    with pytest.raises(OutOfBlocks, match="12 tokens never fit this pool"):
        m.allocate("a", range(12))
    m.allocate("a", range(8))
    with pytest.raises(OutOfBlocks, match="2 kept for those that run.: free a sequence"):
        m.allocate("b", range(4))
    m.append("a", range(8))
    with pytest.raises(OutOfBlocks, match=r"1 blocks short \(0 of 4 free\): 17 tokens never fit"):
        m.append("a", [1])


def test_tags_that_are_equal_and_print_otherwise_are_refused():
    class Tenant(StrEnum):
        ADA = "ada"

    m = BlockManager(8)
    for tag in (True, Tenant.ADA):
        with pytest.raises(ValueError, match="salt must be"):
            m.can_allocate(PROMPT, salt=tag)
        with pytest.raises(ValueError, match="extra at 0 must be"):
            m.can_allocate(PROMPT, extra={0: tag})
    with pytest.raises(ValueError, match="block_size"):
        block_hashes(PROMPT, 0)
    with pytest.raises(ValueError, match="trace"):
        BlockManager(8, trace=3)
    assert BlockManager(100, watermark=0.29).watermark_blocks == 29


def test_an_empty_history_is_no_prompt():
    m = BlockManager(8)
    written(m, "a", PROMPT)
    m.truncate("a", 0)
    history = m.history("a")
    m.free("a")
    before = state(m)
    with pytest.raises(ValueError, match="tokens is empty"):
        m.allocate("a", history)
    assert state(m) == before
    assert m.history is not None and m.allocate("b", m.chain(PROMPT)).num_cached_tokens == 96


def test_many_equal_blocks_cost_no_more_than_one():
    """`lookup=False` on one prompt makes a block each time: the index must not walk them."""

    def cost(count):
        m = BlockManager(count + 2, 4)
        for n in range(count):
            written(m, n, [1, 2, 3, 4], lookup=False)
        for n in range(count):
            m.free(n)
        return lines_run(lambda: (m.allocate("x", [9] * 12), m.commit("x", 12)))

    assert cost(10) == cost(1000)


def test_a_scan_follows_a_request_whose_name_is_none():
    m = BlockManager(8, 4, trace=Trace())
    m.allocate(None, [1, 2, 3], owner="t"), m.fork(None, "b"), m.append(None, [5]), m.free("b")
    m.allocate("c", [8])
    assert owner_scan(m.trace) == []


def test_huge_ids_are_told_apart():
    """Ids of 2³² and more fit no packed label; they are kept as they are."""
    m = BlockManager(64, 4)
    big = [2**40 + n for n in range(9)]
    assert ask(m, "a", big) == 0 and ask(m, "b", big) == 8
    assert ask(m, "c", [n % 2**32 for n in big]) == 0
    assert ask(m, "d", [*big[:5], 1, *big[6:]]) == 4
    m.check()


def test_the_bytes_of_a_cached_block():
    """A count of bytes, not a time: the same on every machine with this Python."""
    assert replay.bytes_per_cached_block(600) < 600


def test_the_benchmarks_trace_is_what_it_says():
    requests = replay.trace()
    assert len(requests) == 2_000 and requests[:3] == replay.trace()[:3]
    assert 0.08 < sum(r.cancelled is not None for r in requests) / 2_000 < 0.12
    starts = [tuple(r.prompt[:200]) for r in requests]
    assert 0.55 < sum(starts.count(s) > 1 for s in random.Random(0).sample(starts, 200)) / 200 < 0.65
