"""The memory ledger against the tensors: what a cache was predicted to take, and what it takes, to the byte.

On the loaded model: DynamicCache, StaticCache and the paged pool, in three dtypes; rows and beams; K and V packed to int8
and int4; a pool filled until it refuses. On small models with random weights: every way of sharing heads, sliding windows,
latent attention. A byte count does not depend on what the weights are.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from kvlab import record
from kvlab.core import ledger
from kvlab.core.blocks import OutOfBlocks
from kvlab.core.ledger import request_bytes
from kvlab.core.spec import ModelSpec
from kvlab.runtime import Loaded, load
from kvlab.runtime.paged import PagedPool

SEED = 5
BLOCK = 16
SLOTS = 64  # of a static cache
SHAPES = ((1, 7), (1, 16), (3, 33))  # rows, tokens
GRID = ((16, 32, 64), (1, 2, 4), (1, 2, 4))  # tokens, rows, beams
GROWTH = 40  # tokens of the growth curve
PROMPT, NEW, BEAMS = 40, 10, 4  # of the beams' run


# ---- measuring ---------------------------------------------------------------------------------------------------------


def tensors(cache: Any) -> Iterator[torch.Tensor]:
    """The tensors of a Transformers cache."""
    for layer in cache.layers:
        yield from (layer.keys, layer.values)


def cache_bytes(cache: Any) -> int:
    """Bytes of a cache's keys and values."""
    return sum(tensor.nbytes for tensor in tensors(cache))


def held_bytes(cache: Any) -> int:
    """Bytes of memory that a cache keeps from being freed: a slice keeps the whole tensor it was cut from."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(cache)}
    return sum(storages.values())


def token_ids(loaded_or_spec: Any, rows: int, tokens: int) -> torch.Tensor:
    """Token ids `[rows, tokens]`, the same each time. What they say does not matter to a byte count."""
    spec = getattr(loaded_or_spec, "spec", loaded_or_spec)
    return torch.randint(0, spec.vocab, (rows, tokens), generator=torch.Generator().manual_seed(SEED))


@torch.inference_mode()
def fill(model: Any, ids: torch.Tensor, cache: Any) -> Any:
    """Feed `ids`, `[rows, tokens]`, through the model into the cache; returns the cache."""
    model(input_ids=ids.to(model.device), cache=cache, use_cache=True, logits_to_keep=1)
    return cache


def dynamic(loaded: Loaded, rows: int, tokens: int) -> Any:
    """A DynamicCache that holds `rows` sequences of `tokens` tokens."""
    from transformers import DynamicCache

    return fill(loaded.model, token_ids(loaded, rows, tokens), DynamicCache(config=loaded.model.config))


def static(loaded: Loaded, rows: int, tokens: int, slots: int = SLOTS) -> Any:
    """A StaticCache of `slots` slots a row, with `tokens` of them in use."""
    from transformers import StaticCache

    return fill(loaded.model, token_ids(loaded, rows, tokens), StaticCache(config=loaded.model.config, max_cache_len=slots))


def paged(loaded: Loaded, rows: int, tokens: int, block: int = BLOCK) -> PagedPool:
    """A pool with `rows` sequences of `tokens` tokens in it, and two blocks to spare."""
    need = rows * ledger.blocks(tokens, block)
    pool = PagedPool(loaded.spec, need + 2, block, device=loaded.device, cache_prefixes=False)
    for row, ids in enumerate(token_ids(loaded, rows, tokens).tolist()):
        pool.manager.allocate(row, ids)
    with torch.inference_mode():
        loaded.model(**pool.inputs(list(range(rows))), logits_to_keep=1)
    return pool


def row_of(cache: str, spec: ModelSpec, predicted: int, measured: int, **more: Any) -> dict:
    """One line of the comparison."""
    return {"cache": cache, "dtype": spec.dtype, **more, "predicted": predicted, "measured": measured}


def on_model(loaded: Loaded, shapes: Sequence[tuple[int, int]] = SHAPES) -> list[dict]:
    """The three caches on the loaded model: what the ledger says, and what the tensors take."""
    spec, rows = loaded.spec, []
    for batch, tokens in shapes:
        size = {"rows": batch, "tokens": tokens}
        rows.append(
            row_of(
                "DynamicCache", spec, batch * request_bytes(spec, tokens), cache_bytes(dynamic(loaded, batch, tokens)), **size
            )
        )
        rows.append(
            row_of("StaticCache", spec, batch * request_bytes(spec, SLOTS), cache_bytes(static(loaded, batch, tokens)), **size)
        )
        for block in (BLOCK, 8):
            pool = paged(loaded, batch, tokens, block)
            blocks = batch * ledger.blocks(tokens, block) + 2
            rows.append(
                row_of("pool", spec, request_bytes(spec, blocks * block, block=block), pool.nbytes, block=block, **size)
            )
            predicted = batch * request_bytes(spec, tokens, block=block)
            rows.append(row_of("pool, in use", spec, predicted, pool.held_nbytes, block=block, **size))
    return rows


def mismatches(rows: Sequence[dict]) -> list[dict]:
    """The detector: the lines where the ledger and the tensors disagree by a byte or more."""
    return [row for row in rows if row["predicted"] != row["measured"]]


# ---- rows and beams multiply (C20, C22) --------------------------------------------------------------------------------


def grid(loaded: Loaded, sizes: Sequence[Sequence[int]] = GRID) -> list[dict]:
    """Tokens × rows × beams, each beam with a cache of its own, as Transformers' beam search keeps them."""
    out = []
    for tokens, rows, beams in itertools.product(*sizes):
        cache = dynamic(loaded, rows, tokens)
        cache.batch_repeat_interleave(beams)
        predicted = rows * request_bytes(loaded.spec, tokens, beams=beams)
        out.append(row_of("DynamicCache", loaded.spec, predicted, cache_bytes(cache), tokens=tokens, rows=rows, beams=beams))
    return out


