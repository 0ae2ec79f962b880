"""The scheduler: which requests run in the next step, and how many tokens of each go through the model.

It stands on a `BlockManager` and knows neither a model nor a clock. An engine (`kvlab.engine`) computes what a step says; a simulator
(`kvlab.core.simulate`) only counts what it would cost. One step feeds *pieces*: a running request's next token, or a part of a prompt.

Three policies, which differ in what a step may hold together:

- **mixed**: everybody who runs gets a token, and what is left of the budget goes to prompts, in pieces (chunked prefill; Sarathi,
  arXiv 2308.16369).
- **prefill first**: a step is prompts or tokens, never both; prompts go first (Orca's iteration-level scheduling, OSDI 2022).
- **decode first**: prompts wait until nobody runs. That is static batching.

When a running request finds no block for its next token, the one that came last is **preempted**: its blocks go back, and it waits,
first in line. Later it computes its tokens anew (what is still cached it finds), or has its K/V brought back by the engine (swap).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from kvlab.core.blocks import BlockCopy, BlockManager, OutOfBlocks
from kvlab.core.prefixes import Chain

POLICIES = ("mixed", "prefill first", "decode first")
WAITING, RUNNING, PREEMPTED, FINISHED = "waiting", "running", "preempted", "finished"


@dataclass(eq=False)
class Job:
    """A request as the scheduler sees it.

    name         of its sequence in the manager
    chain        its prompt
    tokens       prompt and what has been generated so far; whoever runs a step appends to it
    owner        whose it is: for a fair queue, and for the tags on its blocks
    how          keyword arguments of `BlockManager.allocate` (`lookup`, `publish`)
    written      tokens whose K/V is in the pool
    cached       tokens of its prompt that it found there when it was first admitted; None before
    preemptions  how often it had to give its blocks back
    """

    name: Hashable
    chain: Chain
    tokens: list[int] = field(default_factory=list)
    owner: Hashable = None
    how: dict = field(default_factory=dict)
    state: str = WAITING
    written: int = 0
    cached: int | None = None
    preemptions: int = 0
    kept: object = None  # what `swap_out` returned, while it is preempted

    def __post_init__(self) -> None:
        self.tokens = self.tokens or list(self.chain.tokens)

    @property
    def left(self) -> int:
        """Tokens that have to go through the model before the next one can be chosen."""
        return len(self.tokens) - self.written


@dataclass(frozen=True)
class Piece:
    """`count` tokens of a job, from position `start` on. The last piece of what is `left` gives its next token."""

    job: Job
    start: int
    count: int

    @property
    def seq(self) -> Hashable:
        """Whose tokens: a sequence of the manager."""
        return self.job.name

    @property
    def last(self) -> bool:
        """Whether the next token can be chosen behind it."""
        return self.start + self.count == len(self.job.tokens)

    @property
    def decode(self) -> bool:
        """Whether it feeds a token that was generated, not a part of a prompt."""
        return self.count == 1 and self.start >= len(self.job.chain.tokens)


@dataclass
class Step:
    """What to compute: make the `copies`, feed the `pieces`. `admitted` and `preempted` say what changed on the way."""

    pieces: list[Piece] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    admitted: list[Job] = field(default_factory=list)
    preempted: list[Job] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(piece.count for piece in self.pieces)


class Scheduler:
    """Requests in, steps out.

    Args:
        manager: who has which block; its watermark is what admission leaves free.
        max_running: requests at once, at most.
        budget: tokens of a step, at most; a decode step of everybody who runs is never cut.
        policy: one of `POLICIES`.
        fair: the waiting are served owner by owner, least served first; else first come, first served.
        swap_out, swap_in: called with a job before its blocks go, and after it has blocks again; `swap_in` returns how many
            leading tokens are in the pool then. Without them a preempted job computes its tokens anew.

    Raises ValueError for an argument out of range.
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        max_running: int = 64,
        budget: int = 512,
        policy: str = "mixed",
        fair: bool = False,
        swap_out: Callable[[Job], object] | None = None,
        swap_in: Callable[[Job], int] | None = None,
    ) -> None:
        for name, value in (("max_running", max_running), ("budget", budget)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, not {value!r}")
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {policy!r}")
        self.manager, self.max_running, self.budget, self.policy, self.fair = manager, max_running, budget, policy, fair
        self.swap_out, self.swap_in = swap_out, swap_in
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []  # in the order of admission: the last one is the first to be preempted
        self.served: dict[Hashable, int] = {}  # owner -> tokens that went through the model for it

    # ---- coming and going ---------------------------------------------------------------------------------------------------

    @property
    def longest(self) -> int:
        """Tokens of the longest request that can run, alone if need be."""
        return (self.manager.num_blocks - self.manager.watermark_blocks) * self.manager.block_size

    def add(self, job: Job) -> None:
        """Queue a job. Raises ValueError for one that could never run: it would need more blocks than the pool may give."""
        m = self.manager
        need = -(-len(job.tokens) // m.block_size) + m.watermark_blocks
        if need > m.num_blocks:
            raise ValueError(
                f"request {job.name!r} needs {need} blocks, its {len(job.tokens)} tokens and the watermark; the pool has {m.num_blocks}"
            )
        self.waiting.append(job)

    def end(self, job: Job) -> None:
        """Take a job out, whatever state it is in: finished, cancelled, timed out. Its blocks go back."""
        if job.state == RUNNING:
            self.running.remove(job)
            self.manager.free(job.name)
        elif job.state in (WAITING, PREEMPTED) and job in self.waiting:
            self.waiting.remove(job)
        job.state, job.kept = FINISHED, None

    # ---- a step -------------------------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """What to compute next; empty when there is nothing to do. Call `done` when it is computed."""
        step = Step()
        if self.policy == "prefill first":
            self._prompts(step, self.budget)
            self._admit(step, self.budget - step.tokens)
            if not step.pieces:
                self._decode(step)
        elif self.policy == "decode first":
            self._prompts(step, self.budget)
            if not self.running or (step.pieces and not any(job.left == 1 and job.written for job in self.running)):
                self._admit(step, self.budget - step.tokens)
            if not step.pieces:
                self._decode(step)
        else:
            self._decode(step)
            self._prompts(step, self.budget - step.tokens)
            self._admit(step, self.budget - step.tokens)
        return step

    def done(self, step: Step) -> None:
        """The K/V of a step's pieces is written."""
        manager, served = self.manager, self.served
        for piece in step.pieces:
            job = piece.job
            if job.state == RUNNING:
                job.written = written = piece.start + piece.count
                if manager.num_committed(job.name) < written:
                    manager.commit(job.name, written)
            served[job.owner] = served.get(job.owner, 0) + piece.count

    def _decode(self, step: Step) -> None:
        """A token for everybody who has one to feed; who finds no block for it makes room."""
        for job in list(self.running):
            if job.state == RUNNING and job.left == 1 and job.written and self._grow(step, job):
                step.pieces.append(Piece(job, job.written, 1))
        step.pieces = [piece for piece in step.pieces if piece.job.state == RUNNING]

    def _prompts(self, step: Step, budget: int) -> None:
        """The rest of prompts that were begun."""
        for job in self.running:
            if budget > 0 and (job.left > 1 or not job.written):
                count = min(job.left, budget)
                step.pieces.append(Piece(job, job.written, count))
                budget -= count

    def _admit(self, step: Step, budget: int) -> None:
        """Who waits, while there is budget, room and a place."""
        while self.waiting and budget > 0 and len(self.running) < self.max_running and not step.preempted:
            job = self._next()
            if not self.manager.can_allocate(job.chain, **{k: v for k, v in job.how.items() if k == "lookup"}):
                return
            self.waiting.remove(job)
            self._place(job)
            job.state = RUNNING
            self.running.append(job)
            step.admitted.append(job)
            count = min(job.left, budget)
            step.pieces.append(Piece(job, job.written, count))
            budget -= count

    def _place(self, job: Job) -> None:
        """Blocks for a job. `written` starts anew with them: what it finds in these blocks, and what is brought back to them."""
        back = job.state == PREEMPTED
        found = self.manager.allocate(job.name, job.chain, owner=job.owner, preempted=back, **job.how).num_cached_tokens
        job.written = found
        if job.kept is not None and self.swap_in is not None:
            job.written = self.swap_in(job)
            job.kept = None
        job.cached = found if job.cached is None else job.cached

    def _next(self) -> Job:
        if not self.fair or self.waiting[0].state == PREEMPTED:
            return self.waiting[0]
        return min(self.waiting, key=lambda job: self.served.get(job.owner, 0))  # the first of equals

    def _grow(self, step: Step, job: Job) -> bool:
        """A slot for the job's last token; False when it was itself preempted for want of one."""
        while job.state == RUNNING and self.manager.num_tokens(job.name) < len(job.tokens):
            try:
                step.copies += self.manager.append_token(job.name, job.tokens[-1])
            except OutOfBlocks:
                self._preempt(step, self.running[-1])
        return job.state == RUNNING

    def _preempt(self, step: Step, job: Job) -> None:
        job.chain = self.manager.history(job.name, job.tokens[self.manager.num_tokens(job.name) :])
        if self.swap_out is not None:
            job.kept = self.swap_out(job)
        self.manager.free(job.name)
        self.running.remove(job)
        self.waiting.appendleft(job)
        job.state, job.written = PREEMPTED, 0
        job.preemptions += 1
        step.preempted.append(job)
