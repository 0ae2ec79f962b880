"""Attention written out: scores, mask, grouped heads, rotation, and the step that reads what earlier steps kept.

The five functions at the top are lab 1's exercises, worked. :func:`self_attention` puts them together into a layer's
attention, with the layer's own weights; :class:`ByHand` puts that into the model, so that `kvlab.runtime.decode` can run it
like any other. What is kept between steps is two functions, :func:`remember` and :func:`read`: a fault of the zoo replaces one.

Shapes: `[..., heads, seq, head_dim]`; a mask is `[..., queries, keys]`, True where a query may look.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Cache

# ---- the pieces ----------------------------------------------------------------------------------------------------------


def weights(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """How much of each key's value a query takes: softmax(q·k / √head_dim) over the keys it may see (Vaswani et al. 2017).

    q `[..., queries, head_dim]`, k `[..., keys, head_dim]`, mask `[queries, keys]` → `[..., queries, keys]`, rows sum to 1.
    """
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    # the least number rather than −∞: a row that may see nothing (a pad's) then gives an average and not NaN
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The average of the values, by :func:`weights`. Result `[..., queries, head_dim]`."""
    return weights(q, k, mask) @ v


def causal_mask(queries: int, past: int, device: torch.device | str | None = None) -> torch.Tensor:
    """`[queries, past + queries]`: query i, which stands at position past + i, may see itself and everything before it."""
    at = torch.arange(past, past + queries, device=device)
    return torch.arange(past + queries, device=device) <= at[:, None]


def repeat_heads(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Each K/V head `groups` times in a row, so that query heads 0 … groups−1 meet the first one (Ainslie et al. 2023).

    `[..., kv_heads, seq, head_dim]` → `[..., kv_heads · groups, seq, head_dim]`.
    """
    return x.repeat_interleave(groups, dim=-3)


def rotate(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """RoPE (Su et al. 2021), on halves, as the Llama family has it: numbers i and i + head_dim/2 are a pair.

    Pair i of a token at position p is turned by the angle p / base^(2i / head_dim). x `[..., heads, seq, head_dim]`,
    positions `[seq]` or `[batch, seq]`.
    """
    half = x.shape[-1] // 2
    speed = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[..., None].float() * speed
    if positions.dim() > 1:
        angle = angle[:, None]  # the same for all heads
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def decode_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past_k: torch.Tensor, past_v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One new token in one layer: append its key and value to those kept, then read them all.

    q `[heads, 1, head_dim]`; k, v `[kv_heads, 1, head_dim]`; past_k, past_v `[kv_heads, past, head_dim]`, keys rotated.
    Returns the output `[heads, 1, head_dim]` and all keys and values, `[kv_heads, past + 1, head_dim]`, for the next step.
    """
    k, v = torch.cat([past_k, k], dim=-2), torch.cat([past_v, v], dim=-2)
    groups = q.shape[-3] // k.shape[-3]
    mask = causal_mask(1, past_k.shape[-2], q.device)
    return attend(q, repeat_heads(k, groups), repeat_heads(v, groups), mask), k, v


# ---- a layer's attention -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Of a layer's attention: query heads, K/V heads, numbers in a head, base of the rotation."""

    heads: int
    kv_heads: int
    head_dim: int
    base: float


def shape_of(config: Any) -> Shape:
    """The shape, from a Llama-like config. Raises ValueError for a model whose positions or layers are of another kind."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"config: attention by hand needs plain rotary positions; {config.model_type} has others")
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(config.num_attention_heads, config.num_key_value_heads, dim, rope["rope_theta"])


def project(block: Any, x: torch.Tensor, positions: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of a layer, queries and keys rotated. `block` has the projections q_proj, k_proj, v_proj.

    x `[batch, seq, hidden]` → q `[batch, heads, seq, head_dim]`, k and v `[batch, kv_heads, seq, head_dim]`.
    """
    q, k, v = (
        projection(x).unflatten(-1, (count, shape.head_dim)).transpose(1, 2)
        for projection, count in ((block.q_proj, shape.heads), (block.k_proj, shape.kv_heads), (block.v_proj, shape.kv_heads))
    )
    return rotate(q, positions, shape.base), rotate(k, positions, shape.base), v


def remember(cache: Cache | None, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Append the new keys and values to the layer's cache and return all of them. Nobody will ask for the queries again."""
    return (k, v) if cache is None else cache.update(k, v, layer)


def read(
    cache: Cache | None,
    layer: int,
    ids: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """What each query takes from the values: computed now, for these queries and this history. Shapes as in `attend`.

    The tokens `ids`, `[batch, queries]`, and the cache do not enter into it.
    """
    return attend(q, k, v, mask)


def self_attention(
    block: Any,
    x: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor,
    shape: Shape,
    *,
    cache: Cache | None = None,
    layer: int = 0,
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """All heads' outputs, side by side, before the output projection: `[batch, seq, heads · head_dim]`."""
    q, k, v = project(block, x, positions, shape)
    k, v = remember(cache, layer, q, k, v)
    groups = shape.heads // shape.kv_heads
    out = read(cache, layer, ids, q, repeat_heads(k, groups), repeat_heads(v, groups), mask)
    return out.transpose(1, 2).flatten(2)


# ---- the whole model -----------------------------------------------------------------------------------------------------

Attention = Callable[..., torch.Tensor]


class ByHand:
    """A Llama-like model with its attention replaced by this module's; embeddings, norms and MLPs stay the model's own.

    Called as a Transformers model is by `kvlab.runtime.decode`, it returns an object with `.logits`.
    `attention` may be a reader's own :func:`self_attention`; `causal=False` lets every token see every other.
    """

    def __init__(self, model: Any, attention: Attention | None = None, *, causal: bool = True) -> None:
        self.model, self.attention, self.causal = model, attention or self_attention, causal
        self.config, self.shape = model.config, shape_of(model.config)

    device = property(lambda self: self.model.device)
    dtype = property(lambda self: self.model.dtype)

    def mask(self, queries: int, past: int, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """`[queries, keys]`, or `[batch, 1, queries, keys]` where some columns hold padding."""
        may_see = causal_mask(queries, past, self.device) if self.causal else causal_mask(1, past + queries - 1, self.device)
        return may_see if attention_mask is None else may_see & attention_mask[:, None, None].bool()

    def __call__(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
    ) -> SimpleNamespace:
        """input_ids `[batch, seq]`, attention_mask `[batch, past + seq]` → logits `[batch, seq or logits_to_keep, vocab]`."""
        body = self.model.model
        past = int(cache.get_seq_length()) if cache is not None else 0
        if position_ids is None:
            position_ids = torch.arange(past, past + input_ids.shape[1], device=self.device)
        mask = self.mask(input_ids.shape[1], past, attention_mask)
        x = body.embed_tokens(input_ids)
        for number, layer in enumerate(body.layers):
            y = layer.input_layernorm(x)
            y = self.attention(layer.self_attn, y, position_ids, mask, self.shape, cache=cache, layer=number, ids=input_ids)
            x = x + layer.self_attn.o_proj(y)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return SimpleNamespace(logits=self.model.lm_head(body.norm(x[:, -logits_to_keep:])))
