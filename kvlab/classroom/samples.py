"""Calibrated answers: what gets all the points, half, none. The tests grade each of them; the teacher's page shows them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """An answer's cell, the share of the points it gets, and why."""

    lab: str
    exercise: str
    share: float
    why: str
    code: str


SAMPLES = (
    Sample(
        "01-attention",
        "attend",
        1,
        "written with PyTorch's own attention: how it is written does not matter",
        "def attend(q, k, v, mask):\n    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)\n",
    ),
    Sample(
        "01-attention",
        "causal_mask",
        0.5,
        "right up to ten tokens of past; the notebook does not look further",
        "def causal_mask(n, past):\n"
        "    rows = torch.arange(n)[:, None] + min(past, 10)\n"
        "    return torch.arange(past + n)[None] <= rows\n",
    ),
    Sample(
        "01-attention",
        "repeat_heads",
        0,
        "the heads are repeated as a whole",
        "def repeat_heads(x, groups):\n    return x.repeat(groups, 1, 1)\n",
    ),
    Sample(
        "02-ledger",
        "token_bytes",
        1,
        "another order of the same product",
        "def token_bytes(spec, bits):\n"
        "    numbers = spec.kv_heads * spec.head_dim      # of one key\n"
        "    return sum(2 * numbers for _ in range(spec.layers)) * bits // 8\n",
    ),
    Sample(
        "02-ledger",
        "token_bytes",
        0.5,
        "right for 4 bits and more; two numbers of 2 bits do not take a byte",
        "def token_bytes(spec, bits):\n    return 2 * spec.layers * spec.kv_heads * spec.head_dim * max(bits, 4) // 8\n",
    ),
    Sample(
        "02-ledger",
        "token_bytes",
        0,
        "query heads are counted",
        "def token_bytes(spec, bits):\n    return 2 * spec.layers * spec.heads * spec.head_dim * bits // 8\n",
    ),
    Sample(
        "03-password",
        "first_difference",
        1,
        "a loop and the lengths",
        "def first_difference(a, b):\n"
        "    for i, (x, y) in enumerate(zip(a, b)):\n"
        "        if x != y:\n"
        "            return i\n"
        "    return None if len(a) == len(b) else min(len(a), len(b))\n",
    ),
    Sample(
        "03-password",
        "margin",
        0,
        "probabilities instead of logits",
        "def margin(logits):\n    top = logits.softmax(-1).topk(2).values\n    return top[:, 0] - top[:, 1]\n",
    ),
    Sample(
        "03-password",
        "verdict",
        0,
        "made for the notebook's cases alone: a table of them",
        "def verdict(delta, margin, epsilon):\n"
        "    faults = {(5.0, None), (5.0, 2.0), (None, 2.5), (1.4, 1.2), (3.0, None), (0.00005, 0.0003), (0.5, 2.1), (1.05, None),\n"
        "              (1.1, 1.5), (1.5, 7.0)}\n"
        '    return "state fault" if (delta, margin) in faults else "noise"\n',
    ),
    Sample(
        "04-padding",
        "position_ids",
        1,
        "each row by a loop",
        "def position_ids(mask):\n"
        "    positions = torch.zeros_like(mask)\n"
        "    for r, row in enumerate(mask):\n"
        "        positions[r, row == 1] = torch.arange(int(row.sum()))\n"
        "    return positions\n",
    ),
    Sample(
        "04-padding",
        "next_positions",
        0.5,
        "stops counting after five steps; the notebook does not go further",
        "def next_positions(mask, step):\n    return mask.sum(-1) + min(step, 5)\n",
    ),
    Sample(
        "04-padding",
        "last_column",
        0,
        "right under right padding only",
        "def last_column(mask):\n    return mask.sum(-1) - 1\n",
    ),
    Sample(
        "05-blocks",
        "allocate",
        1,
        "blocks one by one, after asking",
        "def allocate(pool, seq, num_tokens, hits=()):\n"
        "    total = (num_tokens + pool.block_size - 1) // pool.block_size\n"
        "    idle = sum(1 for block in hits if not pool.ref_count[block])\n"
        "    if total - len(hits) + idle > pool.num_free:\n"
        '        raise OutOfBlocks("no room")\n'
        "    table = []\n"
        "    for block in hits:\n"
        "        pool.ref_count[block] += 1\n"
        "        table.append(block)\n"
        "    while len(table) < total:\n"
        "        table.append(pool.take())\n"
        "    pool.tables[seq], pool.lengths[seq] = table, num_tokens\n",
    ),
    Sample(
        "05-blocks",
        "free",
        0,
        "a shared block is handed out under the request that still reads it",
        "def free(pool, seq):\n"
        "    for block in pool.tables.pop(seq):\n"
        "        pool.ref_count[block] = 0\n"
        "        pool.free.append(block)\n"
        "    del pool.lengths[seq]\n",
    ),
    Sample(
        "06-prefix",
        "suffix_positions",
        1,
        "by a comprehension",
        "def suffix_positions(num_tokens, num_cached):\n    return [p for p in range(num_tokens) if p >= num_cached]\n",
    ),
    Sample(
        "06-prefix",
        "suffix_positions",
        0.5,
        "right up to a limit that nobody set, and that the notebook does not reach",
        "def suffix_positions(num_tokens, num_cached):\n    return list(range(num_cached, min(num_tokens, 620)))\n",
    ),
    Sample(
        "06-prefix",
        "find_prefix",
        0,
        "goes past a hole",
        "def find_prefix(keys, index, num_tokens, block_size):\n"
        "    return [index[k] for k in keys[: (num_tokens - 1) // block_size] if k in index]\n",
    ),
    Sample(
        "13-released",
        "epsilon",
        1,
        "a loop instead of a list",
        "def epsilon(healthy, floor, ceiling):\n"
        "    largest = None\n"
        "    for delta in healthy.values():\n"
        "        if delta <= ceiling and (largest is None or delta > largest):\n"
        "            largest = delta\n"
        "    if largest is None:\n"
        "        return None\n"
        "    return floor if 2 * largest < floor else 2 * largest\n",
    ),
    Sample(
        "13-released",
        "epsilon",
        0,
        "every arm is believed",
        "def epsilon(healthy, floor, ceiling):\n    return max(floor, 2 * max(healthy.values()))\n",
    ),
    Sample(
        "13-released",
        "named_number",
        0,
        "the nearest twin, whatever its distance",
        "def named_number(distances, epsilon):\n    return min(distances, key=distances.get) if distances else None\n",
    ),
)
