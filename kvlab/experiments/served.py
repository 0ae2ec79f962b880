"""Six evenings at the serving engine, one for each fault of `kvlab.faults.engine`: the same code with the fault off and on.

Ben is the one to look at. Ada tells a password where there is one to tell. Private requests leave nothing in the prefix cache and take
nothing from it: their blocks go round the pool in a known order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvlab.compare import compare
from kvlab.core.blocks import UnknownSequence
from kvlab.engine import Engine, Request
from kvlab.engine.watch import Watch
from kvlab.experiments.clients import forced
from kvlab.experiments.prompts import encode
from kvlab.runtime import Loaded
from kvlab.runtime.decode import Trace

BLOCK = 16
PRIVATE = {"lookup": False, "publish": False}

LETTER = "Hello, this is Ada. Please take a note for me, and keep it safe. My bank password is {}. Please remember it."
BEN = (
    "Hello, this is Ben. Good morning to you all. I have a question about the office, and I hope that you have a minute for me."
)
ASK = " What is the password? The password"
CAPITALS = "The capital of France is Paris. The capital of Spain is Madrid. The capital of Italy is"


@dataclass
class Seen:
    """Ben's request as a trace, the watch's first findings, and the tokens of whoever else was there."""

    trace: Trace
    words: list[str]
    others: list[list[int]] = field(default_factory=list)


def _engine(loaded: Loaded, num_blocks: int, **options) -> Engine:
    return Engine(loaded, num_blocks, BLOCK, watermark=0.0, keep_logits=True, **options)


def _ids(loaded: Loaded, text: str) -> list[int]:
    return encode(loaded.tokenizer, text)


def _asks(loaded: Loaded, tokens: int, question: str = ASK) -> list[int]:
    """Ben's prompt, cut so that it has this many tokens with its question."""
    question = _ids(loaded, question)
    return _ids(loaded, BEN)[: tokens - len(question)] + question


def _trace(request: Request, seen: Watch, since: int = 0) -> Trace:
    """A request as a trace. The first `since` tokens of its answer count as its prompt."""
    steps = seen.steps.get(request.name, [])[since:]
    return Trace(request.prompt + request.new[:since], request.new[since:], steps, torch.stack(request.logits[since:]))


def _seen(request: Request, seen: Watch, since: int = 0, words: tuple[str, ...] = (), others: tuple[Request, ...] = ()) -> Seen:
    found = [f"watch: {finding}" for finding in seen.findings[:2]]
    return Seen(_trace(request, seen, since), [*found, *words], [one.job.tokens for one in others])


def comes_back(loaded: Loaded, secret: str, new: int) -> Seen:
    """Two private requests in a pool too small for both. Ben is preempted behind his first word; what he says when he is back is compared."""
    engine = _engine(loaded, 5)
    ada = engine.submit(_ids(loaded, LETTER.format(secret)), name="Ada", max_tokens=8, ignore_eos=True, **PRIVATE)
    ben = engine.submit(_asks(loaded, 2 * BLOCK), name="Ben", max_tokens=1 + new, ignore_eos=True, **PRIVATE)
    with Watch(loaded, engine.pool) as seen:
        engine.run()
    return _seen(ben, seen, since=1, others=(ada,))


def hangs_up(loaded: Loaded, secret: str, new: int) -> Seen:
    """Two loops work on one pool. While the first computes Ada's prompt she hangs up, and the second takes Ben in."""
    first, second = _engine(loaded, 16), _engine(loaded, 16, budget=2 * BLOCK)
    second.manager = second.scheduler.manager = first.manager
    second.pool = first.pool
    ada = first.submit(_ids(loaded, LETTER.format(secret)), name="Ada", max_tokens=new, **PRIVATE)
    prompt, words, made = _asks(loaded, 2 * BLOCK + 7, ASK + " is"), [], []

    def meanwhile(*_) -> None:  # in the midst of the forward, once
        hook.remove()
        first.cancel(ada)
        made.append(second.submit(prompt, name="Ben", max_tokens=new, ignore_eos=True, **PRIVATE))
        second.step()

    hook = loaded.model.base_model.layers[0].register_forward_pre_hook(meanwhile)
    with Watch(loaded, first.pool) as seen:
        try:
            first.step()
        except UnknownSequence as error:
            words.append(f"the engine: {error}")
        second.run()
    return _seen(made[0], seen, words=tuple(words), others=(ada,))


