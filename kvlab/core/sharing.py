"""How many tokens two prompts may share, and why not more: the sharing policy as something that runs.

The K/V of a token depends on the weights, on its position, and on every token before it. So only a common beginning can be
shared, in whole blocks, between prompts of one domain (weights, adapter, salt), and never the last token of a request.
`share` says the same as `BlockManager.allocate`, and gives its reasons; a test keeps the two together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import NamedTuple

from kvlab.core.prefixes import domain_of


@dataclass(frozen=True)
class Prompt:
    """A prompt's token ids, and what decides who may read its K/V: the weights it was computed with, adapter and salt."""

    tokens: Sequence[int]
    model: str | None = None
    adapter: str | None = None
    salt: str | None = None


class Limit(NamedTuple):
    """A reason not to share: which `rule` of the policy, how many tokens it `costs`, and why in words."""

    rule: str
    costs: int
    why: str


class Overlap(NamedTuple):
    """`length` equal tokens that begin at `first` in one prompt and at `second` in the other."""

    first: int
    second: int
    length: int


class Check(NamedTuple):
    """One line of the checklist: the rule, whether these prompts keep it, and what was found."""

    rule: str
    kept: bool
    found: str


@dataclass(frozen=True)
class Sharing:
    """What the second prompt may read of the first one's K/V.

    length      tokens of the second prompt
    common      leading tokens the two have in common, whatever the rules say
    tokens      tokens it may share; `length - tokens` are left to compute
    limits      why not more: the costs add up to `length - tokens`
    overlap     the longest equal run behind the common beginning, of a block or more: what looks shareable and is not
    block_size  tokens in a block
    """

    length: int
    common: int
    tokens: int
    limits: tuple[Limit, ...]
    overlap: Overlap | None
    block_size: int

    @property
    def blocks(self) -> int:
        """Blocks the two prompts share."""
        return self.tokens // self.block_size

    @property
    def computed(self) -> int:
        """Tokens the second prompt has to compute."""
        return self.length - self.tokens


def share(first: Prompt, second: Prompt, block_size: int = 16) -> Sharing:
    """How many tokens of `second` may be read from the K/V that `first` has written, and why not more.

    Raises ValueError for an empty prompt, ids that are no ints, or a block size below 1.
    """
    a, b = _ids("first", first), _ids("second", second)
    if type(block_size) is not int or block_size < 1:
        raise ValueError(f"block_size must be an int of at least 1, not {block_size!r}")
    common = common_prefix(a, b)
    whole = common // block_size * block_size
    allowed = min(whole, (len(b) - 1) // block_size * block_size)
    limits = []
    apart = _apart(first, second)
    if apart:
        limits.append(Limit("domain", len(b), apart))
        allowed = 0
    else:
        if common < len(b):
            limits.append(Limit("tokens", len(b) - common, _where_they_part(a, b, common)))
        if whole < common:
            why = f"only whole blocks of {block_size} are shared, and {common} equal tokens fill {whole // block_size} of them"
            limits.append(Limit("whole blocks", common - whole, why))
        if allowed < whole:
            why = "the last token has to be computed, or there is no query and there are no logits; its block goes with it"
            limits.append(Limit("last token", whole - allowed, why))
    return Sharing(len(b), common, allowed, tuple(limits), _overlap(a, b, common, block_size), block_size)


def checklist(first: Prompt, second: Prompt, block_size: int = 16) -> list[Check]:
    """The policy's rules, one by one, for two prompts that are meant to share their beginning."""
    found = share(first, second, block_size)
    apart, rest, overlap = _apart(first, second), found.common % block_size, found.overlap
    return [
        Check("one domain", not apart, apart or "same weights, adapter and salt"),
        Check(
            "longer than a block",
            found.common >= block_size,
            f"{found.common} tokens are common; a block has {block_size}",
        ),
        Check(
            "what changes comes last",
            overlap is None,
            "nothing equal follows the first difference"
            if overlap is None
            else f"{overlap.length} equal tokens follow the first difference, at {_places(overlap)}: move what changes behind them",
        ),
        Check(
            "aligned to the block size",
            rest == 0,
            f"the common part fills {found.common // block_size} of its blocks"
            + (f"; every request computes the {rest} tokens behind them again: fill up to {block_size}" if rest else ""),
        ),
    ]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens `a` and `b` have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _ids(name: str, prompt: Prompt) -> list[int]:
    ids = list(prompt.tokens)
    if not ids or any(type(t) is not int for t in ids):
        raise ValueError(f"{name} must have token ids, one int or more (of a tensor or array pass .tolist())")
    domain_of(prompt.salt, prompt.adapter)  # raises for what is neither text nor number
    return ids


def _apart(first: Prompt, second: Prompt) -> str:
    """Why the two may share nothing whatever their tokens are; empty when they may."""
    names = (("model", "weights"), ("adapter", "adapters"), ("salt", "salts"))
    different = [word for field, word in names if getattr(first, field) != getattr(second, field)]
    return f"other {' and other '.join(different)}: equal tokens, other K/V or another tenant" if different else ""


def _where_they_part(a: list[int], b: list[int], common: int) -> str:
    if common == len(a):
        return f"the first prompt ends at position {common}"
    return f"the tokens differ at position {common} ({a[common]} against {b[common]}); every K/V from there on depends on it"


def _overlap(a: list[int], b: list[int], common: int, block_size: int) -> Overlap | None:
    match = SequenceMatcher(None, a, b[common:], autojunk=False).find_longest_match()
    return Overlap(match.a, common + match.b, match.size) if match.size >= block_size else None


def _places(overlap: Overlap) -> str:
    if overlap.first == overlap.second:
        return f"position {overlap.first} of both"
    return f"position {overlap.first} of the first and {overlap.second} of the second"
