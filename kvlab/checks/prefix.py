"""Checks of lab 6, sharing a prefix."""

from __future__ import annotations

from hashlib import blake2b

from kvlab.checks import Exercise, Mistake
from kvlab.core.sharing import Prompt, common_prefix, share


def key(parent: str | None, tokens: list[int], salt: str | None = None) -> str:
    """The key of a block: of its parent's key (None for the first block), its tokens, and a salt (None for no salt)."""
    return blake2b(repr((parent, list(tokens), salt)).encode(), digest_size=8).hexdigest()


# --- exercise 1: the chain ---------------------------------------------------------------------------------------------


def block_keys(tokens: list[int], block_size: int, salt: str | None = None) -> list[str]:
    """One key for each full block of `tokens`, chained; the salt enters at the first block."""
    keys: list[str] = []
    for begin in range(0, len(tokens) - block_size + 1, block_size):
        first = not keys
        keys.append(key(None if first else keys[-1], tokens[begin : begin + block_size], salt if first else None))
    return keys


def _blocks(tokens, size):
    return [tokens[at : at + size] for at in range(0, len(tokens) - size + 1, size)]


def _with_partial(tokens, block_size, salt=None):
    keys = []
    for at in range(0, len(tokens), block_size):
        keys.append(key(keys[-1] if keys else None, tokens[at : at + block_size], None if keys else salt))
    return keys


def _salt_everywhere(tokens, block_size, salt=None):
    keys = []
    for block in _blocks(tokens, block_size):
        keys.append(key(keys[-1] if keys else None, block, salt))
    return keys


def _every_start(tokens, block_size, salt=None):
    keys = []
    for at in range(len(tokens) - block_size + 1):
        keys.append(key(keys[-1] if keys else None, tokens[at : at + block_size], None if keys else salt))
    return keys


def _whole_history(tokens, block_size, salt=None):
    return [key(None, tokens[: at + block_size], salt) for at in range(0, len(tokens) - block_size + 1, block_size)]


BLOCK_KEYS = Exercise(
    1,
    "block_keys",
    block_keys,
    cases=(
        ([5, 6, 7, 8], 2),
        ([5, 6, 7, 8, 9], 2),
        ([5, 6, 5, 6, 5, 6], 2, "tenant-1"),
        ([5, 6, 5, 6, 5, 6], 2, None),
        ([1, 2, 3], 4),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], 4, "x"),
        ([1, 2, 3], 1, "x"),
        ([0, 0, 0, 0, 0], 2),
        ([], 4),
    ),
    mistakes=(
        Mistake(
            "The keys are not chained: equal tokens get equal keys wherever they stand. A block's K/V depends on all tokens "
            "before it, so its key must contain its parent's key.",
            lambda tokens, block_size, salt=None: [
                key(None, block, None if n else salt) for n, block in enumerate(_blocks(tokens, block_size))
            ],
        ),
        Mistake(
            "The salt is left out. Two tenants with equal prompts would find each other's blocks.",
            lambda tokens, block_size, salt=None: block_keys(tokens, block_size),
        ),
        Mistake(
            "The last block gets a key although it is not full. It will be written again, and its key would be wrong.",
            _with_partial,
        ),
        Mistake(
            "The salt goes into every block. It does no harm, but the chain carries it already: give it to the first block only.",
            _salt_everywhere,
        ),
        Mistake(
            "It makes a key at every token. Blocks lie side by side: step by block_size.",
            _every_start,
        ),
        Mistake(
            "It hashes the whole history for every block. That is right in what it tells apart, and quadratic: use the parent's key.",
            _whole_history,
        ),
        Mistake(
            "It gives only the last key. Asked for is one key for each full block: any of them may be where a hit ends.",
            lambda tokens, block_size, salt=None: (block_keys(tokens, block_size, salt) or [None])[-1],
        ),
    ),
)


# --- exercise 2: the hit -----------------------------------------------------------------------------------------------