def generated(loaded: Loaded, ids: torch.Tensor, new: int, **options: Any) -> tuple[torch.Tensor, Any]:
    """Sequences and cache of Transformers' own `generate`, which makes exactly `new` tokens."""
    from transformers import DynamicCache

    cache = DynamicCache(config=loaded.model.config)
    with torch.inference_mode():
        out = loaded.model.generate(
            ids.to(loaded.device),
            attention_mask=torch.ones_like(ids).to(loaded.device),
            max_new_tokens=new,
            min_new_tokens=new,
            return_dict_in_generate=True,
            cache=cache,
            **options,
        )
    return out.sequences, cache


def decoding(loaded: Loaded, prompt: int = PROMPT, new: int = NEW, beams: int = BEAMS) -> list[dict]:
    """How a token is chosen, against the bytes of the cache and against its contents.

    `contents`: the largest difference of any cached number from a run that is fed the same tokens and chooses nothing.
    """
    ids = token_ids(loaded, 1, prompt)
    ways = (
        ("greedy", {"do_sample": False}, 1),
        ("temperature 0.7", {"do_sample": True, "temperature": 0.7}, 1),
        ("temperature 1.5, top-p 0.9, top-k 50", {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "top_k": 50}, 1),
        ("three samples", {"do_sample": True, "num_return_sequences": 3}, 3),
        (f"{beams} beams", {"do_sample": False, "num_beams": beams}, beams),
    )
    out = []
    for name, options, copies in ways:
        torch.manual_seed(SEED)
        sequences, cache = generated(loaded, ids, new, **options)
        predicted = request_bytes(loaded.spec, prompt + new - 1, beams=copies)  # the last token is never fed
        row = row_of("DynamicCache", loaded.spec, predicted, cache_bytes(cache), how=name, copies=copies)
        row["contents"] = _difference(cache, _fed(loaded, sequences, prompt)) if copies == 1 else None
        out.append(row)
    return out


@torch.inference_mode()
def _fed(loaded: Loaded, sequence: torch.Tensor, prompt: int) -> Any:
    """The cache of a run that is fed a finished sequence `[1, tokens]`: its prompt at once, then token by token."""
    from transformers import DynamicCache

    cache = fill(loaded.model, sequence[:, :prompt], DynamicCache(config=loaded.model.config))
    for at in range(prompt, sequence.shape[1] - 1):
        fill(loaded.model, sequence[:, at : at + 1], cache)
    return cache


def _difference(a: Any, b: Any) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(tensors(a), tensors(b), strict=True))


