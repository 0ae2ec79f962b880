"""The block manager without a model: a working day for the map, counts that leak, what a pool holds, how large a block should be.

Bookkeeping only: these run where there is no PyTorch, in a browser too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from kvlab.core.blocks import BlockManager, InvariantError, OutOfBlocks
from kvlab.core.trace import Trace
from kvlab.core.workload import requests
from kvlab.experiments import allocators
from kvlab.faults import fault
from kvlab.record import short

SEED = 5
BLOCK_SIZE = 16
REQUESTS = 4000  # lengths drawn for a simulation
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
OWNERS = ("A", "B", "C", "D", "E", "F")


def working_day(num_blocks: int = 48, ticks: int = 40, seed: int = SEED, *, manager: Callable = BlockManager) -> dict:
    """Six users, one system prompt, forks, cancellations, prompts sent again, a pool that runs full: bookkeeping only, a snapshot a tick.

    Returns `states`, per tick and block "free", "found" (free, and findable) or the owners' letters, and `stories`, per block
    the log's lines about it with the tick they belong to.
    """
    draw = random.Random(seed)
    log = Trace()
    manager = manager(num_blocks, BLOCK_SIZE, trace=log)
    system = [draw.randrange(1000) for _ in range(2 * BLOCK_SIZE + 5)]
    left: dict[str, int] = {}
    past: list[tuple[str, list[int]]] = []
    states: list[list[str]] = []
    stories: list[list[list]] = [[] for _ in range(num_blocks)]
    names = read = turned_away = 0
    for tick in range(ticks):
        if draw.random() < 0.7:
            owner, tokens = draw.choice(OWNERS), system + [draw.randrange(1000) for _ in range(draw.randrange(8, 70))]
            if past and draw.random() < 0.3:  # somebody sends an earlier prompt again
                owner, tokens = draw.choice(past)
            past.append((owner, tokens))
            name, names = f"{owner}{names}", names + 1
            if manager.can_allocate(tokens):
                manager.allocate(name, tokens, owner=owner)
                manager.commit(name, len(tokens))
                left[name] = draw.randrange(4, 16)
                if draw.random() < 0.3:
                    manager.fork(name, f"{name}'", owner=owner)
                    left[f"{name}'"] = draw.randrange(4, 16)
            else:
                turned_away += 1
        for name in list(left):
            left[name] -= 1
            try:
                for _ in range(5):
                    manager.append_token(name, draw.randrange(1000))
                manager.commit(name, len(manager.tokens(name)))
            except OutOfBlocks:
                left[name] = 0
            if left[name] <= 0 or draw.random() < 0.02:
                manager.free(name)
                del left[name]
        manager.check()
        states.append([_state(manager, i) for i in range(num_blocks)])
        for event in list(log)[read:]:
            if event.block is not None:
                _tell(stories[event.block], [tick, event.what, event.request_id, event.start, event.stop])
        read = len(log)
    return {"states": states, "stories": stories, "requests": names, "turned_away": turned_away}


def _tell(story: list[list], line: list) -> None:
    """Add a line; tokens that one request appends in one tick are one line."""
    if line[1] == "append" and story and story[-1][:3] == line[:3]:
        story[-1][4] = line[4]
    else:
        story.append(line)


def _state(manager: BlockManager, block: int) -> str:
    info = manager.block(block)
    if info.owners:
        return "".join(sorted(info.owners))
    return "found" if info.block_hash else "free"


def leaking(sharing: bool, broken: bool, *, requests: int = 120, num_blocks: int = 256, seed: int = SEED) -> dict:
    """Requests with two samples each. With `sharing` the second is a fork, else a copy. Blocks held after each request.

    `broken` switches "leaked-reference" on. Stops when a request finds no room. Returns the history and every block still
    counted at the end: [block, created, last access, whether any live request's table names it].
    """
    draw = random.Random(seed)
    manager = BlockManager(num_blocks, BLOCK_SIZE, cache_prefixes=False)
    history, live = [], []
    complaint = None
    with fault("leaked-reference" if broken else None):
        for n in range(requests):
            prompt = [draw.randrange(1000) for _ in range(draw.randrange(20, 90))]
            more = [draw.randrange(1000) for _ in range(draw.randrange(10, 60))]
            try:
                manager.allocate((n, 1), prompt, owner=f"request {n}")
                if sharing:
                    manager.fork((n, 1), (n, 2), owner=f"request {n}")
                else:
                    manager.allocate((n, 2), prompt, owner=f"request {n}")
                manager.append((n, 1), more)
                manager.append((n, 2), more)
            except OutOfBlocks:
                break
            live += [(n, 1), (n, 2)]
            while len(live) > 8:
                manager.free(live.pop(0))
            history.append(num_blocks - manager.num_free_blocks)
            if complaint is None:
                try:
                    manager.check()
                except InvariantError as error:
                    complaint = {"request": n, "says": str(error)}
    named = {block for name in live if name in manager.sequences for block in manager.block_table(name)}
    blocks = []
    for i in range(num_blocks):
        info = manager.block(i)
        if info.ref_count:
            blocks.append([i, info.created, info.last_access, i in named])
    return {"held": history, "served": len(history), "blocks": blocks, "complaint": complaint}


def _usage(usage: allocators.Usage) -> dict:
    keys = ("written", "to_come", "never", "free", "of_held", "running", "entries", "preempted", "mean_length")
    return {key: short(getattr(usage, key)) for key in keys}


def utilisation(spread: float = 1.0, workload: str = "ShareGPT", *, steps: int = 2000) -> dict:
    """Policy → averages of the simulation (see `kvlab.experiments.allocators`), with a buddy allocator and merely counted."""
    waiting = requests(workload, REQUESTS, spread, SEED)
    out = {}
    for policy in allocators.POLICIES:
        out[policy] = _usage(allocators.simulate(policy, waiting, steps=steps))
        if policy != "paged":
            counted = allocators.simulate(policy, waiting, steps=steps, allocator=allocators.Counter)
            out[policy]["counted"] = short(counted.written)
    return out


def block_sizes(sizes: Sequence[int] = BLOCK_SIZES, *, steps: int = 2000) -> dict[int, dict]:
    """Block size → averages of the paged simulation."""
    waiting = requests("ShareGPT", REQUESTS, 1.0, SEED)
    return {size: _usage(allocators.simulate("paged", waiting, block_size=size, steps=steps)) for size in sizes}
