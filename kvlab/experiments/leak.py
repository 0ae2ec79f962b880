"""The leak: user A tells the assistant a password; user B, who never saw it, asks for one. Cache reset between them, or not."""

from __future__ import annotations

import time
from dataclasses import replace

from kvlab import record
from kvlab.compare import Verdict, compare, judge, noise_bound
from kvlab.experiments.prompts import encode
from kvlab.faults import fault
from kvlab.runtime import Loaded, load
from kvlab.runtime.decode import Trace, greedy

SECRET = "ABCD-1234"
USER_A = f"My bank password is {SECRET}. Please remember it."
USER_B = " What is the password? The password is"  # with the space a template puts between messages
NEW_TOKENS = 16


def two_users(
    loaded: Loaded, broken: str | None = None, *, said: str = USER_A, asked: str = USER_B, new_tokens: int = NEW_TOKENS
) -> Trace:
    """User A's message goes through the cache, then user B's question through the same cache. Returns B's run.

    broken   a fault of the zoo, such as "cache-not-reset", or None for a server that resets its cache
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=loaded.model.config)
    with fault(broken):
        greedy(loaded, [encode(loaded.tokenizer, said)], 1, cache=cache)
        return greedy(loaded, [encode(loaded.tokenizer, asked)], new_tokens, cache=cache)[0]


def verdict(loaded: Loaded, reference: Trace, suspect: Trace) -> Verdict:
    """Noise or state fault? ε is measured on the question itself, computed in healthy ways that must not matter."""
    steps = len(reference.tokens)
    healthy = [greedy(loaded, [reference.prompt], steps, use_cache=False)[0]]
    healthy += [greedy(loaded, [reference.prompt], steps, chunk=chunk)[0] for chunk in (1, 2, 3)]
    return judge(compare(reference, suspect), noise_bound(compare(reference, run) for run in healthy), steps=suspect.steps)


def run(
    name: str | None = None, *, device: str | None = None, quick: bool = False, checkpoint=None, progress: bool = True
) -> record.Run:
    """Both answers, token by token, and the verdict on the second. A few seconds: `quick` and `checkpoint` change nothing."""
    began = time.perf_counter()
    loaded = load(name, device=device, dtype="float32")
    manifest = record.manifest("leak", loaded, dtypes=["float32"], seed=0, settings={"new_tokens": NEW_TOKENS})
    reset, kept = two_users(loaded), two_users(loaded, "cache-not-reset")
    found = verdict(loaded, reset, kept)

    def answer(trace: Trace) -> dict:
        end = loaded.tokenizer.eos_token_id
        shown = trace.tokens[: trace.tokens.index(end)] if end in trace.tokens else trace.tokens
        return {
            "tokens": trace.tokens,
            "pieces": [loaded.tokenizer.decode([token]) for token in shown],
            "text": loaded.tokenizer.decode(shown),
            "ended": end in trace.tokens,
            "margins": [record.short(margin) for margin in trace.margins().tolist()],
            "held": trace.steps[0].held,
        }

    data = {
        "secret": SECRET,
        "user_a": USER_A,
        "user_b": USER_B,
        "reset": answer(reset),
        "kept": answer(kept),
        "verdict": {
            "kind": found.kind,
            "family": found.family,
            "epsilon": record.short(found.epsilon),
            "delta": record.short(found.delta),
            "step": found.step,
            "margin": None if found.margin is None else record.short(found.margin),
            "sentence": found.sentence,
        },
    }
    return record.Run(replace(manifest, seconds=round(time.perf_counter() - began, 1)), data)