def forked(loaded: Loaded, prompt: int = PROMPT, new: int = NEW, beams: int = BEAMS) -> dict:
    """The same beams on the pool, where they share the prompt's blocks until they write."""
    spec = loaded.spec
    blocks = ledger.shared_beams(prompt, new, beams, BLOCK)
    pool = PagedPool(spec, blocks + beams, BLOCK, device=loaded.device, cache_prefixes=False)
    pool.manager.allocate(0, token_ids(loaded, 1, prompt)[0].tolist())
    with torch.inference_mode():
        loaded.model(**pool.inputs([0]), logits_to_keep=1)
        for beam in range(1, beams):
            pool.manager.fork(0, beam)
        for beam in range(beams):
            pool.append(beam, [beam + 1] * new)
        loaded.model(**pool.inputs(list(range(beams))), logits_to_keep=1)
    predicted = request_bytes(spec, blocks * BLOCK)
    apart = request_bytes(spec, prompt + new, beams=beams, block=BLOCK)
    return row_of("pool, in use", spec, predicted, pool.held_nbytes, beams=beams, apart=apart)


# ---- K and V in fewer bits ---------------------------------------------------------------------------------------------


def pack(x: torch.Tensor, form: ledger.Format) -> list[torch.Tensor]:
    """Quantise the last axis in groups, symmetrically, each group with a scale in fp16: [numbers, scales].

    Numbers of 4 bits are packed two to a byte. `head_dim` must be a multiple of the group.
    """
    numbers, scales = quantise(x, form)
    if form.bits == 4:
        pair = (numbers.to(torch.int16) + 8).to(torch.uint8).unflatten(-1, (-1, 2))
        numbers = pair[..., 0] | pair[..., 1] << 4
    return [numbers, scales]


