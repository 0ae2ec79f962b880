"""Who holds how much: the buddy allocator, and the simulation beside PagedAttention's figure 2."""

import random

import pytest

from kvlab.core.workload import MAX_LENGTH, WORKLOADS, Request, requests
from kvlab.experiments import allocators
from kvlab.experiments.allocators import POLICIES, Buddy, Counter, simulate


def test_a_buddy_allocator_gives_disjoint_powers_of_two_and_joins_them_again():
    buddy, draw, mine = Buddy(256), random.Random(3), {}
    for _ in range(2000):
        if mine and draw.random() < 0.5:
            offset = draw.choice(list(mine))
            buddy.release(offset)
            del mine[offset]
        else:
            size = draw.randrange(1, 60)
            offset = buddy.allocate(size)
            if offset is not None:
                mine[offset] = 1 << (size - 1).bit_length()
                assert size <= mine[offset] < 2 * size and offset % mine[offset] == 0
        slots = [slot for offset, size in mine.items() for slot in range(offset, offset + size)]
        assert len(slots) == len(set(slots)) and all(slot < 256 for slot in slots)
        assert sum(size * len(offsets) for size, offsets in buddy.free.items()) == 256 - len(slots)
    for offset in mine:
        buddy.release(offset)
    assert buddy.allocate(256) == 0, "every piece found its other half"


def test_a_buddy_allocator_breaks():
    """Half of the slots are free, and nothing of a quarter's size can be had."""
    buddy = Buddy(16)
    pieces = [buddy.allocate(2) for _ in range(8)]
    for offset in pieces[::2]:
        buddy.release(offset)
    assert buddy.allocate(4) is None and buddy.allocate(2) is not None
    counter = Counter(16)
    taken = [counter.allocate(2) for _ in range(8)]
    for name in taken[::2]:
        counter.release(name)
    assert counter.allocate(4) is not None, "merely counted, nothing breaks"


def test_a_size_that_is_no_power_of_two_is_refused():
    for size in (0, 24, -8):
        with pytest.raises(ValueError, match="power of two"):
            Buddy(size)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_lengths_have_the_papers_means(workload):
    drawn = requests(workload, 20000, 0.5, 1)
    prompt, output = WORKLOADS[workload]
    assert sum(r.prompt for r in drawn) / len(drawn) == pytest.approx(prompt, rel=0.03)
    assert sum(r.output for r in drawn) / len(drawn) == pytest.approx(output, rel=0.03)
    wide = requests(workload, 5000, 1.5, 1)
    assert all(r.prompt >= 1 and r.output >= 1 and r.prompt + r.output <= MAX_LENGTH for r in wide)
    assert requests(workload, 10, 1.0, 2) == requests(workload, 10, 1.0, 2) != requests(workload, 10, 1.0, 3)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_shares_add_up(policy):
    usage = simulate(policy, requests("ShareGPT", 300), slots=8192, steps=200, warm_up=50)
    assert usage.written + usage.to_come + usage.never + usage.free == pytest.approx(1)
    assert min(usage.written, usage.to_come, usage.never, usage.free) >= 0
    assert usage.written == pytest.approx(sum(usage.history) / len(usage.history), abs=1e-4)


def test_what_can_be_said_by_hand():
    """Requests of 96 prompt and 32 output tokens, all alike, in a pool of 1024."""
    alike = [Request(96, 32)]
    oracle = simulate("oracle", alike, slots=1024, steps=320, warm_up=32)
    assert oracle.running == pytest.approx(8) and oracle.never == pytest.approx(0) and oracle.free == pytest.approx(0)
    assert oracle.written == pytest.approx((97 + 128) / 2 / 128), "it grows from 97 tokens to 128"
    power = simulate("power of two", [Request(96, 33)], slots=1024, steps=320, warm_up=32)
    assert power.running == pytest.approx(4), "96 + 64 is rounded up to 256"
    assert simulate("oracle", [Request(96, 33)], slots=1024, steps=99, allocator=Counter).running == pytest.approx(7)


def test_a_requests_typical_length_is_over_its_steps():
    assert allocators.typical_length([Request(10, 1)]) == 11 and allocators.typical_length([Request(10, 3)]) == 12
    assert allocators.typical_length([Request(10, 1), Request(10, 3)]) == pytest.approx((11 + 11 + 12 + 13) / 4)


def test_the_order_of_the_papers_figure_holds():
    waiting = requests("ShareGPT", 2000, 0.5, 5)
    written = {policy: simulate(policy, waiting, steps=600).written for policy in POLICIES}
    assert written["max length"] < written["power of two"] < written["oracle"] < 0.5 < 0.9 < written["paged"]


def test_one_token_blocks_waste_nothing_and_large_ones_much():
    waiting = requests("ShareGPT", 500)
    small, large = (simulate("paged", waiting, block_size=size, slots=4096, steps=200) for size in (1, 256))
    assert small.of_held == pytest.approx(1) and large.of_held < 0.9
    assert small.entries > 100 * large.entries


def test_a_request_that_finds_no_block_sends_the_newest_back_and_nothing_is_lost():
    usage = simulate("paged", [Request(4, 60)], slots=256, block_size=4, steps=400, warm_up=0)
    assert usage.preempted > 0 and usage.written > 0.8


def test_names_that_are_unknown():
    with pytest.raises(ValueError, match="workload"):
        requests("Wikipedia", 3)
    with pytest.raises(ValueError, match="spread"):
        requests("ShareGPT", 3, 0)
    with pytest.raises(ValueError, match="policy"):
        simulate("best", [Request(1, 1)])
