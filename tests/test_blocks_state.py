"""The block manager against a model of what the tensors hold, and the faults that this must find.

The model writes, into a pretended pool, a value for every token: a hash of everything before it, its salt included,
as K/V depends on it. Whatever the manager is asked to do, a sequence must read what it wrote.
"""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvlab.core.blocks import BlockManager, InvariantError, OutOfBlocks
from kvlab.core.mirror import Mirror
from kvlab.core.prefixes import Chain, PrefixIndex
from kvlab.core.scan import owner_scan
from kvlab.core.trace import Trace

TOKENS = st.integers(0, 1)  # few, so that prefixes meet
PROMPT = st.lists(TOKENS, min_size=1, max_size=4)
SALT = st.sampled_from([None, None, "a"])
SHARE = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])


HOW = [(True, True)] * 4 + [(False, True), (True, False), (False, False)]  # looks up, publishes
PICTURE = st.one_of(st.none(), st.none(), st.tuples(st.integers(0, 7), st.sampled_from(["cat", "dog"])))


def meanings(salt, tokens, behind):
    """What the K/V of each token stands for: it, what is behind it, and all that came before it; and whose it is."""
    out, so_far = [], salt
    for at, token in enumerate(tokens):
        so_far = hash((so_far, token, behind.get(at)))
        out.append((salt, so_far))
    return out


