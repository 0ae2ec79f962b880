"""Checks of lab 4, padding and positions."""

from __future__ import annotations

import torch

from kvlab.checks import Exercise, Mistake


def _masks(*rows: str) -> torch.Tensor:
    """`"0011"` is a row of two pads and two tokens."""
    return torch.tensor([[int(bit) for bit in row] for row in rows])


LEFT = _masks("0001111", "1111111", "0000011")
RIGHT = _masks("1110000", "1111111", "1100000")
LONG = _masks("0" * 9 + "1" * 3, "0" * 2 + "1" * 10)


# --- 1: positions from a mask --------------------------------------------------------------------------------------------


def position_ids(mask: torch.Tensor) -> torch.Tensor:
    """Each row counts its own tokens from 0; a pad gets 0. `[batch, columns]` → `[batch, columns]`."""
    return (mask.cumsum(-1) - 1) * mask


def _columns(mask):
    return torch.arange(mask.shape[1]).expand(mask.shape[0], -1)


def _first_rows_pads(mask):
    first = (mask[0] == 0).long().cumprod(0).sum()
    return (_columns(mask) - first).clamp(min=0) * mask


POSITION_IDS = Exercise(
    1,
    "position_ids",
    position_ids,
    cases=(
        (_masks("1111"),),
        (_masks("0011"),),
        (_masks("1100"),),
        (LEFT,),
        (RIGHT,),
        (LONG,),
        (_masks("111100111", "000000001"),),  # a right-padded prompt and the tokens that followed it
    ),
    mistakes=(
        Mistake(
            "It counts from 1. The first token of a row stands at 0: subtract 1 from the sum.",
            lambda m: m.cumsum(-1) * m,
        ),
        Mistake("It counts columns, pads with them. A pad takes no position.", _columns),
        Mistake("It counts columns, pads with them. A pad takes no position.", lambda m: _columns(m) * m),
        Mistake(
            "Pads come out negative. A position is an index into a table or an angle's factor: give pads 0.",
            lambda m: m.cumsum(-1) - 1,
        ),
        Mistake(
            "Pads behind a row's tokens get the last token's position. Give pads 0.",
            lambda m: (m.cumsum(-1) - 1).clamp(min=0),
        ),
        Mistake(
            "Pads get 1, as in Transformers' own generate. It works as well; here give pads 0.",
            lambda m: (m.cumsum(-1) - 1).masked_fill(m == 0, 1),
        ),
        Mistake("It takes the first row's pads for all rows. Each row has an offset of its own.", _first_rows_pads),
        Mistake("It counts the pads. Count the tokens.", lambda m: (1 - m).cumsum(-1)),
        Mistake(
            "It counts from the end. Positions run in the order of the text.",
            lambda m: (m.flip(-1).cumsum(-1).flip(-1) - 1) * m,
        ),
        Mistake(
            "It runs on from one row to the next. Sum along the columns, the last axis.",
            lambda m: (m.flatten().cumsum(0).view_as(m) - 1) * m,
        ),
        Mistake("It sums over the rows of the batch. Sum along the columns, the last axis.", lambda m: (m.cumsum(0) - 1) * m),
    ),
)


# --- 2: who may see whom -------------------------------------------------------------------------------------------------


def may_see(mask: torch.Tensor, cached: int) -> torch.Tensor:
    """The 4-D mask of a forward over a cache: True where a query may look.

    Args:
        mask: `[batch, cached + fed]`, 1 on tokens, 0 on pads, for all columns there are.
        cached: columns that are in the cache already; the others are fed now.

    Returns:
        bool `[batch, 1, fed, cached + fed]`: tokens up to the query's own column, and that column itself even if it is a pad,
        so that a softmax has something to weigh.
    """
    columns = torch.arange(mask.shape[1])
    queries = columns[cached:]
    earlier = columns[None, :] <= queries[:, None]
    itself = columns[None, :] == queries[:, None]
    return ((earlier[None] & mask[:, None, :].bool()) | itself[None])[:, None]


def _seeing(rule):
    """A wrong answer from a rule on (own, earlier, itself), each `[batch, fed, columns]`, for the right offset."""

    def answer(mask, cached):
        columns = torch.arange(mask.shape[1])
        queries = columns[cached:]
        own = mask[:, None, :].bool().expand(-1, len(queries), -1)
        fed = mask[:, cached:, None].bool().expand_as(own)
        return rule(own, (columns[None] <= queries[:, None])[None], (columns[None] == queries[:, None])[None], fed)[:, None]

    return answer


def _no_offset(mask, cached):
    columns, queries = torch.arange(mask.shape[1]), torch.arange(mask.shape[1] - cached)
    own = mask[:, None, :].bool()
    return ((columns[None] <= queries[:, None])[None] & own | (columns[None] == queries[:, None])[None])[:, None]