def quantise(x: torch.Tensor, form: ledger.Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers `[..., head_dim]` in int8 and scales `[..., groups]` in fp16; number · scale is near the original."""
    if x.shape[-1] % form.group:
        raise ValueError(f"head_dim {x.shape[-1]} is no multiple of the group, {form.group}")
    grouped = x.float().unflatten(-1, (-1, form.group))
    most = 2 ** (form.bits - 1) - 1
    scales = (grouped.abs().amax(-1) / most).clamp(min=1e-6).half()
    numbers = (grouped / scales.float()[..., None]).round().clamp(-most, most).to(torch.int8)
    return numbers.flatten(-2), scales


def packed(loaded: Loaded, tokens: int = 33) -> list[dict]:
    """The loaded model's own K and V in int8 and int4: bytes, and the relative error that the packing makes."""
    cache, out = dynamic(loaded, 1, tokens), []
    for name in ("int8", "int4"):
        form = ledger.FORMATS[name]
        measured = sum(part.nbytes for tensor in tensors(cache) for part in pack(tensor, form))
        errors, norm = 0.0, 0.0
        for tensor in tensors(cache):
            numbers, scales = quantise(tensor, form)
            back = (numbers.unflatten(-1, (-1, form.group)).float() * scales.float()[..., None]).flatten(-2)
            errors += float((back - tensor.float()).square().sum())
            norm += float(tensor.float().square().sum())
        predicted = request_bytes(loaded.spec, tokens, form=form)
        row = row_of("packed", replace(loaded.spec, dtype=name), predicted, measured, tokens=tokens)
        row |= {"plain": cache_bytes(cache), "error": record.short((errors / norm) ** 0.5)}
        out.append(row)
    return out


# ---- other shapes, on small models with random weights ----------------------------------------------------------------


_SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SMALL: dict[str, dict] = {
    "MHA": {**_SMALL, "model_type": "llama", "num_key_value_heads": 8},
    "GQA": {**_SMALL, "model_type": "llama", "num_key_value_heads": 2},
    "MQA": {**_SMALL, "model_type": "llama", "num_key_value_heads": 1},
    "head_dim of its own": {**_SMALL, "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    "window, all layers": {**_SMALL, "model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 12},
    "window, every other layer": {
        **_SMALL,
        "model_type": "gemma2",
        "num_key_value_heads": 2,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "Falcon's newer decoder": {
        "model_type": "falcon",
        "vocab_size": 97,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
    },
}
SMALL_MLA = {
    **_SMALL,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def small_model(config: dict) -> Any:
    """A model of this config with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(SEED)
    config = {key: value for key, value in config.items() if key != "head_dim" or config["model_type"] != "deepseek_v3"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()


def narrower(spec: ModelSpec) -> ModelSpec:
    """The spec with windows of one token less: what Transformers keeps, since the token being computed brings its own."""
    if spec.window is None:
        return spec
    mixed = tuple(replace(cache, window=cache.window and cache.window - 1) for cache in spec.mixed)
    return replace(spec, window=spec.window - 1, mixed=mixed)


def shapes(tokens: int = 33) -> list[dict]:
    """DynamicCache and StaticCache on every small model, after a prefill of `tokens` − 1 and one step."""
    from transformers import DynamicCache, StaticCache

    out = []
    for name, config in SMALL.items():
        model = small_model(config)
        spec = ModelSpec.from_config(model.config, "float32", name)
        ids = token_ids(spec, 2, tokens)
        near = narrower(spec)  # a static cache has room for the whole window
        for cache, shape, length in (
            (DynamicCache(config=model.config), near, tokens),
            (StaticCache(config=model.config, max_cache_len=SLOTS), spec, SLOTS),
        ):
            fill(model, ids[:, :-1], cache)
            after_prefill = held_bytes(cache)
            fill(model, ids[:, -1:], cache)
            predicted = 2 * request_bytes(shape, length)
            row = row_of(type(cache).__name__, spec, predicted, cache_bytes(cache), shape=name, rows=2, tokens=tokens)
            row |= {"heads": spec.heads, "kv_heads": spec.kv_heads, "window": spec.window, "windowed": spec.windowed}
            row |= {"held": held_bytes(cache), "held_after_prefill": after_prefill}
            out.append(row)
    return out


def latent(tokens: int = 33) -> dict:
    """Multi-head latent attention: Transformers caches the latent, one vector for all heads."""
    from transformers import DynamicCache

    model = small_model(SMALL_MLA)
    config = model.config
    spec = ModelSpec.from_config(config, "float32", "MLA")
    cache = fill(model, token_ids(spec, 2, tokens), DynamicCache(config=config))
    expanded = 2 * tokens * config.num_hidden_layers * config.num_attention_heads * (8 + 4 + 8) * 4
    return {
        "cache": "DynamicCache",
        "dtype": "float32",
        "shape": "MLA",
        "rows": 2,
        "tokens": tokens,
        "predicted": 2 * request_bytes(spec, tokens),
        "measured": cache_bytes(cache),
        "expanded": expanded,
    }


# ---- growth (B1), and what fits (C15) ----------------------------------------------------------------------------------


@torch.inference_mode()
def growth(loaded: Loaded, tokens: int = GROWTH) -> dict[str, list[int]]:
    """Bytes of the three caches after each of `tokens` tokens."""
    from transformers import DynamicCache, StaticCache

    ids = token_ids(loaded, 1, tokens)
    grows = DynamicCache(config=loaded.model.config)
    fixed = StaticCache(config=loaded.model.config, max_cache_len=SLOTS)
    pool = PagedPool(loaded.spec, ledger.blocks(tokens, BLOCK), BLOCK, device=loaded.device, cache_prefixes=False)
    out: dict[str, list[int]] = {"DynamicCache": [], "StaticCache": [], "pool, in use": []}
    for at in range(tokens):
        one = ids[:, at : at + 1]
        fill(loaded.model, one, grows)
        fill(loaded.model, one, fixed)
        pool.manager.allocate("a", one[0].tolist()) if at == 0 else pool.append("a", one[0].tolist())
        loaded.model(**pool.inputs(["a"]), logits_to_keep=1)
        for name, size in zip(out, (cache_bytes(grows), cache_bytes(fixed), pool.held_nbytes), strict=True):
            out[name].append(size)
    return out


def weights_bytes(model: Any) -> int:
    """Bytes of a model's parameters; tied ones once."""
    return sum(parameter.nbytes for parameter in model.parameters())


def admitted(pool: PagedPool, tokens: int) -> int:
    """How many requests of `tokens` tokens the pool's manager lets in before it refuses one."""
    for n in itertools.count():
        try:
            pool.manager.allocate(n, [0] * tokens, salt=str(n))
        except OutOfBlocks:
            return n


def fill_up(loaded: Loaded, tokens: int = 50, requests: int = 12) -> dict:
    """Plan a small card for `requests` requests and a little; make the pool it leaves room for; fill it.

    The card is the model's weights, an allowance for activations and the K/V, all under a watermark of 0.9.
    """
    spec = loaded.spec
    weights = weights_bytes(loaded.model)
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    activations = 32 * ledger.MIB
    room = requests * request_bytes(spec, tokens, block=BLOCK) + request_bytes(spec, tokens // 2)
    setting = ledger.Setting(
        spec=spec,
        parameters=parameters,
        memory=int((weights + activations + room) / 0.9) + 1,
        context=tokens,
        form=spec.dtype,
        weight_form=spec.dtype,
        block=BLOCK,
        activations=activations,
    )
    plan = ledger.ledger(setting)
    pool = PagedPool(spec, plan.room // request_bytes(spec, BLOCK), BLOCK, device="meta", cache_prefixes=False)
    return {
        "tokens": tokens,
        "parameters": parameters,
        "weights_predicted": plan.weights,
        "weights_measured": weights,
        "memory": setting.memory,
        "room": plan.room,
        "pool": pool.nbytes,
        "predicted": plan.requests,
        "admitted": admitted(pool, tokens),
        "without_blocks": ledger.ledger(replace(setting, block=1)).requests,
        "without_watermark": ledger.ledger(replace(setting, watermark=1.0)).requests,
    }


# ---- on a CUDA device ---------------------------------------------------------------------------------------------------

ROUNDING = 512  # bytes: what PyTorch's allocator rounds a tensor up to


def on_cuda(loaded: Loaded, slots: int = 1024) -> list[dict]:
    """StaticCache and pool on the card: bytes predicted, bytes the allocator handed out, and the rounding it may add.

    Raises ValueError on another device.
    """
    if not str(loaded.device).startswith("cuda"):
        raise ValueError(f"on_cuda needs a model on a CUDA device, not on {loaded.device!r}")
    spec, out = loaded.spec, []
    for name, make, pieces in (
        ("StaticCache", lambda: static(loaded, 1, 8, slots), 2 * spec.layers),
        ("pool", lambda: PagedPool(spec, slots // BLOCK, BLOCK, device=loaded.device), 2),
    ):
        make()  # once for what the first call leaves behind
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(loaded.device)
        kept = make()
        measured = torch.cuda.memory_allocated(loaded.device) - before
        out.append(row_of(name, spec, request_bytes(spec, slots), measured, tokens=slots, rounding=pieces * ROUNDING))
        del kept
    return out


# ------------------------------------------------------------------------------------------------------------------------


def parameters_of(config: Any) -> int:
    """The number of weights of a Hugging Face config's model; tied ones once. Nothing is allocated."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def run(
    name: str | None = None, *, device: str | None = None, quick: bool = False, checkpoint=None, progress: bool = True
) -> record.Run:
    """Everything above, predicted and measured. Under a minute: `quick` and `checkpoint` change nothing."""
    from tqdm.auto import tqdm

    began = time.perf_counter()
    loaded = load(name, device=device, dtype="float32")
    dtypes = ["float32", "bfloat16", "float16"]
    settings = {"block": BLOCK, "slots": SLOTS, "prompt": PROMPT, "new_tokens": NEW, "beams": BEAMS}
    manifest = record.manifest("ledger", loaded, dtypes=dtypes, seed=SEED, settings=settings)
    data: dict[str, Any] = {"spec": asdict(loaded.spec)}
    parts = {
        "caches": on_model,
        "grid": grid,
        "decoding": decoding,
        "forked": forked,
        "packed": packed,
        "shapes": lambda _: shapes(),
        "latent": lambda _: latent(),
        "growth": growth,
        "fits": fill_up,
    }
    if str(loaded.device).startswith("cuda"):
        parts["cuda"] = on_cuda
    bar = tqdm(parts.items(), disable=not progress)
    for part, measure in bar:
        bar.set_description(part)
        data[part] = measure(loaded)
    for dtype in dtypes[1:]:
        data["caches"] += on_model(load(name, device=device, dtype=dtype))
    return record.Run(replace(manifest, seconds=round(time.perf_counter() - began, 1)), data)
