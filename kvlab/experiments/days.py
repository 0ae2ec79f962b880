"""A server's day: requests that arrive, are served and leave, on the real engine or on the simulated clock, measured alike.

Times of the real engine are CPU seconds of its one thread, and an idle engine's clock jumps to the next arrival: what else the machine
does counts little, and nobody waits for a quiet day to pass. On a GPU they are seconds on the wall.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvlab import record
from kvlab.core.blocks import BlockManager
from kvlab.core.schedule import Scheduler
from kvlab.core.simulate import Cost, Simulation, Tick, Work
from kvlab.core.workload import Request
from kvlab.engine import Engine
from kvlab.engine.metrics import mean, percentile
from kvlab.runtime import Loaded


class WorkClock:
    """Seconds of work, and of the idle time that was skipped."""

    def __init__(self, device: str) -> None:
        self._read = time.perf_counter if str(device).startswith("cuda") else time.process_time
        self._skipped = 0.0

    def __call__(self) -> float:
        return self._read() + self._skipped

    def skip_to(self, then: float) -> None:
        """Nothing happens until then."""
        self._skipped += max(0.0, then - self())


@dataclass(frozen=True)
class Served:
    """What became of a request, in seconds since the day began. `stall`: the longest wait between two of its tokens."""

    asked: Request
    admitted: float
    first: float
    last: float
    stall: float
    preemptions: int

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.first - self.asked.at

    @property
    def tpot(self) -> float | None:
        """Time per output token behind the first; None of an answer of one token."""
        return (self.last - self.first) / (self.asked.output - 1) if self.asked.output > 1 else None


@dataclass(frozen=True)
class Moment:
    """One step. `decode`: rows that got their next token; `names`: whose pieces it held, `prompts`: which of those fed prompt
    tokens; `plan`: seconds of `start` to `end` that the scheduler took."""

    start: float
    end: float
    work: Work
    decode: int
    running: int
    waiting: int
    held: int
    preempted: int
    names: tuple = ()
    prompts: tuple = ()
    plan: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass
class Day:
    """All of it, and the places there were."""

    places: int
    served: list[Served] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)


def prompts_of(asked: Sequence[Request], vocab: int, seed: int) -> list[list[int]]:
    """Made-up token ids, no two requests alike."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (one.prompt,), generator=draw).tolist() for one in asked]


def real(
    loaded: Loaded,
    asked: Sequence[Request],
    blocks: int,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    reuse: bool = False,
    **options,
) -> Day:
    """Serve the requests on an engine, each as it arrives. `reuse`: prompts are looked up and published."""
    clock = WorkClock(loaded.device)
    engine = Engine(loaded, blocks, clock=clock, **options)
    prompts = prompts_of(asked, loaded.spec.vocab, 7) if prompts is None else prompts
    began, arrived, requests = clock(), 0, []
    while arrived < len(asked) or not engine.idle:
        while arrived < len(asked) and asked[arrived].at <= clock() - began:
            one = asked[arrived]
            request = engine.submit(
                prompts[arrived],
                max_tokens=one.output,
                owner=one.owner,
                ignore_eos=True,
                lookup=reuse,
                publish=reuse,
            )
            requests.append(request)
            arrived += 1
        if engine.idle:
            clock.skip_to(began + asked[arrived].at)
        else:
            engine.step()
    day = Day(engine.scheduler.max_running)
    for one, r in zip(asked, requests, strict=True):
        day.served.append(
            Served(one, r.admitted - began, r.token_times[0] - began, r.token_times[-1] - began, max(r.gaps, default=0.0), r.job.preemptions)
        )  # fmt: skip
    for step in engine.metrics.steps:
        if step.names:
            day.moments.append(
                Moment(step.start - began, step.end - began, step.work, step.decode, step.running, step.waiting, step.held, step.preempted, step.names, step.prompts, step.plan)
            )  # fmt: skip
    return day


def simulated(asked: Sequence[Request], cost: Cost, blocks: int, block_size: int = 16, *, watermark: float = 0.01, keep: bool = True, **options) -> Day:  # fmt: skip
    """The same on the simulated clock. `keep` False: no moments, for many requests."""
    manager = BlockManager(blocks, block_size, watermark=watermark)
    scheduler = Scheduler(manager, **options)
    day = Day(scheduler.max_running)

    def watch(tick: Tick) -> None:
        pieces = tick.step.pieces
        decode = sum(piece.decode for piece in pieces)
        day.moments.append(
            Moment(
                tick.start,
                tick.end,
                tick.work,
                decode,
                tick.running,
                tick.waiting,
                tick.held,
                len(tick.step.preempted),
                tuple(piece.job.name for piece in pieces),
                tuple(piece.job.name for piece in pieces if not piece.decode),
            )
        )

    lives = Simulation(scheduler, asked, cost).run(watch if keep else None)
    day.served = [Served(x.request, x.admitted, x.first, x.last, x.gap, x.job.preemptions) for x in lives]
    return day


def measures(day: Day) -> dict[str, float]:
    """What one asks of a day. Seconds, tokens a second, shares.

    `places`: rows that got a token, of all the places there were, over the steps that decode. `again`: tokens that went through the
    model more than once, of all that did.
    """
    end = max(one.last for one in day.served)
    tokens = sum(one.asked.output for one in day.served)
    needed = sum(one.asked.prompt + one.asked.output - 1 for one in day.served)
    decoding = [m for m in day.moments if m.decode]
    out = {
        "seconds": end,
        "tokens_per_second": tokens / end,
        "ttft_mean": mean(one.ttft for one in day.served),
        "ttft_p95": percentile((one.ttft for one in day.served), 95),
        "tpot_mean": mean(one.tpot for one in day.served if one.tpot is not None),
        "stall_p95": percentile((one.stall for one in day.served), 95),
        "stall_max": max(one.stall for one in day.served),
        "latency_mean": mean(one.last - one.asked.at for one in day.served),
        "preemptions": sum(one.preemptions for one in day.served),
    }
    if day.moments:
        computed = sum(m.work.tokens for m in day.moments)
        out |= {
            "steps": len(day.moments),
            "computed": computed,
            "again": max(0.0, 1 - needed / computed),
            "places": mean(m.decode for m in decoding) / day.places,
            "running": statistics.fmean(m.running for m in day.moments),
        }
    return out


def brief(day: Day) -> dict:
    """Its measures."""
    return {name: record.short(value) for name, value in measures(day).items()}


def whole(day: Day) -> dict:
    """Its measures, and what a figure needs: each request's times, each step."""
    return {
        **brief(day),
        "places_there": day.places,
        "requests": [
            [s.asked.prompt, s.asked.output, *(record.short(t, 5) for t in (s.asked.at, s.admitted, s.first, s.last)), s.preemptions]
            for s in day.served
        ],
        "moments": [
            [record.short(m.start, 5), record.short(m.end, 5), m.decode, m.work.tokens - m.decode, m.running, m.waiting, m.held, m.preempted, list(m.names), list(m.prompts)]
            for m in day.moments
        ],
    }  # fmt: skip
