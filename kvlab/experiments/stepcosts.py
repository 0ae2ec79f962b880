"""What a step costs: the simulated clock's five coefficients, fitted to recorded steps and held against steps it has not seen."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from kvlab.core.ledger import token_bytes
from kvlab.core.simulate import Cost, Work, roofline
from kvlab.experiments import attention_cost
from kvlab.experiments.days import Moment
from kvlab.runtime import Loaded


def fit(moments: Sequence[Moment]) -> Cost:
    """The cost with the least relative error over these steps, no term below 0.

    Least squares for each value of `flat` in turn, the numbers of tokens that occur. Raises ValueError for fewer than 8 steps.
    """
    if len(moments) < 8:
        raise ValueError(f"{len(moments)} steps are too few to fit five numbers")
    seconds = np.array([m.seconds for m in moments])
    works = [m.work for m in moments]
    best, least = None, np.inf
    for flat in sorted({0, *(w.tokens for w in works if w.tokens <= 256)}):
        terms = np.array([_terms(w, flat) for w in works])
        found = _not_negative(terms / seconds[:, None], np.ones(len(works)))
        error = float(np.sum((terms @ found / seconds - 1) ** 2))
        if error < least:
            best, least = Cost(found[0], found[1], float(flat), found[2], found[3]), error
    return best


def _terms(work: Work, flat: float) -> tuple[float, ...]:
    return 1.0, max(work.tokens, flat), work.read, work.pairs


def _not_negative(a: np.ndarray, b: np.ndarray) -> list[float]:
    """Least squares without negative coefficients: what comes out negative is left out, the most negative first."""
    keep = list(range(a.shape[1]))
    while True:
        found = np.linalg.lstsq(a[:, keep], b, rcond=None)[0]
        if (found >= 0).all():
            out = [0.0] * a.shape[1]
            for k, value in zip(keep, found, strict=True):
                out[k] = float(value)
            return out
        keep.pop(int(found.argmin()))


def errors(cost: Cost, moments: Sequence[Moment]) -> dict[str, float]:
    """How far the cost is from what steps took: of each step, the middle and the 95th percentile; and of their sum."""
    said = np.array([cost.seconds(m.work) for m in moments])
    took = np.array([m.seconds for m in moments])
    off = np.abs(said / took - 1)
    return {
        "steps": len(moments),
        "median": float(np.median(off)),
        "p95": float(np.percentile(off, 95)),
        "sum": float(said.sum() / took.sum() - 1),
    }


def own_roofline(loaded: Loaded, tries: int = 3) -> tuple[Cost, dict[str, float]]:
    """This device's roofline for this model, from ceilings measured now (chapter 1), and the ceilings."""
    ceilings = attention_cost.ceilings(loaded, tries)
    spec = loaded.spec
    weights = list(loaded.model.parameters())
    cost = roofline(
        parameters=sum(p.numel() for p in weights),
        weight_bytes=sum(p.nbytes for p in weights),
        kv_token_bytes=token_bytes(spec),
        pair_flops=4 * spec.layers * spec.heads * spec.head_dim,
        flops=ceilings["flops"],
        bandwidth=ceilings["bytes"],
    )
    return cost, ceilings


@torch.inference_mode()
def linear_seconds(loaded: Loaded, rows: Sequence[int], tries: int = 5) -> list[list[float]]:
    """[rows, seconds] of all the model's weights applied to that many rows, nothing else: the best of `tries`."""
    weights = [
        p for name, p in loaded.model.named_parameters() if p.dim() == 2 and p is not loaded.model.get_input_embeddings().weight
    ]
    weights.append(loaded.model.get_output_embeddings().weight)
    inputs = {w.shape[1]: torch.randn(max(rows), w.shape[1], dtype=w.dtype, device=w.device) for w in weights}
    out = []
    for count in rows:
        best = float("inf")
        for _ in range(tries):
            began = time.perf_counter()
            for w in weights:
                torch.nn.functional.linear(inputs[w.shape[1]][:count], w)
            if w.device.type == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
        out.append([count, best])
    return out
