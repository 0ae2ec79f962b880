"""Who holds how much of a KV pool: contiguous reservations against paging, simulated slot by slot.

The setting is that of PagedAttention's figure 2 (Kwon et al. 2023, arXiv 2309.06180, section 6.1): OPT-13B on a 40 GB card has
room for 15.7 K tokens, its maximum length is 2048, and requests wait in line at all times. Here the pool has 16,384 slots, the
power of two next to that. Lengths are those of `kvlab.core.workload`; the experiment varies their spread.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvlab.core.blocks import BlockManager, OutOfBlocks
from kvlab.core.workload import MAX_LENGTH, Request

SLOTS = 16384
PAPER = {"max length": 20.4, "power of two": 26.8, "oracle": 38.2, "paged": 96.3}  # % token state, figure 2
POLICIES = tuple(PAPER)


def typical_length(served: list[Request]) -> float:
    """Tokens a request has at a random moment of its life, one token a step: long answers are there longer."""
    return sum(r.output * (r.prompt + (r.output + 1) / 2) for r in served) / sum(r.output for r in served)


class Buddy:
    """A buddy allocator: pieces are powers of two, split in halves, and joined with their other half when both are free."""

    def __init__(self, size: int) -> None:
        if size < 1 or size & (size - 1):
            raise ValueError(f"size must be a power of two, not {size}")
        self.size = size
        self.free: dict[int, set[int]] = {size: {0}}  # piece size → offsets
        self.taken: dict[int, int] = {}  # offset → piece size

    def allocate(self, size: int) -> int | None:
        """The offset of a piece of at least `size` slots (1 or more), or None."""
        want = 1 << (size - 1).bit_length()
        have = min((s for s, offsets in self.free.items() if s >= want and offsets), default=None)
        if have is None:
            return None
        offset = min(self.free[have])
        self.free[have].remove(offset)
        while have > want:
            have //= 2
            self.free.setdefault(have, set()).add(offset + have)
        self.taken[offset] = want
        return offset

    def release(self, offset: int) -> None:
        """Give a piece back."""
        size = self.taken.pop(offset)
        while size < self.size and offset ^ size in self.free.get(size, ()):
            self.free[size].remove(offset ^ size)
            offset &= ~size
            size *= 2
        self.free.setdefault(size, set()).add(offset)


class Counter:
    """No placement at all: slots are counted. What a contiguous reservation would cost if memory never broke into pieces."""

    def __init__(self, size: int) -> None:
        self.size, self.left = size, size
        self.taken: dict[int, int] = {}

    def allocate(self, size: int) -> int | None:
        """A number for `size` slots, or None."""
        if size > self.left:
            return None
        self.left -= size
        name = max(self.taken, default=-1) + 1
        self.taken[name] = size
        return name

    def release(self, name: int) -> None:
        """Give them back."""
        self.left += self.taken.pop(name)


class Contiguous:
    """Each request gets one piece for its whole life, as large as the policy says."""

    def __init__(self, policy: str, slots: int, allocator: type = Buddy) -> None:
        self.reserve = {
            "max length": lambda r: MAX_LENGTH,
            "power of two": lambda r: min(r.prompt + (1 << (r.output - 1).bit_length()), MAX_LENGTH),
            "oracle": lambda r: r.prompt + r.output,
        }[policy]
        self.pieces = allocator(slots)
        self.places: dict[int, int] = {}

    def admit(self, name: int, request: Request, length: int) -> bool:
        place = self.pieces.allocate(self.reserve(request))
        if place is not None:
            self.places[name] = place
        return place is not None

    def grow(self, name: int) -> bool:
        return True

    def end(self, name: int) -> None:
        self.pieces.release(self.places.pop(name))

    def held(self, name: int, length: int) -> int:
        return self.pieces.taken[self.places[name]]

    def entries(self, name: int, length: int) -> int:
        return 1


class Paged:
    """The course's block manager: blocks as they are needed, a request sent back to the queue when none is left."""

    def __init__(self, slots: int, block_size: int) -> None:
        self.manager = BlockManager(slots // block_size, block_size, cache_prefixes=False)

    def admit(self, name: int, request: Request, length: int) -> bool:
        try:
            self.manager.allocate(name, [0] * length)
        except OutOfBlocks:
            return False
        return True

    def grow(self, name: int) -> bool:
        try:
            self.manager.append_token(name, 0)
        except OutOfBlocks:
            return False
        return True

    def end(self, name: int) -> None:
        self.manager.free(name)

    def held(self, name: int, length: int) -> int:
        return self.entries(name, length) * self.manager.block_size

    def entries(self, name: int, length: int) -> int:
        return -(-length // self.manager.block_size)


@dataclass
class Usage:
    """Averages over the steps of a simulation, as shares of the pool: they add up to 1.

    written    slots that hold a token's K/V
    to_come    slots held for tokens their request will still write
    never      slots held that their request will never write: over-reservation, rounding, the end of a last block
    free       slots nobody holds, though requests are waiting
    """

    written: float = 0.0
    to_come: float = 0.0
    never: float = 0.0
    free: float = 0.0
    running: float = 0.0
    entries: float = 0.0
    preempted: int = 0
    steps: int = 0
    mean_length: float = 0.0
    history: list[float] = field(default_factory=list)

    @property
    def of_held(self) -> float:
        """Written slots as a share of what is held, the way claim C7 counts."""
        return self.written / (1 - self.free)


def simulate(
    policy: str,
    waiting: list[Request],
    *,
    slots: int = SLOTS,
    block_size: int = 16,
    steps: int = 2000,
    warm_up: int = 500,
    allocator: type = Buddy,
) -> Usage:
    """Serve the queue first come, first served, one token per running request and step; measure after `warm_up` steps.

    The queue is the list over and over, so that somebody always waits. Raises ValueError for an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy {policy!r} is unknown; there are {', '.join(POLICIES)}")
    memory = Paged(slots, block_size) if policy == "paged" else Contiguous(policy, slots, allocator)
    queue: deque[tuple[Request, int]] = deque()
    running: dict[int, list] = {}  # name → [request, tokens so far], oldest first
    names = arrived = 0
    usage = Usage()
    for step in range(warm_up + steps):
        while True:  # admit from the head of the line for as long as it fits
            if not queue:
                request = waiting[arrived % len(waiting)]
                queue.append((request, request.prompt))
                arrived += 1
            request, length = queue[0]
            if not memory.admit(names, request, length):
                break
            queue.popleft()
            running[names] = [request, length]
            names += 1
        for name in list(running):
            while name in running and not memory.grow(name):  # the newest gives way, and computes its tokens again later
                newest = next(reversed(running))
                memory.end(newest)
                queue.appendleft(tuple(running.pop(newest)))
                usage.preempted += 1
            if name in running:
                running[name][1] += 1
        if step >= warm_up:
            _measure(usage, memory, running, slots)
        for name, (request, length) in list(running.items()):
            if length >= request.prompt + request.output:
                memory.end(name)
                del running[name]
    for key in ("written", "to_come", "never", "free", "running", "entries"):
        setattr(usage, key, getattr(usage, key) / usage.steps)
    usage.mean_length = usage.written * slots / usage.running
    return usage


def _measure(usage: Usage, memory: Contiguous | Paged, running: dict[int, list], slots: int) -> None:
    written = sum(length for _, length in running.values())
    held = sum(memory.held(name, length) for name, (_, length) in running.items())
    to_come = sum(
        min(request.prompt + request.output, memory.held(name, length)) - length for name, (request, length) in running.items()
    )
    usage.written += written / slots
    usage.to_come += to_come / slots
    usage.never += (held - written - to_come) / slots
    usage.free += 1 - held / slots
    usage.running += len(running)
    usage.entries += sum(memory.entries(name, length) for name, (_, length) in running.items()) / max(len(running), 1)
    usage.history.append(round(written / slots, 4))
    usage.steps += 1
