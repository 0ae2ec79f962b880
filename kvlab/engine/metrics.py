"""What the engine did, step by step and request by request: as numbers, as a trace for Perfetto, as text for Prometheus."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvlab.core.simulate import Work
from kvlab.engine.request import Request


@dataclass(frozen=True)
class StepRecord:
    """One step. `decode`, `prefill`: tokens of each kind; `plan`: seconds the scheduler took; `held`: blocks in use afterwards;
    `names`: whose pieces it held, `prompts`: which of those fed prompt tokens; `work`: what it cost, in the terms of a simulated clock."""

    start: float
    end: float
    plan: float
    decode: int
    prefill: int
    running: int
    waiting: int
    preempted: int
    held: int
    names: tuple = ()
    prompts: tuple = ()
    work: Work | None = None


@dataclass
class Metrics:
    """The engine's counters and its newest steps."""

    steps: list[StepRecord] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    preemptions: int = 0

    def summary(self, slo: float | None = None) -> dict[str, float]:
        """Means and 95th percentiles over what has finished: queue time, TTFT, inter-token latency, tokens/s; goodput under an SLO.

        slo: seconds to the first token that are still good; goodput is tokens per second of requests that kept it.
        """
        done = [r for r in self.requests if r.finish in ("stop", "length")]
        if not done:
            return {}
        span = max(r.finished for r in done) - min(r.arrival for r in done) or 1e-9
        out = {
            "requests": len(done),
            "tokens": sum(len(r.new) for r in done),
            "tokens_per_second": sum(len(r.new) for r in done) / span,
            "preemptions": self.preemptions,
        }
        for name, values in (
            ("queue", [r.admitted - r.arrival for r in done]),
            ("ttft", [r.ttft for r in done]),
            ("gap", [gap for r in done for gap in r.gaps]),
        ):
            out[f"{name}_mean"], out[f"{name}_p95"] = mean(values), percentile(values, 95)
        if slo is not None:
            out["goodput"] = sum(len(r.new) for r in done if r.ttft <= slo) / span
        return out

    def perfetto(self) -> str:
        """The trace as JSON that Perfetto and chrome://tracing open: a row a request, a row of steps, counters of blocks and queue."""
        events = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "kvlab engine"}}]
        micro = lambda seconds: round(seconds * 1e6, 3)  # noqa: E731
        for row, request in enumerate(self.requests, start=1):
            events.append({"ph": "M", "pid": 1, "tid": row, "name": "thread_name", "args": {"name": f"request {request.name}"}})
            phases = [("queued", request.arrival, request.admitted), ("prefill", request.admitted, _first(request))]
            phases.append(("decode", _first(request), request.finished))
            for name, begin, end in phases:
                if begin is not None and end is not None:
                    events.append(
                        {"ph": "X", "pid": 1, "tid": row, "name": name, "ts": micro(begin), "dur": micro(end - begin)}
                    )
        for step in self.steps:
            args = {"decode": step.decode, "prefill": step.prefill, "requests": [str(name) for name in step.names]}
            events.append(
                {"ph": "X", "pid": 1, "tid": 0, "name": "step", "ts": micro(step.start), "dur": micro(step.end - step.start), "args": args}
            )  # fmt: skip
            counters = {"blocks held": step.held, "waiting": step.waiting, "running": step.running}
            events += [
                {"ph": "C", "pid": 1, "name": name, "ts": micro(step.end), "args": {name: value}}
                for name, value in counters.items()
            ]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

    def prometheus(self, manager) -> str:
        """Counters and gauges in Prometheus' text format; `manager` is the block manager."""
        stats = manager.prefix_stats
        ended: dict[str, int] = {}
        for request in self.requests:
            if request.finish:
                ended[request.finish] = ended.get(request.finish, 0) + 1
        last = self.steps[-1] if self.steps else None
        lines = []

        def metric(name: str, kind: str, text: str, *samples: tuple[str, float]) -> None:
            lines.extend((f"# HELP kvlab_{name} {text}", f"# TYPE kvlab_{name} {kind}"))
            lines.extend(f"kvlab_{name}{labels} {value}" for labels, value in samples)

        metric(
            "requests_total", "counter", "requests that ended, by reason", *((f'{{reason="{k}"}}', v) for k, v in ended.items())
        )
        metric("tokens_total", "counter", "tokens generated", ("", sum(len(r.new) for r in self.requests)))
        metric("steps_total", "counter", "forwards", ("", len(self.steps)))
        metric("preemptions_total", "counter", "requests that gave their blocks back", ("", self.preemptions))
        metric("prefix_queries_total", "counter", "prompt tokens looked up", ("", stats.queries))
        metric("prefix_hits_total", "counter", "prompt tokens found", ("", stats.hits))
        metric("running", "gauge", "requests that run", ("", last.running if last else 0))
        metric("waiting", "gauge", "requests that wait", ("", last.waiting if last else 0))
        metric("blocks_free", "gauge", "blocks that may be taken", ("", manager.num_free_blocks))
        metric("blocks_total", "gauge", "blocks of the pool", ("", manager.num_blocks))
        for name, values in (
            ("ttft_seconds", [r.ttft for r in self.requests if r.ttft is not None]),
            ("inter_token_seconds", [gap for r in self.requests for gap in r.gaps]),
        ):
            _histogram(lines, name, values)
        return "\n".join(lines) + "\n"


BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def _histogram(lines: list[str], name: str, values: Sequence[float]) -> None:
    lines.extend((f"# HELP kvlab_{name} seconds", f"# TYPE kvlab_{name} histogram"))
    for edge in BUCKETS:
        lines.append(f'kvlab_{name}_bucket{{le="{edge}"}} {sum(value <= edge for value in values)}')
    lines.append(f'kvlab_{name}_bucket{{le="+Inf"}} {len(values)}')
    lines.extend((f"kvlab_{name}_sum {sum(values)}", f"kvlab_{name}_count {len(values)}"))


def _first(request: Request) -> float | None:
    return request.token_times[0] if request.token_times else None


def mean(values: Iterable[float]) -> float:
    """0 of nothing."""
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` percent of the values do not exceed; 0 of nothing."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * share // 100) - 1).__int__()] if ordered else 0.0
