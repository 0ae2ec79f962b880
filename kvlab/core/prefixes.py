"""The prefix index: from the tokens a request begins with to the blocks that hold their K/V already.

Only full blocks are in it, one key each. Keys are chained, key(parent's key, this block's label), because a block's
K/V depends on every token before it, not only on its own. A label is the block's tokens, and what else its K/V depends on: salt
and adapter at block 0, the picture behind a placeholder wherever it stands. The chain carries them on. A key is computed once
and kept: in the `Chain` of a request that waits, then in its sequence, then in the index.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import Struct
from struct import error as does_not_fit
from types import MappingProxyType

Tag = str | int | bytes
"""What a salt, an adapter, or what stands behind a token is named by."""

_TAGS = (str, int, bytes)  # these and no subclass: what is equal must have one key

Extra = Mapping[int, Tag]
"""Position -> what stands behind the token there."""


@dataclass(slots=True, eq=False)
class Chain:
    """The tokens of a request, and the key of each of its full blocks, computed when it is first asked for.

    `BlockManager.chain` makes one. A request that waits keeps it and asks with it again: nothing is hashed twice.

    Its tokens and what stands behind them never change. A request that goes on is another chain (`BlockManager.history`).

    tokens      token ids
    block_size  of the manager it was made by
    domain      who may share it (see `domain_of`)
    extra       position -> what stands behind the token there besides its id, a picture's hash for instance
    """

    tokens: Sequence[int]
    block_size: int
    domain: tuple = ()
    extra: Extra = field(default_factory=dict)
    keys: list[bytes] = field(default_factory=list)
    labels: list[bytes | tuple] = field(default_factory=list)  # what each key is the hash of
    seen: tuple = (None, 0, 0)  # the answer to the last look-up: whose, at which of its changes, and how many hits were held

    def parts(self, num_tokens: int | None = None) -> tuple:
        """Copies of what it is made of, of its first `num_tokens` tokens: what another chain begins with."""
        n = len(self.tokens) if num_tokens is None else num_tokens
        whole, extra = n // self.block_size, {at: what for at, what in self.extra.items() if at < n}
        return list(self.tokens[:n]), self.block_size, self.domain, extra, self.keys[:whole], self.labels[:whole]


class Prefix:
    """A run of full blocks' tokens, from the first token on: those of `parent`, then those in `label`.

    `block` holds the K/V of its last block; None is a hole. `twins` hold the same, computed side by side. `children` counts
    the longer prefixes that hang on it. `rest` goes on to another prefix with the same key: nearly always there is none.
    """

    __slots__ = ("block", "children", "domain", "key", "label", "parent", "rest", "twins")

    def __init__(self, key: bytes, parent: Prefix | None, label: bytes | tuple, domain: tuple, rest: Prefix | None) -> None:
        self.key, self.parent, self.label, self.domain, self.rest = key, parent, label, domain, rest
        self.block: int | None = None
        self.twins: OrderedDict[int, None] | None = None  # oldest first; made for the first of them
        self.children = 0

    @property
    def blocks(self) -> tuple[int, ...]:
        """All blocks that hold it; the first one is found."""
        return () if self.block is None else (self.block, *(self.twins or ()))

    @property
    def tokens(self) -> tuple[int, ...]:
        """The token ids of its last block."""
        packed = self.label if type(self.label) is bytes else self.label[1]
        return packed if type(packed) is tuple else Struct(f"<{len(packed) // 4}I").unpack(packed)

    @property
    def extra(self) -> tuple:
        """What its last block depends on besides its tokens and its parent."""
        return () if type(self.label) is bytes else self.label[0]


def domain_of(salt: Tag | None, adapter: Tag | None) -> tuple:
    """Who may share with whom. Tagged, so that a salt "x" and an adapter "x" are two domains."""
    for name, value in (("salt", salt), ("adapter", adapter)):
        if value is not None and type(value) not in _TAGS:
            raise ValueError(f"{name} must be a str, an int or bytes, or None for none; got {type(value).__name__}")
    return tuple((name, value) for name, value in (("salt", salt), ("adapter", adapter)) if value is not None)


def behind(chain: Chain, k: int) -> tuple:
    """What stands behind the tokens of block `k` besides their ids: pairs of position and name."""
    if not chain.extra:
        return ()
    places = range(k * chain.block_size, (k + 1) * chain.block_size)
    return tuple((at, chain.extra[at]) for at in places if at in chain.extra)


class PrefixIndex:
    """Which prefixes are cached, and in which blocks. It names blocks and never owns one."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.buckets: dict[bytes, Prefix] = {}  # by key; keys that collide are linked through `rest`
        self._pack = Struct(f"<{block_size}I").pack

    def __iter__(self) -> Iterator[Prefix]:
        for prefix in self.buckets.values():
            while prefix is not None:
                yield prefix
                prefix = prefix.rest

    def match(self, chain: Chain, most: int | None = None) -> list[int]:
        """The cached blocks `chain` begins with, `most` at most. The first hole ends the hit, whatever is cached behind it."""
        hits: list[int] = []
        prefix = None
        for k in range(self.most_hits(len(chain.tokens)) if most is None else most):
            prefix = self.find(prefix, chain, k)
            if prefix is None or prefix.block is None:
                break
            hits.append(prefix.block)
        return hits

    def most_hits(self, num_tokens: int) -> int:
        """The last token is never a hit: it has to be computed, or there is no query and there are no logits."""
        return (num_tokens - 1) // self.block_size

    def label(self, chain: Chain, k: int) -> bytes | tuple:
        """What block `k` adds to the chain: its tokens, packed; with what else it depends on, a pair of that and them."""
        start, stop = k * self.block_size, (k + 1) * self.block_size
        tokens = chain.tokens[start:stop]
        try:
            packed = self._pack(*tokens)
        except does_not_fit:  # ids of 2³² and more, as nobody has: right, and larger
            packed = tuple(tokens)
        extra = (() if k else chain.domain) + behind(chain, k)
        return (extra, packed) if extra or type(packed) is tuple else packed

    def key(self, parent: bytes, label: bytes | tuple) -> bytes:
        """The same in every process, unlike `hash`: whoever has the tokens can compute it. `parent`: its key, b"" at block 0."""
        return blake2b(parent + (label if type(label) is bytes else repr(label).encode()), digest_size=16).digest()

    def same(self, prefix: Prefix, parent: Prefix | None, label: bytes | tuple) -> bool:
        """Keys may collide, so the tokens decide. `parent` was found the same way: this covers the whole chain."""
        return prefix.parent is parent and prefix.label == label

    def find(self, parent: Prefix | None, chain: Chain, k: int) -> Prefix | None:
        """The prefix that goes on from `parent` with block `k` of `chain`, if it is known."""
        keys, labels = chain.keys, chain.labels
        while len(keys) <= k:  # each block is hashed here, once
            labels.append(self.label(chain, len(keys)))
            keys.append(self.key(keys[-1] if keys else b"", labels[-1]))
        prefix, label = self.buckets.get(keys[k]), labels[k]
        while prefix is not None and not self.same(prefix, parent, label):
            prefix = prefix.rest
        return prefix

    def add(self, block: int, parent: Prefix | None, chain: Chain, k: int) -> Prefix:
        """Enter `block`, whose K/V is written, as block `k` of `chain`."""
        prefix = self.find(parent, chain, k)
        if prefix is None:
            key = chain.keys[k]
            prefix = self.buckets[key] = Prefix(key, parent, chain.labels[k], chain.domain, self.buckets.get(key))
            if parent is not None:
                parent.children += 1
        if prefix.block is None:
            prefix.block = block
        elif prefix.twins is None:
            prefix.twins = OrderedDict({block: None})
        else:
            prefix.twins[block] = None
        return prefix

    def remove(self, block: int, prefix: Prefix) -> None:
        """Take `block` out. A prefix stays while a block holds it or a longer prefix hangs on it."""
        if prefix.block == block:
            prefix.block = prefix.twins.popitem(last=False)[0] if prefix.twins else None
        elif prefix.twins:
            prefix.twins.pop(block, None)
        while prefix is not None and prefix.block is None and not prefix.children:
            self._unlink(prefix)
            prefix = prefix.parent
            if prefix is not None:
                prefix.children -= 1

    def _unlink(self, prefix: Prefix) -> None:
        before = self.buckets[prefix.key]
        if before is not prefix:
            while before.rest is not prefix:
                before = before.rest
            before.rest = prefix.rest
        elif prefix.rest is not None:
            self.buckets[prefix.key] = prefix.rest
        else:
            del self.buckets[prefix.key]


