"""Faults of what a decode step keeps: too much, or the wrong thing."""

from __future__ import annotations

import torch

from kvlab.faults.zoo import Fault, add

MODULE = "kvlab.runtime.attention"


def _queries_too(cache, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """Keys, values, and the queries beside them."""
    if cache is None:
        return k, v
    kept = cache.__dict__.setdefault("queries", {})
    kept[layer] = torch.cat([kept[layer], q], dim=-2) if layer in kept else q
    return cache.update(k, v, layer)


def _by_token(cache, layer: int, ids: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor):
    """A token that an earlier forward has seen gets the output it got then, whatever stands before it now."""
    from kvlab.runtime.attention import attend

    out = attend(q, k, v, mask)
    if cache is None:
        return out
    kept = cache.__dict__.setdefault("outputs", {})  # a reset of the keys and values leaves it as it is
    places = [(r, c, (layer, token)) for r, tokens in enumerate(ids.tolist()) for c, token in enumerate(tokens)]
    for row, column, key in places:
        if key in kept:
            out[row, :, column] = kept[key]
    kept |= {key: out[row, :, column].clone() for row, column, key in places}
    return out


add(
    Fault(
        name="queries-cached",
        breaks=f"{MODULE}:remember",
        broken=_queries_too,
        symptom="The cache takes a multiple of what the model's keys and values take. Every answer is right.",
        mechanism="The query of each token is kept beside its key and value. A query is used in its own step and never read again.",
        family="accounting",
        detector="Bytes held against the ledger's; no logit moves. With grouped heads the queries are the larger part.",
        fix="Keep keys and values. Compute the query of the token at hand and let it go.",
        cases=("mlfoundations/open_lm#74", "huggingface/transformers#25930"),
        claims=("B2", "C3"),
    )
)
add(
    Fault(
        name="output-cached",
        breaks=f"{MODULE}:read",
        broken=_by_token,
        symptom="A word that occurred before is continued as it was then: within a request, and in the next user's too.",
        mechanism="The attention's output is kept by token. It depends on the query and on every key before it, so on the whole context.",
        family="foreign state",
        detector="Logits, from the first token that was seen before. The log sees nothing: lengths and positions are right.",
        fix="Keep what does not depend on later queries, keys and values, and compute the output anew in each step.",
        cases=("sgl-project/sglang#36767", "huggingface/diffusers#13497"),
        claims=("C2", "A5"),
    )
)
