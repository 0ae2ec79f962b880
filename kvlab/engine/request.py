"""A request: what was asked, what has been answered so far, and when."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvlab.core.schedule import Job


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. `temperature` 0: the largest logit. `seed`: of this request alone, whoever runs beside it."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be 0 or more, not {self.temperature!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p!r}")

    def generator(self) -> torch.Generator:
        """A random state of the request's own."""
        return torch.Generator().manual_seed(self.seed)

    def choose(self, logits: torch.Tensor, generator: torch.Generator) -> int:
        """A token from one row of logits, `[vocab]`."""
        if self.temperature == 0:
            return int(logits.argmax())
        p = (logits.float().cpu() / self.temperature).softmax(-1)
        if self.top_p < 1:
            ordered, ids = p.sort(descending=True)
            keep = ordered.cumsum(0) - ordered < self.top_p  # the first one always
            p = torch.zeros_like(p).scatter(0, ids[keep], ordered[keep])
        return int(torch.multinomial(p, 1, generator=generator))


@dataclass(eq=False)
class Request:
    """One request, from its arrival to its end. Times are seconds of the engine's clock.

    new        the tokens it has generated
    text       them as text, cut at a stop string
    finish     why it ended: "stop", "length", "cancelled", "timeout" or "failed"; None while it has not
    samples    with n > 1: the other answers to the same prompt, each a request of its own
    logits     `[steps, vocab]`, what each token was chosen from, where the engine keeps them
    """

    name: Hashable
    job: Job
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    eos: frozenset[int] = frozenset()
    deadline: float | None = None
    arrival: float = 0.0
    admitted: float | None = None
    token_times: list[float] = field(default_factory=list)
    finished: float | None = None
    finish: str | None = None
    text: str = ""
    samples: list[Request] = field(default_factory=list)
    pending: list[Request] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    error: Exception | None = None
    generator: Any = None

    @property
    def prompt(self) -> list[int]:
        """Its token ids."""
        return self.job.tokens[: len(self.job.tokens) - len(self.token_times)]

    @property
    def new(self) -> list[int]:
        """What it has generated."""
        return self.job.tokens[len(self.job.tokens) - len(self.token_times) :]

    @property
    def ready(self) -> str:
        """What of its text may be shown: all of it once it has ended, before that nothing that may yet change."""
        return self.text if self.finish else self.text[: safe(self.text, self.stop)]

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:])]


def cut_at(text: str, stops: Sequence[str]) -> str | None:
    """`text` up to the first stop string in it; None if there is none."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else None


def safe(text: str, stops: Sequence[str]) -> int:
    """How much of `text` may be shown: not half a character, and nothing that may yet become a stop string."""
    shown = len(text.rstrip("\ufffd"))
    for stop in stops:
        for size in range(min(len(stop) - 1, shown), 0, -1):
            if text[:shown].endswith(stop[:size]):
                shown -= size
                break
    return shown
