"""The event log: who did what to which block, at which positions.

Every part of the library that owns state writes to a `Trace` when it is given one, and writes nothing when it is not.
A line names the request, so that a fault is found by reading instead of guessing (claim A21).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from itertools import starmap
from typing import NamedTuple


class Event(NamedTuple):
    """One line of the log.

    `step` counts lines since the trace was made. `start` and `stop` are token positions of the request, half open;
    both are None where an event is about a whole block. What an index kept elsewhere needs: `publish` says under which `key` a
    block can be found from now on, with its parent's key (None at block 0), its `tokens` and its `adapter`; `unpublish` and
    `evict` say which key is gone (`kvlab.core.mirror`).
    """

    step: int
    what: str
    request_id: Hashable | None
    owner: Hashable | None
    block: int | None
    start: int | None
    stop: int | None
    note: str | None
    key: str | None = None
    parent: str | None = None
    tokens: tuple[int, ...] | None = None
    adapter: str | int | bytes | None = None

    def __str__(self) -> str:
        where = "" if self.start is None else f" [{self.start}:{self.stop}]"
        parts = [f"{self.step:>6} {self.what:<9}"]
        if self.request_id is not None:
            parts.append(f"request={self.request_id}")
        if self.owner is not None and self.owner != self.request_id:
            parts.append(f"owner={self.owner}")
        if self.block is not None:
            parts.append(f"block={self.block}{where}")
        if self.note:
            parts.append(self.note)
        return " ".join(parts)


class Trace:
    """An append-only log in memory. With `limit`, only the newest `limit` events are kept."""

    def __init__(self, limit: int | None = None) -> None:
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ValueError(f"limit must be a positive int, or None to keep every event; got {limit!r}")
        self._lines: deque[tuple] = deque(maxlen=limit)
        self._step = 0

    def log(
        self,
        what: str,
        request_id: Hashable | None = None,
        owner: Hashable | None = None,
        block: int | None = None,
        start: int | None = None,
        stop: int | None = None,
        note: str | None = None,
        entry: tuple = (),
    ) -> None:
        """Add a line; `entry` is its key, parent, tokens and adapter, as far as it has them.

        It is kept as a plain tuple: a log must stay cheap where every token writes to it.
        """
        self._step += 1
        self._lines.append((self._step, what, request_id, owner, block, start, stop, note, *entry))

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[Event]:
        return starmap(Event, self._lines)

    def where(self, keep: Callable[[Event], bool] | None = None, **fields: object) -> list[Event]:
        """The events whose named fields equal the given values: `trace.where(block=3, what="write")`."""
        unknown = set(fields) - set(Event._fields)
        if unknown:
            raise ValueError(f"an Event has no field {sorted(unknown)[0]!r}; it has {', '.join(Event._fields)}")
        wanted = list(fields.items())
        return [e for e in self if all(getattr(e, k) == v for k, v in wanted) and (keep is None or keep(e))]

    def clear(self) -> None:
        """Forget every line; the step counter goes on."""
        self._lines.clear()
