"""Our engine beside Transformers' own continuous batching: the same requests, the same model, one thread, in turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import ContinuousBatchingConfig, GenerationConfig

from kvlab import record
from kvlab.core.workload import Request, requests
from kvlab.engine import Engine
from kvlab.engine.metrics import percentile
from kvlab.experiments import days
from kvlab.runtime import Loaded
from kvlab.runtime.decode import attention_kernel

BLOCK = 32  # both; Transformers' kernels of 5.x want pages of at least 32
SLOTS = 8192
BUDGET = 256


@dataclass(frozen=True)
class Outcome:
    """Seconds from the first arrival to the last token, each request's time to first token, and its tokens."""

    seconds: float
    ttft: list[float]
    tokens: list[list[int]]


def ours(loaded: Loaded, asked: Sequence[Request], prompts: Sequence[Sequence[int]]) -> Outcome:
    """The engine of this course."""
    engine = Engine(loaded, SLOTS // BLOCK, BLOCK, budget=BUDGET)
    all_of = [engine.submit(p, max_tokens=one.output, ignore_eos=True) for one, p in zip(asked, prompts, strict=True)]
    engine.run()
    began = min(r.arrival for r in all_of)
    return Outcome(max(r.token_times[-1] for r in all_of) - began, [r.ttft for r in all_of], [r.new for r in all_of])


def transformers(loaded: Loaded, asked: Sequence[Request], prompts: Sequence[Sequence[int]]) -> Outcome:
    """`init_continuous_batching` of Transformers. Its thread is up before the first request is sent; that is not counted."""
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    pool = ContinuousBatchingConfig(page_size=BLOCK, num_blocks=SLOTS // BLOCK, max_batch_tokens=BUDGET)
    with (
        attention_kernel(loaded, "sdpa"),
        loaded.model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=pool, warmup=False
        ) as manager,
    ):  # fmt: skip
        while not manager.is_running():
            time.sleep(0.01)
        names = [
            manager.add_request(list(p), max_new_tokens=one.output, record_timestamps=True)
            for one, p in zip(asked, prompts, strict=True)
        ]
        done: dict = {}
        while len(done) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error:
                    raise RuntimeError(f"Transformers' continuous batching failed: {result.error}")
                done[result.request_id] = result
            elif not manager.is_running():
                raise RuntimeError("Transformers' continuous batching has stopped by itself")
    found = [done[name] for name in names]
    began = min(r.created_time for r in found)
    return Outcome(
        max(r.timestamps[-1] for r in found) - began,
        [r.timestamps[0] - r.created_time for r in found],
        [list(r.generated_tokens) for r in found],
    )


def compared(loaded: Loaded, count: int = 16, turns: int = 3) -> dict:
    """Both on `count` requests with Alpaca's lengths, in turns after one that does not count; the best turn of each.

    `throughput`: ours over theirs, so 1 and more is at least as fast. `ttft_p95`: ours over theirs, so 1 and less is no worse.
    """
    asked = requests("Alpaca", count, seed=11)
    prompts = days.prompts_of(asked, loaded.spec.vocab, 11)
    tries: dict = {ours: [], transformers: []}
    for _ in range(turns + 1):
        for serve, kept in tries.items():
            kept.append(serve(loaded, asked, prompts))
    best = {serve: min(kept[1:], key=lambda one: one.seconds) for serve, kept in tries.items()}
    p95 = {serve: min(percentile(one.ttft, 95) for one in kept[1:]) for serve, kept in tries.items()}
    same = sum(a == b for a, b in zip(best[ours].tokens, best[transformers].tokens, strict=True))
    return {
        "requests": count,
        "same_answers": same,
        "throughput": record.short(best[transformers].seconds / best[ours].seconds),
        "ttft_p95": record.short(p95[ours] / p95[transformers]),
        "turns": [record.short(t.seconds / o.seconds) for o, t in zip(tries[ours][1:], tries[transformers][1:], strict=True)],
    }


def overhead(loaded: Loaded, rows: int = 64, new: int = 12) -> dict:
    """What the scheduler takes of a decode step of `rows` requests: the middle of its shares."""
    day = days.real(loaded, [Request(16, new)] * rows, 4 * rows, max_running=rows, budget=16 * rows)
    shares = sorted(m.plan / m.seconds for m in day.moments if m.decode == rows)
    return {"rows": rows, "share": record.short(shares[len(shares) // 2])}
