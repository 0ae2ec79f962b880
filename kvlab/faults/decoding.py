"""Faults of the decode loop: what is forgotten between requests, and what is said about the tokens of one."""

from __future__ import annotations

import torch

from kvlab.faults.zoo import Fault, add

LOOP = "kvlab.runtime.decode"


def _keep_everything(cache) -> None:
    """A reset that does nothing."""


def _all_ones(is_token: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(is_token, dtype=torch.long)


def _from_zero(history: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(history)[:, None]


def _high_water(written: int, high_water: int) -> int:
    return max(written, high_water)


add(
    Fault(
        name="cache-not-reset",
        breaks=f"{LOOP}:reset",
        broken=_keep_everything,
        symptom="A request is answered with something only an earlier request said.",
        mechanism="The cache of the last request is handed to the next one as it is; the new prompt is appended to it.",
        family="foreign state",
        detector="Logits from the first token on; the log: the cache held tokens before the request began.",
        fix="Reset the cache, or make a new one, before a request's first token.",
        cases=(
            "huggingface/transformers#37078",
            "huggingface/transformers#32159",
            "ggml-org/llama.cpp#27148",
            "sgl-project/sglang#23392",
        ),
        claims=("A1", "A5", "A13"),
    )
)
add(
    Fault(
        name="stale-buffer",
        breaks=f"{LOOP}:valid_length",
        broken=_high_water,
        symptom="A short request after a long one in the same buffer is wrong from its second token on; alone it is right.",
        mechanism="The buffer's valid length is raised, never lowered: decode steps attend to slots an earlier request left.",
        family="foreign state",
        detector="Logits from the first cached step on; the log: visible slots past the write cursor.",
        fix="Set the valid length to what this request has written. Zeroing is no fix: a key of zeros still takes weight.",
        cases=("huggingface/transformers#30476", "huggingface/transformers#48809", "huggingface/transformers#47731"),
        claims=("A10", "A19"),
    )
)
add(
    Fault(
        name="pads-not-masked",
        breaks=f"{LOOP}:attention_mask",
        broken=_all_ones,
        symptom="A request is right alone and wrong beside a longer one; the longest row of a batch is always right.",
        mechanism="Padding tokens have keys and values like any other; without a mask every query attends to them.",
        family="mask",
        detector="Logits from the first token on; the log: more slots visible than the request has tokens.",
        fix="Pass a mask that is 0 on padding, at prefill and at every step after it.",
        cases=("huggingface/transformers#30378", "huggingface/transformers#26869", "unslothai/unsloth#9708"),
        claims=("A9", "A14"),
    )
)
add(
    Fault(
        name="positions-restarted",
        breaks=f"{LOOP}:step_positions",
        broken=_from_zero,
        symptom="The first token is right; from the second on the text loses its thread or repeats itself.",
        mechanism="A cached step feeds its token at position 0 instead of the position after the history.",
        family="position",
        detector="Logits from the first cached step on; the log: a position that is not the request's length minus one.",
        fix="A step's position is the number of tokens already in the row's history.",
        cases=("huggingface/transformers#33095", "huggingface/transformers#26072", "huggingface/transformers#22382"),
        claims=("A6", "A7"),
    )
)
