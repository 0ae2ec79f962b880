"""Lab 7's scheduler, made of the reader's functions, and requests on the engine held against the same requests alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvlab import record
from kvlab.compare import Difference, compare, noise_bound
from kvlab.core.blocks import OutOfBlocks
from kvlab.core.schedule import PREEMPTED, RUNNING, Job, Piece, Scheduler, Step
from kvlab.engine import Engine, Request
from kvlab.experiments import prompts as make_prompts
from kvlab.runtime import Loaded
from kvlab.runtime.decode import Trace, greedy

SEED = 7
NEW = 24


class WrittenScheduler(Scheduler):
    """Policy "mixed" by four functions: who may come in, what a step feeds, who has to go, and where he goes on.

    may_admit(prompt_tokens, free_blocks, num_blocks, block_size, watermark) -> bool
    share_budget(decoding, prompts, budget) -> tokens of each prompt
    make_room(running, free_blocks, needed) -> names, in the order in which they go; `running` is [(name, blocks), …] by admission
    resume(prompt, answer, cached) -> (tokens to feed, position of the first)
    """

    def __init__(self, manager, *, may_admit, share_budget, make_room, resume, **options) -> None:
        super().__init__(manager, **options)
        self.may_admit, self.share_budget, self.make_room, self.resume = may_admit, share_budget, make_room, resume
        self.prompts: dict = {}  # name -> tokens of its prompt

    def step(self) -> Step:
        """Rows that decode, then prompts, by what the functions say."""
        step = Step()
        self._decode(step)
        begun = [job for job in self.running if job.left > 1 or not job.written]
        spare = self.budget - len(step.pieces) - sum(job.left for job in begun)
        while self.waiting and spare > 0 and len(self.running) < self.max_running and not step.preempted:
            job, m = self.waiting[0], self.manager
            if not self.may_admit(
                len(job.tokens), m.num_free_blocks, m.num_blocks, m.block_size, m.watermark_blocks / m.num_blocks
            ):
                break
            self._start(step, self.waiting.popleft())
            begun.append(job)
            spare -= job.left
        counts = self.share_budget(len(step.pieces), [job.left for job in begun], self.budget)
        step.pieces += [Piece(job, job.written, count) for job, count in zip(begun, counts, strict=True) if count]
        return step

    def _start(self, step: Step, job: Job) -> None:
        again = job.state == PREEMPTED
        cached = self.manager.allocate(job.name, job.chain, owner=job.owner, preempted=again, **job.how).num_cached_tokens
        asked = self.prompts.setdefault(job.name, len(job.tokens))
        feed, job.written = self.resume(job.tokens[:asked], job.tokens[asked:], cached)
        if feed != job.tokens[job.written :]:
            raise ValueError(f"resume: {job.name!r} goes on at position {job.written}, but what it feeds does not stand there")
        job.state, job.cached = RUNNING, cached if job.cached is None else job.cached
        self.running.append(job)
        step.admitted.append(job)

    def _grow(self, step: Step, job: Job) -> bool:
        while job.state == RUNNING and self.manager.num_tokens(job.name) < len(job.tokens):
            try:
                step.copies += self.manager.append_token(job.name, job.tokens[-1])
            except OutOfBlocks:
                held = [(one.name, len(self.manager.block_table(one.name))) for one in self.running]
                for name in self.make_room(held, self.manager.num_free_blocks, 1):
                    self._preempt(step, next(one for one in self.running if one.name == name))
        return job.state == RUNNING


# ---- requests on the engine, and alone ----------------------------------------------------------------------------------------


def prompts(loaded: Loaded, count: int = 8) -> list[list[int]]:
    """Token ids of `count` prompts of different lengths, each with a secret in it."""
    return [list(prompt.ids) for prompt in make_prompts.make(loaded.tokenizer, count, SEED)]


def alone(loaded: Loaded, rows: Sequence[Sequence[int]], new: int = NEW) -> tuple[list[Trace], float]:
    """Each request with the model to itself, and ε: from the same in chunks and as one padded batch."""
    reference = [greedy(loaded, [row], new)[0] for row in rows]
    chunked = [greedy(loaded, [row], new, chunk=3)[0] for row in rows]
    batch = greedy(loaded, rows, new)
    return reference, noise_bound(compare(a, b) for other in (chunked, batch) for a, b in zip(reference, other, strict=True))


def together(
    loaded: Loaded,
    rows: Sequence[Sequence[int]],
    blocks: int,
    *,
    new: int = NEW,
    scheduler: Callable[..., Scheduler] | None = None,
    **options,
) -> tuple[Engine, list[Request]]:
    """All of them on one engine that audits its blocks at each step. `scheduler(manager)` takes the place of the engine's own."""
    engine = Engine(loaded, blocks, check=True, keep_logits=True, **options)
    if scheduler is not None:
        engine.scheduler = scheduler(engine.manager)
    requests = [engine.submit(row, max_tokens=new, ignore_eos=True) for row in rows]
    engine.run()
    return engine, requests


def difference(reference: Trace, request: Request) -> Difference:
    """A request on the engine against the same alone."""
    return compare(reference, Trace(list(request.prompt), list(request.new), logits=torch.stack(request.logits)))


ARMS = {
    "static": {"policy": "decode first"},
    "apart": {"policy": "prefill first"},
    "mixed": {},
    "mixed, pieces of 7": {"budget": 7},
    "preempted, computed again": {"tight": True},
    "preempted, swapped out": {"tight": True, "swap": True},
}


def equal(loaded: Loaded, count: int = 8, new: int = NEW) -> dict:
    """|Δlogit| of each request against itself alone, under every policy, preempted and resumed included; ε beside it."""
    rows = prompts(loaded, count)
    reference, epsilon = alone(loaded, rows, new)
    grown = [-(-(len(row) + new) // 16) for row in rows]
    out: dict = {"requests": count, "new": new, "epsilon": record.short(epsilon), "arms": {}}
    for name, options in ARMS.items():
        tight = options.get("tight", False)
        blocks = max(max(grown), sum(grown) * 2 // 3) if tight else sum(grown) + 1
        rest = {key: value for key, value in options.items() if key != "tight"}
        engine, requests = together(loaded, rows, blocks, new=new, watermark=0.0, **rest)
        found = [difference(one, request) for one, request in zip(reference, requests, strict=True)]
        out["arms"][name] = {
            "delta": record.short(max(d.delta for d in found)),
            "flips": sum(d.first is not None for d in found),
            "preemptions": engine.metrics.preemptions,
        }
    return out
