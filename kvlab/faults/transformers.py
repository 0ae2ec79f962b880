"""Faults of how Transformers' caches, masks and positions are used, and two of Transformers itself that were fixed there."""

from __future__ import annotations

import copy

import torch

from kvlab.faults.zoo import Fault, add

CLIENTS = "kvlab.experiments.clients"
LOOP = "kvlab.runtime.decode"
CACHES = "transformers.cache_utils"
HF = "huggingface/transformers"


# --- whose cache is it? ------------------------------------------------------------------------------------------------


def _itself(cache):
    """No copy."""
    return cache


def _two_names_for_one_buffer(cache):
    """Its own lengths, the same tensors."""
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in twin.layers:
        layer.cumulative_length = layer.cumulative_length.clone()
    return twin


def _live(cache):
    """What the cache answers, as it is: a StaticCache hands out the tensor it counts with."""
    return cache.get_seq_length()


def _nothing(*_) -> None:
    """Does nothing."""


add(
    Fault(
        name="prefix-copied-shallow",
        breaks=f"{CLIENTS}:hand_on",
        broken=copy.copy,
        symptom="The saved prefix is copied for every request, and yet the second one is answered from the first one's conversation.",
        mechanism="copy.copy makes a new cache object around the same list of layers: what one request appends, all have.",
        family="foreign state",
        detector="Logits from the first token on; the log: the cache held more tokens than the prefix has.",
        fix="copy.deepcopy. It needs a prefix that was computed without gradients.",
        cases=(f"{HF}#37078", f"{HF}#32159", f"{HF}#32929", "vllm-project/vllm-omni#4752"),
        claims=("B5", "B6", "A5"),
    )
)
add(
    Fault(
        name="fork-shares-the-buffer",
        breaks=f"{CLIENTS}:fork",
        broken=_two_names_for_one_buffer,
        symptom="One branch of a conversation goes on with what the other branch said.",
        mechanism="Each branch has its own length, but both write the next token into the same slot of the same tensor.",
        family="foreign state",
        detector="Logits from the first token after the other branch has written. The log sees nothing: every length is right.",
        fix="Copy the tensors when branching, or copy the block at the first write.",
        cases=("vllm-project/vllm-omni#4752", f"{HF}#32159"),
        claims=("B6", "C9", "C21"),
    )
)
add(
    Fault(
        name="look-writes",
        breaks=f"{CLIENTS}:for_a_look",
        broken=_itself,
        symptom="After a continuation has only been tried, with use_cache=False, the request goes on as if it had been said.",
        mechanism="use_cache=False says that no cache is made. One that is passed in is written to all the same.",
        family="foreign state",
        detector="Logits from the first token on; the log: the cache held more tokens than the request has.",
        fix="Try on a copy, or crop what was tried.",
        cases=(f"{HF}#37078", f"{HF}#32843"),
        claims=("A5", "C21"),
    )
)
add(
    Fault(
        name="length-is-live",
        breaks=f"{CLIENTS}:remember",
        broken=_live,
        symptom="A buffer is rolled back to its prefix after every request, and yet the next request knows the last one.",
        mechanism="A StaticCache's length is a tensor that it counts on with: the mark that was kept moves along, and nothing is cropped.",
        family="foreign state",
        detector="Logits from the first token on; the log: the cache held more tokens than the prefix has.",
        fix="Keep int(cache.get_seq_length()), not what it returns.",
        cases=(f"{HF}#45987", f"{HF}#46286"),
        claims=("A10", "A15"),
    )
)
add(
    Fault(
        name="static-cache-not-reset",
        breaks=f"{CACHES}:CacheLayerMixin.reset",
        broken=_nothing,
        symptom="A second request through a StaticCache is answered with what the first one said.",
        mechanism="The buffer keeps its length and its contents: the new request is appended to the old one.",
        family="foreign state",
        detector="Logits from the first token on; the log: the cache held tokens before the request began.",
        fix="reset() between requests, and a test that says what it must do: length 0 and no old slot visible.",
        cases=(f"{HF}#30476", f"{HF}#48809", f"{HF}#47731"),
        claims=("A5", "A10", "A19"),
    )
)
add(
    Fault(
        name="old-weights-cache",
        breaks=f"{CLIENTS}:forget",
        broken=_nothing,
        symptom="After a weight update, answers on a cached prefix follow the old model in part; a fresh prompt is right.",
        mechanism="Keys and values in the cache were computed by weights that are gone; the new ones read them as their own.",
        family="foreign state",
        detector="Logits from the first token on. The log sees nothing: the tokens and positions are the request's own.",
        fix="Empty every cache when weights or adapters change, or put the weights' version into the prefix key.",
        cases=("huggingface/trl#3024", "InternLM/lmdeploy#4917"),
        claims=("B20", "B21"),
    )
)


