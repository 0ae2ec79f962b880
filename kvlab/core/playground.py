"""The block manager as a game: a click is a move, words stand for tensors, and one sees what each request reads.

All bookkeeping is `BlockManager`'s. What this adds is the part of a tensor store: a word is written into the slot the manager
gave it, and read from the slot the block table names. A request that reads a word it never had reads somebody else's. The book's
playground runs this in the browser; `board` draws the same picture there and in the built page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from html import escape
from typing import NamedTuple

from kvlab.core.blocks import BlockManager, InvariantError
from kvlab.core.scan import owner_scan
from kvlab.core.trace import Trace

NAMES = ("A", "B", "C", "D")
SECRET = "ABCD-1234"
SYSTEM, SAYS, ASKS = "You are a clerk. Be brief.", f"Password: {SECRET}", "What is my password?"
OTHERS = "others"  # the work that makes the pool forget
DO = ("allocate", "append", "fork", "share_prefix", "free", "evict")

Switch = Callable[[str | None], AbstractContextManager]


class Move(NamedTuple):
    """One move. `words` are for allocate and append, `to` for fork and share_prefix, `count` (tokens) for share_prefix."""

    do: str
    seq: str = ""
    words: str = ""
    to: str = ""
    count: int = 0

    def __str__(self) -> str:
        """As one would call the manager."""
        if self.do in ("allocate", "append"):
            return f'{self.do}({self.seq}, "{self.words}")'
        if self.do == "evict":
            return "evict()"
        count = f", {self.count}" if self.do == "share_prefix" else ""
        return f"{self.do}({self.seq}{f', {self.to}' if self.to else ''}{count})"


class Word(NamedTuple):
    """What a slot holds: a word, and the request that wrote it."""

    text: str
    writer: str


class Read(NamedTuple):
    """One position of a request: the word it has there, the word it reads there, who wrote that, and in which block."""

    own: str
    found: str
    writer: str
    block: int

    @property
    def foreign(self) -> bool:
        """Whether the request reads a word that is not its own."""
        return self.own != self.found


class Game:
    """A pool of `num_blocks` blocks of `block_size` words, and the moves played on it so far.

    `switch(fault)` is entered around every move (`kvlab.faults.fault`); without it no fault can be switched on.
    """

    def __init__(self, num_blocks: int = 8, block_size: int = 4, *, switch: Switch = nullcontext) -> None:
        self.switch, self.fault = switch, None
        self.trace = Trace()
        self.manager = BlockManager(num_blocks, block_size, trace=self.trace)
        self.pool: list[list[Word | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.words: list[str] = []  # a word's place is its token id
        self.moves: list[Move] = []

    def play(self, move: Move) -> str:
        """Make a move; return what happened, in a sentence. What the manager refuses it raises, and nothing has changed."""
        if move.do not in DO:
            raise ValueError(f"do is {move.do!r}; a move is one of {', '.join(DO)}")
        with self.switch(self.fault):
            said = getattr(self, f"_{move.do}")(move)
        self.moves.append(move)
        return said

    # ---- the moves ----------------------------------------------------------------------------------------------------------

    def _allocate(self, move: Move) -> str:
        table, cached = self.manager.allocate(move.seq, self._ids(move.words))
        self._write(move.seq, cached)
        found = f"found {cached} tokens written already, and computed the rest" if cached else "computed all its tokens"
        return f"{move.seq} got the blocks {_listed(table)}, {found}."

    def _append(self, move: Move) -> str:
        start = len(self.manager.tokens(move.seq))
        copies = self.manager.append(move.seq, self._ids(move.words))
        for src, dst in copies:
            self.pool[dst] = list(self.pool[src])
        self._write(move.seq, start)
        copied = "".join(f" Block {src} was shared, so it wrote into a copy, block {dst}." for src, dst in copies)
        return f"{move.seq} wrote {len(self.manager.tokens(move.seq)) - start} more tokens.{copied}"

    def _fork(self, move: Move) -> str:
        self.manager.fork(move.seq, _target(move))
        return f"{move.to} starts as all of {move.seq}, in the same blocks {_listed(self.manager.block_table(move.to))}."

    def _share_prefix(self, move: Move) -> str:
        self.manager.share_prefix(move.seq, _target(move), move.count)
        return f"{move.to} starts with the first {move.count} tokens of {move.seq}, in the same blocks."

    def _free(self, move: Move) -> str:
        self.manager.free(move.seq)
        found = self.manager.num_evictable_blocks
        return f"{move.seq} has ended. {self.manager.num_free_blocks} blocks are free; of these {found} can still be found."

    def _evict(self, move: Move) -> str:
        """Other requests fill the pool to the last block and end. A manager evicts when room is needed, and not before."""
        if not self.manager.num_evictable_blocks:
            raise ValueError("nothing to evict: no free block can be found by its words")
        gone = self.manager.num_evictable_blocks
        self.manager.allocate(OTHERS, self._ids("… " * (self.manager.num_free_blocks * self.manager.block_size)))
        self._write(OTHERS, 0, commit=False)  # no word of theirs is worth finding
        self.manager.free(OTHERS)
        return f"Others filled the pool and left: {gone} blocks were evicted."

    def _ids(self, words: str) -> list[int]:
        known = {word: i for i, word in enumerate(self.words)}
        for word in words.split():
            if word not in known:
                known[word] = len(self.words)
                self.words.append(word)
        return [known[word] for word in words.split()]

    def _write(self, seq: str, start: int, *, commit: bool = True) -> None:
        """The model computes the tokens from `start` on, and writes them where the table says."""
        tokens, table, size = self.manager.tokens(seq), self.manager.block_table(seq), self.manager.block_size
        for position in range(start, len(tokens)):
            self.pool[table[position // size]][position % size] = Word(self.words[tokens[position]], seq)
        if commit:
            self.manager.commit(seq, len(tokens))

    # ---- what came of it ----------------------------------------------------------------------------------------------------

    def reads(self, seq: str) -> list[Read]:
        """What a request finds at each of its positions when it reads the pool through its block table."""
        tokens, table, size = self.manager.tokens(seq), self.manager.block_table(seq), self.manager.block_size
        found = []
        for position, token in enumerate(tokens):
            word = self.pool[table[position // size]][position % size] or Word("", "")
            found.append(Read(self.words[token], word.text, word.writer, table[position // size]))
        return found

    def told(self, seq: str = "B") -> bool:
        """Whether a request reads the password without having it among its own words."""
        return seq in self.manager.sequences and any(r.found == SECRET and r.foreign for r in self.reads(seq))

    def complaints(self) -> list[str]:
        """What `check()` and the owner scan say; nothing for a healthy pool."""
        said = []
        try:
            self.manager.check()
        except InvariantError as error:
            said.append(f"check(): {error}")
        return said + [f"owner scan: {finding}" for finding in owner_scan(self.trace)[-1:]]


def replayed(moves: list[Move], fault: str | None, switch: Switch = nullcontext) -> Game:
    """Play the same moves from an empty pool, with another fault or none. A move that is refused now is left out."""
    game = Game(switch=switch)
    game.fault = fault
    for move in moves:
        try:
            game.play(move)
        except (ValueError, LookupError, RuntimeError):
            continue
    return game


def options(game: Game) -> Iterator[Move]:
    """The moves of the challenge that are possible now: three people, a system prompt, a password, a question."""
    live = [name for name in NAMES[:3] if name in game.manager.sequences]
    for name in NAMES[:3]:
        if name not in live:
            yield Move("allocate", name, SYSTEM)
            yield Move("allocate", name, SAYS if name == "A" else ASKS)
            yield from (Move("fork", other, to=name) for other in live)
        else:
            yield Move("append", name, SAYS if name == "A" else ASKS)
            yield Move("free", name)
    if game.manager.num_evictable_blocks:
        yield Move("evict")


def every_game(length: int, fault: str | None, switch: Switch = nullcontext) -> tuple[int, list[list[Move]]]:
    """Play all games of so many moves; return how many there are, and those after which B reads A's password."""
    count, told = 0, []
    stack: list[list[Move]] = [[]]
    while stack:
        moves = stack.pop()
        game = replayed(moves, fault, switch)
        if len(game.moves) < len(moves):  # a broken manager may refuse what it offered
            continue
        if len(moves) == length:
            count += 1
            if game.told():
                told.append(moves)
        else:
            stack += [[*moves, move] for move in options(game)]
    return count, told


