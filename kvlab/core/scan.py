"""The owner scan: who held a block when somebody else was given it, wrote it, or found it.

It reads the event log alone (`kvlab.core.trace`), trusts no counter and needs no access to the manager: a server that logs
what it does to its blocks can be scanned while it runs, or afterwards from the file.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

from kvlab.core.trace import Event

HANDED_OUT = "handed out while held"
WRITTEN = "written while shared"
FOUND = "found by what it no longer holds"


class Finding(NamedTuple):
    """One broken rule: at `step` of the log `request_id` did it to `block`; `others` are those that held it then.

    A pin holds blocks, too: it stands here as its owner, `("pin", name)`.
    """

    step: int
    rule: str
    block: int
    request_id: Hashable
    others: tuple[Hashable, ...]

    def __str__(self) -> str:
        others = ", ".join(map(str, self.others)) or "nobody"
        return f"block {self.block} was {self.rule}: by {self.request_id} (held by {others}), line {self.step} of the log"


def owner_scan(events: Iterable[Event]) -> list[Finding]:
    """Every block that was given out or written while another request held it, or found by what it no longer holds.

    Shared blocks are no finding: two requests may hold one block for as long as neither writes it. Give it the whole log; of
    a log that was cut at its beginning (`Trace(limit=…)`) it can say nothing about blocks handed out before the cut.
    """
    holders: dict[int, dict[Hashable, None]] = {}  # a dict for its order
    findable: set[int] = set()
    found: list[Finding] = []

    def holder(event: Event) -> Hashable:
        return event.owner if event.request_id is None else event.request_id

    def report(event: Event, rule: str) -> None:
        others = tuple(name for name in holders.get(event.block, {}) if name != holder(event))
        found.append(Finding(event.step, rule, event.block, holder(event), others))

    def hand_out(event: Event) -> None:
        if holders.get(event.block):
            report(event, HANDED_OUT)
        holders.setdefault(event.block, {})[holder(event)] = None
        findable.discard(event.block)

    for event in events:
        held = holders.get(event.block, {})
        if event.what == "reserve":
            hand_out(event)
        elif event.what == "copy":
            holders.get(int(event.note.removeprefix("of ")), {}).pop(holder(event), None)
            hand_out(event)
        elif event.what == "append":
            if holder(event) not in held:
                hand_out(event)
            elif len(held) > 1:
                report(event, WRITTEN)
            findable.discard(event.block)
        elif event.what in ("hit", "share", "pin"):
            if event.what != "share" and event.block not in findable:
                report(event, FOUND)
            holders.setdefault(event.block, {})[holder(event)] = None
        elif event.what == "release":
            held.pop(holder(event), None)
        elif event.what == "publish":
            findable.add(event.block)
        elif event.what in ("evict", "unpublish"):
            findable.discard(event.block)
        elif event.what == "reset":
            holders.clear()
            findable.clear()
    return found
