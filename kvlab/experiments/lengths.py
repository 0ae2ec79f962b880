"""RoPE whose angles depend on the request's length: is K/V still a function of the tokens before it?

No bundled model has such angles, so the models here are tiny Llamas with random weights, made for 16 tokens, one for each kind
of RoPE that Transformers has. Their texts mean nothing; their logits do. Every request runs on a model that was made anew, since
a rotary embedding remembers the longest request it has seen; where that is the question, two requests run on one model.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import torch

from kvlab import record
from kvlab.compare import compare, noise_bound
from kvlab.core.spec import ModelSpec
from kvlab.experiments.serving import serve
from kvlab.faults import fault
from kvlab.runtime import Loaded
from kvlab.runtime.decode import Trace, greedy
from kvlab.runtime.models import pick_device
from kvlab.runtime.paged import PagedPool
from kvlab.runtime.weights import quiet

SEED = 4
TRAINED = 16  # tokens
LONG, MIDDLE, SHORT = 40, 20, 9  # tokens of three prompts; the shortest stays within TRAINED with its answer
SHARED = 8  # tokens that the long prompt and the short one begin with
BLOCK = 4
NEW_TOKENS = 4
ROPES: dict[str, dict] = {
    "default": {},
    "linear": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": TRAINED},
    "llama3": {
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
    "dynamic": {"factor": 2.0},
    "longrope": {
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + k / 2 for k in range(8)],
        "original_max_position_embeddings": TRAINED,
    },
}
"""What each kind of RoPE is told beside its name; `rope_type` and the base are the same for all."""


def tiny(rope_type: str, device: str = "cpu") -> Loaded:
    """A Llama of two layers with random weights, made for TRAINED tokens; the same weights for every kind of RoPE."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    rope = {"rope_type": rope_type, "rope_theta": 10000.0} | ROPES[rope_type]
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        config = LlamaConfig(**shape, **heads, max_position_embeddings=TRAINED, rope_parameters=rope)
        model = LlamaForCausalLM(config).requires_grad_(False).eval().to(device)
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.cpu().numpy().tobytes())
    name = f"tiny Llama, {rope_type} RoPE"
    pad = SimpleNamespace(pad_token_id=0)  # nothing else is asked of its tokenizer
    return Loaded(model, pad, ModelSpec.from_config(config, "float32", name), name, digest.hexdigest(), device, "float32")


def prompts() -> dict[int, list[int]]:
    """Three prompts of made-up ids by their length; the short one begins as the long one does."""
    draw = torch.Generator().manual_seed(SEED)
    long = torch.randint(3, 512, (LONG,), generator=draw).tolist()
    middle = torch.randint(3, 512, (MIDDLE,), generator=draw).tolist()
    return {LONG: long, MIDDLE: middle, SHORT: [*long[:SHARED], 7]}


# --- the arms ------------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A run, what it should be, and how many of its tokens were found in the pool, where there is one."""

    trace: Trace
    right: Trace
    hit: int | None = None


def _alone(kind: str, device: str, ids: Sequence[int], **options) -> Trace:
    return greedy(tiny(kind, device), [list(ids)], NEW_TOKENS, **options)[0]


def on_its_blocks(kind: str, device: str) -> Pair:
    """The short prompt in a pool that has served the long one."""
    loaded, asked = tiny(kind, device), prompts()
    pool = PagedPool(loaded.spec, 32, BLOCK, device=device)
    serve(loaded, pool, {"long": asked[LONG]}, 1)
    served = serve(loaded, pool, {"short": asked[SHORT]}, NEW_TOKENS)["short"]
    return Pair(served.trace, _alone(kind, device, asked[SHORT]), len(asked[SHORT]) - served.computed)


def beside(kind: str, device: str) -> Pair:
    """The short prompt in one batch with the long one, padded on the left."""
    asked = prompts()
    return Pair(greedy(tiny(kind, device), [asked[LONG], asked[SHORT]], NEW_TOKENS)[1], _alone(kind, device, asked[SHORT]))