def _stay(self, beam_idx) -> None:
    """The rows of the cache stay where they are."""


add(
    Fault(
        name="beams-not-reordered",
        breaks=f"{CACHES}:CacheLayerMixin.reorder_cache",
        broken=_stay,
        symptom="Beam search ends in a worse text than it would, and scores it better than it is.",
        mechanism="When a beam takes another one's place its tokens move and its keys and values do not: beams read each other's past.",
        family="foreign state",
        detector="Rescoring: the text once more in one forward; the logits of its tokens must be those the search weighed them by.",
        fix="Select the cache's rows by the beam indices after every step, in every layer.",
        cases=(f"{HF}#46612",),
        claims=("C20", "A5"),
    )
)


# --- what may be seen --------------------------------------------------------------------------------------------------


def _history_only(is_token: torch.Tensor) -> torch.Tensor:
    """The mask is made before the newest token is counted. One token alone is not masked."""
    return is_token[:, :-1].long() if is_token.shape[1] > 1 else is_token.long()


def _minus_infinity(mask, begin, slots, beyond, dtype, window=None):
    """-inf where nothing may be seen, in place of the least finite number."""
    right = _buffer_mask(mask, begin, slots, beyond, dtype, window)
    return right.masked_fill(right < 0, float("-inf"))


def _one_too_many(sliding_window: int):
    """A window of one token more: `>=` for `>`."""

    def inside(batch_idx, head_idx, q_idx, kv_idx):
        return kv_idx >= q_idx - sliding_window

    return inside


def _what_is_kept(self) -> int:
    """The length is what the layer keeps, and it never keeps more than its window."""
    return self.keys.shape[-2] if self.is_initialized and self.keys.numel() else 0


from kvlab.runtime.decode import buffer_mask as _buffer_mask  # noqa: E402  (the right one, before it is replaced)

add(
    Fault(
        name="mask-one-short",
        breaks=f"{LOOP}:attention_mask",
        broken=_history_only,
        symptom="Answers are fluent and beside the point: the model never sees the newest token.",
        mechanism="The mask is shorter than past plus new. Transformers fills it up with zeros without a word, so the newest token is hidden.",
        family="mask",
        detector="Logits from the first token on; the log: one slot fewer visible than the request has tokens.",
        fix="A mask has one column for every token in the cache and every token fed; check its width before the forward.",
        cases=(f"{HF}#38060",),
        claims=("A18", "A9"),
    )
)
add(
    Fault(
        name="masked-row-is-nan",
        breaks=f"{LOOP}:buffer_mask",
        broken=_minus_infinity,
        symptom="The shortest rows of a batch end in NaN, and their text in one token repeated; the longest row is right.",
        mechanism="A padding query may see nothing. With -inf everywhere its softmax is 0/0, and the NaN spreads through its values.",
        family="mask",
        detector="Logits: NaN counts as infinitely far. The log sees nothing: the right slots are masked.",
        fix="Mask with the dtype's least finite number, or let a query that may see nothing see itself.",
        cases=("unslothai/unsloth#9848",),
        claims=("A9", "A14"),
    )
)
add(
    Fault(
        name="window-one-too-wide",
        breaks="transformers.masking_utils:sliding_window_overlay",
        broken=_one_too_many,
        symptom="Short prompts are right. Past the window, a prefill and the cached steps after it do not agree.",
        mechanism="The mask lets a query see window + 1 tokens, the cache keeps window: `>=` where `>` belongs.",
        family="mask",
        detector="Logits, on a prompt longer than the window, against a full forward under a window mask.",
        fix="One definition of the window for mask and cache: itself and window − 1 tokens before it. Test at window ± 1.",
        cases=(f"{HF}#37574", f"{HF}#38046", "ml-explore/mlx-lm#390", f"{HF}#48280"),
        claims=("C12",),
    )
)
add(
    Fault(
        name="window-caps-the-length",
        breaks=f"{CACHES}:DynamicSlidingWindowLayer.get_seq_length",
        broken=_what_is_kept,
        symptom="A conversation is right until it has filled the window; from then on every token stands at the same place.",
        mechanism="The cache answers with what it keeps, not with what it has seen. Positions and mask are counted from that number.",
        family="position",
        detector="Logits from the first cached step past the window; the log: a position that is not the request's length minus one.",
        fix="Count the tokens seen apart from the tokens kept.",
        cases=(f"{HF}#38156", f"{HF}#35681"),
        claims=("C12", "A6"),
    )
)


