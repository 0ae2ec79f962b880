"""Requests served from a block pool: admitted one after another, decoded together, and watched like any other run.

`kvlab.runtime.decode` runs rows; this runs *requests*, which may find their beginning in the pool. Labs 5 and 6 stand on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvlab.runtime import Loaded
from kvlab.runtime.decode import Step, Trace
from kvlab.runtime.paged import PagedPool

Admit = Callable[[PagedPool, Hashable, Sequence[int]], None]


@dataclass
class Served:
    """One request. `computed`: prompt tokens that went through the model; `ttft`, `seconds`: to its first and last token."""

    trace: Trace
    computed: int
    ttft: float
    seconds: float


def allocate(pool: PagedPool, name: Hashable, ids: Sequence[int]) -> None:
    """Admit a request as a server does: share what the pool holds of it, reserve blocks for the rest."""
    pool.manager.allocate(name, ids)


@torch.inference_mode()
def serve(
    loaded: Loaded,
    pool: PagedPool,
    requests: Mapping[Hashable, Sequence[int]],
    new_tokens: int,
    *,
    admit: Admit = allocate,
) -> dict[Hashable, Served]:
    """Prefill the requests one by one, then decode them greedily in one batch. They stay in the pool.

    Times are the request's own: its admission and prefill, and the decode steps it shares with the others.
    """
    done: dict[Hashable, Served] = {}
    for name, ids in requests.items():
        began = _now(loaded)
        admit(pool, name, ids)
        computed = len(ids) - pool.manager.num_committed(name)
        trace = Trace(list(ids))
        rows = _forward(loaded, pool, {name: trace})
        took = _now(loaded) - began
        trace.logits = rows
        done[name] = Served(trace, computed, took, took)
    began = _now(loaded)
    traces = {name: served.trace for name, served in done.items()}
    logits = {name: [trace.logits] for name, trace in traces.items()}
    for _ in range(new_tokens - 1):
        for name, trace in traces.items():
            pool.append(name, [trace.tokens[-1]])
        rows = _forward(loaded, pool, traces)
        for row, name in enumerate(traces):
            logits[name].append(rows[row : row + 1])
    took = _now(loaded) - began
    for name, served in done.items():
        served.trace.logits = torch.cat(logits[name])
        served.seconds += took
    return done


def _forward(loaded: Loaded, pool: PagedPool, traces: Mapping[Hashable, Trace]) -> torch.Tensor:
    """One forward over what the named requests have not computed yet; logs a step and a token for each. `[rows, vocab]`."""
    fed = pool.inputs(list(traces))
    logits = loaded.model(**fed, logits_to_keep=1).logits[:, -1].float().cpu()
    for row, (name, trace) in enumerate(traces.items()):
        own, position = len(pool.manager.tokens(name)), int(fed["position_ids"][row, -1])
        trace.steps.append(Step(own, position, int(fed["attention_mask"][row].sum()), 0, 0))
        trace.tokens.append(int(logits[row].argmax()))
    return logits


def _now(loaded: Loaded) -> float:
    """Seconds; a GPU is waited for."""
    if loaded.device.startswith("cuda"):
        torch.cuda.synchronize(loaded.device)
    return time.perf_counter()