def after(kind: str, device: str) -> Pair:
    """The middle prompt after the long one, with a cache of its own."""
    loaded, asked = tiny(kind, device), prompts()
    greedy(loaded, [asked[LONG]], 1)
    return Pair(greedy(loaded, [asked[MIDDLE]], NEW_TOKENS)[0], _alone(kind, device, asked[MIDDLE]))


def across(kind: str, device: str) -> Pair:
    """A prompt that is made for, and cached steps that grow past it, against every step computed anew."""
    ids = prompts()[LONG][: TRAINED - 2]
    return Pair(_alone(kind, device, ids), _alone(kind, device, ids, use_cache=False))


def in_pieces(kind: str, device: str) -> Pair:
    """The long prompt in pieces of eight tokens, against the prompt at once."""
    ids = prompts()[LONG]
    return Pair(_alone(kind, device, ids, chunk=8), _alone(kind, device, ids))


ARMS: dict[str, tuple[Callable[[str, str], Pair], str | None]] = {
    "on a longer request's blocks": (on_its_blocks, "prefix-of-another-length"),
    "the same, as kvlab does it": (on_its_blocks, None),
    "beside a longer row": (beside, None),
    "after a longer request": (after, None),
    "cached past the trained length": (across, None),
    "prefilled in pieces": (in_pieces, None),
}
"""What is run, and the fault that is on."""


def epsilon(kind: str, device: str = "cpu") -> float:
    """ε of a model: other prompts, cached against anew, in pieces, and in a batch; where angles depend on the length, short ones."""
    longest = TRAINED - NEW_TOKENS if tiny(kind, device).spec.rope_by_length else LONG
    draw = torch.Generator().manual_seed(SEED + 1)
    rows = [torch.randint(3, 512, (longest * k // 6,), generator=draw).tolist() for k in (2, 3, 4, 5, 6)]
    runs = [_alone(kind, device, row) for row in rows]
    others = [_alone(kind, device, row, use_cache=False) for row in rows]
    others += [_alone(kind, device, row, chunk=3) for row in rows]
    others += greedy(tiny(kind, device), rows, NEW_TOKENS)
    return noise_bound(compare(a, b) for a, b in zip(runs * 3, others))


def study(kind: str, device: str = "cpu") -> dict:
    """One kind of RoPE in every arm: `epsilon`; by arm |Δlogit|, first flip, and `hit`, tokens found in the pool; what its spec says."""
    found: dict = {"epsilon": record.short(epsilon(kind, device)), "arms": {}}
    rope = tiny(kind, device).spec.rope_by_length
    found["by_length"] = None if rope is None else list(rope)
    for name, (play, broken) in ARMS.items():
        with fault(broken):
            pair = play(kind, device)
        d = compare(pair.right, pair.trace)
        found["arms"][name] = {"delta": record.short(d.delta), "first": d.first, "hit": pair.hit}
    return found


def refusal(kind: str, device: str = "cpu") -> str | None:
    """What `PagedPool.inputs` says to the long and the short prompt in one forward; None when it takes them."""
    loaded, asked = tiny(kind, device), prompts()
    pool = PagedPool(loaded.spec, 32, BLOCK, device=device)
    for length in (LONG, SHORT):
        pool.manager.allocate(length, asked[length])
    try:
        pool.inputs([LONG, SHORT])
    except ValueError as error:
        return str(error)
    return None


def run(
    name: str | None = None, *, device: str | None = None, quick: bool = False, checkpoint=None, progress: bool = True
) -> record.Run:
    """Every kind of RoPE in every arm. Seconds, on models of its own: `name`, `quick` and `checkpoint` change nothing."""
    began = time.perf_counter()
    device = pick_device(device)
    settings = {"trained": TRAINED, "long": LONG, "middle": MIDDLE, "short": SHORT, "shared": SHARED, "new_tokens": NEW_TOKENS}
    loaded = replace(tiny("default", device), name="tiny Llama")
    manifest = record.manifest("lengths", loaded, dtypes=["float32"], seed=SEED, settings=settings)
    data = {"kinds": {kind: study(kind, device) | {"refusal": refusal(kind, device)} for kind in ROPES}}
    return record.Run(replace(manifest, seconds=round(time.perf_counter() - began, 1)), data)
