"""Requests that nobody sent: when they arrive, how long their prompts are, and how long their answers will be.

Lengths are drawn from log-normal distributions with the means that PagedAttention gives for ShareGPT and Alpaca (Kwon et al. 2023,
arXiv 2309.06180, figure 11). The paper does not give the spread, so it is an argument: the standard deviation of the logarithm.
Draws are cut at 1024 prompt tokens and at the model's maximum length. Arrivals are a Poisson process.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

MAX_LENGTH = 2048
WORKLOADS = {"ShareGPT": (161.31, 337.99), "Alpaca": (19.31, 58.45)}  # mean prompt and output tokens


@dataclass(frozen=True)
class Request:
    """Tokens of a prompt and of the answer it will get; seconds until it arrives; whose it is."""

    prompt: int
    output: int
    at: float = 0.0
    owner: Hashable = None


def requests(workload: str, count: int, spread: float = 1.0, seed: int = 0) -> list[Request]:
    """`count` requests of a workload of WORKLOADS, all there at once. Raises ValueError for an unknown workload or a spread that
    is not positive."""
    if workload not in WORKLOADS:
        raise ValueError(f"workload {workload!r} is unknown; there are {', '.join(WORKLOADS)}")
    if not spread > 0:
        raise ValueError(f"spread must be positive, not {spread}")
    draw = random.Random(seed)

    def length(mean: float, most: int) -> int:
        return min(max(round(draw.lognormvariate(math.log(mean) - spread**2 / 2, spread)), 1), most)

    mean_prompt, mean_output = WORKLOADS[workload]
    prompts = [length(mean_prompt, 1024) for _ in range(count)]
    return [Request(prompt, length(mean_output, MAX_LENGTH - prompt)) for prompt in prompts]


def poisson(asked: Sequence[Request], rate: float, seed: int = 0) -> list[Request]:
    """The same requests, one after the other, `rate` of them a second on average. Raises ValueError for a rate that is not
    positive."""
    if not rate > 0:
        raise ValueError(f"rate must be above 0 requests a second, not {rate}")
    draw, at, out = random.Random(f"arrivals {seed}"), 0.0, []
    for request in asked:
        at += draw.expovariate(rate)
        out.append(replace(request, at=at))
    return out
