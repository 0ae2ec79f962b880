"""The serving engine: each request's greedy answer is its own, in logits, whatever is scheduled beside it; endings leave nothing held."""

import asyncio
import contextlib
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_paged import EPSILON, prompts, tiny

from kvlab.compare import audit
from kvlab.core.blocks import BlockManager, UnknownSequence
from kvlab.core.schedule import POLICIES, Job, Scheduler
from kvlab.core.spec import ModelSpec
from kvlab.engine import Engine
from kvlab.engine.engine import serving
from kvlab.engine.metrics import percentile
from kvlab.engine.request import Sampling, cut_at, safe
from kvlab.engine.watch import Watch
from kvlab.faults import fault
from kvlab.runtime import packed
from kvlab.runtime.decode import attention_kernel, greedy
from kvlab.runtime.models import Loaded
from kvlab.runtime.paged import PagedPool


class Letters:
    """A tokenizer of the tiny models' 97 ids: a character each."""

    pad_token_id = 0

    def __call__(self, text):
        return {"input_ids": [ord(c) - 30 for c in text]}

    def decode(self, ids):
        return "".join(chr(int(i) + 30) for i in ids)


def loaded_of(name):
    model = tiny(name)
    model.generation_config.eos_token_id = None
    return Loaded(model, Letters(), ModelSpec.from_config(model.config, "float32", name), name, "", "cpu", "float32")


LLAMA = loaded_of("llama")
ALONE = {}


def alone(loaded, prompt, new):
    """The request with the model to itself: tokens and logits."""
    key = loaded.name, tuple(prompt), new
    if key not in ALONE:
        ALONE[key] = greedy(loaded, [prompt], new)[0]
    return ALONE[key]


def right(loaded, request):
    """The request's logits are those of the request alone."""
    trace = alone(loaded, request.prompt, len(request.new))
    delta = (torch.stack(request.logits) - trace.logits).abs().max()
    assert request.new == trace.tokens and delta <= EPSILON, f"{request.name}: {delta:.2g}"


# ---- one packed forward -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "mistral, window 8", "qwen2, mixed", "gemma3"])
def test_a_packed_forward_gives_each_request_its_own_logits(name):
    loaded = loaded_of(name)
    pool, rows = PagedPool(loaded.spec, 64, 4), prompts(11, 23, 5, 9)
    for n, row in enumerate(rows):
        pool.manager.allocate(n, row)
    with attention_kernel(loaded, packed.NAME):
        packed.forward(loaded, pool, [packed.Piece(0, 0, 6), packed.Piece(1, 0, 23)])
        packed.forward(loaded, pool, [packed.Piece(0, 6, 5), packed.Piece(2, 0, 5), packed.Piece(3, 0, 9)])
        for n in range(4):
            pool.append(n, [7])
        got = packed.forward(loaded, pool, [packed.Piece(n, len(row), 1) for n, row in enumerate(rows)])
    for n, row in enumerate(rows):
        with torch.no_grad():
            own = loaded.model(torch.tensor([[*row, 7]]), use_cache=False).logits[0, -1]
        assert (got[n] - own).abs().max() <= EPSILON


def test_a_piece_that_does_not_go_on_is_refused():
    pool = PagedPool(LLAMA.spec, 8, 4)
    pool.manager.allocate("a", [1, 2, 3])
    for piece in (packed.Piece("a", 1, 1), packed.Piece("a", 0, 4), packed.Piece("a", 0, 0)):
        with pytest.raises(ValueError, match="does not go on"):
            packed.forward(LLAMA, pool, [piece])
    assert pool.manager.num_committed("a") == 0


def test_what_packed_attention_does_not_know_is_refused_by_name():
    loaded = loaded_of("gemma2")
    engine = Engine(loaded, 16, 4)
    request = engine.submit([1, 2, 3], max_tokens=2)
    with pytest.raises(ValueError, match="softcap"):
        engine.run()
    assert request.finish == "failed" and engine.manager.num_free_blocks == 16


# ---- the engine -----------------------------------------------------------------------------------------------------------

