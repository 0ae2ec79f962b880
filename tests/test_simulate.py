"""The simulated clock: the scheduler's own decisions, a cost that is added up, and requests that nobody sent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_engine import LLAMA

from kvlab.core.blocks import BlockManager
from kvlab.core.cards import CEILINGS, MODELS
from kvlab.core.schedule import POLICIES, Scheduler
from kvlab.core.simulate import Cost, Simulation, Work, card_cost, roofline
from kvlab.core.workload import Request, poisson, requests
from kvlab.engine import Engine

COST = Cost(fixed=1.0, token=0.1, flat=8, read=0.01, pair=0.001)


def simulation(asked, blocks=64, block_size=4, watermark=0.0, prompt=None, **how):
    return Simulation(Scheduler(BlockManager(blocks, block_size, watermark=watermark), **how), asked, COST, prompt)


# ---- the cost --------------------------------------------------------------------------------------------------------------


def test_a_step_costs_what_its_work_costs():
    assert COST.seconds(Work(tokens=3, read=0, pairs=0)) == pytest.approx(1.8)  # fewer tokens than `flat` cost as many as that
    assert COST.seconds(Work(tokens=20, read=100, pairs=50)) == pytest.approx(1 + 2 + 1 + 0.05)


def test_the_work_of_a_life_is_its_tokens_its_reads_and_its_pairs():
    seen = []
    simulation([Request(prompt=5, output=3)], budget=3).run(seen.append)
    assert [tick.work for tick in seen] == [Work(3, 0, 1 + 2 + 3), Work(2, 0, 4 + 5), Work(1, 6, 0), Work(1, 7, 0)]
    assert [tick.end for tick in seen][-1] == pytest.approx(sum(COST.seconds(tick.work) for tick in seen))


def test_a_roofline_is_flat_up_to_the_tokens_whose_arithmetic_takes_as_long_as_reading_the_weights():
    cost = roofline(parameters=100, weight_bytes=200, kv_token_bytes=10, pair_flops=4, flops=1000.0, bandwidth=50.0)
    assert cost.seconds(Work(1, 0, 0)) == pytest.approx(200 / 50) == cost.seconds(Work(int(cost.flat), 0, 0))
    assert cost.seconds(Work(60, 0, 0)) == pytest.approx(60 * 2 * 100 / 1000)
    assert cost.seconds(Work(1, 5, 3)) - cost.seconds(Work(1, 0, 0)) == pytest.approx(5 * 10 / 50 + 3 * 4 / 1000)


def test_the_cost_of_a_named_card_is_its_two_ceilings():
    cost, most, model = card_cost(), CEILINGS["A100 80 GB"], MODELS["Llama 3.1 8B"]
    assert cost.flat == pytest.approx(most.flops / most.bandwidth)  # two bytes and two FLOP a weight
    assert cost.seconds(Work(1, 0, 0)) == pytest.approx(2 * model.parameters / most.bandwidth)
    assert cost.read * most.bandwidth == pytest.approx(2 * 32 * 8 * 128 * 2)  # K and V, layers, heads, width, bytes
    assert cost.pair * most.flops == pytest.approx(4 * 32 * 32 * 128)
    assert "data sheet" in most.source


# ---- the clock -----------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20), st.floats(0, 40)), min_size=1, max_size=12),
    st.sampled_from(POLICIES),
    st.integers(14, 40),
    st.integers(1, 8),
    st.integers(1, 40),
    st.booleans(),
)
def test_everybody_is_served_in_full_and_the_blocks_are_right_at_each_step(drawn, policy, blocks, at_once, budget, fair):
    asked = sorted((Request(p, o, at, owner=p % 2) for p, o, at in drawn), key=lambda r: r.at)
    run = simulation(asked, blocks, max_running=at_once, budget=budget, policy=policy, fair=fair)
    clock = [0.0]

    def watch(tick):
        run.scheduler.manager.check()
        assert clock[0] <= tick.start < tick.end and tick.running <= at_once
        clock[0] = tick.end

    lives = run.run(watch)
    assert run.over and len(lives) == len(asked) and run.scheduler.manager.num_free_blocks == blocks
    for life in lives:
        assert life.done and len(life.job.tokens) == life.request.prompt + life.request.output
        assert life.request.at <= life.admitted < life.first <= life.last
        assert life.gap <= life.last - life.first + 1e-9


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("blocks", [64, 18])
def test_it_decides_as_the_engine_does(policy, blocks):
    asked = [Request(prompt, output) for prompt, output in ((5, 9), (23, 4), (11, 20), (2, 30), (17, 8), (9, 9))]
    engine = Engine(LLAMA, blocks, 4, max_running=4, budget=16, policy=policy, watermark=0.1)
    for n, one in enumerate(asked):
        engine.submit([n] * one.prompt, max_tokens=one.output, ignore_eos=True, lookup=False, publish=False)
    engine.run()
    seen = []
    simulation(asked, blocks, watermark=0.1, max_running=4, budget=16, policy=policy).run(seen.append)
    real = [(step.names, step.work, step.preempted, step.held) for step in engine.metrics.steps]
    assert real == [(tuple(p.job.name for p in t.step.pieces), t.work, len(t.step.preempted), t.held) for t in seen]
    assert blocks == 64 or policy == "decode first" or engine.metrics.preemptions


def test_with_prompts_of_its_own_what_is_cached_is_not_computed_again():
    asked = [Request(20, 2, at) for at in (0.0, 50.0)]
    first, second = simulation(asked, prompt=lambda n, request: list(range(request.prompt))).run()
    assert first.job.cached == 0 and second.job.cached == 16 and second.ttft < first.ttft


def test_a_request_that_could_never_run_is_refused_and_nothing_is_queued():
    run = simulation([], blocks=4)
    with pytest.raises(ValueError, match="request 0 grows to 17 tokens; the pool has room for 16"):
        run.add(Request(10, 7))
    assert run.over and not run.scheduler.waiting


# ---- who asks ------------------------------------------------------------------------------------------------------------


def test_arrivals_are_seeded_and_come_at_their_rate():
    asked = requests("Alpaca", 4000)
    come = poisson(asked, 2.0, seed=1)
    assert come == poisson(asked, 2.0, seed=1) != poisson(asked, 2.0, seed=2)
    assert [(r.prompt, r.output) for r in come] == [(r.prompt, r.output) for r in asked]
    assert all(a.at < b.at for a, b in zip(come, come[1:]))
    assert len(come) / come[-1].at == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("rate", [0, -1.0])
def test_a_rate_that_is_not_positive_is_refused(rate):
    with pytest.raises(ValueError, match="rate must be above 0"):
        poisson([Request(1, 1)], rate)