# --- where a token stands ----------------------------------------------------------------------------------------------


def _pads_count(is_token: torch.Tensor, start: int) -> torch.Tensor:
    """Positions are the columns of the batch."""
    columns = torch.arange(is_token.shape[1], device=is_token.device)
    return columns.expand(is_token.shape[0], -1) + start


def _first_rows(history: torch.Tensor) -> torch.Tensor:
    """Every row goes on at the first row's place."""
    return history[:1].expand(history.shape[0])[:, None]


def _counted_from_one(history: torch.Tensor) -> torch.Tensor:
    """The next position is one too far."""
    return history[:, None] + 1


def _very_last(is_token: torch.Tensor) -> torch.Tensor:
    """The last column of the batch, whatever stands there."""
    return torch.full((is_token.shape[0],), is_token.shape[1] - 1)


def _leave_out(is_token: torch.Tensor) -> None:
    """No position ids: the model counts columns."""


@torch.no_grad()
def _angles_in_bf16(self, x, position_ids):
    """The rotary embedding with positions, frequencies and angles in bf16."""
    freqs = position_ids[..., None].to(torch.bfloat16) * self.inv_freq.to(x.device, torch.bfloat16)
    angles = torch.cat((freqs, freqs), dim=-1)
    return (angles.cos() * self.attention_scaling).to(x.dtype), (angles.sin() * self.attention_scaling).to(x.dtype)


def _as_they_are(keys, cos, sin):
    """Renumbered, not rotated."""
    return keys


