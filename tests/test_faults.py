"""The zoo: every fault is reversible, shows its symptom, is caught and named; its healthy twin is quiet."""

import importlib

import pytest

from kvlab.claims import claims
from kvlab.compare import compare, judge, noise_bound
from kvlab.experiments import leak, password, prompts, served
from kvlab.faults import ZOO, add, fault
from kvlab.runtime.decode import greedy

DECODING = ("cache-not-reset", "stale-buffer", "pads-not-masked", "positions-restarted")
SICK = {arm.fault: arm for arm in password.ARMS.values() if arm.fault}


@pytest.fixture(scope="module")
def bench(loaded):
    chosen = prompts.make(loaded.tokenizer, 5, seed=11)
    rows = [list(prompt.ids) for prompt in chosen]
    world = password.world_for(loaded, chosen, 4)
    reference = [greedy(loaded, [row], 4)[0] for row in rows]
    healthy = [greedy(loaded, [row], 4, use_cache=False)[0] for row in rows]
    epsilon = noise_bound(compare(a, b) for a, b in zip(reference, healthy))
    return rows, world, reference, epsilon


def judged(loaded, bench, arm):
    rows, world, reference, epsilon = bench
    traces = password.run_arm(loaded, arm, world, rows)
    return [judge(compare(a, b), epsilon, steps=b.steps) for a, b in zip(reference, traces)]


@pytest.mark.model
@pytest.mark.parametrize("name", DECODING)
def test_fault_on_is_caught_and_named_fault_off_is_quiet(loaded, bench, name):
    arm = SICK[name]
    sick = judged(loaded, bench, arm)
    assert [v.kind for v in sick] == ["state fault"] * len(sick)
    assert {v.family for v in sick} == {ZOO[name].family}
    healthy = judged(loaded, bench, password.Arm("twin", "healthy", "the same arm, nothing broken", arm.run))
    assert not [v.sentence for v in healthy if v.kind == "state fault"]


@pytest.mark.model
def test_symptom_the_leak(loaded):
    assert leak.SECRET in loaded.tokenizer.decode(leak.two_users(loaded, "cache-not-reset").tokens)
    assert leak.SECRET not in loaded.tokenizer.decode(leak.two_users(loaded).tokens)


@pytest.mark.model
def test_symptom_the_buffer_leaks_only_from_long_to_short(loaded, bench):
    """A10: a test with one request, or with a shorter one first, never sees it."""
    rows, world, _, epsilon = bench
    short, long = sorted(rows, key=len)[0], world.previous
    alone = greedy(loaded, [short], 4)[0]
    from kvlab.runtime.decode import static_cache

    with fault("stale-buffer"):
        first_use = greedy(loaded, [short], 4, cache=static_cache(loaded, 160))[0]
        buffer = static_cache(loaded, 160)
        greedy(loaded, [short], 4, cache=buffer)
        long_after = greedy(loaded, [long], 4, cache=buffer)[0]
        short_after = greedy(loaded, [short], 4, cache=buffer)[0]
    assert compare(alone, first_use).delta <= epsilon
    assert compare(greedy(loaded, [long], 4)[0], long_after).delta <= epsilon
    assert compare(alone, short_after).delta > epsilon


@pytest.mark.model
@pytest.mark.parametrize("name", served.SCENES)
def test_faults_of_the_engine_leak_another_password_too_and_the_watch_says_whose(loaded, name):
    """`test_zoo` has them with the recorded password."""
    for on in (False, True):
        with fault(name if on else None):
            told = served.SCENES[name](loaded, "MOSS-7316", 6)
        text = loaded.tokenizer.decode(told.trace.tokens)
        assert bool(told.words) == on
        assert ("Ada" in " ".join(told.words)) == (on and bool(told.others))
        assert ("moss" in text.lower()) == (on and bool(told.others)), text


def target(name):
    module, attribute = ZOO[name].breaks.split(":")
    owner = importlib.import_module(module)
    for part in attribute.split(".")[:-1]:
        owner = getattr(owner, part)
    return owner.__dict__[attribute.split(".")[-1]]


@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_fault_is_reversible_even_after_an_error(name):
    right = target(name)
    with pytest.raises(RuntimeError), fault(name) as entry:
        assert entry is ZOO[name] and target(name) is not right
        raise RuntimeError
    assert target(name) is right


@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_entry_is_complete(name):
    entry = ZOO[name]
    assert entry.name == name
    for text in (entry.symptom, entry.mechanism, entry.detector, entry.fix):
        assert len(text) > 20 and text.endswith(".")
    assert entry.cases and all(case.count("/") == 1 and case.rsplit("#")[1].isdigit() for case in entry.cases)
    assert entry.claims and set(entry.claims) <= set(claims())


def test_unknown_and_taken_names():
    with pytest.raises(KeyError, match="cache-not-reset"), fault("no-such-fault"):
        pass
    with pytest.raises(ValueError, match="already"):
        add(ZOO["cache-not-reset"])
    with fault(None) as nothing:
        assert nothing is None
