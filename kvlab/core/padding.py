"""A padded row, looked at by hand: what each of its tokens attends to, and whether the row is as if it stood alone.

Which columns hold tokens, what the mask says and which positions are fed are three things, and any of them may be wrong. Two
kinds of model judge positions differently. A learned position is a vector added to the input, so each token must stand at its
own number. RoPE turns queries and keys by an angle that grows with the position, and their product depends on the distance
alone (RoFormer, eq. 16): all positions may be shifted by the same amount.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One row of a batch; `tokens`, `mask` and `positions` have a value for each column.

    tokens      True where a token of the row stands, False on a pad
    mask        True where attention may look
    positions   position ids as fed
    read        the column whose logits give the next token
    """

    tokens: tuple[bool, ...]
    mask: tuple[bool, ...]
    positions: tuple[int, ...]
    read: int

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.mask) == len(self.positions):
            raise ValueError("tokens, mask and positions must have a value for each column")
        if not 0 <= self.read < len(self.tokens):
            raise ValueError(f"read must be a column from 0 to {len(self.tokens) - 1}, not {self.read}")


@dataclass(frozen=True)
class Finding:
    """What is wrong with a row.

    pads_seen   pads that some token of the row attends to
    unseen      tokens of the row that they themselves or some later one do not see
    shift       by how much all its positions are off; None where they are not off by the same amount
    reads_pad   the next token is read at a pad
    reads_early the next token is read at a token that is not the row's last
    rope        as if alone, in a model with RoPE
    learned     as if alone, in a model with learned positions
    """

    pads_seen: int
    unseen: int
    shift: int | None
    reads_pad: bool
    reads_early: bool
    rope: bool
    learned: bool


def from_mask(mask: Sequence[bool]) -> tuple[int, ...]:
    """Positions as they should be: the row's tokens counted from 0; a pad gets 0."""
    counted, found = 0, []
    for here in mask:
        found.append(counted if here else 0)
        counted += bool(here)
    return tuple(found)


def seen(row: Row, query: int) -> list[int]:
    """The columns a query attends to: those the mask shows, up to its own; where it shows none, its own."""
    return [column for column in range(query + 1) if row.mask[column]] or [query]


def look(row: Row) -> Finding:
    """Hold a row against the same tokens alone."""
    own = [column for column, here in enumerate(row.tokens) if here]
    pads, unseen = set(), set()
    for query in own:
        visible = set(seen(row, query))
        pads |= {column for column in visible if not row.tokens[column]}
        unseen |= {column for column in own if column <= query} - visible
    offsets = {row.positions[column] - number for number, column in enumerate(own)}
    shift = offsets.pop() if len(offsets) == 1 else None
    reads_pad = not row.tokens[row.read]
    reads_early = not reads_pad and row.read != own[-1]
    masked = bool(own) and not pads and not unseen and not reads_pad and not reads_early
    return Finding(len(pads), len(unseen), shift, reads_pad, reads_early, masked and shift is not None, masked and shift == 0)


def sentence(row: Row) -> str:
    """What is wrong with a row, in words."""
    found = look(row)
    if not any(row.tokens):
        return "It has no token."
    wrong = []
    if found.reads_pad:
        wrong.append("the next token is read at a pad")
    if found.reads_early:
        wrong.append("the next token is read before the row's end")
    if found.pads_seen:
        wrong.append(f"{_count(found.pads_seen, 'pad')} can be seen")
    if found.unseen:
        wrong.append(f"{_count(found.unseen, 'token')} cannot be seen")
    if found.shift is None:
        wrong.append("distances between its tokens are wrong")
    if wrong:
        return f"Wrong in both kinds of model: {'; '.join(wrong)}."
    if found.shift:
        return f"All positions are off by {found.shift}: with RoPE as if alone, with learned positions wrong."
    return "As if alone, in both kinds of model."


def attends(row: Row, names: Sequence[str]) -> str:
    """What the column that is read attends to, in words: each column's name and its distance in positions."""
    columns = seen(row, row.read)
    listed = ", ".join(names[column] if row.tokens[column] else "pad" for column in columns)
    distances = ", ".join(str(row.positions[row.read] - row.positions[column]) for column in columns)
    return f"Column {row.read} attends to {listed}; distances {distances}.".replace("-", "−")


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