def _target(move: Move) -> str:
    if not move.to:
        raise ValueError(f"to is empty: say which request {move.do} starts")
    return move.to


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


# ---- the picture, as HTML ------------------------------------------------------------------------------------------------------


def board(game: Game) -> str:
    """The pool, the requests with what they read, the moves, and what the checks say: HTML without a script."""
    return _pool(game) + _requests(game) + _verdict(game) + _moves(game)


def _own(name: str) -> str:
    return f"owner-{name.lower()}" if name in NAMES else "owner-none"


def _word(word: Word | None, stale: bool) -> str:
    if word is None:
        return '<span class="kvb-slot" data-empty></span>'
    old = " data-old" if stale else ""
    return f'<span class="kvb-slot {_own(word.writer)}"{old}>{escape(word.text)}</span>'


def _pool(game: Game) -> str:
    cells = []
    used: dict[int, int] = {}  # slots of a block that some request has
    for name in game.manager.sequences:
        size = game.manager.block_size
        for k, i in enumerate(game.manager.block_table(name)):
            used[i] = max(used.get(i, 0), min(size, len(game.manager.tokens(name)) - k * size))
    for i, slots in enumerate(game.pool):
        info = game.manager.block(i)
        holders = [name for name in game.manager.sequences if i in game.manager.block_table(name)]
        if holders or info.ref_count:
            held = " and ".join(holders) or "nobody"
            state, says = "shared" if len(holders) > 1 else "held", f"held by {held}, count {info.ref_count}"
        elif info.block_hash:
            state, says = "found", "free, can be found"
        else:
            state, says = "free", "free"
        full = len(slots) if state == "found" else used.get(i, 0)
        words = "".join(_word(word, k >= full) for k, word in enumerate(slots))
        owner = _own(holders[0]) if len(holders) == 1 else ""
        cells.append(
            f'<li class="kvb-block {owner}" data-state="{state}"><span class="kvb-head"><b>block {i}</b> '
            f'<span>{says}</span></span><span class="kvb-slots">{words}</span></li>'
        )
    return f'<h2 class="kvb-title">The pool</h2><ol class="kvb-pool" start="0">{"".join(cells)}</ol>'