MAY_SEE = Exercise(
    2,
    "may_see",
    may_see,
    cases=(
        (_masks("111"), 0),
        (_masks("0011"), 0),
        (LEFT, 0),
        (LEFT, 6),
        (LEFT, 4),
        (RIGHT, 0),
        (_masks("0111111", "1111111"), 6),
        (_masks("1110001", "1111111"), 6),
        (_masks("11100011", "11111111"), 6),
    ),
    mistakes=(
        Mistake(
            "It forgets the offset: a query fed now stands behind the cached columns, so the first one is column `cached`, not 0.",
            _no_offset,
        ),
        Mistake(
            "Every query sees the whole row, later tokens too. Query and column have an order: only columns up to the query's own.",
            _seeing(lambda own, earlier, itself, fed: own | itself),
        ),
        Mistake(
            "Pads are seen. A column that holds a pad is for nobody but itself.",
            _seeing(lambda own, earlier, itself, fed: earlier.expand_as(own)),
        ),
        Mistake(
            "The mask lies on the wrong axis: it silences the pads' queries and leaves their keys to be seen. Mask the columns.",
            _seeing(lambda own, earlier, itself, fed: earlier & fed | itself),
        ),
        Mistake(
            "A token does not see itself. Its own column is the last one it may see.",
            _seeing(lambda own, earlier, itself, fed: (earlier & ~itself) & own),
        ),
        Mistake(
            "A pad's query sees nothing at all; its softmax is 0/0, and the NaN spreads. Let it see its own column.",
            _seeing(lambda own, earlier, itself, fed: earlier & own),
        ),
        Mistake(
            "It is turned round: True where a query may not look. In PyTorch's attention True means: may look.",
            _seeing(lambda own, earlier, itself, fed: ~(earlier & own | itself)),
        ),
        Mistake(
            "It has no axis for the heads. The shape is [batch, 1, fed, columns]; the 1 stands for all heads.",
            lambda mask, cached: may_see(mask, cached)[:, 0],
        ),
        Mistake(
            "It gives a row for every column. Only the columns fed now have queries.",
            lambda mask, cached: may_see(mask, 0),
        ),
        Mistake(
            "It gives 0 and 1 as whole numbers, or floats. Attention adds a number mask to the scores; give a tensor of booleans.",
            lambda mask, cached: may_see(mask, cached).long(),
        ),
        Mistake(
            "It leaves the cached columns out. The keys of the cache are there to be seen.",
            lambda mask, cached: may_see(mask, cached)[..., cached:],
        ),
    ),
)


# --- 3: which column to read ---------------------------------------------------------------------------------------------


def last_column(mask: torch.Tensor) -> torch.Tensor:
    """The column of each row's last token, `[batch, columns]` → `[batch]`."""
    return (torch.arange(mask.shape[1]) * mask).argmax(-1)


LAST_COLUMN = Exercise(
    3,
    "last_column",
    last_column,
    cases=(
        (RIGHT,),
        (LEFT,),
        (_masks("1111"),),
        (_masks("10000", "11000", "11110", "11111"),),
        (_masks("0001", "1000", "0110"),),
        (LONG,),
    ),
    mistakes=(
        Mistake(
            "It reads the last column. Under right padding a shorter row has a pad there.",
            lambda m: torch.full((m.shape[0],), m.shape[1] - 1),
        ),
        Mistake(
            "It counts the tokens and subtracts 1. That is the column under right padding only; under left padding pads come first.",
            lambda m: m.sum(-1) - 1,
        ),
        Mistake("It is one column too far: n tokens from column 0 on end at n − 1.", lambda m: m.sum(-1)),
        Mistake("It gives the first token's column: argmax finds the first 1 of a row.", lambda m: m.argmax(-1)),
        Mistake(
            "It looks for the first pad. A row without one, or with pads in front, has no pad behind its last token.",
            lambda m: m.argmin(-1) - 1,
        ),
        Mistake(
            "It takes the first row's column for all rows. Each row ends where it ends.",
            lambda m: last_column(m)[:1].expand(m.shape[0]),
        ),
        Mistake("It counts from the end. Give the column, counted from 0 at the left.", lambda m: m.flip(-1).argmax(-1)),
        Mistake(
            "It gives the column behind the last token. The last token's own logits say what follows it.",
            lambda m: last_column(m) + 1,
        ),
    ),
)


# --- 4: the offset on a cached step --------------------------------------------------------------------------------------


def next_positions(mask: torch.Tensor, step: int) -> torch.Tensor:
    """Position of the token fed at a cached step, for each row: `[batch, columns]`, step 0 the first → `[batch]`."""
    return mask.sum(-1) + step


NEXT_POSITIONS = Exercise(
    4,
    "next_positions",
    next_positions,
    cases=((_masks("1111"), 0), (LEFT, 0), (LEFT, 3), (RIGHT, 0), (RIGHT, 2), (LONG, 5), (_masks("0011", "0111"), 1)),
    mistakes=(
        Mistake(
            "It goes on from the number of columns. A shorter row's pads take no positions: go on from its own tokens.",
            lambda m, step: torch.full((m.shape[0],), m.shape[1] + step),
        ),
        Mistake(
            "It starts again at 0. The token stands behind the whole prompt.", lambda m, step: torch.full((m.shape[0],), step)
        ),
        Mistake(
            "It is 0 at every step. Each new token stands one further.",
            lambda m, step: torch.zeros(m.shape[0], dtype=torch.long),
        ),
        Mistake(
            "It is one too far. n tokens stand at 0 to n − 1, so the next one stands at n.",
            lambda m, step: m.sum(-1) + step + 1,
        ),
        Mistake(
            "It gives the first step the place of the prompt's last token. n tokens stand at 0 to n − 1, so the next one stands at n.",
            lambda m, step: m.sum(-1) + step - 1,
        ),
        Mistake(
            "It takes the first row's length for all rows. Each row has a history of its own.",
            lambda m, step: (m.sum(-1) + step)[:1].expand(m.shape[0]),
        ),
        Mistake(
            "It takes the longest row's length for all rows. Each row has a history of its own.",
            lambda m, step: (m.sum(-1) + step).max().expand(m.shape[0]),
        ),
        Mistake("It forgets the step: the second new token stands one behind the first.", lambda m, step: m.sum(-1)),
        Mistake("It counts the pads. Count the tokens.", lambda m, step: (1 - m).sum(-1) + step),
    ),
)

EXERCISES = (POSITION_IDS, MAY_SEE, LAST_COLUMN, NEXT_POSITIONS)