def chain_of(
    tokens: Iterable[int], block_size: int, *, salt: Tag | None = None, adapter: Tag | None = None, extra: Extra | None = None
) -> Chain:
    """A request's chain. Raises ValueError for what are no token ids, no salt, no adapter, or no extra of these tokens."""
    ids = token_ids(tokens)
    if not ids:
        raise ValueError("tokens is empty; a sequence starts with at least one token")
    return Chain(tuple(ids), block_size, domain_of(salt, adapter), MappingProxyType(extra_of(extra, 0, len(ids))))


def token_ids(tokens: Iterable[int]) -> list[int]:
    """A list of `tokens`. Raises ValueError for anything that is no id."""
    try:
        ids = list(tokens)
    except TypeError:
        raise ValueError(f"tokens must be a list of token ids, not {type(tokens).__name__}") from None
    for t in ids:
        if type(t) is not int or t < 0:
            raise ValueError(f"tokens holds {t!r}; ids are ints of 0 and more (of a tensor or array pass .tolist())")
    return ids


def extra_of(extra: Extra | None, start: int, stop: int) -> dict[int, Tag]:
    """A copy of `extra`, whose positions must lie in start..stop − 1."""
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise ValueError(f"extra must map positions to what stands there, as in {{33: 'hash'}}, not {type(extra).__name__}")
    for at, what in extra.items():
        if type(at) is not int or not start <= at < stop:
            raise ValueError(f"extra names position {at!r}; these tokens stand at {start} to {stop - 1}")
        if type(what) not in _TAGS:
            raise ValueError(f"extra at {at} must be a str, an int or bytes, not {type(what).__name__}")
    return dict(extra)


def block_hashes(tokens: Iterable[int], block_size: int = 16, **domain) -> list[str]:
    """The keys of the full blocks of `tokens`, as `BlockInfo.block_hash` shows them: what an index kept elsewhere looks up.

    `domain`: salt, adapter and extra, as in `BlockManager.allocate`.
    """
    if type(block_size) is not int or block_size < 1:
        raise ValueError(f"block_size must be an int of at least 1, not {block_size!r}")
    chain = chain_of(tokens, block_size, **domain)
    whole = len(chain.tokens) // block_size
    if whole:
        PrefixIndex(block_size).find(None, chain, whole - 1)
    return [key.hex() for key in chain.keys]
