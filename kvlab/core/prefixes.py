"""The prefix index: from the tokens a request begins with to the blocks that hold their K/V already.

Only full blocks are in it, one key each. Keys are chained, key(parent's key, this block's tokens), because a block's
K/V depends on every token before it, not only on its own. Salt and adapter enter at block 0; the chain carries them on.
"""

from __future__ import annotations

from hashlib import blake2b


class Prefix:
    """A run of full blocks' tokens, from the first token on: those of `parent`, then those in `label`.

    `blocks` hold the K/V of its last block: none (a hole), one, or several that were computed side by side.
    `children` counts the longer prefixes that hang on it.
    """

    __slots__ = ("blocks", "children", "key", "label", "parent")

    def __init__(self, key: bytes, parent: Prefix | None, label: tuple) -> None:
        self.key, self.parent, self.label = key, parent, label
        self.blocks: dict[int, None] = {}  # a dict for its order: of equal blocks the oldest is found
        self.children = 0


def domain_of(salt: str | int | bytes | None, adapter: str | int | bytes | None) -> tuple:
    """Who may share with whom. Tagged, so that a salt "x" and an adapter "x" are two domains."""
    for name, value in (("salt", salt), ("adapter", adapter)):
        if value is not None and not isinstance(value, str | int | bytes):
            raise ValueError(f"{name} must be a str, an int or bytes, or None for none; got {type(value).__name__}")
    return tuple((name, value) for name, value in (("salt", salt), ("adapter", adapter)) if value is not None)


class PrefixIndex:
    """Which prefixes are cached, and in which blocks. It names blocks and never owns one."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.buckets: dict[bytes, list[Prefix]] = {}  # a bucket has one entry unless keys collide

    def match(self, tokens: list[int], domain: tuple) -> list[int]:
        """The cached blocks `tokens` begins with. The first hole ends the hit, whatever is cached behind it."""
        hits: list[int] = []
        prefix = None
        for k in range(self.most_hits(len(tokens))):
            prefix = self.find(prefix, self.label(tokens, k, domain))
            if prefix is None or not prefix.blocks:
                break
            hits.append(next(iter(prefix.blocks)))
        return hits

    def most_hits(self, num_tokens: int) -> int:
        """The last token is never a hit: it has to be computed, or there is no query and there are no logits."""
        return (num_tokens - 1) // self.block_size

    def label(self, tokens: list[int], k: int, domain: tuple) -> tuple:
        """What block `k` adds to the chain."""
        return (domain if k == 0 else (), tuple(tokens[k * self.block_size : (k + 1) * self.block_size]))

    def key(self, parent: Prefix | None, label: tuple) -> bytes:
        """The same in every process, unlike `hash`: whoever has the tokens can compute it."""
        return blake2b((parent.key if parent else b"") + repr(label).encode(), digest_size=16).digest()

    def same(self, prefix: Prefix, parent: Prefix | None, label: tuple) -> bool:
        """Keys may collide, so the tokens decide. `parent` was found the same way: this covers the whole chain."""
        return prefix.parent is parent and prefix.label == label

    def find(self, parent: Prefix | None, label: tuple) -> Prefix | None:
        """The prefix that goes on from `parent` with `label`, if it is known."""
        bucket = self.buckets.get(self.key(parent, label), ())
        return next((p for p in bucket if self.same(p, parent, label)), None)

    def add(self, block: int, parent: Prefix | None, label: tuple) -> Prefix:
        """Enter `block`, whose K/V is written."""
        prefix = self.find(parent, label)
        if prefix is None:
            prefix = Prefix(self.key(parent, label), parent, label)
            self.buckets.setdefault(prefix.key, []).append(prefix)
            if parent is not None:
                parent.children += 1
        prefix.blocks[block] = None
        return prefix

    def remove(self, block: int, prefix: Prefix | None) -> None:
        """Take `block` out. A prefix stays while a block holds it or a longer prefix hangs on it."""
        prefix.blocks.pop(block, None)
        while prefix is not None and not prefix.blocks and not prefix.children:
            bucket = self.buckets[prefix.key]
            bucket.remove(prefix)
            if not bucket:
                del self.buckets[prefix.key]
            prefix = prefix.parent
            if prefix is not None:
                prefix.children -= 1
