"""Field cases of servers and tenants, as far as the block manager decides them (times are chapter 9's)."""

import random

import pytest
from test_paged import close, decode, pool_for, prompts, step, tiny, truth

from kvlab.core.blocks import BlockManager
from kvlab.core.scan import owner_scan
from kvlab.core.trace import Trace


def ask(manager, name, tokens, **domain):
    """A request from start to end; the tokens it had to compute."""
    computed = len(tokens) - manager.allocate(name, tokens, owner=str(name), **domain).num_cached_tokens
    manager.commit(name, len(tokens))
    manager.free(name)
    return computed


SECRET = random.Random(1).choices(range(100), k=64)


def test_a_count_tells_a_stranger_what_was_asked_before():
    """Not a time, a count: `cached_tokens` in a reply is enough (CVE-2025-46570)."""
    m = BlockManager(64, 16)
    ask(m, "victim", [*SECRET, 1])
    guess = [*SECRET[:32], *[100] * 32, 1]
    assert [ask(m, f"probe {n}", p) for n, p in enumerate(([100] * 65, guess, [*SECRET, 2]))] == [65, 33, 1]


def test_salt_closes_it_and_a_prompt_cannot_spell_a_salt():
    m = BlockManager(64, 16)
    ask(m, "victim", [*SECRET, 1], salt="tenant 1")
    for n, salt in enumerate((None, "", "tenant 2", "tenant 1 ", "Tenant 1")):
        assert ask(m, f"probe {n}", [*SECRET, 2], salt=salt) == 65, f"salt {salt!r} found the victim's blocks"
    spelled = [*b"tenant 1", *SECRET]
    assert ask(m, "spelled", spelled) == len(spelled), "what a prompt says is not who sent it"
    assert ask(m, "again", [*SECRET, 2], salt="tenant 1") == 1, "and the tenant keeps its own hits"


@pytest.mark.parametrize("tenants", [4, 256])
def test_the_price_of_salt_is_one_prefill_a_tenant(tenants):
    """vllm#37961: a system prompt that all tenants share is computed once for each of them."""
    shared, salted = BlockManager(16 * 1024, 16), BlockManager(16 * 1024, 16)
    once = sum(ask(shared, n, [*SECRET, n]) for n in range(tenants))
    each = sum(ask(salted, n, [*SECRET, n], salt=f"tenant {n}") for n in range(tenants))
    assert (once, each) == (len(SECRET) + tenants, tenants * (len(SECRET) + 1))


def test_where_nothing_is_said_to_be_cached_nothing_foreign_is_held():
    """llama.cpp#25992: another conversation came back word for word, and `cached_tokens` said 0."""
    r, m = random.Random(5), BlockManager(48, 4, trace=Trace())
    live = []
    for n in range(400):
        prompt = r.choices(range(3), k=r.randint(2, 24))
        if len(live) > 3:
            m.free(live.pop(r.randrange(len(live))))
        got = m.allocate(n, prompt, owner=str(n))
        held_by_others = {b for s in live for b in m.block_table(s)}
        if not got.num_cached_tokens:
            assert not held_by_others & set(m.block_table(n))
        m.commit(n, len(prompt))
        live.append(n)
        m.check()
    assert owner_scan(m.trace) == []


def test_sixteen_at_once_are_as_right_as_one():
    """mlx-lm#965: right alone, wrong with sixteen at a time. Some share a prefix, some end early, new ones take their blocks."""
    model = tiny("llama")
    pool = pool_for(model, num_blocks=120)
    rows = prompts(*range(3, 19), seed=4)
    for n in range(0, 16, 3):
        rows[n] = rows[15][:12] + rows[n][:3]
    for n, tokens in enumerate(rows):
        pool.manager.allocate(n, tokens)
    decode_all(model, pool, range(16))
    assert pool.manager.allocate("hit", rows[15]).num_cached_tokens == 12
    for n in range(0, 16, 2):
        pool.manager.free(n)
    for n, tokens in enumerate(prompts(5, 9, 14, seed=6), start=16):
        pool.manager.allocate(n, tokens)
    decode_all(model, pool, [*range(1, 16, 2), 16, "hit", 17, 18])


def decode_all(model, pool, names):
    """What is new, then two greedy tokens, all rows in one batch; each compared with its row alone."""
    for name in names:
        pool.append(name, [5])
    logits = step(model, pool, names)
    for row, name in zip(logits, names, strict=True):
        close(row, truth(model, pool.manager.tokens(name))[-1])
    decode(model, pool, names, logits, 2)
