"""A watch over the pool: what each forward was really given, and whose keys and values each slot holds.

    with Watch(engine.loaded, engine.pool) as seen:
        engine.run()
    seen.findings    # nothing, if every request read its own past and no more

It trusts no scheduler and no manager: it looks at the ids, positions and slots that reach the model. A slot holds the K/V of one token at
one position behind one history. Whoever reads a slot has to have that history; whose request wrote it does not matter.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kvlab.compare import Step
from kvlab.core.blocks import BlockCopy
from kvlab.runtime.models import Loaded
from kvlab.runtime.packed import Packed
from kvlab.runtime.paged import PagedPool


class Watch:
    """Sees packed forwards and copies on `pool`, while it is entered: enter it before anything is written there.

    K/V that is swapped in comes by another way, unseen: such a request is accused wrongly.

    findings   one sentence for each request that read what it should not have, in the order they were found
    steps      request -> what it was given for each of its tokens, for `kvlab.compare.audit`
    """

    def __init__(self, loaded: Loaded, pool: PagedPool) -> None:
        self.loaded, self.pool = loaded, pool
        self.findings: list[str] = []
        self.steps: dict[Hashable, list[Step]] = {}
        self._held: dict[int, tuple[int, Hashable]] = {}  # slot -> the history it holds, who wrote it
        self._accused: set[Hashable] = set()

    def __enter__(self) -> Watch:
        self._hook = self.loaded.model.register_forward_hook(self._after, with_kwargs=True)
        self.pool.copy = self._copy
        return self

    def __exit__(self, *_) -> None:
        self._hook.remove()
        del self.pool.copy

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        size = self.pool.block_size
        for src, dst in copies:
            for offset in range(size):
                self._held[dst * size + offset] = self._held.get(src * size + offset, (None, None))
        type(self.pool).copy(self.pool, copies)

    def _after(self, model, args, fed: dict, out) -> None:
        packed = fed.get("packed")
        if packed is None or packed.pool is not self.pool:
            return
        ids, at, write = (row.tolist() for row in (fed["input_ids"][0], fed["position_ids"][0], packed.write))
        read = [_read(packed, n) for n in range(len(packed.pieces))]
        for piece, first, slots in zip(packed.pieces, packed.first, read, strict=True):
            before = self._held.get(slots[piece.start - 1], (0, None))[0] if piece.start else 0
            for n in range(first, first + piece.count):
                before = hash((before, ids[n], at[n]))
                self._held[write[n]] = before, piece.seq
        for piece, first, slots in zip(packed.pieces, packed.first, read, strict=True):
            own = piece.start + piece.count
            if piece.seq not in self.pool.manager.sequences:
                self._accuse(piece.seq, f"{piece.seq} was computed, and its blocks were not its own any more")
                continue
            tokens = self.pool.manager.tokens(piece.seq)
            if own == len(tokens):
                step = Step(own, at[first + piece.count - 1], len(slots), max(len(slots) - own, 0), 0)
                self.steps.setdefault(piece.seq, []).append(step)
            history = 0
            for n, slot in enumerate(slots):
                history = hash((history, tokens[n], n)) if n < own else None
                holds, who = self._held.get(slot, (None, None))
                if holds is None or holds != history:
                    self._accuse(piece.seq, f"{piece.seq} reads {_whose(who, piece.seq)} as token {n} of its {own}")
                    break

    def _accuse(self, seq: Hashable, what: str) -> None:
        if seq not in self._accused:
            self._accused.add(seq)
            self.findings.append(what)


def _whose(who: Hashable | None, seq: Hashable) -> str:
    if who is None:
        return "a slot that nobody has written"
    return "a wrong token or place of its own" if who == seq else f"what {who} wrote"


def _read(packed: Packed, n: int) -> list[int]:
    """The slots that piece `n` may look at."""
    if n in packed.single:
        row = packed.single.index(n)
        return packed.read[row][~packed.beyond[row]].tolist()
    return next(slots for m, slots in packed.long if m == n).tolist()
