"""Position ids and angles in low precision, and positions beyond the trained length.

RoPE turns a query and a key by an angle, position times frequency. What rounding does to it depends on what is rounded: the
position, the angle, or only its cosine and sine. Studies of arithmetic need no model; the others run on the bundled one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvlab import record
from kvlab.compare import compare
from kvlab.experiments import clients
from kvlab.experiments.prompts import encode
from kvlab.faults import fault
from kvlab.runtime import Loaded
from kvlab.runtime.decode import Trace

HALVES = ("bfloat16", "float16")
LAST = 8192  # positions asked about: 0 to LAST − 1
TURNS = 64  # times a key is turned on by one position
PROMPT = "The capital of France is Paris. The capital of Spain is Madrid. The capital of Italy is"
NEW_TOKENS = 3


@dataclass(frozen=True)
class Limits:
    """How far the studies go: `text` tokens are read for the loss, `long` for cached against uncached, `offsets` are where a prompt stands."""

    text: int = 10240
    long: int = 2048
    offsets: tuple[int, ...] = (16, 64, 256, 512, 1024, 2048, 4096, 8000)
    chunk: int = 512


QUICK = Limits(text=256, long=128, offsets=(256, 4096), chunk=64)


# --- arithmetic ----------------------------------------------------------------------------------------------------------


def distinct(loaded: Loaded, limits: Limits) -> dict:
    """For each 16-bit type: how many of positions 0 to LAST − 1 stay apart, how many below each power of two, where a counter sticks."""
    found = {}
    for name in HALVES:
        dtype = getattr(torch, name)
        kept = torch.arange(LAST).to(dtype)
        found[name] = {
            "values": len(kept.unique()),
            "below": [[2**k, len(kept[: 2**k].unique())] for k in range(4, LAST.bit_length())],
            "first_lost": int((kept[1:] == kept[:-1]).nonzero()[0]) + 1,
            "counter": counter(dtype),
        }
    return found


def counter(dtype: torch.dtype) -> int:
    """Where counting up by one in `dtype` comes to a stop: one more is rounded away."""
    at = torch.zeros((), dtype=dtype)
    while at + 1 != at:
        at += 1
    return int(at)


VARIANTS: dict[str, tuple[str | None, str | None]] = {
    "angles in bf16": ("bfloat16", None),
    "angles in fp16": ("float16", None),
    "cos and sin in bf16": (None, "bfloat16"),
    "cos and sin in fp16": (None, "float16"),
}
"""What is computed in low precision: the angle from its beginning (position, frequency, product), or cosine and sine only at the end."""


def cosine_and_sine(
    inv_freq: torch.Tensor, position_ids: torch.Tensor, angles: str | None = None, tables: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE's cosines and sines, `[batch, seq, head_dim]`, fp32 (RoFormer, eq. 34).

    Args:
        inv_freq: frequencies `[head_dim / 2]`, radians a position.
        position_ids: `[batch, seq]`.
        angles: dtype in which position, frequency and their product are held; by default fp32.
        tables: dtype to which cosine and sine are rounded; by default fp32.
    """
    work = getattr(torch, angles or "float32")
    product = position_ids[..., None].to(work) * inv_freq.to(work)
    turned = torch.cat((product, product), dim=-1)
    kept = getattr(torch, tables or "float32")
    return turned.cos().to(kept).float(), turned.sin().to(kept).float()