class Machine(RuleBasedStateMachine):
    """Drives a BlockManager, keeps the pool's contents beside it, and compares after every step."""

    judge_hits = True

    @initialize(num_blocks=st.integers(3, 14), block_size=st.sampled_from([2, 2, 3, 1]))
    def start(self, num_blocks, block_size):
        self.log = Trace()
        self.m = BlockManager(num_blocks, block_size, trace=self.log)
        self.mirror, self.told = Mirror(), 0
        self.waiting = []  # chains of before, asked about again and again
        self.pins = {}  # name -> its blocks, and what they held when they were pinned
        self.private = set()  # sequences that leave nothing behind
        self.behind = {}  # of each sequence, what stands behind its tokens
        self.pool = [[None] * block_size for _ in range(num_blocks)]
        self.complete = set()  # blocks that are full and committed and have not been given out or written since
        self.salt = {}
        self.past = [[0]]  # prompts of before, so that they come again
        self.names = 0

    # ---- what a tensor store does ----

    def new_name(self):
        self.names += 1
        return self.names

    def pick(self, data):
        return data.draw(st.sampled_from(list(self.salt)), label="seq")

    def slots(self, seq):
        table, bs = self.m.block_table(seq), self.m.block_size
        return [(table[p // bs], p % bs) for p in range(len(self.m.tokens(seq)))]

    def handed_out(self, blocks):
        """Blocks a table gained: a findable one may only go when no other free block is left."""
        spare = self.m.num_free_blocks - self.m.num_evictable_blocks
        if self.judge_hits and self.complete & set(blocks):
            assert spare == 0, "evicted a findable block while another was free"
        for i in blocks:
            self.pool[i] = [None] * self.m.block_size
        self.complete -= set(blocks)

    def expected_hits(self, salt, tokens, behind, last=1):
        bs, found = self.m.block_size, {self.pool[i][-1] for i in self.complete}
        k = 0
        meaning = meanings(salt, tokens, behind)
        while (k + 1) * bs + last <= len(tokens) and meaning[(k + 1) * bs - 1] in found:
            k += 1
        return k * bs

    # ---- what a caller does ----

    @rule(
        data=st.data(), more=PROMPT, salt=SALT, then=st.sampled_from(["write", "finish", "finish", ""]),
        how=st.sampled_from(HOW), picture=PICTURE, kept=st.booleans(),
    )  # fmt: skip
    def allocate(self, data, more, salt, then, how, picture, kept):
        tokens = data.draw(st.sampled_from([[], *self.past]), label="as before") + more
        behind = {} if picture is None else {min(picture[0], len(tokens) - 1): picture[1]}
        domain = {"salt": salt, "extra": behind}
        lookup, publish = how
        prompt = tokens
        if kept:  # asked with a chain, and asked again
            prompt, domain = self.m.chain(tokens, **domain), {}
            self.waiting = [*self.waiting[-2:], (prompt, {"salt": salt, "extra": behind})]
        seq, fits = self.new_name(), self.m.can_allocate(prompt, **domain, lookup=lookup)
        expected = self.expected_hits(salt, tokens, behind) if lookup else 0
        before = self.m.prefix_stats
        try:
            table, cached = self.m.allocate(seq, prompt, **domain, lookup=lookup, publish=publish)
        except OutOfBlocks:
            assert not fits, "can_allocate said yes"
            assert self.m.prefix_stats == before
            return
        assert fits, "can_allocate said no"
        if self.judge_hits:
            assert cached == expected
        assert cached < len(tokens), "nothing is left to compute"
        after = self.m.prefix_stats
        asked = (1, len(tokens), cached) if lookup else (0, 0, 0)
        assert (after.requests - before.requests, after.queries - before.queries, after.hits - before.hits) == asked
        self.salt[seq], self.behind[seq] = salt, behind
        if not publish:
            self.private.add(seq)
        self.past = [*self.past[-4:], tokens]
        self.handed_out(table[cached // self.m.block_size :])
        if then:
            self.write_up_to(seq, len(tokens))
            self.reads_what_it_wrote()
        if then == "finish":
            self.m.free(seq)
            del self.salt[seq]
            self.private.discard(seq)

    @precondition(lambda self: self.salt)
    @rule(data=st.data(), tokens=PROMPT, then_write=st.booleans(), picture=PICTURE)
    def append(self, data, tokens, then_write, picture):
        self.append_to(self.pick(data), tokens, then_write, picture)

    @precondition(lambda self: self.salt)
    @rule(data=st.data(), share=SHARE, tokens=PROMPT)
    def edit_history(self, data, share, tokens):
        seq = self.pick(data)
        self.cut(seq, share)
        self.append_to(seq, tokens, then_write=True)

    def cut(self, seq, share):
        keep = round(share * len(self.m.tokens(seq)))
        self.m.truncate(seq, keep)
        self.behind[seq] = {at: what for at, what in self.behind[seq].items() if at < keep}

    def append_to(self, seq, tokens, then_write, picture=None):
        before, length = self.m.block_table(seq), len(self.m.tokens(seq))
        behind = {} if picture is None else {length + min(picture[0], len(tokens) - 1): picture[1]}
        try:
            if len(tokens) == 1 and not behind:
                copies = self.m.append_token(seq, *tokens)
            else:
                copies = self.m.append(seq, tokens, extra=behind)
            self.behind[seq] = self.behind[seq] | behind
        except OutOfBlocks:
            assert self.m.block_table(seq) == before and len(self.m.tokens(seq)) == length
            return
        after = self.m.block_table(seq)
        contents = {copy: list(self.pool[copy.src]) for copy in copies}
        self.handed_out(set(after) - set(before))
        for copy, content in contents.items():
            self.pool[copy.dst] = content
        if length % self.m.block_size:
            self.complete.discard(after[length // self.m.block_size])
        if then_write:
            self.write_up_to(seq, length + len(tokens))

    @precondition(lambda self: self.salt)
    @rule(data=st.data(), share=SHARE)
    def write(self, data, share):
        seq = self.pick(data)
        length, done = len(self.m.tokens(seq)), self.m.num_committed(seq)
        self.write_up_to(seq, done + round(share * (length - done)))

    def write_up_to(self, seq, stop):
        meaning = meanings(self.salt[seq], self.m.tokens(seq), self.behind[seq])
        for p, (block, slot) in list(enumerate(self.slots(seq)))[self.m.num_committed(seq) : stop]:
            self.pool[block][slot] = meaning[p]
        self.m.commit(seq, stop)
        if seq not in self.private:
            self.complete |= set(self.m.block_table(seq)[: stop // self.m.block_size])

    @precondition(lambda self: self.salt)
    @rule(data=st.data(), share=SHARE)
    def share_prefix(self, data, share):
        src, dst = self.pick(data), self.new_name()
        length = round(share * len(self.m.tokens(src)))
        self.m.share_prefix(src, dst, length)
        self.inherit(src, dst, length)

    def inherit(self, src, dst, length):
        self.salt[dst] = self.salt[src]
        self.behind[dst] = {at: what for at, what in self.behind[src].items() if at < length}
        if src in self.private:
            self.private.add(dst)

    @precondition(lambda self: self.salt)
    @rule(data=st.data())
    def fork(self, data):
        src, dst = self.pick(data), self.new_name()
        self.m.fork(src, dst)
        self.inherit(src, dst, len(self.m.tokens(src)))

    @precondition(lambda self: self.salt)
    @rule(data=st.data())
    def preempt_and_resume(self, data):
        seq = self.pick(data)
        history, private = self.m.history(seq), seq in self.private
        expected = self.m.tokens(seq), self.behind[seq]
        self.m.free(seq)
        cached = self.expected_hits(self.salt[seq], *expected)
        if not history.tokens or not self.m.can_allocate(history):
            del self.salt[seq]
            self.private.discard(seq)
            return
        before = self.m.prefix_stats
        table, got = self.m.allocate(seq, history, publish=not private, preempted=True)
        assert (self.m.tokens(seq), got) == (expected[0], cached) or not self.judge_hits
        after = self.m.prefix_stats
        assert after.preempted_hits - before.preempted_hits == got and after.hits == before.hits
        self.handed_out(table[got // self.m.block_size :])
        self.write_up_to(seq, len(expected[0]))

    @rule(data=st.data(), salt=SALT, more=PROMPT)
    def pin(self, data, salt, more):
        tokens = data.draw(st.sampled_from(self.past), label="as before") + more
        name, expected = ("p", self.new_name()), self.expected_hits(salt, tokens, {}, last=0)
        got = self.m.pin(name, tokens, salt=salt)
        if self.judge_hits:
            assert got == expected
        if got:
            held = [i for i in range(self.m.num_blocks) if ("pin", name) in self.m.block(i).owners]
            self.pins[name] = salt, {i: list(self.pool[i]) for i in held}

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        name = data.draw(st.sampled_from(list(self.pins)), label="pin")
        self.m.unpin(name)
        del self.pins[name]

    @rule(salt=st.sampled_from(["a", "b"]))
    def drop(self, salt):
        self.m.drop(salt=salt)
        self.private |= {seq for seq in self.salt if self.salt[seq] == salt}
        self.pins = {name: pin for name, pin in self.pins.items() if pin[0] != salt}
        self.complete -= {i for i in self.complete if self.pool[i][-1][0] == salt}

    @precondition(lambda self: self.salt)
    @rule(data=st.data(), share=SHARE)
    def truncate(self, data, share):
        self.cut(self.pick(data), share)

    @precondition(lambda self: self.salt)
    @rule(data=st.data())
    def free(self, data):
        seq = self.pick(data)
        self.m.free(seq)
        del self.salt[seq]
        self.private.discard(seq)

    @rule()
    def reset(self):
        idle = not self.salt and not self.pins
        assert self.m.reset() == idle
        if idle:
            self.complete.clear()
            assert self.m.num_evictable_blocks == 0 and self.m.num_free_blocks == self.m.num_blocks

    # ---- what must hold ----

    @invariant()
    def a_kept_chain_is_answered_as_a_new_one(self):
        for chain, domain in getattr(self, "waiting", ()):
            fresh = self.m.can_allocate(chain.tokens, **domain)
            assert self.m.can_allocate(chain) == fresh == self.m.can_allocate(chain), "an old answer"

    @invariant()
    def reads_what_it_wrote(self):
        for seq, salt in getattr(self, "salt", {}).items():
            expected = meanings(salt, self.m.tokens(seq), self.behind[seq])[: self.m.num_committed(seq)]
            read = [self.pool[block][slot] for block, slot in self.slots(seq)][: len(expected)]
            assert read == expected, f"sequence {seq} reads what it did not write"
        for name, (_, blocks) in getattr(self, "pins", {}).items():
            assert all(self.pool[i] == kept for i, kept in blocks.items()), f"a block of {name} was written"

    @invariant()
    def adds_up(self):
        if not hasattr(self, "m"):
            return
        held = {i for seq in self.salt for i in self.m.block_table(seq)} | {i for _, kept in self.pins.values() for i in kept}
        assert len(held) + self.m.num_free_blocks == self.m.num_blocks
        for i in range(self.m.num_blocks):
            info = self.m.block(i)
            pins = {("pin", name) for name, (_, kept) in self.pins.items() if i in kept}
            assert set(info.owners) == {seq for seq in self.salt if i in self.m.block_table(seq)} | pins
            assert info.ref_count == len(info.owners)
            assert (info.block_hash is not None) == (i in self.complete)
        self.m.check()

    @invariant()
    def the_log_tells_what_can_be_found(self):
        if not hasattr(self, "m"):
            return
        self.mirror.read(list(self.log)[self.told :])
        self.told = len(self.log)
        hashes = {i: self.m.block(i).block_hash for i in range(self.m.num_blocks)}
        assert self.mirror.keys == {i: key for i, key in hashes.items() if key}, "the log leaves a change out"
        assert owner_scan(self.log) == [], "the log tells of a fault"


class ReadsOnly(Machine):
    """The same walk, judged by the contents alone: what a user would see."""

    judge_hits = False

    @invariant()
    def adds_up(self):
        pass

    @invariant()
    def the_log_tells_what_can_be_found(self):
        pass


class ChecksOnly(Machine):
    """The same walk, judged by check() alone."""

    judge_hits = False

    @invariant()
    def reads_what_it_wrote(self):
        pass

    @invariant()
    def the_log_tells_what_can_be_found(self):
        pass

    @invariant()
    def adds_up(self):
        if hasattr(self, "m"):
            self.m.check()


TestBlockManager = Machine.TestCase
TestBlockManager.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


# ---- the faults: each one small method, changed and put back ----


def taken_first(self, hits, grow, owner):
    fresh = [self._take(owner) for _ in range(grow)]
    for i in hits:
        self._hold(i, owner)
    return hits + fresh


def freed_whatever_the_count(self, i, owner):
    self._blocks[i].ref_count = 0
    self._blocks[i].owners = {}
    self._blocks[i].last_access = self._clock
    if i not in self._evictable and i not in self._blank:
        self._reclaim(i)


def published_at_once(self, seq, tokens, **domain):
    out = allocate(self, seq, tokens, **domain)
    for k in range(len(self._sequences[seq].tokens) // self.block_size):
        self._publish(seq, self._sequences[seq], k)
    return out


def released_twice(self, seq, table, owner):
    give_back(self, seq, table, owner)
    give_back(self, seq, table, owner)


def revived_not_counted(self, hits):
    return len(hits)


def partly_full_published(self, seq, num_tokens):
    commit(self, seq, num_tokens)
    if num_tokens % self.block_size:
        self._publish(seq, self._sequences[seq], num_tokens // self.block_size)


def published_all_the_same(self, seq, tokens, **how):
    return allocate(self, seq, tokens, **(how | {"publish": True}))


def dropped_but_still_published(self, *, salt):
    published = {name: s.publish for name, s in self._sequences.items()}
    out = drop(self, salt=salt)
    for name, s in self._sequences.items():
        s.publish = published[name]
    return out


def pin_dropped_at_once(self, name, tokens, **domain):
    got = pin(self, name, tokens, **domain)
    if got:
        for i in self._pins[name][0]:
            self._release(i, ("pin", name))
    return got


def cut_without_its_keys(self, num_tokens=None):
    return *parts(self, num_tokens)[:4], list(self.keys), list(self.labels)


def what_stands_behind_shared_with_the_fork(self, num_tokens=None):
    made = parts(self, num_tokens)
    return *made[:3], self.extra if made[3] == self.extra and type(self.extra) is dict else made[3], *made[4:]


def unpublished_unsaid(self, i, why, seq=None, owner=None):
    if why == "evict":
        return forget(self, i, why, seq, owner)
    return self._unpublish(i)


NO_CHANGE_NOTED = property(lambda self: 0, lambda self, value: None)
drop, pin, parts, forget = BlockManager.drop, BlockManager.pin, Chain.parts, BlockManager._forget
allocate, commit, give_back = BlockManager.allocate, BlockManager.commit, BlockManager._give_back
label = PrefixIndex.label
DOMAIN_OF = "kvlab.core.prefixes.domain_of"

FAULTS = {
    "no copy-on-write": [(BlockManager, "_must_copy", lambda self, i: False)],
    "reference not raised on fork": [(BlockManager, "_share", lambda self, table, owner: None)],
    "freed without a look at the count": [(BlockManager, "_release", freed_whatever_the_count)],
    "hash not cleared on reuse": [(BlockManager, "_unpublish", lambda self, i: None)],
    "hits not held before new blocks are taken": [(BlockManager, "_claim", taken_first)],
    "findable before it is written": [(BlockManager, "allocate", published_at_once)],
    "partly full block findable": [(BlockManager, "commit", partly_full_published)],
    "salt ignored": [DOMAIN_OF],
    "tokens not verified": [
        (PrefixIndex, "key", lambda self, parent, label: b"all the same"),
        (PrefixIndex, "same", lambda self, prefix, parent, label: True),
    ],
    "history not verified": [
        (PrefixIndex, "key", lambda self, parent, label: repr(label).encode()),
        (PrefixIndex, "same", lambda self, prefix, parent, label: prefix.label == label),
    ],
    "key of truncated tokens": [
        (PrefixIndex, "label", lambda self, chain, k: label(self, replace(chain, tokens=[0] * len(chain.tokens)), k))
    ],
    "referenced block evicted": [(BlockManager, "_victim", lambda self: 0)],
    "hit on the last token": [(PrefixIndex, "most_hits", lambda self, n: n // self.block_size)],
    "free on every path but one": [(BlockManager, "_give_back", lambda self, seq, table, owner: None)],
    "released twice": [(BlockManager, "_give_back", released_twice)],
    "published against its will": [(BlockManager, "allocate", published_all_the_same)],
    "dropped, and still published by those that live": [(BlockManager, "drop", dropped_but_still_published)],
    "pinned, and not held": [(BlockManager, "pin", pin_dropped_at_once)],
    "a picture behind a token left out": [
        (PrefixIndex, "label", lambda self, chain, k: label(self, replace(chain, extra={}), k))
    ],
    "keys kept of tokens that are cut": [(Chain, "parts", cut_without_its_keys)],
    "a fork changes what stands behind its parent's tokens": [(Chain, "parts", what_stands_behind_shared_with_the_fork)],
    "an answer kept too long": [(BlockManager, "_changes", NO_CHANGE_NOTED)],
    "a key that goes unsaid": [(BlockManager, "_forget", unpublished_unsaid)],
    "revived hits counted as free": [(BlockManager, "_held", revived_not_counted)],
}


@contextmanager
def applied(changes):
    with ExitStack() as stack:
        for change in changes:
            if change is DOMAIN_OF:
                stack.enter_context(patch(DOMAIN_OF, lambda salt, adapter: ()))
            else:
                stack.enter_context(patch.object(*change, create=change[1] == "_changes"))
        yield


def walk(machine, examples=2_000):
    """Up to 40 · `examples` steps, the same ones every time; raises on the first that breaks a rule."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            report_multiple_bugs=False,
        ),
    )


@pytest.mark.parametrize("name", FAULTS)
def test_the_walk_finds(name):
    with applied(FAULTS[name]), pytest.raises((AssertionError, InvariantError, IndexError, KeyError, StopIteration)):
        walk(Machine)


SEEN_BY_USERS = ["no copy-on-write", "reference not raised on fork", "freed without a look at the count"]
SEEN_BY_USERS += ["hash not cleared on reuse", "findable before it is written", "tokens not verified"]


@pytest.mark.parametrize("name", SEEN_BY_USERS)
def test_it_leaks(name):
    """These are no matter of bookkeeping: a sequence reads what another wrote."""
    with applied(FAULTS[name]), pytest.raises(AssertionError, match="reads what it did not write"):
        walk(ReadsOnly)


# The audit sees tables, counts and tokens. It cannot see that K/V was not there yet when a block became findable, that a
# salt never reached it, that a hit was allowed that should not have been, or that a call took the wrong blocks in order.
UNSEEN_BY_CHECK = [
    "hits not held before new blocks are taken",
    "findable before it is written",
    "salt ignored",
    "hit on the last token",
    "revived hits counted as free",
    "published against its will",
    "a picture behind a token left out",
    "an answer kept too long",
    "a key that goes unsaid",
]


@pytest.mark.parametrize("name", [n for n in FAULTS if n not in UNSEEN_BY_CHECK])
def test_check_finds(name):
    with applied(FAULTS[name]), pytest.raises(InvariantError):
        walk(ChecksOnly)


def test_colliding_keys_are_harmless():
    """With every key the same, the tokens alone decide; nothing changes but speed."""
    with applied([(PrefixIndex, "key", lambda self, parent, label: b"all the same")]):
        walk(Machine, 300)
