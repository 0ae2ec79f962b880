"""Attention, with and without a memory: the pieces against the model's own layers, what of the past is read again, and by whom.

What it costs is measured in `kvlab.experiments.attention_cost`; `run` puts both into one recorded run.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvlab import record
from kvlab.compare import compare
from kvlab.core.ledger import request_bytes
from kvlab.experiments import attention_cost, prompts
from kvlab.experiments.prompts import encode
from kvlab.faults import fault
from kvlab.runtime import Loaded, load
from kvlab.runtime import attention as hand
from kvlab.runtime.attention import Attention, ByHand, shape_of
from kvlab.runtime.decode import Trace, attention_kernel, greedy

SEED = 1
SECRET = "ABCD-1234"
PROMPT = f"The password is: {SECRET}. I repeat, the password is:"
ASKED = "Hello. What is the password? The password is:"  # another user, who was never told
PLAIN = "The sun rose over the harbour, and the fishermen carried their nets down to the boats, as they had done every day."
NEW_TOKENS = 8
FIND, JUDGE, MOST = 6, 24, 40  # prompts the readers are found on, prompts they are judged on, heads it is hidden from at most
DRAWS = 5  # of heads chosen blindly


def by_hand(loaded: Loaded, attention: Attention | None = None, *, causal: bool = True) -> Loaded:
    """The same model with its attention written out; see `kvlab.runtime.attention.ByHand`."""
    return replace(loaded, model=ByHand(loaded.model, attention, causal=causal))


# ---- against the model's own layers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What one layer of the model was given and what it made of it, in its own code.

    x          its input, `[batch, seq, hidden]`
    cos, sin   the rotation it was given, `[batch, seq, head_dim]`
    heads      all heads' outputs before the output projection, `[batch, seq, heads · head_dim]`
    out        after it, `[batch, seq, hidden]`
    """

    block: Any
    x: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    heads: torch.Tensor
    out: torch.Tensor