def _reading(read: Read) -> str:
    if not read.foreign:
        return escape(read.found)
    whose = f"{read.writer}’s" if read.writer else "nobody’s"
    return (
        f'<mark class="kvb-foreign">{escape(read.found) or "(nothing)"}</mark>'
        f'<span class="kvb-note"> ({whose}; its own was “{escape(read.own)}”)</span>'
    )


def _requests(game: Game) -> str:
    rows = "".join(
        f'<tr><th scope="row"><span class="{_own(name)}">{escape(name)}</span></th><td>{_listed(game.manager.block_table(name))}</td>'
        f"<td>{len(game.manager.tokens(name))}</td><td>{' '.join(_reading(read) for read in game.reads(name))}</td></tr>"
        for name in game.manager.sequences
    )
    rows = rows or '<tr><td colspan="4">No request lives.</td></tr>'
    return (
        '<h2 class="kvb-title">The requests</h2><div class="pst-scrollable-table-container" tabindex="0" role="region" '
        'aria-label="The requests"><table class="kvb-requests"><thead><tr><th scope="col">request</th><th scope="col">block table</th>'
        f'<th scope="col">tokens</th><th scope="col">what it reads</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _verdict(game: Game) -> str:
    complaints = game.complaints()
    said = "".join(f"<li>{escape(line)}</li>" for line in complaints) or "<li>check(): every rule holds.</li>"
    told = '<p class="kvb-told">B reads A’s password.</p>' if game.told() else ""
    return f'{told}<ul class="kvb-check" data-broken="{str(bool(complaints)).lower()}">{said}</ul>'


def _moves(game: Game) -> str:
    if not game.moves:
        return '<h2 class="kvb-title">Moves</h2><p>None yet.</p>'
    lines = "".join(f"<li><code>{escape(str(move))}</code></li>" for move in game.moves)
    fault = f", with the fault <code>{escape(game.fault)}</code> on" if game.fault else ", no fault on"
    return f'<h2 class="kvb-title">Moves{fault}</h2><ol class="kvb-moves">{lines}</ol>'
