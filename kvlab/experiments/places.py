"""Where two dtypes come to differ (claim A8): the margin at every token of longer texts, which tokens flip, and the places named.

The reports say where answers usually come apart: at punctuation, at the start of a repetition, near the end. Each place is
marked token by token, so that :mod:`kvlab.experiments.confusion` can test it against the base rate of low margins.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import torch

from kvlab import record
from kvlab.runtime import Loaded
from kvlab.runtime.decode import margins, pad_left, score


@torch.inference_mode()
def write(loaded: Loaded, rows: Sequence[Sequence[int]], passwords: Sequence[str], length: int) -> list[dict]:
    """A text of `length` new tokens for each prompt, greedy in this dtype, and what stands where in it.

    One dict a prompt: `ids` of prompt and text, `chosen` (the token at every step), `margins`, the places as strings of 0
    and 1 (`punctuation`, `repetition`), and whether the text `repeats_password`.
    """
    out = []
    for begin in range(0, len(rows), 8):
        batch = rows[begin : begin + 8]
        ids, is_token = pad_left(batch, loaded.tokenizer.pad_token_id)
        longer = loaded.model.generate(
            ids.to(loaded.model.device),
            attention_mask=is_token.long().to(loaded.model.device),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            pad_token_id=loaded.tokenizer.pad_token_id,
        )
        for row, new, password in zip(batch, longer, passwords[begin:]):
            text = list(row) + new[ids.shape[1] :].tolist()
            logits = score(loaded, text)[len(row) - 1 : -1]
            decode = loaded.tokenizer.decode
            out.append(
                {
                    "ids": text,
                    "chosen": logits.argmax(-1).tolist(),
                    "margins": [record.short(m, 3) for m in margins(logits).tolist()],
                    "punctuation": _flags(is_punctuation(decode([token])) for token in text[len(row) :]),
                    "repetition": _flags(repetition_starts(text, len(row))),
                    "repeats_password": password in decode(text[len(row) :]),
                }
            )
    return out


def flips(loaded: Loaded, texts: Sequence[dict]) -> list[str]:
    """For each of these texts: 1 where this model and dtype choose another token than was chosen, else 0.

    One forward over the whole text, so that every token is judged in the same context.
    """
    out = []
    for text in texts:
        begin = len(text["ids"]) - len(text["chosen"])
        mine = score(loaded, text["ids"])[begin - 1 : -1].argmax(-1).tolist()
        out.append(_flags(a != b for a, b in zip(mine, text["chosen"])))
    return out


def _flags(values) -> str:
    return "".join("1" if value else "0" for value in values)


def is_punctuation(text: str) -> bool:
    """True for a token of punctuation only, such as ",", ".\\n" or "。"; blanks around it do not count."""
    text = text.strip()
    return bool(text) and all(unicodedata.category(character).startswith("P") for character in text)


def repetition_starts(ids: Sequence[int], begin: int, length: int = 3) -> list[bool]:
    """For each token from `begin` on: is it the first of `length` tokens that have stood in the text before?

    A token inside a repetition that is already under way is not a start.
    """
    seen = {tuple(ids[at : at + length]): at for at in range(len(ids) - length, -1, -1)}  # first occurrence of each run
    repeats = [at + length <= len(ids) and seen[tuple(ids[at : at + length])] < at for at in range(len(ids))]
    return [repeats[at] and not repeats[at - 1] for at in range(begin, len(ids))]