@torch.inference_mode()
def watch(loaded: Loaded, ids: Sequence[int]) -> list[Seen]:
    """Run the model over `ids` and note what passes through each layer's attention."""
    found: list[dict] = []

    def note(block, args, given, out):
        found[-1] |= {"block": block, "x": given["hidden_states"], "out": out[0]}
        found[-1] |= dict(zip(("cos", "sin"), given["position_embeddings"]))

    hooks = []
    for layer in loaded.model.model.layers:
        hooks.append(layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: found.append({"heads": args[0]})))
        hooks.append(layer.self_attn.register_forward_hook(note, with_kwargs=True))
    try:
        loaded.model(input_ids=torch.tensor([list(ids)], device=loaded.model.device), use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return [Seen(**one) for one in found]


@torch.inference_mode()
def layers(loaded: Loaded, ids: Sequence[int], attention: Attention | None = None) -> list[dict]:
    """Each layer's attention by hand, fed what the model's own layer was fed: the largest |Δ| and the largest |number|.

    `heads`: of the heads' outputs; `out`: after the output projection, whose numbers are larger. `attention` may be a reader's own.
    """
    attention = attention or hand.self_attention
    positions = torch.arange(len(ids), device=loaded.model.device)
    mask, shape = hand.causal_mask(len(ids), 0, loaded.model.device), shape_of(loaded.model.config)
    rows = []
    for seen in watch(loaded, ids):
        ours = attention(seen.block, seen.x, positions, mask, shape)
        rows.append(
            {
                "heads": float((ours - seen.heads).abs().max()),
                "heads_size": float(seen.heads.abs().max()),
                "out": float((seen.block.o_proj(ours) - seen.out).abs().max()),
                "out_size": float(seen.out.abs().max()),
            }
        )
    return rows


@torch.inference_mode()
def pieces(loaded: Loaded, ids: Sequence[int]) -> dict[str, list[float]]:
    """The rotation and the grouped heads against the functions of the model's own file, in each layer: the largest |Δ|."""
    shape, positions = shape_of(loaded.model.config), torch.arange(len(ids), device=loaded.model.device)
    theirs = sys.modules[type(loaded.model).__module__]
    out: dict[str, list[float]] = {"rotation": [], "grouped heads": []}
    for seen in watch(loaded, ids):
        q, k, v = hand.project(seen.block, seen.x, positions, shape)
        plain = [
            projection(seen.x).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
            for projection in (seen.block.q_proj, seen.block.k_proj)
        ]
        turned = theirs.apply_rotary_pos_emb(*plain, seen.cos, seen.sin)
        out["rotation"].append(max(_largest(q, turned[0]), _largest(k, turned[1])))
        groups = shape.heads // shape.kv_heads
        out["grouped heads"].append(_largest(hand.repeat_heads(v, groups), theirs.repeat_kv(v, groups)))
    return out


@torch.inference_mode()
def masks(loaded: Loaded, sizes: Sequence[tuple[int, int]] = ((7, 0), (1, 7), (3, 7), (5, 1))) -> list[dict]:
    """The mask against the one the model makes for itself, for queries after some past: how many entries differ."""
    from transformers import DynamicCache

    out = []
    with attention_kernel(loaded, "eager"):  # the kernel that is handed its mask as a tensor
        for queries, past in sizes:
            made = []
            hook = loaded.model.model.layers[0].self_attn.register_forward_pre_hook(
                lambda _, args, given, made=made: made.append(given["attention_mask"]), with_kwargs=True
            )
            cache = DynamicCache(config=loaded.model.config)
            ids = torch.arange(past + queries, device=loaded.model.device)[None] + 100
            try:
                for part in filter(lambda part: part.shape[1], (ids[:, :past], ids[:, past:])):
                    loaded.model(input_ids=part, cache=cache, logits_to_keep=1)
            finally:
                hook.remove()
            theirs = made[-1]
            may_see = torch.ones(queries, past + queries, dtype=torch.bool) if theirs is None else (theirs[0, 0] == 0).cpu()
            out.append({"queries": queries, "past": past, "differ": int((may_see != hand.causal_mask(queries, past)).sum())})
    return out


# Classic slips, one function of `kvlab.runtime.attention` each
def _undivided_root(q, k, mask):
    return (q @ k.transpose(-1, -2) / q.shape[-1]).masked_fill(~mask, torch.finfo(q.dtype).min).softmax(-1)


def _interleaved(x, positions, base):
    pairs = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
    turned = _rotate(pairs, positions, base)
    half = x.shape[-1] // 2
    return torch.stack([turned[..., :half], turned[..., half:]], dim=-1).flatten(-2)


def _tiled(x, groups):
    return torch.cat([x] * groups, dim=-3)


def _one_too_many(q, k, mask):
    return _weights(q, k, mask | mask.roll(1, -1))


_rotate, _weights = hand.rotate, hand.weights
SLIPS: dict[str, tuple[str, Callable]] = {
    "divided by d, not √d": ("weights", _undivided_root),
    "pairs of neighbours rotated": ("rotate", _interleaved),
    "heads repeated as a whole": ("repeat_heads", _tiled),
    "mask one too wide": ("weights", _one_too_many),
}


@contextlib.contextmanager
def slip(name: str) -> Iterator[None]:
    """Make one of SLIPS, and take it back."""
    attribute, wrong = SLIPS[name]
    right = getattr(hand, attribute)
    setattr(hand, attribute, wrong)
    try:
        yield
    finally:
        setattr(hand, attribute, right)


def whole(loaded: Loaded, new_tokens: int = NEW_TOKENS, attention: Attention | None = None) -> dict[str, float]:
    """The assembled model against Transformers' own: the largest |Δlogit| of greedy runs, by how they are run."""
    ours = by_hand(loaded, attention)
    rows = [encode(loaded.tokenizer, PROMPT), encode(loaded.tokenizer, PLAIN)]
    ways: dict[str, dict] = {
        "prefill, then cached steps": {},
        "prefill in chunks of 3": {"chunk": 3},
        "no cache": {"use_cache": False},
    }
    out = {}
    for name, options in ways.items():
        deltas = [
            compare(greedy(loaded, [row], new_tokens)[0], greedy(ours, [row], new_tokens, **options)[0]).delta for row in rows
        ]
        out[name] = max(deltas)
    both = zip(greedy(loaded, rows, new_tokens), greedy(ours, rows, new_tokens))
    out["two rows, one padded"] = max(compare(a, b).delta for a, b in both)
    return out


# ---- the past does not change (A3) ----------------------------------------------------------------------------------------


@torch.inference_mode()
def kept(loaded: Loaded, ids: Sequence[int], *, causal: bool = True) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer after reading `ids`, `[kv_heads, seq, head_dim]`, attention by hand."""
    from transformers import DynamicCache

    cache = DynamicCache(config=loaded.model.config)
    ByHand(loaded.model, causal=causal)(torch.tensor([list(ids)], device=loaded.model.device), cache=cache, logits_to_keep=1)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def past(loaded: Loaded, ids: Sequence[int]) -> dict[str, dict[str, list[float]]]:
    """How far the keys and values of all tokens but the last move, by layer, when something behind them changes.

    Each |Δ| is given as a share of the layer's largest number. "another last token": the computation has the same shape, so
    rounding is the same; "one token more": another shape.
    """
    other = [*ids[:-1], (ids[-1] + 1) % loaded.spec.vocab]
    out = {}
    for label, causal in (("causal", True), ("every token sees every other", False)):
        before = kept(loaded, ids, causal=causal)
        for what, after in (("another last token", other), ("one token more", [*ids, ids[0]])):
            changes = [
                [_share(a[:, : len(ids) - 1], b[:, : len(ids) - 1]) for a, b in zip(*pair)]
                for pair in zip(before, kept(loaded, after, causal=causal))
            ]
            out[f"{label}: {what}"] = {"keys": [c[0] for c in changes], "values": [c[1] for c in changes]}
    return out


@torch.inference_mode()
def appended(loaded: Loaded, ids: Sequence[int]) -> float:
    """The largest change of any cached number of the past when one token is fed to a filled cache."""
    from transformers import DynamicCache

    cache = DynamicCache(config=loaded.model.config)
    model = ByHand(loaded.model)
    fed = torch.tensor([list(ids)], device=loaded.model.device)
    model(fed[:, :-1], cache=cache, logits_to_keep=1)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    model(fed[:, -1:], cache=cache, logits_to_keep=1)
    return max(
        _largest(old, new[..., : old.shape[-2], :])
        for layer, pair in zip(cache.layers, before)
        for old, new in zip(pair, (layer.keys, layer.values))
    )


# ---- what of the past is read again (B2, C2) --------------------------------------------------------------------------------


@torch.inference_mode()
def reads(loaded: Loaded, ids: Sequence[int]) -> dict[str, float]:
    """Keep keys, values and queries; turn one of them into noise; take a step: how far does a logit move?"""
    from transformers import DynamicCache

    model = ByHand(loaded.model)
    fed = torch.tensor([list(ids)], device=loaded.model.device)

    def step(spoiled: str | None) -> tuple[torch.Tensor, Any]:
        cache = DynamicCache(config=loaded.model.config)
        with fault("queries-cached"):
            model(fed[:, :-1], cache=cache, logits_to_keep=1)
            drawn = torch.Generator().manual_seed(SEED)
            for number, layer in enumerate(cache.layers):
                for tensor in {"keys": [layer.keys], "values": [layer.values], "queries": [cache.queries[number]]}.get(
                    spoiled, []
                ):
                    tensor.copy_(tensor.std() * torch.randn(tensor.shape, generator=drawn))
            return model(fed[:, -1:], cache=cache, logits_to_keep=1).logits, cache

    right, cache = step(None)
    out = {name: _largest(right, step(name)[0]) for name in ("keys", "values", "queries")}
    out["bytes of keys and values"] = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    out["bytes of queries"] = sum(tensor.nbytes for tensor in cache.queries.values())
    return out


@torch.inference_mode()
def held(loaded: Loaded, ids: Sequence[int]) -> dict[str, int]:
    """Bytes that a cache holds after reading `ids`, attention by hand: whatever tensors there are; and what the ledger plans."""
    from transformers import DynamicCache

    cache = DynamicCache(config=loaded.model.config)
    ByHand(loaded.model)(torch.tensor([list(ids)], device=loaded.model.device), cache=cache, logits_to_keep=1)
    more = [tensor for value in vars(cache).values() if isinstance(value, dict) for tensor in value.values()]
    there = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)] + more
    return {"planned": request_bytes(loaded.spec, len(ids)), "held": sum(tensor.nbytes for tensor in there)}


@torch.inference_mode()
def twice(loaded: Loaded, ids: Sequence[int]) -> dict[str, list[float]]:
    """The last token's earlier occurrence: how far its key, value and output there are from those here, by layer.

    In shares of the larger one's norm, the keys before rotation, since position alone changes them after it. "query swapped": the output here, asked with the query of the token
    before, against the right one.
    """
    last = len(ids) - 1
    earlier = max(i for i in range(last) if ids[i] == ids[last])
    shape, mask = shape_of(loaded.model.config), hand.causal_mask(len(ids), 0, loaded.model.device)
    positions, nowhere = torch.arange(len(ids), device=loaded.model.device), torch.zeros(len(ids), device=loaded.model.device)
    out: dict[str, list[float]] = {"keys": [], "values": [], "outputs": [], "query swapped": []}
    for seen in watch(loaded, ids):
        _, plain, _ = hand.project(seen.block, seen.x, nowhere, shape)
        q, k, v = hand.project(seen.block, seen.x, positions, shape)
        groups = shape.heads // shape.kv_heads
        k, v = hand.repeat_heads(k, groups), hand.repeat_heads(v, groups)
        swapped = hand.attend(q[..., last - 1 : last, :], k, v, mask[last:])
        for name, a, b in (
            ("keys", plain[..., earlier, :], plain[..., last, :]),
            ("values", v[..., earlier, :], v[..., last, :]),
            ("outputs", seen.heads[0, earlier], seen.heads[0, last]),
            ("query swapped", swapped.flatten(), seen.heads[0, last]),
        ):
            out[name].append(float((a - b).norm() / max(a.norm(), b.norm())))
    return out


def told(loaded: Loaded, broken: str | None = None, new_tokens: int = NEW_TOKENS) -> tuple[Trace, Trace]:
    """One user tells a password, another asks for one; the cache is reset between them; attention by hand. Both runs."""
    from transformers import DynamicCache

    ours, cache = by_hand(loaded), DynamicCache(config=loaded.model.config)
    with fault(broken):
        first = greedy(ours, [encode(loaded.tokenizer, PROMPT)], new_tokens, cache=cache)[0]
        return first, greedy(ours, [encode(loaded.tokenizer, ASKED)], new_tokens, cache=cache)[0]


def outputs_reused(loaded: Loaded) -> dict:
    """The fault "output-cached" against the same two users without it: what is said, and how far the logits are."""
    right, wrong = told(loaded), told(loaded, "output-cached")
    decode = loaded.tokenizer.decode
    return {
        who: {"said": decode(b.tokens), "meant": decode(a.tokens), "delta": compare(a, b).delta}
        for who, a, b in zip(("the first", "the second"), right, wrong)
    }


# ---- who reads the password -------------------------------------------------------------------------------------------------

Head = tuple[int, int]


@torch.inference_mode()
def maps(loaded: Loaded, ids: Sequence[int]) -> torch.Tensor:
    """Every head's attention over `ids`: `[layers, heads, queries, keys]`."""
    shape, positions = shape_of(loaded.model.config), torch.arange(len(ids), device=loaded.model.device)
    mask, out = hand.causal_mask(len(ids), 0, loaded.model.device), []
    for seen in watch(loaded, ids):
        q, k, _ = hand.project(seen.block, seen.x, positions, shape)
        out.append(hand.weights(q, hand.repeat_heads(k, shape.heads // shape.kv_heads), mask)[0])
    return torch.stack(out).float().cpu()


@contextlib.contextmanager
def hidden(
    loaded: Loaded, heads: Sequence[Head], places: Sequence[Sequence[int]], *, last: int = 1, row_by_row: bool = False
) -> Iterator[None]:
    """Hide some tokens from some heads, (layer, head) pairs: these look elsewhere, and nothing else is taken from them.

    places       for each row of the batch, the columns that are hidden
    last         only the last so many tokens of each forward are kept from looking. With 1, greedy decoding reads its prompt
                 undisturbed, and cannot look from the last token of it on
    row_by_row   from the n-th head in the n-th row only
    """
    by_layer: dict[int, list[tuple[int, int]]] = {}
    for n, (layer, head) in enumerate(heads):
        by_layer.setdefault(layer, []).extend((row, head) for row in ([n] if row_by_row else range(len(places))))

    def blind(layer: int, gone: list[tuple[int, int]]):
        def hook(_, args, given):
            rows, seq, _ = given["hidden_states"].shape
            past = 0 if given.get("cache") is None else int(given["cache"].get_seq_length(layer))
            mask = given["attention_mask"]
            if mask is None:
                mask = hand.causal_mask(seq, past, loaded.model.device)[None, None]
            mask = mask.expand(rows, loaded.spec.heads, seq, past + seq).clone()
            for row, head in gone:
                mask[row, head, -last:, places[row]] = False
            return args, given | {"attention_mask": mask}

        return hook

    blocks = loaded.model.model.layers
    hooks = [
        blocks[layer].self_attn.register_forward_pre_hook(blind(layer, gone), with_kwargs=True)
        for layer, gone in by_layer.items()
    ]
    try:
        with attention_kernel(loaded, "sdpa"):  # whose masks are True and False
            yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def needed(loaded: Loaded, prompt: Sequence[int], places: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """What it costs the answer to hide the tokens at `places` from one head: log-probability lost, the mean over its tokens.

    `[layers, heads]`, nats. The prompt is read undisturbed; from its last token on the head cannot look there. The answer is
    fed, not generated, so that every number is about the same tokens.
    """
    from transformers import DynamicCache

    spec, kept = loaded.spec, len(prompt) - 1
    ids = torch.tensor([[*prompt, *answer[:-1]]], device=loaded.model.device)
    wanted = torch.tensor(list(answer), device=loaded.model.device)
    cache = DynamicCache(config=loaded.model.config)
    if kept:
        loaded.model(input_ids=ids[:, :kept], cache=cache, logits_to_keep=1)
        cache.batch_repeat_interleave(spec.heads)
    fed = ids[:, kept:].expand(spec.heads, -1)

    def says() -> torch.Tensor:
        logits = loaded.model(input_ids=fed, cache=cache, logits_to_keep=len(answer)).logits
        cache.crop(-fed.shape[1])
        return logits.float().log_softmax(-1)[:, torch.arange(len(answer)), wanted].mean(-1)

    base, out = says(), []
    for layer in range(spec.layers):
        row_each = [(layer, head) for head in range(spec.heads)]
        with hidden(loaded, row_each, [places] * spec.heads, last=len(answer), row_by_row=True):
            out.append(base - says())
    return torch.stack(out).cpu()


@dataclass(frozen=True)
class Said:
    """A prompt that the model answers with its password: token ids, where the password stands in them, the answer's tokens."""

    password: str
    ids: tuple[int, ...]
    places: tuple[int, ...]
    answer: tuple[int, ...]


def places_of(tokenizer: Any, text: str, part: str) -> tuple[int, ...]:
    """Which tokens of `text` hold the first occurrence of `part`, or a piece of it."""
    begin = text.index(part)
    spans = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return tuple(at for at, (a, b) in enumerate(spans) if a < begin + len(part) and b > begin)


def sayers(loaded: Loaded, count: int, seed: int = SEED) -> list[Said]:
    """The first `count` of the course's password prompts that the model answers with the password."""
    found: list[Said] = []
    made = prompts.make(loaded.tokenizer, 6 * count, seed)
    for begin in range(0, len(made), count):
        some = made[begin : begin + count]
        for prompt, trace in zip(some, greedy(loaded, [p.ids for p in some], 2 * NEW_TOKENS)):
            if prompt.password in loaded.tokenizer.decode(trace.tokens):
                places = places_of(loaded.tokenizer, prompt.text, prompt.password)
                found.append(Said(prompt.password, prompt.ids, places, tuple(trace.tokens[:NEW_TOKENS])))
        if len(found) >= count:
            break
    return found[:count]


def still_said(loaded: Loaded, some: Sequence[Said], heads: Sequence[Head]) -> int:
    """In how many of the prompts the password is still said when it is hidden from these heads."""
    longest = max(len(one.ids) for one in some)
    columns = [[longest - len(one.ids) + place for place in one.places] for one in some]  # rows are padded on the left
    with hidden(loaded, heads, columns):
        traces = greedy(loaded, [one.ids for one in some], 2 * NEW_TOKENS)
    return sum(one.password in loaded.tokenizer.decode(trace.tokens) for one, trace in zip(some, traces))


def readers(loaded: Loaded, find: int = FIND, judge: int = JUDGE, most: int = MOST, draws: int = DRAWS) -> dict:
    """The heads that read the password: found on some prompts, judged on others.

    The password is hidden from one head after another, in the order of their need (the mean of :func:`needed`), until none of
    the finding prompts is answered with it. The others judge: against as many heads drawn blindly, as many of those that look
    hardest at the password in PROMPT, and all heads there are.
    """
    some = sayers(loaded, find + judge)
    finding, judging = some[:find], some[find:]
    need = torch.stack([needed(loaded, one.ids, one.places, one.answer) for one in finding]).mean(0)
    order, curve = _ranked(need), [len(finding)]
    while curve[-1] and len(curve) <= most:
        curve.append(still_said(loaded, finding, order[: len(curve)]))
    count = len(curve) - 1
    ids = encode(loaded.tokenizer, PROMPT)
    look = maps(loaded, ids)[:, :, -1, secret_tokens(loaded)].sum(-1)
    arms = {
        "none": [],
        "the first reader": order[:1],
        "the readers": order[:count],
        "those that look hardest": _ranked(look)[:count],
    }
    arms |= {f"as many, blindly ({n + 1})": random.Random(n).sample(order[count:], count) for n in range(draws)}
    arms |= {"all but the readers": order[count:], "all": order}
    return {
        "need": need.tolist(),
        "look": look.tolist(),
        "habits": habits(loaded, ids),
        "order": [list(head) for head in order[:most]],
        "curve": curve,
        "count": count,
        "finding": len(finding),
        "judged": len(judging),
        "arms": {
            name: {
                "heads": [list(head) for head in heads[:most]],
                "count": len(heads),
                "said": still_said(loaded, judging, heads),
            }
            for name, heads in arms.items()
        },
    }


def habits(loaded: Loaded, ids: Sequence[int]) -> dict[str, list[list[float]]]:
    """What kind of place each head looks at, `[layers, heads]`: the mean weight on

    "the token before"; "what followed": the token behind the last earlier occurrence of the one that looks, over those that
    have one; "the first": the text's first token, the last token looking.
    """
    found, seq = maps(loaded, ids), len(ids)
    before = [(at, at - 1) for at in range(1, seq)]
    earlier = {at: max((i for i in range(at) if ids[i] == ids[at]), default=None) for at in range(seq)}
    followed = [(at, i + 1) for at, i in earlier.items() if i is not None]
    places = {"the token before": before, "what followed": followed, "the first": [(seq - 1, 0)]}
    return {name: torch.stack([found[:, :, q, k] for q, k in pairs]).mean(0).tolist() for name, pairs in places.items()}


def secret_tokens(loaded: Loaded) -> list[int]:
    """Where the password's tokens stand in PROMPT."""
    return list(places_of(loaded.tokenizer, PROMPT, SECRET))


def _ranked(values: torch.Tensor) -> list[Head]:
    """(layer, head) pairs, largest first."""
    wide = values.shape[1]
    return [divmod(int(i), wide) for i in values.flatten().argsort(descending=True, stable=True)]


# ------------------------------------------------------------------------------------------------------------------------


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def _share(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / a.abs().max())


def _short(value: Any) -> Any:
    """A tensor, or a container of numbers, as plain values of four digits."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_short(item) for item in value]
    return record.short(value) if isinstance(value, float) else value


def run(
    name: str | None = None, *, device: str | None = None, quick: bool = False, checkpoint=None, progress: bool = True
) -> record.Run:
    """Everything, in a few minutes. `quick`: fewer prompts and shorter histories; `checkpoint` changes nothing."""
    from tqdm.auto import tqdm

    began = time.perf_counter()
    loaded = load(name, device=device, dtype="float32")
    ids = encode(loaded.tokenizer, PROMPT)
    settings = {
        "prompt": PROMPT,
        "find": 2 if quick else FIND,
        "judge": 4 if quick else JUDGE,
        "most": MOST,
        "draws": 2 if quick else DRAWS,
    }
    settings |= attention_cost.settings(quick)
    manifest = record.manifest("attention", loaded, dtypes=["float32"], seed=SEED, settings=settings)
    parts: dict[str, Callable[[], Any]] = {
        "cost": lambda: attention_cost.measure(loaded, quick),
        "pieces": lambda: pieces(loaded, ids),
        "masks": lambda: masks(loaded),
        "layers": lambda: layers(loaded, ids),
        "slips": lambda: {name: _slipped(loaded, ids, name) for name in SLIPS},
        "whole": lambda: whole(loaded),
        "past": lambda: past(loaded, ids),
        "appended": lambda: appended(loaded, ids),
        "reads": lambda: reads(loaded, ids),
        "twice": lambda: twice(loaded, ids),
        "outputs": lambda: outputs_reused(loaded),
        "readers": lambda: readers(loaded, settings["find"], settings["judge"], MOST, settings["draws"]),
    }
    bar, data = tqdm(parts.items(), disable=not progress), {}
    for part, measure in bar:
        bar.set_description(part)
        data[part] = _short(measure())
    everything = maps(loaded, ids)
    shown = [tuple(head) for head in data["readers"]["order"][:6]] + [_resting(everything)]
    data["maps"] = {
        "tokens": [loaded.tokenizer.decode([token]) for token in ids],
        "secret": secret_tokens(loaded),
        "last": [[[round(w, 3) for w in head] for head in layer] for layer in everything[:, :, -1].tolist()],
        "full": [
            {"layer": layer, "head": head, "map": [[round(w, 3) for w in row] for row in everything[layer, head].tolist()]}
            for layer, head in shown
        ],
    }
    return record.Run(replace(manifest, seconds=round(time.perf_counter() - began, 1)), data)


def _slipped(loaded: Loaded, ids: Sequence[int], name: str) -> list[float]:
    with slip(name):
        return [row["heads"] for row in layers(loaded, ids)]


def _resting(everything: torch.Tensor) -> Head:
    """The head whose queries look hardest at the first token, on average over all but the first."""
    return _ranked(everything[:, :, 1:, 0].mean(-1))[0]