def angle_errors(loaded: Loaded, limits: Limits) -> dict:
    """Largest error of a cosine against fp64, over all frequencies, by position: the largest of each eighth of an octave."""
    inv_freq = loaded.model.base_model.rotary_emb.inv_freq.float().cpu()
    at = torch.arange(LAST)[None]
    half = at[0][:, None].double() * inv_freq.double()
    truth = half.cos().repeat(1, 2)
    edges = sorted({0, *(round(2 ** (k / 4)) for k in range(4 * (LAST.bit_length() - 1) + 1))})
    found: dict = {"positions": [(a + b - 1) // 2 for a, b in zip(edges, edges[1:])], "errors": {}}
    for name, (angles, tables) in {"all in fp32": (None, None), **VARIANTS}.items():
        cos, _ = cosine_and_sine(inv_freq, at, angles, tables)
        error = (cos[0].double() - truth).abs().amax(-1)
        found["errors"][name] = [record.short(float(error[a:b].max()), 3) for a, b in zip(edges, edges[1:])]
    return found


def turned_again(loaded: Loaded, limits: Limits) -> dict:
    """A key turned by one position, again and again, against one turn by the whole angle: the relative error after 1, 2, … turns.

    A cache whose context is shifted does this to its keys at every shift, and keeps them in the cache's type.
    """
    inv_freq = loaded.model.base_model.rotary_emb.inv_freq.float().cpu()
    key = torch.randn(1, 1, 1, 2 * len(inv_freq), generator=torch.Generator().manual_seed(4))
    cos, sin = (t[:, None] for t in cosine_and_sine(inv_freq, torch.ones(1, 1)))
    found = {}
    for name in ("float32", *HALVES):
        dtype, errors = getattr(torch, name), []
        kept = key.to(dtype)
        begun = kept.float()
        for turns in range(1, TURNS + 1):
            kept = clients.turn(kept.float(), cos, sin).to(dtype)
            whole = clients.turn(begun, *(t[:, None] for t in cosine_and_sine(inv_freq, torch.full((1, 1), turns))))
            errors.append(record.short(float((kept.float() - whole).norm() / whole.norm()), 3))
        found[name] = errors
    return found


# --- on the model --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def rotation(loaded: Loaded, variant: str | None) -> Iterator[None]:
    """The model's own rotary embedding replaced by one of VARIANTS, `None` for the model's own."""
    if variant is None:
        yield
        return
    angles, tables = VARIANTS[variant]
    rotary = loaded.model.base_model.rotary_emb

    def forward(x, position_ids):
        cos, sin = cosine_and_sine(rotary.inv_freq.float(), position_ids, angles, tables)
        return (cos * rotary.attention_scaling).to(x.dtype), (sin * rotary.attention_scaling).to(x.dtype)

    rotary.forward = forward
    try:
        yield
    finally:
        del rotary.forward


@torch.inference_mode()
def uncached(loaded: Loaded, trace: Trace, position: int) -> Trace:
    """The tokens of `trace` once more in one forward without a cache, the first at `position`."""
    ids = [*trace.prompt, *trace.tokens[:-1]]
    at = torch.arange(position, position + len(ids), device=loaded.model.device)[None]
    out = loaded.model(input_ids=torch.tensor([ids], device=at.device), position_ids=at, use_cache=False)
    logits = out.logits[0, len(trace.prompt) - 1 :].float().cpu()
    return Trace(list(trace.prompt), logits.argmax(-1).tolist(), [], logits)


def moved(loaded: Loaded, limits: Limits) -> dict:
    """A prompt whose first token stands further and further in, against the same prompt at 0 in fp32.

    For each variant and offset: |Δlogit|, KL, first flip; and `paths`, how far the cached run there is from the uncached one there.
    """
    prompt = encode(loaded.tokenizer, PROMPT)
    plain = clients.from_afar(loaded, prompt, 0, NEW_TOKENS)
    found: dict = {"offsets": [0, *limits.offsets], "variants": {}}
    for variant in (None, *VARIANTS):
        rows = []
        for offset in found["offsets"]:
            with rotation(loaded, variant):
                there = clients.from_afar(loaded, prompt, offset, NEW_TOKENS)
                paths = compare(there, uncached(loaded, there, offset)).delta
            d = compare(plain, there)
            rows.append([record.short(d.delta), record.short(d.kl), d.first, record.short(paths)])
        found["variants"][variant or "all in fp32"] = rows
    return found


def counted_low(loaded: Loaded, limits: Limits) -> dict:
    """Cached steps whose position is counted in bf16, behind prompts of different length: |Δlogit| and first flip."""
    from kvlab.runtime.decode import greedy

    ids, rows = text_ids(loaded, limits.long), []
    for length in [n for n in (100, 255, 257, 301, 515, 1029, 2041) if n + NEW_TOKENS <= limits.long]:
        right = greedy(loaded, [ids[:length]], NEW_TOKENS)[0]
        with fault("step-position-in-bf16"):
            other = greedy(loaded, [ids[:length]], NEW_TOKENS)[0]
        d = compare(right, other)
        stands = [step.position for step in other.steps[1:]]
        rows.append([length, stands, record.short(d.delta), d.first])
    return {"rows": rows}


def text_ids(loaded: Loaded, count: int) -> list[int]:
    """English prose that comes with Python, its help topics: `count` token ids."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return encode(loaded.tokenizer, text[: 8 * count])[:count]


@torch.inference_mode()
def hidden(loaded: Loaded, ids: Sequence[int], chunk: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Last hidden states `[fed, hidden]` of a prefill in pieces, each with the position of its first token."""
    from transformers import DynamicCache

    cache = DynamicCache(config=loaded.model.config)
    for begin in range(0, len(ids), chunk):
        fed = torch.tensor([ids[begin : begin + chunk]], device=loaded.model.device)
        yield begin, loaded.model.base_model(input_ids=fed, cache=cache, use_cache=True).last_hidden_state[0]


@torch.inference_mode()
def along(loaded: Loaded, limits: Limits) -> dict:
    """Does the difference between a cached and an uncached run grow along a text? `[position, largest |Δlogit| of 16 places there]`.

    Uncached: one forward. Cached: pieces of 64 tokens, each reading the cache of those before it.
    """
    ids, head = text_ids(loaded, limits.long), loaded.model.get_output_embeddings()
    (_, whole), *_ = hidden(loaded, ids, len(ids))
    pieces = torch.cat([state for _, state in hidden(loaded, ids, 64)])
    bins, points = limits.long // 8, []
    for begin in range(0, limits.long, bins):
        places = range(begin, begin + bins, max(1, bins // 16))
        deltas = [float((head(whole[p]) - head(pieces[p])).abs().max()) for p in places]
        points.append([begin + bins // 2, record.short(max(deltas))])
    return {"points": points}


@torch.inference_mode()
def losses(loaded: Loaded, ids: Sequence[int], chunk: int) -> list[float]:
    """Nats for each token of `ids` but the first, read from position 0."""
    head, found = loaded.model.get_output_embeddings(), []
    for begin, states in hidden(loaded, ids[:-1], chunk):
        aims = torch.tensor(ids[begin + 1 : begin + 1 + len(states)], device=states.device)
        found += torch.nn.functional.cross_entropy(head(states).float(), aims, reduction="none").tolist()
    return found


def beyond(loaded: Loaded, limits: Limits) -> dict:
    """Loss by position along one text that is longer than the model was made for: nats a token, in bins.

    What is hard in the text moves the loss as well. So its last quarters are read `again`, each from position 0 with the quarter's
    length of text before it: the same tokens, with less context, at positions the model knows.
    """
    ids = text_ids(loaded, limits.text + 1)
    size, block = min(256, limits.text // 4), limits.text // 10
    block -= block % size or 0
    block = max(block, size)

    def bins(values: Sequence[float]) -> tuple[list[float], list[float]]:
        cut = [values[at : at + size] for at in range(0, len(values), size)]
        mean = [sum(part) / len(part) for part in cut]
        error = [math.sqrt(sum((v - m) ** 2 for v in part)) / len(part) for part, m in zip(cut, mean)]
        return [record.short(m) for m in mean], [record.short(e, 2) for e in error]

    loss, error = bins(losses(loaded, ids, limits.chunk))
    again: list[list] = []
    for begin in range(max(block, limits.text - 4 * block), limits.text, block):
        there = losses(loaded, ids[begin - block : begin + block + 1], limits.chunk)[block:]
        again += [[begin + n * size + size // 2, value] for n, value in enumerate(bins(there)[0])]
    return {
        "made_for": loaded.spec.max_context,
        "size": size,
        "positions": [at + size // 2 for at in range(0, limits.text, size)],
        "loss": loss,
        "error": error,
        "before": block,
        "again": again,
    }


PARTS: dict[str, Callable[[Loaded, Limits], dict]] = {
    "distinct": distinct,
    "angles": angle_errors,
    "turns": turned_again,
    "moved": moved,
    "counted": counted_low,
    "along": along,
    "beyond": beyond,
}
