"""Checks of lab 7, scheduling."""

from __future__ import annotations

from kvlab.checks import Exercise, Mistake

# --- exercise 1: who may come in -------------------------------------------------------------------------------------------


def may_admit(prompt_tokens: int, free_blocks: int, num_blocks: int, block_size: int, watermark: float) -> bool:
    """Whether a prompt fits into the free blocks and leaves `watermark` of the pool, in whole blocks, free."""
    return -(-prompt_tokens // block_size) + int(watermark * num_blocks + 1e-9) <= free_blocks


MAY_ADMIT = Exercise(
    1,
    "may_admit",
    may_admit,
    cases=(
        (32, 2, 100, 16, 0.0),
        (33, 2, 100, 16, 0.0),
        (16, 10, 100, 16, 0.1),
        (16, 11, 100, 16, 0.1),
        (160, 11, 100, 16, 0.0),
        (17, 3, 10, 16, 0.19),
        (1, 1, 10, 16, 0.0),
        (1, 0, 10, 16, 0.0),
        (8, 50, 50, 4, 0.5),
        (100, 50, 50, 4, 0.5),
        (104, 50, 50, 4, 0.5),
        (64, 20, 40, 16, 0.4),
        (65, 20, 40, 16, 0.4),
    ),
    mistakes=(
        Mistake(
            "It rounds the blocks of the prompt down. 33 tokens need three blocks of 16, the last one with one token in it.",
            lambda p, free, total, size, w: p // size + int(w * total + 1e-9) <= free,
        ),
        Mistake(
            "It leaves nothing free. The watermark is what those who run will grow into; without it they are preempted at once.",
            lambda p, free, total, size, w: -(-p // size) <= free,
        ),
        Mistake(
            "It wants one block more than needed: a prompt that leaves exactly the watermark may come in.",
            lambda p, free, total, size, w: -(-p // size) + int(w * total + 1e-9) < free,
        ),
        Mistake(
            "The watermark is taken of the free blocks. It is a share of the pool, so that it does not shrink when it is needed.",
            lambda p, free, total, size, w: -(-p // size) + int(w * free + 1e-9) <= free,
        ),
        Mistake(
            "It compares tokens with blocks. free_blocks counts blocks of block_size tokens.",
            lambda p, free, total, size, w: p + int(w * total + 1e-9) <= free,
        ),
        Mistake(
            "It asks whether the prompt fits the whole pool. What counts is what is free now.",
            lambda p, free, total, size, w: -(-p // size) + int(w * total + 1e-9) <= total,
        ),
    ),
)


# --- exercise 2: what a step feeds -----------------------------------------------------------------------------------------


def share_budget(decoding: int, prompts: list[int], budget: int) -> list[int]:
    """Tokens that each prompt may feed in a step in which `decoding` rows feed one token each; first come, first served."""
    left, out = budget - decoding, []
    for prompt in prompts:
        out.append(max(0, min(prompt, left)))
        left -= out[-1]
    return out


def _whole_only(decoding, prompts, budget):
    left, out = budget - decoding, []
    for prompt in prompts:
        out.append(prompt if prompt <= left else 0)
        left -= out[-1]
    return out


def _evenly(decoding, prompts, budget):
    each = max(0, budget - decoding) // max(1, len(prompts))
    return [min(prompt, each) for prompt in prompts]


def _budget_each(decoding, prompts, budget):
    return [max(0, min(prompt, budget - decoding)) for prompt in prompts]


def _below_zero(decoding, prompts, budget):
    left, out = budget - decoding, []
    for prompt in prompts:
        out.append(min(prompt, left))
        left -= out[-1]
    return out


def _shortest_first(decoding, prompts, budget):
    out = [0] * len(prompts)
    left = budget - decoding
    for n in sorted(range(len(prompts)), key=lambda n: prompts[n]):
        out[n] = max(0, min(prompts[n], left))
        left -= out[n]
    return out


SHARE_BUDGET = Exercise(
    2,
    "share_budget",
    share_budget,
    cases=(
        (0, [100], 64),
        (0, [10, 20], 64),
        (4, [100], 64),
        (4, [40, 40], 64),
        (4, [40, 10, 40], 64),
        (64, [5], 64),
        (70, [5, 5], 64),
        (3, [], 16),
        (2, [100, 3, 3], 16),
        (0, [8, 8], 16),
        (1, [8, 8], 16),
        (2, [90, 7], 64),
    ),
    mistakes=(
        Mistake(
            "The rows that decode are not counted. Each of them feeds a token in this step, too.",
            lambda decoding, prompts, budget: share_budget(0, prompts, budget),
        ),
        Mistake(
            "A prompt that does not fit whole gets nothing. It is cut: that is what chunked prefill means.",
            _whole_only,
        ),
        Mistake("The budget is divided evenly. First come, first served: the first prompt takes what it needs.", _evenly),
        Mistake("Each prompt gets the whole budget. What one takes is no longer there for the next.", _budget_each),
        Mistake("With more rows than budget it feeds a negative number of tokens. A prompt then waits: 0.", _below_zero),
        Mistake(
            "It serves the shortest prompt first. Asked for is the order of arrival, or long prompts may wait for ever.",
            _shortest_first,
        ),
        Mistake(
            "It gives what is left of each prompt. Asked for is what the step feeds of it.",
            lambda decoding, prompts, budget: [p - n for p, n in zip(prompts, share_budget(decoding, prompts, budget))],
        ),
    ),
)


# --- exercise 3: who has to go ---------------------------------------------------------------------------------------------


def make_room(running: list[tuple[str, int]], free_blocks: int, needed: int) -> list[str]:
    """Who gives the blocks back so that `needed` are free: the last admitted first, and no more than it takes."""
    out = []
    for name, blocks in reversed(running):
        if free_blocks >= needed:
            break
        out.append(name)
        free_blocks += blocks
    return out


def _oldest(running, free_blocks, needed):
    return make_room(running[::-1], free_blocks, needed)


def _largest(running, free_blocks, needed):
    return make_room(sorted(running, key=lambda one: one[1]), free_blocks, needed)


def _everybody(running, free_blocks, needed):
    return [name for name, _ in reversed(running)] if free_blocks < needed else []


def _one_more(running, free_blocks, needed):
    return make_room(running, free_blocks, needed + 1)


def _forgets_free(running, free_blocks, needed):
    return make_room(running, 0, needed)


def _one_at_most(running, free_blocks, needed):
    return make_room(running, free_blocks, needed)[:1]


MAKE_ROOM = Exercise(
    3,
    "make_room",
    make_room,
    cases=(
        ([("a", 4), ("b", 2), ("c", 3)], 0, 1),
        ([("a", 4), ("b", 2), ("c", 1)], 0, 2),
        ([("a", 4), ("b", 2), ("c", 1)], 1, 1),
        ([("a", 4), ("b", 2), ("c", 1)], 1, 2),
        ([("a", 4), ("b", 2), ("c", 1)], 3, 5),
        ([("a", 1), ("b", 5), ("c", 2), ("d", 1)], 0, 3),
        ([("a", 2)], 0, 1),
        ([("a", 3), ("b", 3)], 0, 6),
        ([("c", 9), ("b", 1), ("a", 1)], 0, 2),
        ([("a", 1), ("b", 2)], 5, 3),
    ),
    mistakes=(
        Mistake("It sends away who came first, and has waited longest. The last one in is the first to go.", _oldest),
        Mistake(
            "It sends away whoever holds the most blocks. That is nearly always who has worked longest, and all of it is lost.",
            _largest,
        ),
        Mistake("It sends everybody away. Stop as soon as there is room.", _everybody),
        Mistake("It frees one block more than is needed.", _one_more),
        Mistake("It does not count the blocks that are free already.", _forgets_free),
        Mistake("It sends away one at most. If that does not make room, the next one has to go, too.", _one_at_most),
        Mistake(
            "The names are in order of admission. Asked for is the order in which they go: the last one in first.",
            lambda running, free_blocks, needed: make_room(running, free_blocks, needed)[::-1],
        ),
    ),
)


# --- exercise 4: where a preempted request goes on ---------------------------------------------------------------------------


def resume(prompt: list[int], answer: list[int], cached: int) -> tuple[list[int], int]:
    """What a preempted request feeds when it comes back, and the position of the first of these tokens."""
    return (prompt + answer)[cached:], cached


RESUME = Exercise(
    4,
    "resume",
    resume,
    cases=(
        ([5, 6, 7], [8, 9], 0),
        ([5, 6, 7], [8, 9], 2),
        ([5, 6, 7, 8], [9, 10, 11], 4),
        ([5, 6, 7, 8], [9, 10, 11], 6),
        ([5, 6, 7], [], 0),
        ([5, 6, 7, 4], [], 2),
        ([1], [2, 3, 4, 5], 4),
        ([3, 3], [3, 3, 3], 2),
    ),
    mistakes=(
        Mistake(
            "It feeds the prompt alone. The K/V of what it had answered is gone, too; without it the next token is chosen as if it had said nothing.",
            lambda prompt, answer, cached: (prompt[cached:], cached),
        ),
        Mistake(
            "What it feeds begins at position 0. Behind cached tokens the next one stands at position cached.",
            lambda prompt, answer, cached: ((prompt + answer)[cached:], 0),
        ),
        Mistake(
            "It goes on behind the prompt, as if the prompt's K/V were still there. Its blocks were given back: only `cached` tokens are found.",
            lambda prompt, answer, cached: (answer, len(prompt)),
        ),
        Mistake(
            "It feeds everything again. The first `cached` tokens are found in the pool, and their slots are not its own to write.",
            lambda prompt, answer, cached: (prompt + answer, 0),
        ),
        Mistake(
            "It feeds the last token only, as if it had never been away.",
            lambda prompt, answer, cached: ((prompt + answer)[-1:], len(prompt) + len(answer) - 1),
        ),
        Mistake(
            "It stops one token early. Logits come from the last token that is fed: that has to be the last one it has said.",
            lambda prompt, answer, cached: ((prompt + answer)[cached:-1], cached),
        ),
    ),
)


# --- exercise 5: the knee --------------------------------------------------------------------------------------------------


def flat_tokens(flops: float, bandwidth: float, weight_bytes: int) -> float:
    """Tokens of a step whose arithmetic takes as long as reading the weights once. `flops` and `bandwidth` a second; bytes of one weight.

    A token costs 2 FLOP for each weight; a step reads `weight_bytes` for each weight, however many tokens it has.
    """
    return flops * weight_bytes / (2 * bandwidth)


FLAT_TOKENS = Exercise(
    5,
    "flat_tokens",
    flat_tokens,
    cases=((100e9, 25e9, 4), (312e12, 2.039e12, 2), (989e12, 3.35e12, 1), (8.0, 2.0, 2), (65e12, 0.3e12, 2)),
    mistakes=(
        Mistake(
            "Each weight is multiplied and added: a token costs 2 FLOP a weight, not 1.",
            lambda flops, bandwidth, weight_bytes: flops * weight_bytes / bandwidth,
        ),
        Mistake(
            "It is upside down: tokens per step grow with the arithmetic there is, and fall with the bandwidth.",
            lambda flops, bandwidth, weight_bytes: 2 * bandwidth / (flops * weight_bytes),
        ),
        Mistake(
            "It leaves out how many bytes a weight takes. Half the bytes are read in half the time.",
            lambda flops, bandwidth, weight_bytes: flops / (2 * bandwidth),
        ),
        Mistake(
            "It divides by the bytes of a weight. More bytes take longer to read, so more tokens are computed in the same time.",
            lambda flops, bandwidth, weight_bytes: flops / (2 * bandwidth * weight_bytes),
        ),
        Mistake(
            "It multiplies by 2 where it should divide.",
            lambda flops, bandwidth, weight_bytes: 2 * flops * weight_bytes / bandwidth,
        ),
    ),
)

EXERCISES = (MAY_ADMIT, SHARE_BUDGET, MAKE_ROOM, RESUME, FLAT_TOKENS)