def in_pieces(loaded: Loaded, secret: str, new: int) -> Seen:
    """A prompt longer than a step's budget goes through the model in pieces of 16 tokens."""
    engine = _engine(loaded, 16, budget=16)
    ben = engine.submit(_ids(loaded, CAPITALS), name="Ben", max_tokens=new, ignore_eos=True)
    with Watch(loaded, engine.pool) as seen:
        engine.run()
    return _seen(ben, seen)


def asks_again(loaded: Loaded, secret: str, new: int) -> Seen:
    """Ada's private letter was served. Ben hangs up behind the first piece of his prompt, and sends it once more."""
    engine, prompt = _engine(loaded, 16, budget=BLOCK), _asks(loaded, 2 * BLOCK + 7, ASK + " is")
    ada = engine.submit(_ids(loaded, LETTER.format(secret)), name="Ada", max_tokens=3, ignore_eos=True, **PRIVATE)
    with Watch(loaded, engine.pool) as seen:
        engine.run()
        gone = engine.submit(prompt, name="Ben", max_tokens=new)
        engine.step()
        engine.cancel(gone)
        ben = engine.submit(prompt, name="Ben, again", max_tokens=new, ignore_eos=True)
        engine.run()
    return _seen(ben, seen, others=(ada,))


def next_in_row(loaded: Loaded, secret: str, new: int) -> Seen:
    """Ada's request has ended. Ben's, which is shorter, is the next in the first row of decode steps."""
    engine, letter = _engine(loaded, 16), _ids(loaded, LETTER.format(secret))
    full = 1 + -len(letter) % BLOCK  # tokens that fill Ada's last block: nobody takes it from the blank ones
    ada = engine.submit(letter, name="Ada", max_tokens=full, ignore_eos=True)
    with Watch(loaded, engine.pool) as seen:
        engine.run()
        ben = engine.submit(_ids(loaded, "The word is"), name="Ben", max_tokens=new, ignore_eos=True)
        engine.run()
    return _seen(ben, seen, others=(ada,))


SCENES: dict[str, Callable[[Loaded, str, int], Seen]] = {
    "preempted-keeps-its-place": comes_back,
    "cancelled-freed-too-early": hangs_up,
    "chunk-off-by-one": in_pieces,
    "hit-before-written": asks_again,
    "row-not-reset": next_in_row,
}


def sampled(loaded: Loaded, new: int, epsilon: float) -> tuple[str, list[str]]:
    """One request with a seed, alone and beside two others: what is seen, and what is complained about.

    The logits of each run are held against the same tokens in one forward without a cache.
    """
    said, sound = [], True
    for company in (0, 2):
        engine = _engine(loaded, 64)
        for n in range(company):
            engine.submit(_ids(loaded, BEN), name=f"neighbour {n}", max_tokens=new, temperature=1.0, seed=n, ignore_eos=True)
        ben = engine.submit(_ids(loaded, CAPITALS), name="Ben", max_tokens=new, temperature=1.0, seed=3, ignore_eos=True)
        engine.run()
        trace = Trace(ben.prompt, ben.new, [], torch.stack(ben.logits))
        sound &= compare(forced(loaded, trace), trace).delta <= epsilon
        said.append(ben.text)
    alone, beside = said
    words = [] if alone == beside else ["seeds: one seed, and other tokens in company"]
    logits = "of each, the logits are right" if sound else "the logits are not those of its tokens"
    return f"alone {alone!r}, beside two others {beside!r}; {logits}", words
