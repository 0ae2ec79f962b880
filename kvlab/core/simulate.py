"""The scheduler on a simulated clock: what a step would have cost, added up. No model, no torch, and it runs in a page.

`simulate` drives the very `Scheduler` and `BlockManager` that the engine drives; only the forward is replaced by a `Cost`. Its terms are
those of a roofline (Williams et al. 2009): a step reads all weights once, however few its tokens (`flat` tokens' worth of time), and from
there on every token adds its arithmetic; each decode row reads its K/V; each prompt piece computes its pairs. A cost is fitted
to the recorded steps of an engine (`kvlab.experiments.stepcosts`) or computed from a device's ceilings (`roofline`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlab.core.cards import CEILINGS, MODELS
from kvlab.core.ledger import stored_bytes, token_bytes
from kvlab.core.schedule import Job, Piece, Scheduler, Step
from kvlab.core.workload import Request


@dataclass(frozen=True)
class Work:
    """What a step has to do. `tokens` go through the linear layers; decode rows `read` tokens of K/V, themselves included; prompt
    pieces compute `pairs` of a query and a key."""

    tokens: int
    read: int
    pairs: int


def work_of(pieces: Sequence[Piece]) -> Work:
    """The work of a step's pieces."""
    tokens = read = pairs = 0
    for piece in pieces:
        tokens += piece.count
        if piece.count == 1:
            read += piece.start + 1
        else:
            pairs += piece.count * (piece.start + piece.start + piece.count + 1) // 2
    return Work(tokens, read, pairs)


@dataclass(frozen=True)
class Cost:
    """Seconds of a step: `fixed + token · max(tokens, flat) + read · K/V tokens read + pair · pairs`."""

    fixed: float
    token: float
    flat: float
    read: float
    pair: float

    def seconds(self, work: Work) -> float:
        """What a step with this work takes."""
        return self.fixed + self.token * max(work.tokens, self.flat) + self.read * work.read + self.pair * work.pairs


def roofline(
    *, parameters: int, weight_bytes: int, kv_token_bytes: int, pair_flops: int, flops: float, bandwidth: float
) -> Cost:
    """The cost that a device's two ceilings allow at best: `flops` a second and `bandwidth` in bytes a second.

    `pair_flops`: of one (query, key) pair in all layers, 4·layers·heads·head_dim. `flat`, the tokens whose arithmetic takes as long
    as reading the weights, is where decoding stops being free of charge. Nothing is counted for launching kernels.
    """
    token = 2 * parameters / flops
    return Cost(0.0, token, weight_bytes / bandwidth / token, kv_token_bytes / bandwidth, pair_flops / flops)


def card_cost(model: str = "Llama 3.1 8B", card: str = "A100 80 GB") -> Cost:
    """The roofline of a public model on a card, weights and K/V in bf16: computed from the two, not measured.

    All weights are counted, the table of the embedding too, which is looked up and not multiplied (6.5 % of Llama 3.1 8B).
    Raises KeyError for a model that is not in `cards.MODELS` or a card that is not in `cards.CEILINGS`.
    """
    public, most = MODELS[model], CEILINGS[card]
    spec = public.spec
    return roofline(
        parameters=public.parameters,
        weight_bytes=stored_bytes(public.parameters, "bfloat16"),
        kv_token_bytes=token_bytes(spec),
        pair_flops=4 * spec.layers * spec.heads * spec.head_dim,
        flops=most.flops,
        bandwidth=most.bandwidth,
    )


@dataclass(eq=False)
class Life:
    """What became of a request, in seconds of the simulated clock. `gap`: the longest wait between two of its tokens."""

    request: Request
    job: Job
    admitted: float = 0.0
    first: float = 0.0
    last: float = 0.0
    gap: float = 0.0
    done: bool = False

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.first - self.request.at


@dataclass(frozen=True)
class Tick:
    """One simulated step: from when to when, what it was, and how the house stood behind it."""

    start: float
    end: float
    step: Step
    work: Work
    running: int
    waiting: int
    held: int  # blocks


class Simulation:
    """Requests, a scheduler and a cost; `tick` by `tick`, or all at once with `run`.

    Args:
        scheduler: a fresh one; its manager is the pool.
        asked: requests in the order of their arrival.
        cost: of a step.
        prompt: makes a request's token ids; by default zeros that are never shared. With one, prompts are looked up and published.

    Raises ValueError for a request that could never run.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        asked: Sequence[Request],
        cost: Cost,
        prompt: Callable[[int, Request], Sequence[int]] | None = None,
    ) -> None:
        self.scheduler, self.asked, self.cost, self.prompt = scheduler, asked, cost, prompt
        self.now, self.arrived = 0.0, 0
        self.lives: list[Life] = []
        self._of: dict[Job, Life] = {}

    @property
    def over(self) -> bool:
        """Whether everybody has been served."""
        return self.arrived == len(self.asked) and not self._of

    def add(self, request: Request) -> Life:
        """Queue a request now."""
        tokens = [0] * request.prompt if self.prompt is None else self.prompt(len(self.lives), request)
        how = {"lookup": False, "publish": False} if self.prompt is None else {}
        job = Job(len(self.lives), self.scheduler.manager.chain(tokens), owner=request.owner, how=how)
        grown, longest = request.prompt + request.output, self.scheduler.longest
        if grown > longest:
            raise ValueError(f"request {job.name} grows to {grown} tokens; the pool has room for {longest}")
        self.scheduler.add(job)
        life = Life(request, job)
        self.lives.append(life)
        self._of[job] = life
        return life

    def tick(self) -> Tick | None:
        """One step; the clock jumps to the next arrival first if there is nothing to do. None when everybody has been served."""
        while self.arrived < len(self.asked) and self.asked[self.arrived].at <= self.now:
            self.add(self.asked[self.arrived])
            self.arrived += 1
        step = self.scheduler.step()
        if not step.pieces:
            if self.arrived == len(self.asked):
                if self._of:
                    raise RuntimeError("requests wait and none can run")
                return None
            self.now = self.asked[self.arrived].at
            return self.tick()
        start, work = self.now, work_of(step.pieces)
        self.now = now = start + self.cost.seconds(work)
        for job in step.admitted:
            if job.preemptions == 0:
                self._of[job].admitted = start
        self.scheduler.done(step)
        for piece in step.pieces:
            job = piece.job
            if piece.start + piece.count == len(job.tokens):
                life = self._of[job]
                job.tokens.append(0)
                if life.last:
                    if now - life.last > life.gap:
                        life.gap = now - life.last
                else:
                    life.first = now
                life.last = now
                if len(job.tokens) - life.request.prompt >= life.request.output:
                    life.done = True
                    self.scheduler.end(job)
                    del self._of[job]
        manager = self.scheduler.manager
        return Tick(
            start,
            now,
            step,
            work,
            len(self.scheduler.running),
            len(self.scheduler.waiting),
            manager.num_blocks - manager.num_free_blocks,
        )

    def run(self, watch: Callable[[Tick], None] | None = None) -> list[Life]:
        """Until everybody has been served; `watch` sees each step."""
        while (tick := self.tick()) is not None:
            if watch is not None:
                watch(tick)
        return self.lives
