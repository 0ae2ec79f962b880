"""The engine's loop: admit, compute a step, choose tokens, end what has ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence

import torch

from kvlab.core.blocks import BlockManager
from kvlab.core.schedule import RUNNING, Job, Scheduler, Step
from kvlab.core.simulate import work_of
from kvlab.core.trace import Trace
from kvlab.engine.metrics import Metrics, StepRecord
from kvlab.engine.request import Request, Sampling, cut_at
from kvlab.runtime import packed
from kvlab.runtime.decode import attention_kernel
from kvlab.runtime.models import Loaded
from kvlab.runtime.paged import PagedPool


class Engine:
    """Serves requests on one model from one pool of blocks.

    Args:
        loaded: the model. While the engine steps, its attention is switched to `kvlab.runtime.packed`.
        num_blocks, block_size: the pool.
        max_running, budget, policy, fair: see `kvlab.core.schedule.Scheduler`.
        watermark: share of the pool that admission leaves free.
        swap: a preempted request's K/V is copied out and back, instead of being computed anew.
        check: audit the block manager after every step.
        keep_logits: keep what each token was chosen from, on the request.
        trace: an event log for the block manager.
        clock: seconds; for tests.

    Raises ValueError for a setting out of range, or a model whose K/V the pool cannot hold.
    """

    def __init__(
        self,
        loaded: Loaded,
        num_blocks: int,
        block_size: int = 16,
        *,
        max_running: int = 64,
        budget: int = 512,
        policy: str = "mixed",
        fair: bool = False,
        watermark: float = 0.01,
        swap: bool = False,
        check: bool = False,
        keep_logits: bool = False,
        trace: Trace | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.loaded, self.clock, self.check, self.keep_logits = loaded, clock, check, keep_logits
        self.manager = BlockManager(num_blocks, block_size, watermark=watermark, trace=trace)
        self.pool = PagedPool(loaded.spec, num_blocks, block_size, device=loaded.model.device, manager=self.manager)
        self.scheduler = Scheduler(
            self.manager,
            max_running=max_running,
            budget=budget,
            policy=policy,
            fair=fair,
            swap_out=self._swap_out if swap else None,
            swap_in=self._swap_in if swap else None,
        )
        self.metrics = Metrics()
        self.requests: dict[Hashable, Request] = {}  # those that have not ended
        self._numbers = itertools.count()
        self._computing, self._leaving = False, []  # who is cancelled while a step runs goes when it is done
        self._stepping: asyncio.Future | None = None
        eos = loaded.model.generation_config.eos_token_id
        self.eos = frozenset([eos] if isinstance(eos, int) else eos or ())

    # ---- asking -------------------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        name: Hashable = None,
        max_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        n: int = 1,
        salt: str | None = None,
        owner: Hashable = None,
        timeout: float | None = None,
        lookup: bool = True,
        publish: bool = True,
    ) -> Request:
        """Queue a request; `step`, `run` or `stream` computes it.

        Args:
            prompt: text, or token ids.
            name: by default a number.
            max_tokens: to generate at most.
            temperature, top_p, seed: see `Sampling`; sample k of n uses `seed + k`.
            stop: texts at which the answer ends; they are not part of it.
            ignore_eos: go on behind the model's end-of-text token.
            n: answers to the one prompt, which is computed once; the others are in `Request.samples`.
            salt: who shares with whom. owner: whose blocks these are, and whose turn it is in a fair queue.
            timeout: seconds until it is ended, finished or not.
            lookup, publish: see `BlockManager.allocate`.

        Raises ValueError, naming the argument, and queues nothing.
        """
        ids = self.loaded.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        name = next(self._numbers) if name is None else name
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if name in self.requests:
            raise ValueError(f"name {name!r} is taken by a request that has not ended")
        for what, value in (("max_tokens", max_tokens), ("n", n)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{what} must be an int of at least 1, not {value!r}")
        if any(not isinstance(text, str) or not text for text in stops):
            raise ValueError("stop must be texts, none of them empty")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be above 0 seconds, not {timeout!r}")
        chain = self.manager.chain(ids, salt=salt)
        top = max(chain.tokens)
        if top >= self.loaded.spec.vocab:
            raise ValueError(f"prompt holds token {top}; the model has {self.loaded.spec.vocab}")
        longest = min(self.loaded.spec.max_context, self.scheduler.longest)
        if len(chain.tokens) + max_tokens > longest:
            raise ValueError(
                f"prompt has {len(chain.tokens)} tokens and max_tokens is {max_tokens}: {longest} fit together, by model and pool"
            )
        now, how = self.clock(), {"lookup": lookup, "publish": publish}
        made = []
        for k in range(n):
            sampling = Sampling(temperature, top_p, seed + k)
            job = Job(name if k == 0 else (name, k), chain, owner=name if owner is None else owner, how=how)
            made.append(
                Request(
                    job.name,
                    job,
                    max_tokens,
                    sampling,
                    stops,
                    frozenset() if ignore_eos else self.eos,
                    None if timeout is None else now + timeout,
                    now,
                    generator=sampling.generator(),
                )
            )
        request, request.samples, request.pending = made[0], made[1:], made[1:]
        self.scheduler.add(request.job)
        for one in made:
            self.requests[one.name] = one
            self.metrics.requests.append(one)
        return request

    def cancel(self, request: Request, reason: str = "cancelled") -> None:
        """End a request now, wherever it is; its blocks go back. What it has said stays. Nothing happens if it has ended.

        While a step is being computed (in another thread) its blocks are in use: then it ends with that step.
        """
        if self._computing:
            self._leaving.append((request, reason))
        elif request.finish is None:
            for sample in request.pending:
                self._end(sample, reason)
            request.pending = []
            self._end(request, reason)

    # ---- computing ------------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nobody waits or runs."""
        return not self.requests

    def step(self) -> list[Request]:
        """One forward; returns the requests that ended with it. If it raises, those that ran end as "failed", their blocks free."""
        start, there = self.clock(), list(self.requests.values())
        for request in there:
            if request.deadline is not None and start >= request.deadline:
                self.cancel(request, "timeout")
        self._computing = True
        try:
            work = self.scheduler.step()
            planned = self.clock()
            for job in work.admitted:
                request = self.requests[job.name]
                request.admitted = start if request.admitted is None else request.admitted
            self.metrics.preemptions += len(work.preempted)
            if work.pieces:
                self._choose(work, self._compute(work))
            self._record(start, planned - start, work)
        except Exception as error:  # the model, not the bookkeeping: nobody's K/V can be trusted any more
            self._fail(error)
            raise
        finally:
            self._computing = False
            while self._leaving:
                self.cancel(*self._leaving.pop())
        if self.check:
            self.manager.check()
        return [request for request in there if request.finish]

    def run(self) -> None:
        """Steps until nobody waits or runs."""
        while not self.idle:
            self.step()

    def stream(self, request: Request) -> Iterator[str]:
        """The answer as it comes, in pieces of text. Leaving the loop early cancels the request."""
        shown = 0
        try:
            while True:
                if new := request.ready[shown:]:
                    yield new
                    shown += len(new)
                if request.finish:
                    return
                self.step()
        finally:
            self.cancel(request)

    async def generate(self, prompt: str | Sequence[int], **options) -> AsyncIterator[str]:
        """`submit` and `stream` for many callers in one event loop. A caller that goes away cancels its request."""
        request = self.submit(prompt, **options)
        shown = 0
        try:
            while True:
                if new := request.ready[shown:]:
                    yield new
                    shown += len(new)
                if request.finish:
                    return
                await self._turn()
        finally:
            self.cancel(request)

    async def _turn(self) -> None:
        """One step for all who wait: the first of them has it computed in a thread. If that one goes away, the step goes on."""
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.ensure_future(asyncio.to_thread(self.step))
        await asyncio.shield(self._stepping)

    # ---- inside a step -----------------------------------------------------------------------------------------------------------

    def _compute(self, work: Step) -> torch.Tensor:
        self.pool.copy(work.copies)
        with attention_kernel(self.loaded, packed.NAME):
            logits = packed.forward(self.loaded, self.pool, work.pieces)
        self.scheduler.done(work)
        return logits

    def _fail(self, error: Exception) -> None:
        for job in list(self.scheduler.running):
            request = self.requests[job.name]
            request.error = error
            for one in (*request.pending, request):
                self._end(one, "failed")

    def _choose(self, work: Step, logits: torch.Tensor) -> None:
        now = self.clock()
        for piece, row in zip(work.pieces, logits, strict=True):
            request = self.requests.get(piece.job.name)
            if request is None or not piece.last or piece.job.state != RUNNING:
                continue
            for one in (request, *self._fork(request)):
                if self.keep_logits:
                    one.logits.append(row.float().cpu())
                self._say(one, one.sampling.choose(row, one.generator), now)

    def _fork(self, request: Request) -> list[Request]:
        """The other samples of a prompt that has just been computed: each goes on from its blocks."""
        samples, request.pending = request.pending, []
        for sample in samples:
            self.manager.fork(request.name, sample.name, owner=sample.job.owner)
            sample.job.state, sample.job.written, sample.job.cached = RUNNING, request.job.written, request.job.cached
            sample.admitted = request.admitted
            self.scheduler.running.append(sample.job)
        return samples

    def _say(self, request: Request, token: int, now: float) -> None:
        request.job.tokens.append(token)
        request.token_times.append(now)
        if token in request.eos:
            request.text = self._decode(request.new[:-1])
            self._end(request, "stop")
            return
        text = self._decode(request.new)
        cut = cut_at(text, request.stop)
        request.text = text if cut is None else cut
        if cut is not None:
            self._end(request, "stop")
        elif len(request.new) >= request.max_tokens:
            self._end(request, "length")

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.loaded.tokenizer.decode(tokens)

    def _end(self, request: Request, reason: str) -> None:
        self.scheduler.end(request.job)
        request.finish, request.finished = reason, self.clock()
        self.requests.pop(request.name, None)

    def _record(self, start: float, plan: float, work: Step) -> None:
        decode = sum(piece.decode for piece in work.pieces)
        self.metrics.steps.append(
            StepRecord(
                start,
                self.clock(),
                plan,
                decode,
                work.tokens - decode,
                len(self.scheduler.running),
                len(self.scheduler.waiting),
                len(work.preempted),
                self.manager.num_blocks - self.manager.num_free_blocks,
                tuple(piece.job.name for piece in work.pieces),
                tuple(piece.job.name for piece in work.pieces if not piece.decode),
                work_of(work.pieces),
            )
        )

    # ---- swapping -----------------------------------------------------------------------------------------------------------------

    def _slots(self, name: Hashable, start: int, stop: int) -> torch.Tensor:
        size = self.pool.block_size
        table = torch.tensor(self.manager.block_table(name))
        return (table[:, None] * size + torch.arange(size)).flatten()[start:stop].to(self.pool.keys.device)

    def _swap_out(self, job: Job):
        """Copy a job's K/V out of the pool, `[layers, tokens, kv_heads, head_dim]` twice."""
        slots = self._slots(job.name, 0, job.written)
        return job.written, *(store.flatten(1, 2).index_select(1, slots).cpu() for store in (self.pool.keys, self.pool.values))

    def _swap_in(self, job: Job) -> int:
        """Bring it back behind what the job has found cached; returns how many tokens are in the pool now."""
        written, *kept = job.kept
        if written > job.written:
            slots = self._slots(job.name, job.written, written)
            for store, saved in zip((self.pool.keys, self.pool.values), kept, strict=True):
                store.flatten(1, 2).index_copy_(1, slots, saved[:, job.written : written].to(store.device))
            self.manager.commit(job.name, written)
        return max(written, job.written)


@contextlib.contextmanager
def serving(loaded: Loaded, num_blocks: int, **options) -> Iterator[Engine]:
    """An engine whose requests are cancelled at the end, whatever happens."""
    engine = Engine(loaded, num_blocks, **options)
    try:
        yield engine
    finally:
        for request in list(engine.requests.values()):
            engine.cancel(request)
