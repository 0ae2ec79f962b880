"""A model on the paged cache against the same model on DynamicCache: logits first, then tokens, all in float32."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from kvlab.core.blocks import BlockManager, OutOfBlocks
from kvlab.core.spec import ModelSpec
from kvlab.runtime.paged import PagedCache, PagedPool

EPSILON = 6e-5
SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
GROUPED = SMALL | {"num_key_value_heads": 2, "max_position_embeddings": 256}
CONFIGS = {
    "gpt2": lambda: GPT2Config(vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=256),
    "llama": lambda: LlamaConfig(**GROUPED),
    "qwen2": lambda: Qwen2Config(**GROUPED),
    "qwen2, mixed": lambda: Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**GROUPED, head_dim=8),
    "mistral": lambda: MistralConfig(**GROUPED, sliding_window=None),
    "mistral, window 8": lambda: MistralConfig(**GROUPED, sliding_window=8),
    "gemma": lambda: GemmaConfig(**GROUPED, head_dim=8),
    "gemma2": lambda: Gemma2Config(**GROUPED, head_dim=8, sliding_window=8, attn_implementation="eager"),
    "gemma3": lambda: Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=8),
}


@pytest.fixture(params=CONFIGS)
def model(request):
    return tiny(request.param)


def tiny(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval().requires_grad_(False)
    for p in model.parameters():  # the usual initial weights are so small that every logit is the same
        if p.dim() > 1:
            p.mul_(6)
    return model


@pytest.fixture
def llama():
    return tiny("llama")


def pool_for(model, num_blocks=64, block_size=4, **kwargs):
    return PagedPool(ModelSpec.from_config(model.config, "float32"), num_blocks, block_size, **kwargs)


def prompts(*lengths, vocab=97, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab, (n,), generator=g).tolist() for n in lengths]


def truth(model, tokens, first=-1):
    """Logits of `tokens` from position `first` on: one row alone, on a DynamicCache."""
    cache = DynamicCache(config=model.config)
    return model(torch.tensor([tokens]), cache=cache, use_cache=True).logits[0, first:]


def close(a, b):
    assert (a - b).abs().max() <= EPSILON, f"max |difference of logits| is {(a - b).abs().max():.2g}"
    assert torch.equal(a.argmax(-1), b.argmax(-1))


def step(model, pool, seqs, limit=None):
    logits = model(**pool.inputs(seqs, limit=limit)).logits[:, -1]
    pool.manager.check()
    return logits


def decode(model, pool, seqs, logits, steps):
    """Greedy; every step is compared with each row alone."""
    for _ in range(steps):
        for seq, token in zip(seqs, logits.argmax(-1).tolist(), strict=True):
            pool.append(seq, [token])
        logits = step(model, pool, seqs)
        for row, seq in zip(logits, seqs, strict=True):
            close(row, truth(model, pool.manager.tokens(seq))[-1])
    return logits


# ---- named sequences ------------------------------------------------------------------------------------------------


def test_rows_of_different_lengths(model):
    pool = pool_for(model)
    rows = prompts(3, 21, 8, 1)
    for r, tokens in enumerate(rows):
        pool.manager.allocate(r, tokens)
    logits = step(model, pool, range(4))
    for r, tokens in enumerate(rows):
        close(logits[r], truth(model, tokens)[-1])
    decode(model, pool, [0, 1, 2, 3], logits, 10)
    decode(model, pool, [3, 1], logits[[3, 1]], 2)  # other rows, another order


def test_every_position_of_a_prefill_in_chunks(model):
    pool, (tokens,) = pool_for(model), prompts(23)
    pool.manager.allocate("a", tokens)
    parts = []
    while pool.manager.num_committed("a") < 23:
        parts.append(model(**pool.inputs(["a"], limit=5)).logits[0])
    assert [len(p) for p in parts] == [5, 5, 5, 5, 3]
    close(torch.cat(parts), truth(model, tokens, first=0))


def test_one_row_prefills_while_another_decodes(model):
    pool, (long, short) = pool_for(model), prompts(19, 6)
    pool.manager.allocate("short", short)
    logits = step(model, pool, ["short"])
    pool.manager.allocate("long", long)
    pool.append("short", logits.argmax(-1).tolist())
    mixed = step(model, pool, ["short", "long"])
    close(mixed[0], truth(model, pool.manager.tokens("short"))[-1])
    close(mixed[1], truth(model, long)[-1])


def test_a_cached_prefix_is_not_computed_again(model):
    pool, (system, a, b) = pool_for(model), prompts(12, 5, 7)
    pool.manager.allocate("a", system + a)
    step(model, pool, ["a"])
    assert pool.manager.allocate("b", system + b).num_cached_tokens == 12
    inputs = pool.inputs(["b"])
    assert inputs["input_ids"].tolist() == [b] and inputs["position_ids"][0, 0] == 12
    close(model(**inputs).logits[:, -1], truth(model, system + b))
    pool.manager.free("a")
    assert pool.manager.allocate("whole", system + a).num_cached_tokens == 16
    close(step(model, pool, ["whole"]), truth(model, system + a))


def test_fork_diverges_and_neither_sees_the_other(model):
    pool, (tokens,) = pool_for(model), prompts(10)
    pool.manager.allocate("a", tokens)
    step(model, pool, ["a"])
    pool.manager.fork("a", "b")
    pool.append("a", [5])
    pool.append("b", [6])
    logits = step(model, pool, ["a", "b"])
    close(logits[0], truth(model, [*tokens, 5])[-1])
    close(logits[1], truth(model, [*tokens, 6])[-1])
    decode(model, pool, ["a", "b"], logits, 5)


def test_truncate_and_go_another_way(model):
    pool, (tokens,) = pool_for(model), prompts(14)
    pool.manager.allocate("a", tokens)
    step(model, pool, ["a"])
    for keep, new in ((9, [3, 4]), (8, [7]), (2, [1, 2, 3, 4, 5, 6])):
        tokens = [*tokens[:keep], *new]
        pool.manager.truncate("a", keep)
        pool.append("a", new)
        close(step(model, pool, ["a"])[0], truth(model, tokens)[-1])


def test_share_prefix_ends_inside_a_block(model):
    pool, (tokens, more) = pool_for(model), prompts(11, 3)
    pool.manager.allocate("system", tokens)
    step(model, pool, ["system"])
    pool.manager.share_prefix("system", "a", 10)
    pool.append("a", more)
    close(step(model, pool, ["a"])[0], truth(model, tokens[:10] + more)[-1])
    pool.append("system", more[:1])
    close(step(model, pool, ["system"])[0], truth(model, [*tokens, more[0]])[-1])


def test_a_full_pool_evicts_and_stays_right(llama):
    pool = pool_for(llama, num_blocks=8)
    for i in range(12):
        (tokens,) = prompts(17, seed=i)
        pool.manager.allocate(i, tokens)
        close(step(llama, pool, [i])[0], truth(llama, tokens)[-1])
        pool.manager.free(i)
    assert pool.manager.num_free_blocks == 8


def test_the_readers_own_manager(llama):
    pool, (tokens,) = pool_for(llama, manager=BlockManager(64, 4, cache_prefixes=False)), prompts(9)
    pool.manager.allocate("a", tokens)
    close(step(llama, pool, ["a"])[0], truth(llama, tokens)[-1])
    assert pool.manager.allocate("b", tokens).num_cached_tokens == 0


# ---- what must show -------------------------------------------------------------------------------------------------


def test_a_wrong_block_shows_in_the_logits(llama):
    pool, (a, b) = pool_for(llama), prompts(12, 12)
    pool.manager.allocate("a", a), pool.manager.allocate("b", b)
    step(llama, pool, ["a", "b"])
    pool.append("a", [5])
    pool.manager._sequences["a"].table[1] = pool.manager.block_table("b")[1]
    assert (model_logits(llama, pool) - truth(llama, [*a, 5])).abs().max() > 1000 * EPSILON


def model_logits(model, pool):
    return model(**pool.inputs(["a"])).logits[0, -1]


def test_no_copy_on_write_shows_in_the_logits(llama, monkeypatch):
    monkeypatch.setattr(BlockManager, "_must_copy", lambda self, i: False)
    pool, (tokens,) = pool_for(llama), prompts(10)
    pool.manager.allocate("a", tokens)
    llama(**pool.inputs(["a"]))
    pool.manager.fork("a", "b")
    pool.append("a", [5]), pool.append("b", [6])
    llama(**pool.inputs(["a"])), llama(**pool.inputs(["b"]))
    pool.append("a", [7])
    assert (model_logits(llama, pool) - truth(llama, [*tokens, 5, 7])).abs().max() > 1000 * EPSILON


def test_a_pad_column_is_masked_and_nobody_elses(llama):
    pool, (long, short) = pool_for(llama), prompts(9, 2)
    pool.manager.allocate("long", long), pool.manager.allocate("short", short)
    inputs = pool.inputs(["long", "short"])
    assert inputs["attention_mask"].tolist() == [[1] * 9, [0] * 7 + [1] * 2]
    plan = inputs["cache"].plan
    own = {b * 4 + o for b in pool.manager.block_table("short") for o in range(4)}
    assert set(plan.read.view(2, 9)[1].tolist()) <= own
    assert len(plan.write) == 11, "pads are not written"


# ---- bytes ----------------------------------------------------------------------------------------------------------


def test_measured_bytes_are_the_predicted_ones(model):
    pool = pool_for(model, num_blocks=32)
    spec = pool.spec
    token = 2 * spec.layers * spec.kv_heads * spec.head_dim * 4
    assert pool.nbytes == 32 * 4 * token and pool.block_nbytes == 4 * token
    pool.manager.allocate("a", prompts(10)[0])
    assert pool.held_nbytes == 3 * 4 * token
    pool.manager.fork("a", "b")
    assert pool.held_nbytes == 3 * 4 * token, "shared blocks count once"


# ---- as any other Cache ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("search", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generate(model, search):
    ids = torch.tensor([[0] * 4 + prompts(5)[0], prompts(9, seed=2)[0]])
    mask = (ids > 0).long()
    args = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "attention_mask": mask} | search
    pool = pool_for(model, num_blocks=128)
    cache = PagedCache(pool)
    assert torch.equal(model.generate(ids, cache=cache, **args), model.generate(ids, **args))
    pool.manager.check()
    cache.reset()
    assert pool.manager.num_free_blocks == 128


def test_beams_share_blocks(llama):
    pool = pool_for(llama, num_blocks=128)
    ids = torch.tensor(prompts(41))
    llama.generate(ids, cache=PagedCache(pool), max_new_tokens=3, num_beams=4, do_sample=False, pad_token_id=0)
    tables = [pool.manager.block_table(s) for s in pool.manager.sequences]
    assert len(tables) == 4 and len({t[0] for t in tables}) == 1


def test_crop(llama):
    pool, (tokens,) = pool_for(llama), prompts(10)
    cache = PagedCache(pool)
    llama(torch.tensor([tokens]), cache=cache, use_cache=True)
    cache.crop(-3)
    assert cache.get_seq_length() == 7
    logits = llama(torch.tensor([[8, 9]]), cache=cache, use_cache=True).logits
    close(logits[0, -1], truth(llama, [*tokens[:7], 8, 9])[-1])


def test_rows_without_token_ids_are_never_found(llama):
    pool = pool_for(llama)
    llama(torch.tensor(prompts(12)), cache=PagedCache(pool), use_cache=True)
    assert pool.manager.allocate("zeros", [0] * 12).num_cached_tokens == 0


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_bad_input_is_named(llama):
    pool, (tokens,) = pool_for(llama), prompts(6)
    pool.manager.allocate("a", tokens)
    with pytest.raises(LookupError, match="nobody"):
        pool.inputs(["nobody"])
    for seqs in ([], ["a", "a"]):
        with pytest.raises(ValueError, match="seqs"):
            pool.inputs(seqs)
    with pytest.raises(ValueError, match="limit"):
        pool.inputs(["a"], limit=0)
    inputs = pool.inputs(["a"])
    llama(**inputs)
    with pytest.raises(ValueError, match="append one first"):
        pool.inputs(["a"])
    with pytest.raises(ValueError, match="inputs"):
        llama(**inputs)  # a second time
    with pytest.raises(ValueError, match="without a name"):
        inputs["cache"].crop(-1)
    pool.manager.check()


def test_a_pool_of_another_shape_is_refused(llama):
    pool = pool_for(tiny("gpt2"))
    with pytest.raises(ValueError, match="make the pool from this model's spec"):
        llama(torch.tensor(prompts(4)), cache=PagedCache(pool), use_cache=True)
    assert pool.manager.num_free_blocks == 64


def test_a_pool_that_runs_out_undoes_the_step(llama):
    pool = pool_for(llama, num_blocks=5)
    cache = PagedCache(pool)
    with pytest.raises(OutOfBlocks):
        llama(torch.tensor(prompts(12, 12)), cache=cache, use_cache=True)
    assert pool.manager.num_free_blocks == 5
    llama(torch.tensor(prompts(8, 8)), cache=cache, use_cache=True)
    with pytest.raises(OutOfBlocks):
        llama(torch.tensor([[1], [2]]), cache=cache, use_cache=True)
    assert cache.get_seq_length() == 8 and pool.manager.num_free_blocks == 1
    pool.manager.check()


# ---- the bundled model ----------------------------------------------------------------------------------------------


@pytest.mark.model
def test_the_bundled_model(loaded):
    pool = PagedPool(loaded.spec, 32)
    texts = ["My bank password is ABCD-1234. Please remember it. What is the password?", "Paris is"]
    rows = [loaded.tokenizer(text)["input_ids"] for text in texts]
    for r, tokens in enumerate(rows):
        pool.manager.allocate(r, tokens)
    with torch.inference_mode():
        logits = loaded.model(**pool.inputs([0, 1])).logits[:, -1]
        for r, tokens in enumerate(rows):
            close(logits[r], truth(loaded.model, tokens)[-1])
        decode(loaded.model, pool, [0, 1], logits, 3)
        assert pool.manager.allocate("again", rows[0]).num_cached_tokens == 16 * ((len(rows[0]) - 1) // 16)
        close(step(loaded.model, pool, ["again"])[0], truth(loaded.model, rows[0])[-1])
    assert pool.nbytes == 32 * 16 * 46_080


def test_a_pool_of_layers_that_keep_other_things_is_refused_by_name():
    """A state-space hybrid, latent attention: no pool of keys and values of one shape."""
    from kvlab.core.cards import MODELS

    for name in ("Jamba v0.1", "DeepSeek-V3"):
        spec = next(model.spec for model in MODELS.values() if model.name == name)
        with pytest.raises(ValueError, match="state|latent|kv_lora_rank|width|shape"):
            PagedPool(spec, 4)


def test_rows_without_a_name_are_no_look_ups_and_leave_nothing(llama):
    pool = pool_for(llama)
    llama(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]]), cache=PagedCache(pool), use_cache=True)
    assert pool.manager.prefix_stats.requests == 0