add(
    Fault(
        name="conventions-mixed",
        breaks=f"{LOOP}:positions",
        broken=_pads_count,
        symptom="In a padded batch the first token is right and the text falls apart from the second on; the longest row is fine.",
        mechanism="The prefill counts pads as positions, the cached steps do not: between prompt and answer a row jumps back by its pads.",
        family="position",
        detector="Logits from the first cached step on; the log: a position that is not the request's length minus one.",
        fix="One convention for prefill and decode: positions from the mask, in both.",
        cases=(f"{HF}#33095", f"{HF}#26072", f"{HF}#22382"),
        claims=("A7", "A18"),
    )
)
add(
    Fault(
        name="one-offset-for-all",
        breaks=f"{LOOP}:step_positions",
        broken=_first_rows,
        symptom="In a batch the first row is right, rows of another length are not; alone every row is right.",
        mechanism="One position is computed for the step and given to every row, though their histories differ in length.",
        family="position",
        detector="Logits from the first cached step on; the log: a position that is not the request's length minus one.",
        fix="A position for each row, from that row's own mask.",
        cases=("unslothai/unsloth#3699", "unslothai/unsloth#4078", f"{HF}#29029"),
        claims=("A7", "A14"),
    )
)
add(
    Fault(
        name="position-one-too-far",
        breaks=f"{LOOP}:step_positions",
        broken=_counted_from_one,
        symptom="Text that is nearly right: small slips after the first token, often none.",
        mechanism="The first generated token stands one place too far, and all after it: between prompt and answer there is a hole.",
        family="position",
        detector="Logits from the first cached step on; the log: a position that is not the request's length minus one.",
        fix="A step's position is the number of tokens before it; the first token of all stands at 0.",
        cases=(f"{HF}#22382", "Wenyueh/MinivLLM#98"),
        claims=("A6", "B10"),
    )
)
add(
    Fault(
        name="right-padding-misread",
        breaks=f"{CLIENTS}:last_column",
        broken=_very_last,
        symptom="With padding on the right only the longest row of a batch is right; the others answer to a pad.",
        mechanism="The next token is read from the last column. There a shorter row has a pad, not its last token.",
        family="position",
        detector="Logits from the first token on; the log: the column that is read does not stand at the request's length minus one.",
        fix="Pad on the left to generate, or read each row at its own last token.",
        cases=(f"{HF}#18388", f"{HF}#25790", f"{HF}#23401"),
        claims=("A9", "A14", "A18"),
    )
)
add(
    Fault(
        name="no-position-ids",
        breaks=f"{CLIENTS}:row_positions",
        broken=_leave_out,
        symptom="A model with learned positions is wrong in every padded row; one with RoPE gives the same answer as ever.",
        mechanism="Left-padded rows go through a bare forward without position ids: columns are counted, pads with them.",
        family="position",
        detector="Logits from the first token on; the log: a position that is not the request's length minus one.",
        fix="Pass positions counted from the mask. `generate` does; a bare forward does not.",
        cases=("TransformerLensOrg/TransformerLens#1609", f"{HF}#26072"),
        claims=("A7", "A18"),
    )
)
add(
    Fault(
        name="angles-in-bf16",
        breaks="transformers.models.llama.modeling_llama:LlamaRotaryEmbedding.forward",
        broken=_angles_in_bf16,
        symptom="Right at the start of a context, ever worse further in: neighbouring tokens have the same position.",
        mechanism="bf16 has 8 bits of mantissa. From 256 on it cannot tell all positions apart, and an angle is off by whole turns.",
        family="position",
        detector="Logits far from 0 against logits at 0: with RoPE they must agree. The log sees nothing: the position ids are right.",
        fix="Positions, frequencies and angles in fp32; only cosine and sine may be cast.",
        cases=(f"{HF}#29285",),
        claims=("A11",),
    )
)
add(
    Fault(
        name="shift-without-rotation",
        breaks=f"{CLIENTS}:turn",
        broken=_as_they_are,
        symptom="When a long conversation drops its beginning, the next answer goes wrong; before that all was right.",
        mechanism="The kept tokens are renumbered, but their keys keep the rotation of their old positions.",
        family="position",
        detector="Logits against the same cache with its beginning masked. The log sees nothing: the numbers are right.",
        fix="Rotate every kept key back by the number of dropped tokens, or do not renumber.",
        cases=("ggml-org/llama.cpp#3825", "ggml-org/llama.cpp#12160", "ggml-org/llama.cpp#12253"),
        claims=("A11", "B7"),
    )
)


# --- which tokens ------------------------------------------------------------------------------------------------------


def _piece_by_piece(tokenizer, pieces) -> list[int]:
    """Each piece tokenised on its own."""
    return [token for piece in pieces for token in tokenizer(piece, add_special_tokens=False)["input_ids"]]


add(
    Fault(
        name="tokenised-apart",
        breaks=f"{CLIENTS}:token_ids",
        broken=_piece_by_piece,
        symptom="The same text gives another answer when it is put together from a cached prefix and a suffix.",
        mechanism="Prefix and suffix are tokenised apart. Where a word spans the seam, the ids are not those of the joined text.",
        family="token ids",
        detector="The ids, decoded and encoded again, are not the same ids; logits, from the first token on.",
        fix="Tokenise the joined text, and share what its ids have in common with the prefix's.",
        cases=("mlc-ai/mlc-llm#3179", "kubernetes-sigs/inference-perf#491", "ggml-org/llama.cpp#4778"),
        claims=("B17", "B4"),
    )
)
