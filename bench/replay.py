"""A server's day on the block manager alone: one seeded trace of requests, replayed, and what each call costs.

2,000 requests come and go in a pool of 3,000 blocks of 16. Six in ten begin with one of twenty shared prompts; one in ten is
cancelled. Times are CPU times of one process. Beside them stands what nano-vllm's block manager (`nanovllm/engine/block_manager.py`)
would have hashed and looked up on the same trace, counted from its scheme: one hash and one look-up for each full block of a prompt,
one of each for each block that decoding fills, one set operation for each block taken or given back.
"""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from dataclasses import dataclass

from kvlab.core.blocks import BlockManager

REQUESTS, BLOCKS, BLOCK = 2_000, 3_000, 16


@dataclass(frozen=True)
class Request:
    """One line of the trace: a prompt, how many tokens it generates, and after how many it is cancelled (None: never)."""

    prompt: list[int]
    new: list[int]
    cancelled: int | None


def trace(seed: int = 0, requests: int = REQUESTS) -> list[Request]:
    """The requests in order of arrival, the same for the same seed."""
    draw = random.Random(seed)
    ids = lambda n: draw.choices(range(49_152), k=n)  # noqa: E731
    shared = [ids(draw.randint(256, 768)) for _ in range(20)]
    out = []
    for _ in range(requests):
        begin = draw.choice(shared) if draw.random() < 0.6 else ids(draw.randint(64, 512))
        new = ids(draw.randint(16, 256))
        out.append(Request(begin + ids(draw.randint(16, 160)), new, draw.randrange(len(new)) if draw.random() < 0.1 else None))
    return out


@dataclass
class Costs:
    """Seconds in each kind of call, and how often it was made. `start`: admission, allocation and the prompt's commit."""

    start: float = 0.0
    token: float = 0.0
    end: float = 0.0
    requests: int = 0
    tokens: int = 0


def replay(manager: BlockManager, requests: list[Request], at_once: int = 48) -> Costs:
    """Serve the trace: admit while there is room and fewer than `at_once` run, then a token for each of those, and so on."""
    cost, clock = Costs(requests=len(requests)), time.process_time
    waiting, running, chains = list(enumerate(requests))[::-1], {}, {}
    while waiting or running:
        while waiting and len(running) < at_once:
            n, request = waiting[-1]
            begin = clock()
            prompt = chains[n] = chains.get(n) or manager.chain(request.prompt)
            room = manager.can_allocate(prompt)
            if room:
                manager.allocate(n, prompt)
                manager.commit(n, len(request.prompt))
            cost.start += clock() - begin
            if not room:
                break
            waiting.pop(), chains.clear()
            running[n] = 0
        begin = clock()
        done = []
        for n, step in running.items():
            request = requests[n]
            manager.append_token(n, request.new[step])
            if (len(request.prompt) + step + 1) % BLOCK == 0:
                manager.commit(n, len(request.prompt) + step + 1)
            running[n] = step + 1
            if step + 1 >= len(request.new) or step == request.cancelled:
                done.append(n)
        cost.token += clock() - begin
        cost.tokens += len(running)
        begin = clock()
        for n in done:
            manager.free(n)
            del running[n]
        cost.end += clock() - begin
    return cost


def bytes_per_cached_block(blocks: int = BLOCKS) -> float:
    """What a block costs that nobody holds and that can be found: a full pool of them over the number of blocks."""
    draw = random.Random(1)
    prompts = [draw.choices(range(49_152), k=BLOCK * 30) for _ in range(blocks // 30)]
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    manager = BlockManager(blocks, BLOCK)
    for n, prompt in enumerate(prompts):
        manager.allocate(n, prompt)
        manager.commit(n, len(prompt))
        manager.free(n)
    gc.collect()
    size = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return size / manager.num_evictable_blocks


def asking(tokens: int, times: int = 200) -> tuple[float, float, float]:
    """Seconds of `can_allocate` for a cached prompt that needs room: with a chain the first time and again, and by its tokens."""
    prompt = random.Random(2).choices(range(49_152), k=tokens)
    manager = BlockManager(2 * tokens // BLOCK + 8, BLOCK)
    manager.allocate("a", prompt)
    manager.commit("a", tokens)
    manager.allocate("others", [1] * (tokens + BLOCK))
    first, again, by_tokens = [], [], []
    for _ in range(times):
        chain = manager.chain([*prompt, 1])
        for kept, asked in ((first, chain), (again, chain), (by_tokens, chain.tokens)):
            begin = time.process_time()
            assert manager.can_allocate(asked)
            kept.append(time.process_time() - begin)
    return min(first), min(again), min(by_tokens)


def nano_vllm_counts(requests: list[Request]) -> dict[str, int]:
    """Hashes, look-ups and set operations that nano-vllm's scheme makes of a trace it can serve one by one."""
    counts = {"hashes": 0, "look-ups": 0, "set operations": 0}
    for request in requests:
        steps = len(request.new) if request.cancelled is None else request.cancelled + 1
        full, all_full = len(request.prompt) // BLOCK, (len(request.prompt) + steps) // BLOCK
        counts["hashes"] += all_full
        counts["look-ups"] += full
        counts["set operations"] += 2 * -(-(len(request.prompt) + steps) // BLOCK)
    return counts


def our_hashes(requests: list[Request]) -> int:
    """Blocks hashed by a manager that serves the trace, counted where they are hashed."""
    manager = BlockManager(BLOCKS, BLOCK)
    count, key = 0, manager._index.key

    def counted(parent, label):
        nonlocal count
        count += 1
        return key(parent, label)

    manager._index.key = counted
    replay(manager, requests)
    return count