TIGHT = {
    "room for all": {"num_blocks": 200},
    "preempted, computed anew": {"num_blocks": 22},
    "preempted, swapped": {"num_blocks": 22, "swap": True},
    "prompts in small pieces": {"num_blocks": 40, "budget": 5},
    "two at once": {"num_blocks": 60, "max_running": 2},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", TIGHT)
def test_whatever_runs_beside_it_a_request_gets_its_own_answer(name, policy):
    engine = Engine(LLAMA, block_size=4, policy=policy, check=True, keep_logits=True, **TIGHT[name])
    rows = prompts(3, 17, 9, 30, 12, 5, 21, 8)
    rows[3] = rows[1] + rows[3]  # some share a beginning
    requests = [engine.submit(row, max_tokens=12) for row in rows]
    with contextlib.nullcontext() if "swap" in TIGHT[name] else Watch(LLAMA, engine.pool) as seen:
        engine.run()
    if seen is not None:
        assert not seen.findings and all(audit(seen.steps[request.name]) is None for request in requests)
        assert all(len(seen.steps[request.name]) >= 12 for request in requests)
    for request in requests:
        right(LLAMA, request)
        assert request.finish == "length" and request.ttft >= 0 and len(request.gaps) == 11
    assert engine.manager.num_free_blocks == engine.manager.num_blocks
    if name.startswith("preempted") and policy != "decode first":
        assert engine.metrics.preemptions > 0, "the scene must be tight"


def test_a_prefix_is_found_and_a_salt_divides():
    engine = Engine(LLAMA, 64, 4, check=True, keep_logits=True)
    (row,) = prompts(33)
    first = engine.submit(row, max_tokens=3)
    engine.run()
    again, other = engine.submit(row, max_tokens=3), engine.submit(row, max_tokens=3, salt="x")
    engine.run()
    assert (first.job.cached, again.job.cached, other.job.cached) == (0, 32, 0)
    for request in (first, again, other):
        right(LLAMA, request)


def test_samples_fork_one_prompt_and_seeds_do_not_depend_on_the_neighbours():
    (row, *others) = prompts(13, 5, 22)

    def sampled(beside):
        engine = Engine(LLAMA, 64, 4, check=True)
        for other in others if beside else ():
            engine.submit(other, max_tokens=9, temperature=1.0, seed=5)
        request = engine.submit(row, max_tokens=8, temperature=1.0, seed=3, n=3)
        engine.run()
        return [one.new for one in (request, *request.samples)], engine

    (answers, engine), (same, _) = sampled(True), sampled(False)
    assert answers == same and len({tuple(a) for a in answers}) > 1
    assert sum(s.prefill for s in engine.metrics.steps) < 13 + 5 + 22 + 12, "the prompt is computed once"
    single = Engine(LLAMA, 64, 4).submit(row, max_tokens=8, temperature=1.0, seed=4)
    assert single.sampling.seed == 4
    greedy_three = Engine(LLAMA, 64, 4, keep_logits=True)
    request = greedy_three.submit(row, max_tokens=6, n=3)
    with Watch(LLAMA, greedy_three.pool) as seen:
        greedy_three.run()
    assert not seen.findings, "a copied block holds what its original held"
    for one in (request, *request.samples):
        right(LLAMA, one)


def test_stop_strings_end_of_text_and_streaming():
    trace = alone(LLAMA, prompts(9)[0], 8)
    text = Letters().decode(trace.tokens)
    engine = Engine(LLAMA, 64, 4, check=True)
    request = engine.submit(prompts(9)[0], max_tokens=8, stop=text[3:5])
    pieces = list(engine.stream(request))
    assert "".join(pieces) == request.text == text[: text.index(text[3:5])] and request.finish == "stop"
    engine.eos = frozenset([trace.tokens[2]])
    ended = engine.submit(prompts(9)[0], max_tokens=8)
    through = engine.submit(prompts(9)[0], max_tokens=8, ignore_eos=True)
    engine.run()
    assert ended.text == text[: trace.tokens.index(trace.tokens[2])] and ended.finish == "stop"
    assert through.text == text and through.finish == "length"


def test_half_a_stop_string_and_half_a_character_are_held_back():
    assert safe("abcEN", ["END"]) == 3 and safe("abcEX", ["END"]) == 5 and safe("ab\ufffd", []) == 2
    assert cut_at("abENDc END", ["END", "c"]) == "ab" and cut_at("abc", ["END"]) is None


def test_who_leaves_the_stream_cancels_and_a_timeout_ends():
    now = [0.0]
    engine = Engine(LLAMA, 64, 4, check=True, clock=lambda: now[0])
    request = engine.submit(prompts(9)[0], max_tokens=50)
    for _ in engine.stream(request):
        break
    assert request.finish == "cancelled" and engine.idle and engine.manager.num_free_blocks == 64
    late = engine.submit(prompts(9)[0], max_tokens=50, timeout=2.0)
    engine.step()
    now[0] = 3.0
    assert engine.step() == [late] and late.finish == "timeout" and engine.manager.num_free_blocks == 64


def test_a_forward_that_fails_fails_those_that_ran_and_the_engine_goes_on(monkeypatch):
    engine = Engine(LLAMA, 64, 4)
    ran, right_after = engine.submit(prompts(9)[0], max_tokens=4), None
    monkeypatch.setattr(packed, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
    with pytest.raises(RuntimeError, match="no memory"):
        engine.step()
    monkeypatch.undo()
    assert ran.finish == "failed" and str(ran.error) == "no memory" and engine.manager.num_free_blocks == 64
    right_after = engine.submit(prompts(9)[0], max_tokens=4)
    engine.run()
    assert right_after.new == alone(LLAMA, prompts(9)[0], 4).tokens


def test_many_callers_in_one_event_loop_and_one_goes_away():
    engine, rows = Engine(LLAMA, 64, 4), prompts(9, 14, 4)

    async def caller(row, leave=False):
        text = ""
        answer = engine.generate(row, max_tokens=8)
        async for piece in answer:
            text += piece
            if leave:
                await answer.aclose()
                return None
        return text

    async def all_of_them():
        return await asyncio.gather(*(caller(row, leave=n == 1) for n, row in enumerate(rows)))

    with ThreadPoolExecutor(1) as thread:  # a loop of its own: another test's may run in this thread
        said = thread.submit(lambda: asyncio.run(all_of_them())).result()
    assert said[1] is None and engine.idle and engine.manager.num_free_blocks == 64
    for n in (0, 2):
        assert said[n] == Letters().decode(alone(LLAMA, rows[n], 8).tokens)


def test_when_the_caller_who_computes_is_cancelled_the_next_waits_for_its_step(monkeypatch):
    engine, rows, at_work, most = Engine(LLAMA, 64, 4, check=True), prompts(9, 14), [], []
    step = engine.step

    def slowly():
        at_work.append(1)
        most.append(len(at_work))
        time.sleep(0.02)
        try:
            return step()
        finally:
            at_work.pop()

    monkeypatch.setattr(engine, "step", slowly)

    async def caller(row):
        return "".join([piece async for piece in engine.generate(row, max_tokens=6)])

    async def both():
        first = asyncio.create_task(caller(rows[0]))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0.002)  # it goes, while its step is still at work
        return await caller(rows[1])

    with ThreadPoolExecutor(1) as thread:
        said = thread.submit(lambda: asyncio.run(both())).result()
    assert max(most) == 1 and said == Letters().decode(alone(LLAMA, rows[1], 6).tokens)
    assert engine.idle and engine.manager.num_free_blocks == 64


def test_cancelled_while_a_step_is_computed_it_ends_with_the_step(monkeypatch):
    """Its blocks are in use until the forward is done."""
    engine = Engine(LLAMA, 64, 4, check=True)
    one, two = (engine.submit(row, max_tokens=6) for row in prompts(9, 14))
    forward = packed.forward

    def meanwhile(*work):
        engine.cancel(one)
        assert engine.manager.num_committed(one.name) == 0 and one.finish is None, "still there"
        return forward(*work)

    monkeypatch.setattr(packed, "forward", meanwhile)
    engine.step()
    monkeypatch.undo()
    assert one.finish == "cancelled"
    engine.run()
    assert two.new == alone(LLAMA, prompts(9, 14)[1], 6).tokens and engine.manager.num_free_blocks == 64


# ---- its faults ------------------------------------------------------------------------------------------------------------


def test_a_hit_in_the_step_of_its_writer_is_right_even_where_blocks_are_found_too_early():
    """Each layer writes before it reads. `hit-before-written` takes a writer who does not get that far."""
    (row,) = prompts(33)
    with fault("hit-before-written"):
        engine = Engine(LLAMA, 64, 4, check=True, keep_logits=True)
        first, second = (engine.submit(row, max_tokens=3) for _ in range(2))
        with Watch(LLAMA, engine.pool) as seen:
            engine.run()
    assert (first.job.cached, second.job.cached) == (0, 32) and not seen.findings
    right(LLAMA, first), right(LLAMA, second)


def test_pieces_of_a_prompt_begin_where_the_last_one_ended():
    for name, findings in ((None, 0), ("chunk-off-by-one", 1)):
        with fault(name):
            engine = Engine(LLAMA, 64, 4, budget=7)
            engine.submit(prompts(24)[0], name="a", max_tokens=3)
            with Watch(LLAMA, engine.pool) as seen:
                engine.run()
        assert len(seen.findings) == findings and all("of its own as token 7 " in one for one in seen.findings)


def test_a_row_of_the_decode_step_has_its_requests_slots_and_no_more():
    for name, family in ((None, None), ("row-not-reset", "foreign state")):
        with fault(name):
            engine = Engine(LLAMA, 64, 4)
            with Watch(LLAMA, engine.pool) as seen:
                long = engine.submit(prompts(24)[0], max_tokens=4)
                engine.run()
                short = engine.submit(prompts(5)[0], max_tokens=4)
                engine.run()
        assert audit(seen.steps[short.name]) == family and bool(seen.findings) == bool(name)
        assert long.finish == short.finish == "length"


def test_a_preempted_request_finds_what_is_there_and_takes_nothing_else_for_its_own():
    for name in (None, "preempted-keeps-its-place"):
        with fault(name):
            engine = Engine(LLAMA, block_size=4, keep_logits=True, num_blocks=22)
            requests = [engine.submit(row, max_tokens=12, publish=False) for row in prompts(17, 9, 30, 12)]
            with Watch(LLAMA, engine.pool) as seen:
                engine.run()
        hurt = {request.name for request in requests if request.new != alone(LLAMA, request.prompt, 12).tokens}
        assert engine.metrics.preemptions and bool(seen.findings) == bool(name)
        assert hurt <= {request.name for request in requests if request.job.preemptions}


def test_one_generator_for_all_and_a_neighbours_draw_counts():
    (row, other) = prompts(13, 22)
    for name in (None, "sampler-shared"):
        texts = []
        for beside in (False, True):
            with fault(name):
                engine = Engine(LLAMA, 64, 4, keep_logits=True)
                if beside:
                    engine.submit(other, max_tokens=9, temperature=1.0, seed=5)
                request = engine.submit(row, max_tokens=9, temperature=1.0, seed=3)
                engine.run()
            texts.append(request.new)
        assert (texts[0] == texts[1]) == (name is None)


@pytest.mark.parametrize("name", [None, "cancelled-freed-too-early"])
def test_who_leaves_while_a_step_is_computed_keeps_its_blocks_until_then(monkeypatch, name):
    engine, forward, seen = Engine(LLAMA, 64, 4), packed.forward, []
    request, beside = (engine.submit([n, *range(8)], max_tokens=6) for n in (20, 30))

    def meanwhile(*work):
        engine.cancel(request)
        seen.append((request.finish, engine.manager.num_free_blocks))
        return forward(*work)

    monkeypatch.setattr(packed, "forward", meanwhile)
    with fault(name), pytest.raises(UnknownSequence) if name else contextlib.nullcontext():
        engine.step()
    assert seen == [("cancelled", 61) if name else (None, 58)] and request.finish == "cancelled"
    assert beside.finish == ("failed" if name else None), "one loop alone does not leak: it fails all that ran"


BAD = {
    "no tokens": ({"prompt": []}, "tokens is empty"),
    "a token of no vocabulary": ({"prompt": [97]}, "prompt holds token 97"),
    "too long for the pool": ({"prompt": [1] * 60, "max_tokens": 200}, "fit together"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens"),
    "n": ({"n": 0}, "n must be"),
    "temperature": ({"temperature": -1}, "temperature"),
    "top_p": ({"top_p": 0}, "top_p"),
    "stop": ({"stop": [""]}, "stop"),
    "timeout": ({"timeout": 0}, "timeout"),
    "a name twice": ({"name": "a"}, "'a' is taken"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_and_queues_nothing(case):
    engine = Engine(LLAMA, 32, 4)
    engine.submit([1, 2], name="a")
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        engine.submit(**({"prompt": [1, 2, 3]} | options))
    assert list(engine.requests) == ["a"] and len(engine.scheduler.waiting) == 1 == len(engine.metrics.requests)
    for setting in ({"policy": "best"}, {"budget": 0}, {"max_running": 0}, {"watermark": 2}):
        with pytest.raises(ValueError):
            Engine(LLAMA, 8, 4, **setting)


class Day(RuleBasedStateMachine):
    """Arrivals, cancels and steps in a tight pool, in any order; audited at every step, each answer held against the request alone."""

    @initialize(policy=st.sampled_from(POLICIES), swap=st.booleans(), budget=st.sampled_from([3, 16, 512]))
    def open(self, policy, swap, budget):
        self.engine = Engine(LLAMA, 14, 4, policy=policy, swap=swap, budget=budget, check=True, keep_logits=True, watermark=0.0)
        self.rows = prompts(3, 9, 14, 6)

    @rule(n=st.integers(0, 3), cut=st.integers(2, 14), new=st.integers(1, 6), salt=st.sampled_from([None, None, "x"]))
    def arrive(self, n, cut, new, salt):
        self.engine.submit(self.rows[n][:cut], max_tokens=new, salt=salt)

    @precondition(lambda self: not self.engine.idle)
    @rule(data=st.data())
    def leave(self, data):
        name = data.draw(st.sampled_from(sorted(self.engine.requests)))
        self.engine.cancel(self.engine.requests[name])

    @rule(count=st.integers(1, 4))
    def work(self, count):
        for _ in range(count):
            for request in self.engine.step():
                if request.finish == "length":
                    right(LLAMA, request)

    @invariant()
    def nothing_is_held_by_who_is_gone(self):
        if hasattr(self, "engine"):
            self.engine.manager.check()
            running = {job.name for job in self.engine.scheduler.running}
            assert set(self.engine.manager.sequences) == running <= set(self.engine.requests)

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.run()
            assert self.engine.manager.num_free_blocks == 14


TestDay = Day.TestCase
TestDay.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)


# ---- the scheduler alone, and what is counted -------------------------------------------------------------------------------


def drive(scheduler, jobs, tokens):
    """Steps without a model: who may choose a token gets a 1; a job ends after `tokens` of them."""
    steps = []
    while scheduler.running or scheduler.waiting:
        step = scheduler.step()
        scheduler.done(step)
        steps.append([(piece.job.name, piece.count) for piece in step.pieces])
        for piece in step.pieces:
            if piece.last:
                piece.job.tokens.append(1)
                if len(piece.job.tokens) - len(jobs[piece.job.name]) >= tokens:
                    scheduler.end(piece.job)
    return steps


def queue(scheduler, jobs, **options):
    for name, prompt in jobs.items():
        scheduler.add(Job(name, scheduler.manager.chain(prompt), owner=options.get("owners", {}).get(name)))


def test_the_three_policies_differ_in_what_a_step_holds():
    jobs = {"a": [1] * 6, "b": [2] * 6}
    for policy, first in {
        "mixed": [[("a", 4)], [("a", 2), ("b", 2)], [("a", 1), ("b", 3)], [("a", 1), ("b", 1)]],
        "prefill first": [[("a", 4)], [("a", 2), ("b", 2)], [("b", 4)], [("a", 1), ("b", 1)]],
    }.items():
        scheduler = Scheduler(BlockManager(32, 4, cache_prefixes=False), budget=4, policy=policy)
        queue(scheduler, jobs)
        assert drive(scheduler, jobs, 4)[:4] == first, policy
    static = Scheduler(BlockManager(32, 4, cache_prefixes=False), policy="decode first", max_running=1)
    queue(static, jobs)
    assert [{name for name, _ in step} for step in drive(static, jobs, 2)] == [{"a"}, {"a"}, {"b"}, {"b"}]


def test_a_fair_queue_serves_the_least_served_owner():
    jobs = {f"a{n}": [n + 1] * 8 for n in range(4)} | {"b0": [9] * 8}
    order = {}
    for fair in (False, True):
        scheduler = Scheduler(BlockManager(64, 4), max_running=1, fair=fair)
        queue(scheduler, jobs, owners={name: name[0] for name in jobs})
        order[fair] = list(dict.fromkeys(name for step in drive(scheduler, jobs, 2) for name, _ in step))
    assert order[False][-1] == "b0" and order[True][1] == "b0"


def test_who_came_last_is_preempted_first_and_is_first_in_line():
    m = BlockManager(5, 4, cache_prefixes=False)
    scheduler = Scheduler(m)
    jobs = {name: [n] * 8 for n, name in enumerate("ab", start=1)}
    queue(scheduler, jobs)
    first = scheduler.step()
    scheduler.done(first)
    for piece in first.pieces:
        piece.job.tokens.append(1)
    second = scheduler.step()
    assert [job.name for job in second.preempted] == ["b"] and [piece.job.name for piece in second.pieces] == ["a"]
    assert scheduler.waiting[0].name == "b" and scheduler.waiting[0].chain.tokens == (*jobs["b"], 1) and "b" not in m.sequences


def test_a_job_that_never_fits_is_refused_when_it_comes():
    scheduler = Scheduler(BlockManager(4, 4, watermark=0.25))
    with pytest.raises(ValueError, match="needs 5 blocks"):
        scheduler.add(Job("a", scheduler.manager.chain([1] * 16)))
    assert not scheduler.waiting


def test_metrics_add_up_and_the_formats_are_read_by_their_readers():
    with serving(LLAMA, 64, block_size=4) as engine:
        requests = [engine.submit(row, max_tokens=5) for row in prompts(9, 14, 4)]
        engine.run()
        found = engine.metrics.summary(slo=1e9)
        assert found["requests"] == 3 and found["tokens"] == 15 and found["goodput"] == found["tokens_per_second"] > 0
        assert engine.metrics.summary(slo=0.0)["goodput"] == 0.0
        assert sum(step.prefill for step in engine.metrics.steps) == 27
        assert sum(step.decode for step in engine.metrics.steps) == 12
        events = json.loads(engine.metrics.perfetto())["traceEvents"]
        assert {event["name"] for event in events if event["ph"] == "X"} == {"queued", "prefill", "decode", "step"}
        assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
        text = engine.metrics.prometheus(engine.manager)
        assert 'kvlab_requests_total{reason="length"} 3' in text and "kvlab_tokens_total 15" in text
        assert f"kvlab_ttft_seconds_count {len(requests)}" in text
        left = engine.submit([1, 2, 3], max_tokens=40)
    assert left.finish == "cancelled"
    assert percentile([1, 2, 3, 4], 95) == 4 and percentile([], 95) == 0.0 and percentile(range(1, 101), 95) == 95


def test_sampling_is_its_own_random_state():
    row = torch.tensor([0.0, 1.0, 2.0, 3.0])
    draws = lambda s: [s.choose(row, g) for g in [s.generator()] for _ in range(20)]  # noqa: E731
    random.seed(0), torch.manual_seed(0)
    one = draws(Sampling(1.0, seed=4))
    torch.manual_seed(99)
    assert draws(Sampling(1.0, seed=4)) == one != draws(Sampling(1.0, seed=5))
    assert set(draws(Sampling(1.0, top_p=0.5, seed=4))) == {3} and Sampling().choose(row, None) == 3


def test_a_model_whose_keys_depend_on_its_length_is_refused():
    from kvlab.experiments import lengths

    model = lengths.tiny("dynamic")
    model.model.generation_config = SimpleNamespace(eos_token_id=None)
    with pytest.raises(ValueError, match="rope_type"):
        Engine(model, 8, 4)
