"""An index kept elsewhere: which prefixes a manager has cached, from its event log alone.

A router that sends a request to the replica with the longest prefix (chapter 12) has no manager to ask; it reads what each one
logs. After any sequence of calls the mirror and the manager's own index agree, block by block.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvlab.core.trace import Event


class Mirror:
    """What can be found in one pool. `keys`: block -> its key; several blocks may hold the same.

    Feed it every event of the log once, in order, from the first on.
    """

    def __init__(self) -> None:
        self.keys: dict[int, str] = {}
        self._blocks: dict[str, int] = {}  # key -> how many blocks hold it

    def read(self, events: Iterable[Event]) -> Mirror:
        """Follow the log; events that say nothing of what can be found are passed over."""
        for event in events:
            if event.what == "publish":
                self._gone(event.block)
                self.keys[event.block] = event.key
                self._blocks[event.key] = self._blocks.get(event.key, 0) + 1
            elif event.what in ("unpublish", "evict"):
                self._gone(event.block)
            elif event.what == "reset":
                self.keys.clear(), self._blocks.clear()
        return self

    def hits(self, keys: Iterable[str]) -> int:
        """How many of a prompt's leading blocks are there. `keys`: its `block_hashes`; the first hole ends the hit."""
        count = 0
        for key in keys:
            if key not in self._blocks:
                break
            count += 1
        return count

    def _gone(self, block: int) -> None:
        key = self.keys.pop(block, None)
        if key is not None:
            self._blocks[key] -= 1
            if not self._blocks[key]:
                del self._blocks[key]
