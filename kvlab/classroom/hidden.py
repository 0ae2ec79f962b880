"""Cases that the notebook does not show: one generator for each exercise, drawn from a secret of the teacher's.

A generator takes a `random.Random` and gives one argument tuple. It may be read by anybody; the cases it will give cannot be
known without the secret. Whatever the exercise's own answer refuses, or the notebook shows already, is drawn again.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

from kvlab.checks import Exercise, same

COUNT = 24
DRAWS: dict[tuple[str, str], Callable[[random.Random], tuple]] = {}

# What an answer may import from the course, by lab; everything else of it is not there while grading.
LENDS = {
    "blocks": ("kvlab.core.blocks.OutOfBlocks",),
    "ledger": ("kvlab.core.spec.ModelSpec",),
    "prefix": ("kvlab.checks.prefix.key",),
}


def lends(lab: str) -> tuple[str, ...]:
    """The names of `LENDS` for "05-blocks"."""
    return LENDS.get(lab.partition("-")[2], ())


def draws(lab: str, name: str) -> Callable:
    """Register the generator of an exercise."""

    def register(draw: Callable) -> Callable:
        DRAWS[lab, name] = draw
        return draw

    return register


def cases(lab: str, exercise: Exercise, secret: str, count: int = COUNT) -> tuple[tuple, ...]:
    """`count` cases for the exercise of "05-blocks", the same for the same secret. Raises LookupError without a generator."""
    key = lab.partition("-")[2], exercise.name
    if key not in DRAWS:
        raise LookupError(
            f"there are no hidden cases for {exercise.name} of {lab}: write a generator in kvlab/classroom/hidden.py"
        )
    rng = random.Random(f"{secret}/{lab}/{exercise.name}")
    found: list[tuple] = []
    for _ in range(60 * count):
        case = DRAWS[key](rng)
        if _computable(exercise, case) and not any(same(_plain(case), _plain(other)) for other in (*exercise.cases, *found)):
            found.append(case)
        if len(found) == count:
            return tuple(found)
    raise LookupError(f"the generator of {exercise.name} gives only {len(found)} different cases of {count}")


def _computable(exercise: Exercise, case: tuple) -> bool:
    from kvlab.core.blocks import OutOfBlocks

    try:
        exercise.right(*copy.deepcopy(case))
    except OutOfBlocks:  # is what some cases are about
        return True
    except Exception:
        return False
    return True


def _plain(case: tuple) -> list:
    """A case that `same` can compare: objects by their fields."""
    return [vars(item) if hasattr(item, "__dict__") and not hasattr(item, "shape") else item for item in case]


# ---- lab 1 -----------------------------------------------------------------------------------------------------------


def _normal(rng: random.Random, *shape: int) -> Any:
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(rng.getrandbits(40)))


def _seen(rng: random.Random, queries: int, keys: int) -> Any:
    """A mask, bool [queries, keys], in which each query sees something."""
    mask = _normal(rng, queries, keys) > 0
    mask[:, rng.randrange(keys)] |= ~mask.any(-1)
    return mask


@draws("attention", "attend")
def _attend(rng):
    queries, keys, dim = rng.randint(1, 5), rng.randint(2, 6), rng.choice((2, 4, 8, 16))
    front = rng.choice(((), (), (2,), (3,)))
    size = rng.choice((1.0, 1.0, 2.0))
    q, k = size * _normal(rng, *front, queries, dim), _normal(rng, *front, keys, dim)
    return q, k, _normal(rng, *front, keys, rng.choice((dim, dim + 2))), _seen(rng, queries, keys)


@draws("attention", "causal_mask")
def _causal_mask(rng):
    return rng.randint(1, 9), rng.randint(0, 12)


@draws("attention", "repeat_heads")
def _repeat_heads(rng):
    return _normal(rng, rng.randint(1, 4), rng.randint(2, 5), rng.choice((2, 4, 8))), rng.randint(1, 4)


@draws("attention", "rotate")
def _rotate(rng):
    import torch

    tokens = rng.randint(1, 5)
    positions = torch.tensor([rng.randint(0, 7) for _ in range(tokens)])
    return _normal(rng, rng.randint(1, 3), tokens, rng.choice((4, 8, 16))), positions, rng.choice((10.0, 50.0, 100.0, 500.0))


@draws("attention", "decode_step")
def _decode_step(rng):
    kv_heads, groups, past, dim = rng.randint(1, 3), rng.randint(1, 4), rng.choice((0, 1, 2, 3, 5, 8)), rng.choice((4, 8))
    heads = kv_heads * groups
    shapes = ((heads, 1), (kv_heads, 1), (kv_heads, 1), (kv_heads, past), (kv_heads, past))
    return tuple(_normal(rng, *shape, dim) for shape in shapes)


# ---- lab 2 -----------------------------------------------------------------------------------------------------------


@draws("ledger", "token_bytes")
def _token_bytes(rng):
    from kvlab.core.spec import ModelSpec

    kv_heads = rng.choice((1, 2, 3, 4, 8))
    heads = kv_heads * rng.choice((1, 2, 3, 4))
    layers, head_dim = rng.randint(2, 64), rng.choice((32, 64, 80, 96, 128, 192))
    return ModelSpec("m", layers, heads, kv_heads, head_dim, "float16", "rope", 4096, 32000), rng.choice((2, 4, 8, 16, 32))


@draws("ledger", "packed_bytes")
def _packed_bytes(rng):
    return 8 * rng.randint(2, 40), rng.choice((2, 4, 8)), rng.choice((16, 32, 48, 64, 128)), rng.choice((8, 16, 32))


@draws("ledger", "slots")
def _slots(rng):
    return rng.randint(1, 300), rng.choice((1, 4, 5, 8, 16, 32)), rng.choice((None, rng.randint(5, 200))), rng.randint(1, 5)


@draws("ledger", "max_batch")
def _max_batch(rng):
    gib = 1 << 30
    while True:
        case = (
            rng.choice((8, 12, 16, 24, 40, 48, 80)),
            rng.choice((0.8, 0.85, 0.9, 0.95, 1.0)),
            rng.randint(1, 20) * 10**9 + rng.randrange(10**6),
            rng.choice((0, gib // 2, gib, 3 * gib)),
            rng.randint(50, 3000) * 10**6,
        )
        fits = (case[0] * gib * case[1] - case[2] - case[3]) / case[4]
        if 0.05 < fits % 1 < 0.95:  # away from where the order of the arithmetic decides
            return case


# ---- lab 3 -----------------------------------------------------------------------------------------------------------


@draws("password", "first_difference")
def _first_difference(rng):
    common = [rng.randint(0, 49151) for _ in range(rng.randint(0, 9))]
    ends = [[rng.randint(0, 49151) for _ in range(rng.choice((0, 0, 1, 3, 5)))] for _ in range(2)]
    if rng.random() < 0.2:
        ends[1] = list(ends[0])
    elif all(ends) and rng.random() < 0.5:
        ends[1][1:] = ends[0][1:]  # one token differs, and the texts agree again
    return [int(str(token)) for token in common] + ends[0], [int(str(token)) for token in common] + ends[1]


@draws("password", "margin")
def _margin(rng):
    logits = 3 * _normal(rng, rng.randint(1, 6), rng.randint(3, 40))
    return (logits - rng.choice((0.0, 0.0, 20.0)),)


@draws("password", "largest_delta")
def _largest_delta(rng):
    steps, vocab = rng.randint(2, 7), rng.randint(4, 12)
    first = rng.choice((None, rng.randrange(steps)))
    a = 3 * _normal(rng, steps, vocab)
    b = a + 0.01 * _normal(rng, steps, vocab)
    row = rng.randrange(steps if first is None else first + 1)
    b[row, rng.randrange(vocab)] += rng.choice((-1, 1)) * (0.5 + rng.random())
    if first is not None:
        b[first + 1 :] += 40.0
    return a, b, first


@draws("password", "verdict")
def _verdict(rng):
    epsilon = rng.choice((0.0001, 0.5, 1.0, 2.0))
    return (
        rng.choice((None, epsilon * rng.choice((0.0, 0.3, 0.9, 1.2, 8.0)))),
        rng.choice((None, epsilon * rng.choice((0.2, 0.8, 1.3, 1.9, 2.2, 6.0)))),
        epsilon,
    )


# ---- lab 4 -----------------------------------------------------------------------------------------------------------


def _mask(rng: random.Random, columns: int | None = None) -> Any:
    """Rows of pads and tokens, each padded in its own way: left, right, on both sides, or with a gap."""
    import torch

    columns = columns or rng.randint(3, 10)
    rows = []
    for _ in range(rng.randint(1, 4)):
        front, back = rng.choice(((1, 0), (0, 1), (1, 1), (0, 0)))
        begin = rng.randint(1, columns - 1) if front else 0
        end = rng.randint(begin + 1, columns) if back else columns
        row = [int(begin <= column < end) for column in range(columns)]
        if not front and back and end < columns:
            row[end + 1 :] = [1] * (columns - end - 1)  # a right-padded prompt and what was generated after it
        rows.append(row)
    return torch.tensor(rows)


@draws("padding", "position_ids")
def _position_ids(rng):
    return (_mask(rng),)


@draws("padding", "may_see")
def _may_see(rng):
    mask = _mask(rng)
    return mask, rng.randrange(mask.shape[1])


@draws("padding", "last_column")
def _last_column(rng):
    return (_mask(rng),)


@draws("padding", "next_positions")
def _next_positions(rng):
    return _mask(rng), rng.randint(0, 6)


# ---- lab 5: a pool that has been worked with -------------------------------------------------------------------------


def _pool(rng: random.Random, busy: int) -> Any:
    """A pool after some random steps of the worked functions; some blocks can be found, some of these by nobody held."""
    from kvlab.core.blocks import OutOfBlocks
    from kvlab.experiments import byhand

    pool = byhand.new_pool(rng.randint(3, 9), rng.choice((2, 4, 4, 8)))
    for step in range(busy):
        names = list(pool.tables)
        try:
            what = rng.choice(("allocate", "share", "append", "append", "free", "findable"))
            if what == "allocate" or not names:
                byhand.allocate(pool, f"r{step}", rng.randint(1, 3 * pool.block_size))
            elif what == "share":
                source = rng.choice(names)
                byhand.share_prefix(pool, source, f"r{step}", rng.randint(1, pool.lengths[source]))
            elif what == "append":
                byhand.append_token(pool, rng.choice(names))
            elif what == "free":
                byhand.free(pool, rng.choice(names))
            else:
                _make_findable(rng, pool, rng.choice(names))
        except OutOfBlocks:
            continue
    pool.last_access = rng.sample(range(1, 100), len(pool.ref_count))
    return pool


def _make_findable(rng: random.Random, pool: Any, seq: str) -> None:
    """The first full blocks of a request get keys, as if they had been written and indexed."""
    for k, block in enumerate(pool.tables[seq][: pool.lengths[seq] // pool.block_size]):
        key = (seq, k)
        if block not in pool.keys and key not in pool.index:
            pool.keys[block], pool.index[key] = key, block


def _with_findable(rng: random.Random, ended: bool) -> Any:
    from kvlab.experiments import byhand

    pool = _pool(rng, rng.randint(0, 3))
    for name in ("f1", "f2")[: rng.randint(1, 2)]:
        if len(pool.free) >= 2:
            byhand.allocate(pool, name, rng.randint(pool.block_size, 2 * pool.block_size))
            _make_findable(rng, pool, name)
            if ended or rng.random() < 0.5:
                byhand.free(pool, name)
    pool.last_access = rng.sample(range(1, 100), len(pool.ref_count))
    return pool


@draws("blocks", "allocate")
def _allocate(rng):
    pool = _with_findable(rng, ended=rng.random() < 0.7) if rng.random() < 0.6 else _pool(rng, rng.randint(0, 8))
    tokens = rng.randint(1, max(2, (len(pool.ref_count) + 1) * pool.block_size // rng.choice((1, 2))))
    runs = {}
    for (seq, k), block in pool.index.items():
        runs.setdefault(seq, {})[k] = block
    hits: tuple = ()
    if runs and rng.random() < 0.8:
        run = rng.choice(list(runs.values()))
        for k in range((tokens - 1) // pool.block_size):
            if k not in run:
                break
            hits += (run[k],)
    if hits and rng.random() < 0.5:  # just enough blocks, or one too few: what is counted as free decides
        idle = sum(pool.ref_count[block] == 0 for block in hits)
        tokens = pool.block_size * max(len(hits) + pool.num_free - idle + rng.choice((0, 1)), len(hits) + 1)
    return (pool, "new", tokens, hits) if hits else (pool, "new", tokens)


@draws("blocks", "share_prefix")
def _share_prefix(rng):
    while not (pool := _pool(rng, rng.randint(2, 10))).tables:
        pass
    source = rng.choice(list(pool.tables))
    return pool, source, "new", rng.choice((pool.lengths[source], rng.randint(1, pool.lengths[source])))


@draws("blocks", "append_token")
def _append_token(rng):
    from kvlab.experiments import byhand

    while not (pool := _pool(rng, rng.randint(2, 12))).tables:
        pass
    if rng.random() < 0.4 and len(pool.free) > 2:  # a fork at a block's edge, or behind it
        byhand.allocate(pool, "old", pool.block_size + rng.choice((0, 0, 1)))
        byhand.share_prefix(pool, "old", "new", pool.lengths["old"])
        return pool, rng.choice(("old", "new"))
    for block in [block for seq, table in pool.tables.items() for block in table[pool.lengths[seq] // pool.block_size :]]:
        if block in pool.keys:  # a block that will be written is found by nobody
            del pool.index[pool.keys.pop(block)]
    return pool, rng.choice(list(pool.tables))


@draws("blocks", "free")
def _free(rng):
    while not (pool := _pool(rng, rng.randint(2, 12))).tables:
        pass
    seq = rng.choice(list(pool.tables))
    if rng.random() < 0.4:
        _make_findable(rng, pool, seq)
    return pool, seq


@draws("blocks", "evict")
def _evict(rng):
    while True:
        pool = _with_findable(rng, ended=True) if rng.random() < 0.5 else _pool(rng, rng.randint(5, 14))
        for seq in list(pool.tables):
            _make_findable(rng, pool, seq)
        if len(pool.keys) > 1 and any(pool.ref_count[block] == 0 for block in pool.keys):
            return (pool,)


# ---- lab 6 -----------------------------------------------------------------------------------------------------------


def _ids(rng: random.Random, count: int) -> list[int]:
    return [int(str(rng.randint(0, 600))) for _ in range(count)]


@draws("prefix", "block_keys")
def _block_keys(rng):
    size = rng.choice((1, 2, 3, 4, 8))
    tokens = _ids(rng, size) * rng.randint(1, 4) if rng.random() < 0.4 else _ids(rng, rng.randint(0, 24))
    return tokens + _ids(rng, rng.choice((0, 1, size - 1))), size, rng.choice((None, f"tenant-{rng.randint(0, 99)}"))


@draws("prefix", "find_prefix")
def _find_prefix(rng):
    from kvlab.checks.prefix import block_keys

    size = rng.choice((2, 4, 8))
    tokens = rng.randint(1, 7 * size)
    if rng.random() < 0.4:
        tokens = rng.randint(1, 6) * size
    keys = block_keys(_ids(rng, tokens), size)
    there = [rng.random() < rng.choice((0.75, 1.0)) for _ in keys]
    blocks = rng.sample(range(40), len(keys) + 1)
    index = {key: block for key, block, is_there in zip(keys, blocks, there) if is_there}
    return keys, index | {"another": blocks[-1]}, tokens, size


@draws("prefix", "suffix_positions")
def _suffix_positions(rng):
    cached = 16 * rng.randint(0, 40)
    return cached + rng.randint(1, 40), cached


@draws("prefix", "shareable")
def _shareable(rng):
    size = rng.choice((1, 2, 3, 4, 8))
    common = _ids(rng, rng.choice((0, size, 2 * size, rng.randint(0, 4 * size))))
    first, second = [[int(str(token)) for token in common] for _ in range(2)]
    kind = rng.random()
    if kind < 0.5:
        first, second = first + _ids(rng, rng.randint(0, 2 * size)), second + _ids(rng, rng.randint(1, 2 * size))
    elif kind < 0.65:  # the second is in the first
        first = first + _ids(rng, rng.randint(0, 2 * size))
    elif kind < 0.85:  # one token between, then the same text again
        rest = _ids(rng, 2 * size)
        first, second = first + [601] + rest, second + [602] + rest
    else:
        second = list(reversed(second))
    return (first, second or [5], size) if rng.random() < 0.85 else (first, second or [5], size, False)


# ---- lab 7 -----------------------------------------------------------------------------------------------------------


@draws("scheduling", "may_admit")
def _may_admit(rng):
    size, total, watermark = rng.choice((1, 4, 16, 32)), rng.choice((8, 64, 128, 1024)), rng.choice((0.0, 0.125, 0.25, 0.5))
    blocks = rng.randint(1, max(2, total // 4))
    prompt = rng.choice((blocks * size, rng.randint((blocks - 1) * size + 1, blocks * size)))
    free = blocks + int(total * watermark) + rng.choice((-2, -1, 0, 0, 1, 5))
    return prompt, min(max(free, 0), total), total, size, watermark


@draws("scheduling", "share_budget")
def _share_budget(rng):
    prompts = [rng.choice((rng.randint(1, 12), rng.randint(1, 300))) for _ in range(rng.randint(0, 6))]
    return rng.choice((0, 1, rng.randint(1, 80))), prompts, rng.choice((8, 32, 64, 256))


@draws("scheduling", "make_room")
def _make_room(rng):
    names = rng.sample("abcdefghij", rng.randint(1, 8))
    running = [(name, rng.randint(1, 9)) for name in names]
    free = rng.randint(0, 6)
    return running, free, rng.randint(1, free + sum(blocks for _, blocks in running))


@draws("scheduling", "resume")
def _resume(rng):
    prompt, answer = _ids(rng, rng.randint(1, 30)), _ids(rng, rng.randint(0, 20))
    if rng.random() < 0.3:
        prompt, answer = [5] * len(prompt), [5] * len(answer)
    return prompt, answer, rng.choice((0, rng.randint(0, len(prompt) + len(answer) - 1)))


@draws("scheduling", "flat_tokens")
def _flat_tokens(rng):
    return rng.uniform(1e10, 1e15), rng.uniform(1e9, 8e12), rng.choice((1, 2, 4, 8))


# ---- lab 13 ----------------------------------------------------------------------------------------------------------

ARM_NAMES = ("rows2", "rows7", "threads", "float64", "behind", "chunks")


@draws("released", "epsilon")
def _epsilon(rng):
    floor = rng.choice((1.0e-6, 5.0e-6, 1.0e-5, 1.4e-4))
    ceiling = 100 * floor
    sizes = (0.0, 0.3, 0.9, 3.0, 20.0, 60.0, 90.0, 400.0, 1.0e5)
    if rng.random() < 0.15:
        sizes = (400.0, 3000.0, 1.0e5)
    names = rng.sample(ARM_NAMES, rng.randint(1, 4))
    return {name: floor * rng.choice(sizes) * rng.uniform(0.8, 1.05) for name in names}, floor, ceiling


@draws("released", "verdict")
def _third_answer(rng):
    epsilon = rng.choice((1.0e-5, 1.4e-4, 0.5, 1.0))
    margin = rng.choice((None, epsilon * rng.choice((0.5, 1.3, 1.9, 2.2, 3.0, 3.8, 4.3, 40.0))))
    return epsilon * rng.choice((0.0, 0.5, 0.95, 1.1, 1.5, 1.9, 2.2, 30.0, 1.0e4)), margin, epsilon


@draws("released", "begins")
def _begins(rng):
    epsilon, steps = rng.choice((1.0e-5, 1.4e-4)), rng.randint(2, 9)
    first = rng.choice((None, 0, rng.randrange(steps), rng.randrange(steps)))
    deltas = [epsilon * rng.uniform(0.0, 0.9) for _ in range(steps)]
    for step in range(steps if first is None else first, steps):
        deltas[step] = epsilon * rng.choice((0.5, 1.0e3, 1.0e4, 1.0e5)) * rng.uniform(0.9, 1.1)
    if first is not None:
        deltas[first] = epsilon * rng.choice((1.5, 1.0e4)) * rng.uniform(0.9, 1.1)
    return deltas, epsilon


@draws("released", "named_number")
def _named_number(rng):
    epsilon = rng.choice((1.0e-5, 1.4e-4))
    numbers = rng.sample(range(70), rng.randint(1, 9))
    fits = rng.sample(numbers, min(len(numbers), rng.choice((0, 1, 1, 1, 2))))
    return {n: epsilon * (rng.uniform(0.05, 0.9) if n in fits else rng.uniform(5.0, 5.0e4)) for n in numbers}, epsilon
