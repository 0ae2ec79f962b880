"""The audit behind `BlockManager.check()`: every rule the bookkeeping must keep, and the words for a broken one.

It trusts no counter: what it compares against, it counts again from the tables. `m` is the manager throughout; its class imports
this module, so this one does not import it.
"""

from collections import Counter

from kvlab.core.prefixes import behind as behind_of


class InvariantError(RuntimeError):
    """The bookkeeping contradicts itself. `rule` names the broken rule."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


def audit(m) -> None:
    """Raise InvariantError for the first broken rule: tables, references, owners, pool, eviction, index, contents."""
    _tables(m)
    _references(m)
    _pool(m)
    _index(m)
    _contents(m)


def _must(rule: str, holds: object, detail: str) -> None:
    if not holds:
        raise InvariantError(rule, detail)


def _tables(m) -> None:
    for name, s in m._sequences.items():
        _must(
            "tables",
            len(s.table) == -(-len(s.tokens) // m.block_size),
            f"{name!r}: {len(s.table)} blocks for {len(s.tokens)} tokens",
        )
        _must("tables", len(set(s.table)) == len(s.table), f"{name!r} names a block twice: {s.table}")
        _must("tables", all(0 <= i < len(m._blocks) for i in s.table), f"{name!r} names a block outside the pool")
        _must("tables", 0 <= s.written <= len(s.tokens), f"{name!r}: {s.written} of {len(s.tokens)} tokens are written")
        labels = [m._index.label(s, k) for k in range(len(s.keys))]
        _must("keys", labels == s.labels, f"{name!r} keeps keys of tokens that it does not have")


def _references(m) -> None:
    named = Counter(i for s in m._sequences.values() for i in s.table)
    owners: dict[int, Counter] = {}
    for s in m._sequences.values():
        for i in s.table:
            owners.setdefault(i, Counter())[s.owner] += 1
    for name, (table, _) in m._pins.items():
        for i in table:
            named[i] += 1
            owners.setdefault(i, Counter())["pin", name] += 1
    for i, block in enumerate(m._blocks):
        _must("references", block.ref_count == named[i], f"block {i} counts {block.ref_count}, {named[i]} tables name it")
        _must("owners", block.owners == owners.get(i, {}), f"block {i} is tagged {block.owners}, held by {owners.get(i)}")


def _pool(m) -> None:
    blank, evictable = set(m._blank), set(m._evictable)
    held = {i for s in m._sequences.values() for i in s.table} | {i for table, _ in m._pins.values() for i in table}
    _must("pool", len(blank) == len(m._blank), "a block is in the free list twice: it was freed twice")
    _must(
        "pool",
        not blank & evictable and not held & (blank | evictable),
        "a block is free and held, or free in two lists",
    )
    _must("pool", blank | evictable | held == set(range(len(m._blocks))), "a block is neither free nor held: it leaked")
    _must("pool", len(m._blocks) <= m.num_blocks, f"{len(m._blocks)} blocks in a pool of {m.num_blocks}")
    _must("pool", m.num_free_blocks + len(held) == m.num_blocks, "free + held is not the pool")
    last = [m._blocks[i].last_access for i in m._evictable]
    _must("eviction", last == sorted(last), "the blocks to evict are not in order of their last use")
    for i in blank:
        _must("eviction", m._blocks[i].prefix is None, f"block {i} is free as blank, but it can be found")
    for i in evictable:
        _must("eviction", m._blocks[i].prefix is not None, f"block {i} waits to be evicted, but it cannot be found")


def _index(m) -> None:
    known = list(m._index)
    there = set(map(id, known))
    entered = {i: p for p in known for i in p.blocks}
    _must("index", len(entered) == sum(len(p.blocks) for p in known), "a block can be found by two prefixes")
    for i, block in enumerate(m._blocks):
        _must("index", block.prefix is entered.get(i), f"block {i} and the index disagree on what it holds")
    children = Counter(id(p.parent) for p in known if p.parent is not None)
    for key, p in m._index.buckets.items():
        while p is not None:
            _must("index", p.key == key and p.children == children[id(p)], "a prefix is filed under a wrong key or count")
            _must("index", len(p.tokens) == m.block_size, "a block can be found that is not full")
            _must("index", p.blocks or p.children, "a prefix is kept that no block holds and nothing hangs on")
            _must("index", p.parent is None or id(p.parent) in there, "a prefix lost its parent")
            p = p.rest


def _contents(m) -> None:
    """A block has one content: all who name it agree on it, from the first token on, and so does the index.

    Walks the tables by column, so that "the same so far" is one comparison with the column before.
    """
    bs = m.block_size
    meaning: dict[int, tuple] = {}  # block -> (what leads to it, its tokens, a sequence that says so)
    for name, s in m._sequences.items():
        lead: object = s.domain
        for k, i in enumerate(s.table):
            chunk = s.tokens[k * bs : (k + 1) * bs]
            behind = behind_of(s, k)
            lead_before, other, behind_before, who = meaning.get(i, (lead, chunk, behind, name))
            overlap = min(len(chunk), len(other))
            agree = lead == lead_before and chunk[:overlap] == other[:overlap]
            agree = agree and _below(k * bs + overlap, behind) == _below(k * bs + overlap, behind_before)
            _must("contents", agree, f"block {i} holds other tokens for {name!r} than for {who!r}: written without a copy")
            longest = (chunk, behind) if len(chunk) > len(other) else (other, behind_before)
            meaning[i] = (lead, *longest, name)
            prefix = m._blocks[i].prefix
            if prefix is not None:
                agree = prefix.domain == s.domain and list(prefix.tokens[: len(chunk)]) == chunk
                agree = agree and _below(len(s.tokens), prefix.extra) == (() if k else s.domain) + behind
                _must("contents", agree, f"block {i} can be found by tokens that {name!r} does not have there")
                parent = m._blocks[s.table[k - 1]].prefix if k else None
                _must("contents", prefix.parent is parent, f"block {i} can be found by a history {name!r} does not have")
            if s.publish and s.written >= (k + 1) * bs:
                _must("contents", prefix is not None, f"block {i} of {name!r} is full and written, but cannot be found")
            lead = hash((lead, tuple(chunk), behind))


def _below(stop: int, extra: tuple) -> tuple:
    """Those of `extra` that stand at no token (salt, adapter) or at one before `stop`."""
    return tuple(entry for entry in extra if type(entry[0]) is str or entry[0] < stop)
