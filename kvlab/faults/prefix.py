"""Faults of prefix sharing: what is looked up by too little, shared too far, fed at the wrong place, or written by everybody."""

from __future__ import annotations

from kvlab.core.prefixes import PrefixIndex
from kvlab.faults.zoo import Fault, add
from kvlab.runtime.paged import PagedPool

INDEX = "kvlab.core.prefixes:PrefixIndex"
BY_HAND = "kvlab.experiments.prefix"

_find, _match, _inputs = PrefixIndex.find, PrefixIndex.match, PagedPool.inputs


def _find_anywhere(self, parent, chain, k):
    """A block is looked up by its own tokens, whatever stood before them."""
    _find(self, parent, chain, k)  # computes the keys, as ever
    tokens = tuple(chain.tokens[k * self.block_size : (k + 1) * self.block_size])
    return next((p for p in self if p.tokens == tokens and p.blocks), None)


def _fingerprint(self, chain, k):
    """A block is known by its first and last token."""
    block = chain.tokens[k * self.block_size : (k + 1) * self.block_size]
    return (() if k else chain.domain, (block[0], block[-1]))


def _round_up(self, chain, most=None):
    """The hit goes on to the end of the block in which the prompts part."""
    hits = _match(self, chain, most)
    if len(hits) == self.most_hits(len(chain.tokens)):
        return hits
    parent = None
    for k in range(len(hits)):
        parent = self.find(parent, chain, k)
    begun = chain.tokens[len(hits) * self.block_size]
    for p in self:
        if p.parent is parent and p.blocks and p.tokens[0] == begun:
            return [*hits, p.block]
    return hits


def _count_own_work(self, seqs, *, limit=None):
    """Positions count the tokens this request has computed itself."""
    first = self.__dict__.setdefault("first_computed", {})
    for seq in seqs:
        first.setdefault(seq, self.manager.num_committed(seq))
    fed = _inputs(self, seqs, limit=limit)
    for row, seq in enumerate(seqs):
        fed["position_ids"][row] = (fed["position_ids"][row] - first[seq]).clamp(min=0)
    return fed


def _itself(cache):
    """No copy, no crop: the cache as it is."""
    return cache


add(
    Fault(
        name="prefix-unchained",
        breaks=f"{INDEX}.find",
        broken=_find_anywhere,
        symptom="A document that was read before, behind another beginning, gives a wrong answer when it is asked about again.",
        mechanism="A block is found by its own tokens alone; its K/V was computed at other positions and behind other tokens.",
        family="foreign state",
        detector="Logits from the first token on; check(): a block can be found by a history the request does not have.",
        fix="Chain the keys: key(parent's key, tokens). The salt, too, only reaches later blocks through the chain.",
        cases=("vllm-project/vllm#12603", "LMCache/LMCache#443"),
        claims=("B7", "B13"),
    )
)
add(
    Fault(
        name="blocks-not-verified",
        breaks=f"{INDEX}.label",
        broken=_fingerprint,
        symptom="An edited prompt is answered as if it had not been edited.",
        mechanism="A block is known by part of its tokens, its first and its last: an edit between them goes unseen.",
        family="foreign state",
        detector="Logits from the first token on; check(): a block can be found that its tokens do not fill.",
        fix="Put every token into the key, in full, and compare the tokens on a hit: keys may collide.",
        cases=("vllm-project/vllm#12621", "openvinotoolkit/openvino.genai#3723"),
        claims=("B4", "B13"),
    )
)
add(
    Fault(
        name="hit-rounded-up",
        breaks=f"{INDEX}.match",
        broken=_round_up,
        symptom="The first words of a request are lost, and the first words of another one stand in their place.",
        mechanism="The common length is rounded up to whole blocks: the block in which two prompts part is shared.",
        family="foreign state",
        detector="Logits from the first token on; check(): one block holds other tokens for one request than for another.",
        fix="Round down: share a block only if all its tokens are common, and compute the rest.",
        cases=("kvcache-ai/Mooncake#4153", "kvcache-ai/Mooncake#4164"),
        claims=("B12", "B13"),
    )
)
add(
    Fault(
        name="suffix-positions-from-zero",
        breaks="kvlab.runtime.paged:PagedPool.inputs",
        broken=_count_own_work,
        symptom="A request is right when it computes everything itself and loses its thread when it hits.",
        mechanism="Positions count the tokens a request has computed, so behind a shared prefix they begin at 0 again.",
        family="position",
        detector="Logits from the first token on; the log: a position that is not the request's length minus one.",
        fix="The first computed token stands at position num_cached_tokens.",
        cases=("Wenyueh/MinivLLM#98", "huggingface/transformers#33095"),
        claims=("B10", "B13"),
    )
)
add(
    Fault(
        name="prefix-cache-aliased",
        breaks=f"{BY_HAND}:hand_over",
        broken=_itself,
        symptom="The first request on a saved prefix is right; the next one is answered from the first one's conversation.",
        mechanism="The saved cache object itself is handed to each request, and each appends its own tokens to it.",
        family="foreign state",
        detector="Logits from the first token on; the log: the cache held more tokens than the prefix has.",
        fix="Hand out a copy, or blocks that are read-only or copied when written. copy.copy is no copy: it shares the tensors' list.",
        cases=("huggingface/transformers#37078", "huggingface/transformers#32159", "huggingface/transformers#32929"),
        claims=("B5", "B6", "B13"),
    )
)
add(
    Fault(
        name="last-token-fed-twice",
        breaks=f"{BY_HAND}:before_last",
        broken=_itself,
        symptom="A prompt that is cached to its last token is answered almost right; often no word changes.",
        mechanism="To have a query the last token is fed again over a cache that holds it: its K/V stands there twice.",
        family="foreign state",
        detector="Logits from the first token on; the log: the cache held one token more than the request may use.",
        fix="Share at most all tokens but the last: crop one, then compute it.",
        cases=("vllm-project/vllm#17999", "vllm-project/vllm#11186", "GeeeekExplorer/nano-vllm#144"),
        claims=("B13",),
    )
)
