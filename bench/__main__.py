"""`python -m bench`: what the block manager and the paged cache cost, as ratios of one run on this machine.

Nothing here is a test: times depend on the machine and on what else runs on it. Each figure stands beside its target.
All are CPU times on one thread, so that a busy machine counts little; the two caches take turns, step by step.
"""

import statistics
import sys
import time

from bench import replay
from kvlab.core.blocks import BlockManager
from kvlab.core.trace import Trace


def main() -> None:
    print("block manager, one core")
    off, on = (append_rate(trace) for trace in (None, Trace(limit=100_000)))
    show("tokens appended one by one, log off", f"{off:,.0f}/s", "1,000,000/s")
    show("the same with the log on", f"{on:,.0f}/s", "300,000/s")
    for name, ratio in pool_ratios(1_000, 1_000_000).items():
        show(f"{name}, 1,000,000 blocks to 1,000", f"{ratio:.2f}", "at most 1.5")
    trace_costs()
    if "--no-model" not in sys.argv:
        print("paged cache, bundled model, float32, CPU, one thread")
        ratio, paged, dynamic = decode_ratio(rows=8, length=512)
        show("decode step, 8 rows of 512, paged to DynamicCache", f"{ratio:.2f}", "at most 1.25")
        print(f"  ({paged * 1e3:.0f} ms to {dynamic * 1e3:.0f} ms)")


def show(what: str, measured: str, target: str) -> None:
    print(f"  {what:<58} {measured:>14}{f'   target {target}' if target else ''}")


def trace_costs() -> None:
    """A server's day (`bench.replay`): what a request and a token cost, beside what nano-vllm's scheme counts on the same trace."""
    requests = replay.trace()
    best = min(
        (replay.replay(BlockManager(replay.BLOCKS), requests) for _ in range(5)), key=lambda c: c.start + c.token + c.end
    )
    counts, hashed = replay.nano_vllm_counts(requests), replay.our_hashes(requests)
    print(
        f"replay of {best.requests:,} requests, {best.tokens:,} tokens generated, pool of {replay.BLOCKS:,} blocks of {replay.BLOCK}"
    )
    micro = lambda seconds, calls: f"{seconds / calls * 1e6:.2f} us"  # noqa: E731
    show("a request starts: admitted, allocated, committed", micro(best.start, best.requests), "")
    show("a token", micro(best.token, best.tokens), "flat in the pool's size")
    show("a request ends", micro(best.end, best.requests), "")
    print(f"  nano-vllm's scheme on this trace: {', '.join(f'{count:,} {what}' for what, count in counts.items())}")
    show("blocks hashed, to the full blocks of all requests", f"{hashed / counts['hashes']:.3f}", "1")
    show("bytes of a cached block", f"{replay.bytes_per_cached_block():,.0f}", "at most 600")
    first, again, by_tokens = replay.asking(tokens=2_048)
    show("can_allocate, 2,048 cached tokens: by the tokens", f"{by_tokens * 1e6:.1f} us", "")
    show("the same with a chain, the first time", f"{first * 1e6:.1f} us", "")
    show("the same with a chain, again", f"{again * 1e6:.1f} us", "the same for any length")


def append_rate(trace: Trace | None, tokens: int = 500_000) -> float:
    """Tokens a second through `append_token`, the best of three."""
    best = 0.0
    for _ in range(3):
        m = BlockManager(tokens // 16 + 1, trace=trace)
        m.allocate("a", [1])
        append = m.append_token
        start = time.process_time()
        for token in range(tokens - 1):
            append("a", token)
        best = max(best, tokens / (time.process_time() - start))
    return best


def pool_ratios(small: int, large: int) -> dict[str, float]:
    """Cost of each call in a large pool over its cost in a small one. In both, every block is held or findable."""
    pools = {n: churned(n) for n in (small, large)}
    times: dict[str, dict[int, list[float]]] = {}
    for trial in range(400):
        for n, m in pools.items():
            for name, seconds in one_round(m, trial).items():
                times.setdefault(name, {small: [], large: []})[n].append(seconds)
    return {name: statistics.median(t[large]) / statistics.median(t[small]) for name, t in times.items()}


def churned(num_blocks: int) -> BlockManager:
    """A pool with a quarter of it held and the rest findable, oldest first: each new block is an eviction."""
    m = BlockManager(num_blocks)
    for i in range(num_blocks // 4):
        tokens = [i] * 64
        m.allocate(i, tokens)
        m.commit(i, 64)
        if i % 4:
            m.free(i)
    return m


def one_round(m: BlockManager, trial: int) -> dict[str, float]:
    """Times of single calls, each on 16 blocks' worth of tokens."""
    prompt = [1_000_000 + trial] * 257
    more = list(range(256))
    times = {}

    def timed(name, call, *args):
        start = time.process_time()
        call(*args)
        times[name] = time.process_time() - start

    timed("allocate, nothing cached", m.allocate, "a", prompt)
    timed("commit", m.commit, "a", 257)
    timed("allocate, all but one token cached", m.allocate, "b", prompt)
    timed("append", m.append, "a", more)
    timed("fork", m.fork, "a", "c")
    timed("truncate", m.truncate, "c", 257)
    timed("free", m.free, "a")
    m.free("b"), m.free("c")
    return times


def decode_ratio(rows: int, length: int, steps: int = 16) -> tuple[float, float, float]:
    """Median decode step on the paged cache over that on a DynamicCache, alternating; and both in seconds."""
    import torch
    from transformers import DynamicCache

    from kvlab.runtime import load
    from kvlab.runtime.paged import PagedPool

    torch.set_num_threads(1)
    loaded = load(device="cpu", dtype="float32")
    model = loaded.model
    prompts = torch.randint(0, loaded.spec.vocab, (rows, length), generator=torch.Generator().manual_seed(0))
    pool = PagedPool(loaded.spec, rows * (length + 2 * steps) // 16 + rows)
    paged, dynamic = [], []
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        model(prompts, cache=cache, use_cache=True, logits_to_keep=1)
        for r, row in enumerate(prompts.tolist()):
            pool.manager.allocate(r, row)
        model(**pool.inputs(range(rows)), logits_to_keep=1)
        for step in range(steps):
            tokens = torch.full((rows, 1), step)
            start = time.process_time()
            for r in range(rows):
                pool.append(r, [step])
            ours = model(**pool.inputs(range(rows)), logits_to_keep=1).logits
            paged.append(time.process_time() - start)
            start = time.process_time()
            mask = torch.ones(rows, length + step + 1, dtype=torch.long)
            theirs = model(tokens, attention_mask=mask, cache=cache, use_cache=True, logits_to_keep=1).logits
            dynamic.append(time.process_time() - start)
            assert (ours - theirs).abs().max() < 6e-5
    return (
        statistics.median(p / d for p, d in zip(paged, dynamic, strict=True)),
        statistics.median(paged),
        statistics.median(dynamic),
    )


if __name__ == "__main__":
    main()