def find_prefix(keys: list[str], index: dict[str, int], num_tokens: int, block_size: int) -> list[int]:
    """The cached blocks a prompt of `num_tokens` tokens may begin with: up to the first hole, and never its last token."""
    found: list[int] = []
    for k in keys[: (num_tokens - 1) // block_size]:
        if k not in index:
            break
        found.append(index[k])
    return found


def _to_the_end(keys, index, num_tokens, block_size):
    return find_prefix(keys, index, num_tokens + 1, block_size)


def _over_holes(keys, index, num_tokens, block_size):
    return [index[k] for k in keys[: (num_tokens - 1) // block_size] if k in index]


def _always_one_less(keys, index, num_tokens, block_size):
    return find_prefix(keys, index, num_tokens, block_size)[:-1]


def _last_one_found(keys, index, num_tokens, block_size):
    """The longest run that ends in a cached block, holes filled with whatever."""
    keys = keys[: (num_tokens - 1) // block_size]
    last = max((n for n, k in enumerate(keys) if k in index), default=-1)
    return [index.get(k) for k in keys[: last + 1]]


def _all_or_nothing(keys, index, num_tokens, block_size):
    keys = keys[: (num_tokens - 1) // block_size]
    return [index[k] for k in keys] if all(k in index for k in keys) else []


_K = block_keys(list(range(40)), 4)  # ten keys of blocks of 4

FIND_PREFIX = Exercise(
    2,
    "find_prefix",
    find_prefix,
    cases=(
        (_K[:3], {_K[0]: 7, _K[1]: 3}, 13, 4),
        (_K[:3], {_K[0]: 7, _K[1]: 3, _K[2]: 5}, 13, 4),
        (_K[:3], {_K[0]: 7, _K[1]: 3, _K[2]: 5}, 12, 4),
        (_K[:4], {_K[0]: 7, _K[2]: 5, _K[3]: 1}, 17, 4),
        (_K[:4], {_K[1]: 3, _K[2]: 5}, 17, 4),
        (_K[:1], {_K[0]: 0}, 4, 4),
        (_K[:1], {_K[0]: 0}, 5, 4),
        ([], {_K[0]: 0}, 3, 4),
        (_K[:3], {}, 13, 4),
        (_K[:5], {k: 9 - n for n, k in enumerate(_K)}, 20, 4),
        (_K[:5], {k: 9 - n for n, k in enumerate(_K)}, 23, 4),
    ),
    mistakes=(
        Mistake(
            "It shares the whole prompt when all of it is cached. Then there is nothing to compute, no query and no logits: leave at "
            "least the last token, and with it its block.",
            _to_the_end,
        ),
        Mistake(
            "It goes past a hole. A block behind a missing one would be read at the missing one's place.",
            _over_holes,
        ),
        Mistake(
            "It always drops the last block found. Only a hit that would reach the last token has to be cut.", _always_one_less
        ),
        Mistake(
            "It looks for the last cached block and takes everything before it. The first hole ends the hit.", _last_one_found
        ),
        Mistake("It shares all or nothing. Whatever is cached in front of the first hole can be used.", _all_or_nothing),
        Mistake(
            "It gives how many blocks are found. Asked for are the blocks: they go into the request's table.",
            lambda keys, index, num_tokens, block_size: len(find_prefix(keys, index, num_tokens, block_size)),
        ),
    ),
)


# --- exercise 3: where the suffix stands -------------------------------------------------------------------------------


def suffix_positions(num_tokens: int, num_cached: int) -> list[int]:
    """Positions of the tokens that are left to compute."""
    return list(range(num_cached, num_tokens))


SUFFIX_POSITIONS = Exercise(
    3,
    "suffix_positions",
    suffix_positions,
    cases=((20, 16), (544, 512), (5, 0), (17, 16), (33, 16)),
    mistakes=(
        Mistake(
            "It begins at 0. The suffix stands behind the prefix: its first token is at position num_cached.",
            lambda num_tokens, num_cached: list(range(num_tokens - num_cached)),
        ),
        Mistake(
            "It begins one too late. Positions count from 0, so after 16 cached tokens the next one stands at 16.",
            lambda num_tokens, num_cached: list(range(num_cached + 1, num_tokens + 1)),
        ),
        Mistake(
            "It begins one too early. Position num_cached − 1 is that of the last cached token.",
            lambda num_tokens, num_cached: list(range(num_cached - 1, num_tokens - 1)),
        ),
        Mistake(
            "It gives every token's position. Only the tokens that are not cached are fed.",
            lambda num_tokens, num_cached: list(range(num_tokens)),
        ),
        Mistake(
            "It gives only where the suffix begins. Asked for is a position for each of its tokens.",
            lambda num_tokens, num_cached: num_cached,
        ),
    ),
)


# --- exercise 4: the policy --------------------------------------------------------------------------------------------


def shareable(first: list[int], second: list[int], block_size: int, same_salt: bool = True) -> int:
    """How many tokens of `second` may be read from what `first` has written."""
    salts = ("x", "x") if same_salt else ("x", "y")
    return share(Prompt(first, salt=salts[0]), Prompt(second, salt=salts[1]), block_size).tokens


def _ceil(first, second, block_size, same_salt=True):
    common = common_prefix(first, second)
    return min(-(-common // block_size) * block_size, (len(second) - 1) // block_size * block_size) * same_salt


def _anywhere(first, second, block_size, same_salt=True):
    equal = sum(a == b for a, b in zip(first, second))
    return min(equal // block_size * block_size, (len(second) - 1) // block_size * block_size) * same_salt


def _as_a_set(first, second, block_size, same_salt=True):
    common = len(set(first) & set(second))
    return min(common // block_size * block_size, (len(second) - 1) // block_size * block_size) * same_salt


SHAREABLE = Exercise(
    4,
    "shareable",
    shareable,
    cases=(
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9], 2),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 5, 6], 2),
        ([1, 2, 3, 4], [1, 2, 3, 4], 2),
        ([1, 2, 3, 4], [1, 2, 3, 4, 5], 2),
        ([1, 2, 3, 4], [1, 2, 3, 4, 5], 2, False),
        ([7, 1, 2, 3, 4], [1, 2, 3, 4, 5], 2),
        ([1, 2, 3], [1, 2, 3, 4, 5], 2),
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6], 4),
        ([5], [5], 1),
        ([49000, 300, 7, 8], [int("49000"), int("300"), 7, 9], 2),  # equal ids that are not the same object
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 4),
        ([2, 1, 4, 3, 6, 5], [1, 2, 3, 4, 5, 6, 7], 2),
        ([1, 2], [3, 4, 5], 2),
    ),
    mistakes=(
        Mistake(
            "It does not round down to whole blocks: only full blocks are shared.",
            lambda first, second, block_size, same_salt=True: min(common_prefix(first, second), len(second) - 1) * same_salt,
        ),
        Mistake("It rounds up: the block in which the prompts part would be shared, with the other one's tokens in it.", _ceil),
        Mistake(
            "It shares all of a prompt that is cached whole. At least the last token must be computed.",
            lambda first, second, block_size, same_salt=True: (
                common_prefix(first, second) // block_size * block_size * same_salt
            ),
        ),
        Mistake("It counts equal tokens behind the first difference. The reuse ends there.", _anywhere),
        Mistake("It counts common tokens wherever they stand. Order and place decide.", _as_a_set),
        Mistake(
            "It shares across salts.",
            lambda first, second, block_size, same_salt=True: shareable(first, second, block_size),
        ),
        Mistake(
            "It gives blocks. Asked for are tokens.",
            lambda first, second, block_size, same_salt=True: shareable(first, second, block_size, same_salt) // block_size,
        ),
    ),
)

EXERCISES = (BLOCK_KEYS, FIND_PREFIX, SUFFIX_POSITIONS, SHAREABLE)
