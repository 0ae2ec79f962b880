"""Faults of a serving engine: who comes back, who leaves early, where a piece of a prompt begins, what a row or a sampler keeps."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvlab.core.schedule import PREEMPTED, Scheduler
from kvlab.faults.zoo import Fault, add
from kvlab.runtime import packed

_place, _plan, _fed = Scheduler._place, packed.plan, packed.fed


def _where_it_was(self, job) -> None:
    """Who was running goes on with its next token: all before that is computed, is it not?"""
    back = job.state == PREEMPTED
    _place(self, job)
    if back:
        job.written = len(job.tokens) - 1
        self.manager.commit(job.name, job.written)


def _end_at_once(self, request, reason="cancelled") -> None:
    """No look at whether a forward is under way."""
    if request.finish is None:
        for sample in request.pending:
            self._end(sample, reason)
        request.pending = []
        self._end(request, reason)


def _one_early(pool, piece) -> list[int]:
    """Where a prompt goes on, its tokens are counted from the last one of the piece before."""
    if piece.start and piece.count > 1:
        return pool.manager.tokens(piece.seq)[piece.start - 1 : piece.start + piece.count - 1]
    return _fed(pool, piece)


def _findable_at_once(self, job) -> None:
    """Every full block of the prompt goes into the index as soon as the job has it."""
    _place(self, job)
    s = self.manager._sequences[job.name]
    if s.publish:
        for k in range(s.written // self.manager.block_size, len(s.tokens) // self.manager.block_size):
            self.manager._publish(job.name, s, k)


def _rows_kept(pool, pieces):
    """The rows of slots are a buffer that stays. Who gets a row writes its own slots into it; what lies behind them stays as it was."""
    made = _plan(pool, pieces)
    own = ~made.beyond
    read, beyond = pool.__dict__.get("rows", (made.read, made.beyond))
    pool.rows = read, beyond = _over(read, made.read, own), _over(beyond, made.beyond, own)
    return replace(made, read=read[: len(own)], beyond=beyond[: len(own)])


def _over(kept: torch.Tensor, new: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """A copy of `kept`, made larger where need be, with those of `new` written over it that are a row's `own`. All `[rows, width]`."""
    out = kept.new_ones([max(sizes) for sizes in zip(kept.shape, new.shape)])
    out[: kept.shape[0], : kept.shape[1]] = kept
    out[: new.shape[0], : new.shape[1]][own] = new[own]
    return out


_ONE = torch.Generator()


def _the_engines(self) -> torch.Generator:
    """The engine's generator, set to the seed of whoever came last."""
    return _ONE.manual_seed(self.seed)


add(
    Fault(
        name="preempted-keeps-its-place",
        breaks="kvlab.core.schedule:Scheduler._place",
        broken=_where_it_was,
        symptom="Under load a request that had to wait goes on with somebody else's words.",
        mechanism="A preempted request gets other blocks when it comes back, and goes on where it was: what they hold counts as its own.",
        family="foreign state",
        detector="Logits from the first token after the pause on; the watch: it reads slots that another request wrote.",
        fix="What is written begins anew with the blocks: what is found in them and what is swapped in, and nothing from before.",
        cases=("vllm-project/vllm#52360", "sgl-project/sglang#30578", "vllm-project/vllm#16832"),
        claims=("C17", "A10"),
    )
)
add(
    Fault(
        name="cancelled-freed-too-early",
        breaks="kvlab.engine.engine:Engine.cancel",
        broken=_end_at_once,
        symptom="When one user hangs up, another one is told what the first had written.",
        mechanism="A cancelled request's blocks are given away while its forward still runs: it writes into whoever has them now.",
        family="foreign state",
        detector="Logits from the first token on; the watch: a forward wrote blocks that were no longer its request's.",
        fix="While a step is computed, note who leaves; end it when the step is done.",
        cases=("sgl-project/sglang#35049", "sgl-project/sglang#32564", "sgl-project/sglang#24527"),
        claims=("C18", "A5"),
    )
)
add(
    Fault(
        name="chunk-off-by-one",
        breaks="kvlab.runtime.packed:fed",
        broken=_one_early,
        symptom="A long prompt is answered as if its last word were missing; often the answer begins with that word.",
        mechanism="Each further piece of a prompt begins one token early: one is read twice, the rest one place too far, the last never.",
        family="own state altered",
        detector="Logits from the first token on; the watch: a slot holds another token than the request has there.",
        fix="A piece begins at the number of tokens that are written, for its ids as for its positions.",
        cases=("tinygrad/tinygrad#15182", "huggingface/transformers#43082", "vllm-project/vllm#36580"),
        claims=("A6", "C17"),
    )
)
add(
    Fault(
        name="hit-before-written",
        breaks="kvlab.core.schedule:Scheduler._place",
        broken=_findable_at_once,
        symptom="A request that was broken off and is sent again is answered from what somebody else wrote before.",
        mechanism="Blocks can be found as soon as they are reserved. If the writer leaves early, they hold what their last holder left.",
        family="foreign state",
        detector="Logits from the first token on; the watch: it reads slots that another request wrote, or nobody.",
        fix="Publish a block when its K/V is written (commit), not when it is reserved.",
        cases=("GeeeekExplorer/nano-vllm#208", "vllm-project/vllm#7822", "vllm-project/vllm#29387"),
        claims=("A10", "C18"),
    )
)
add(
    Fault(
        name="row-not-reset",
        breaks="kvlab.runtime.packed:plan",
        broken=_rows_kept,
        symptom="The first word is right; then a short request goes on with what a longer one before it had said.",
        mechanism="Rows of slots are kept from step to step. A row's next holder overwrites its beginning; the tail still counts.",
        family="foreign state",
        detector="Logits from the first decode step on; the log: slots beyond the request's own tokens; the watch: whose they are.",
        fix="Make the rows anew for each step, or clear a row, or its length, when its request ends or moves.",
        cases=("tenstorrent/vllm-tt-plugin#103", "vllm-project/vllm#42494", "vllm-project/vllm#43894"),
        claims=("A10", "A17"),
    )
)
add(
    Fault(
        name="sampler-shared",
        breaks="kvlab.engine.request:Sampling.generator",
        broken=_the_engines,
        symptom="A request with a seed gives one text alone and another in company, though temperature and seed are the same.",
        mechanism="All requests draw from one random generator: every draw of a neighbour moves it on. K and V have no part in it.",
        family="sampling",
        detector="Equal seeds, other tokens, while the logits of those tokens are right: the state is the sampler's.",
        fix="A generator for each request, from its own seed.",
        cases=("vllm-project/vllm#51226", "ml-explore/mlx-lm#1245", "vllm-project/vllm#1211"),
        claims=("A20", "C20"),
    )
)
