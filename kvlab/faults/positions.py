"""Faults of where a token stands that lab 4 adds: counted from the wrong end, over pads, in too few bits, or turned by the angles
of another request's length."""

from __future__ import annotations

import torch

from kvlab.faults.zoo import Fault, add

LOOP = "kvlab.runtime.decode"
LOG = "Logits from the first cached step on; the log: a position that is not the request's length minus one."


def _from_one(is_token: torch.Tensor, start: int) -> torch.Tensor:
    """A sum over the mask, the −1 forgotten."""
    return is_token.long().cumsum(-1) + start


def _columns(history: torch.Tensor) -> torch.Tensor:
    """The cache's length: what its longest row has, which has no pads."""
    return history.max().expand(history.shape[0])[:, None]


def _in_bf16(history: torch.Tensor) -> torch.Tensor:
    """Counted in bf16, which has 8 bits: from 256 on not every whole number can be written."""
    return history.to(torch.bfloat16).long()[:, None]


def _always(spec) -> bool:
    """Whatever the model's angles depend on."""
    return True


@torch.no_grad()
def _never_back(self, x, position_ids):
    """The angles grow with a request beyond the trained length; the length they have grown to is not kept, so nothing sets them back."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    length = position_ids.max() + 1
    if self.rope_type == "dynamic" and length > self.max_seq_len_cached:
        self.inv_freq, self.attention_scaling = ROPE_INIT_FUNCTIONS["dynamic"](self.config, x.device, seq_len=length)
    angles = position_ids[..., None].float() * self.inv_freq.to(x.device)
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * self.attention_scaling).to(x.dtype), (angles.sin() * self.attention_scaling).to(x.dtype)


add(
    Fault(
        name="prefill-from-one",
        breaks=f"{LOOP}:positions",
        broken=_from_one,
        symptom="The first token is right, and the text after it nearly so: small slips, often none. Only logits show it every time.",
        mechanism="The prefill's positions are a sum over the mask without the −1: the first new token stands where the prompt's last one does.",
        family="position",
        detector="Logits: from the first cached step on with RoPE, from the first token on with learned positions; the log, from the first token on.",
        fix="A sum over the mask, minus 1, so that the first token of all stands at 0; the same convention in the steps.",
        cases=("PrimeIntellect-ai/prime-rl#1545", "Physical-Intelligence/openpi#762"),
        claims=("A6", "B10"),
    )
)
add(
    Fault(
        name="steps-count-pads",
        breaks=f"{LOOP}:step_positions",
        broken=_columns,
        symptom="In a padded batch the first token is right and the text falls apart from the second on; the longest row is fine.",
        mechanism="Cached steps take the cache's length for the position. In a padded row that counts the pads, which the prefill did not.",
        family="position",
        detector=LOG,
        fix="A step's position is the sum of its row's mask, minus 1, not the length of the cache.",
        cases=("unslothai/unsloth#3803", "Comfy-Org/ComfyUI#15698", "mosaicml/examples#257"),
        claims=("A7", "A18"),
    )
)
add(
    Fault(
        name="step-position-in-bf16",
        breaks=f"{LOOP}:step_positions",
        broken=_in_bf16,
        symptom="Short requests are right. From some 256 tokens on, new tokens share positions, the more the longer the request.",
        mechanism="The position is counted in bf16. It has 8 bits: after 256 every second whole number is missing, after 512 three of four.",
        family="position",
        detector=LOG,
        fix="Positions are whole numbers: keep them in an integer type, and compute angles from them in fp32.",
        cases=("EleutherAI/gpt-neox#1003", "huggingface/diffusers#13920", "huggingface/transformers#25681"),
        claims=("A11",),
    )
)
add(
    Fault(
        name="prefix-of-another-length",
        breaks="kvlab.runtime.paged:may_share",
        broken=_always,
        symptom="With RoPE that is scaled by length a short request is right alone, and wrong behind a long one with the same beginning.",
        mechanism="Beyond the trained length a forward turns all its tokens by the angles of its longest row. Their keys fit no shorter request.",
        family="foreign state",
        detector="Logits from the first token on. The log sees nothing: tokens and positions are right, the angles are not.",
        fix="Share no prefix under such a rope_type (dynamic, longrope), or fix one set of angles for every length.",
        cases=("huggingface/transformers#25104", "vllm-project/vllm#27431", "trymirai/uzu#604"),
        claims=("B3",),
    )
)
add(
    Fault(
        name="angles-not-set-back",
        breaks="transformers.models.llama.modeling_llama:LlamaRotaryEmbedding.forward",
        broken=_never_back,
        symptom="After one long request every short one is off, on a new cache too; a restart mends it.",
        mechanism="Dynamic RoPE stretches its angles for a request beyond the trained length and never sets them back.",
        family="position",
        detector="Logits of one short request before and after a long one. The log sees nothing, and no cache is shared.",
        fix="Compute the angles from each request's own length, or set them back when a request is within the trained length.",
        cases=("huggingface/transformers#46624", "huggingface/transformers#27227"),
        claims=("A5", "A10"),
    )
)
