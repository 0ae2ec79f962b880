"""Hugging Face Transformers, 4.27 to 5: scenarios on tiny random models.   python hf.py FOLDER "SCENARIO ARCH"...

The reference is written out here and uses neither `generate` nor a cache: every step computes the whole history again.
"""

import contextlib
import copy

import torch
import transformers as tf
from common import NotThere, fill, ids_of, main, threads

tf.logging.set_verbosity_error()
V, H, L, A = 96, 64, 2, 4
N = 8  # tokens
ALL = {
    "vocab_size": V,
    "hidden_size": H,
    "num_hidden_layers": L,
    "num_attention_heads": A,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
}
GQA = {**ALL, "num_key_value_heads": 2}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NEO = {"vocab_size": V, "hidden_size": H, "num_layers": L, "num_heads": A, "window_size": 8, "max_position_embeddings": 256}
ARCHS = {
    "llama": ("Llama", ALL),
    "llama_dyn": ("Llama", {**ALL, "max_position_embeddings": 32, "rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    "gpt_neo": ("GPTNeo", {**NEO, "attention_types": [[["global", "local"], 1]]}),
    "gpt_neox": ("GPTNeoX", ALL),
    "xglm": (
        "XGLM",
        {"vocab_size": V, "d_model": H, "ffn_dim": 128, "num_layers": L, "attention_heads": A, "max_position_embeddings": 256},
    ),
    "mistral_sw": ("Mistral", {**GQA, "sliding_window": 8}),
    "phi3_long": (
        "Phi3",
        {
            **GQA,
            "original_max_position_embeddings": 16,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            **GQA,
            "head_dim": 16,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "sliding_window_pattern": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mamba": ("Mamba", {"vocab_size": V, "hidden_size": H, "num_hidden_layers": L, "state_size": 8}),
    "mamba2": (
        "Mamba2",
        {
            "vocab_size": V,
            "hidden_size": H,
            "num_hidden_layers": L,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 16,
            "expand": 2,
            "n_groups": 1,
            "chunk_size": 8,
        },
    ),
}


def build(arch, **more):
    name, options = ARCHS[arch]
    config_class = getattr(tf, name + ("TextConfig" if name == "Gemma3" else "Config"), None)
    model_class = getattr(tf, name + "ForCausalLM", None)
    if config_class is None or model_class is None:
        raise NotThere("no " + name + " in this release")
    config = config_class(**{**options, **IDS, **more})
    config.use_cache = True
    torch.manual_seed(0)
    model = fill(model_class(config).eval(), skip=("A_log",))
    g = model.generation_config
    g.eos_token_id, g.pad_token_id, g.bos_token_id = None, 0, 1
    model.config.eos_token_id = None
    return model


@torch.no_grad()
def recompute(model, prompt, steps, rows=1, forced=None, after=0, before=()):
    """Greedy (or along `forced`), the whole history again at every step, alone or as equal rows: no cache, no padding.

    after    masked tokens behind the last one, which a causal model cannot see: other shapes, other rounding
    before   a twin's: tokens in front that are no part of the request
    """
    ids, tokens, out = [*before, *prompt], [], []
    for step in range(steps):
        now = torch.tensor([ids + [0] * after] * rows)
        options = {"attention_mask": torch.tensor([[1] * len(ids) + [0] * after] * rows)}
        logits = model(input_ids=now, use_cache=False, **options).logits[0, len(ids) - 1].float()
        token = int(logits.argmax()) if forced is None else forced[step]
        out.append(logits)
        tokens.append(token)
        ids.append(token)
    return tokens, torch.stack(out)


def healthy(model, prompt, steps, forced=None):
    """Rounding and nothing else: equal rows, another thread count, masked tokens behind, float64.

    Some of these may be bit-identical, and one may be sick itself in a release (masked tokens behind move the switch of a
    longrope model): who judges must expect both.
    """
    out = {f"healthy.rows{n}": recompute(model, prompt, steps, rows=n, forced=forced) for n in (2, 7)}
    threads()
    out["healthy.threads"] = recompute(model, prompt, steps, forced=forced)
    threads()
    for name, make in (
        ("behind", lambda: recompute(model, prompt, steps, forced=forced, after=5)),
        ("float64", lambda: recompute(model.double(), prompt, steps, forced=forced)),
    ):
        try:
            out["healthy." + name] = make()
        except Exception as error:  # some releases put float64's smallest number into a float32 mask
            print("no", name, str(error)[:80])
    model.float()
    return out


@torch.no_grad()
def generate(model, rows, steps, row=0, **options):
    """The release's own generate on rows of ids, left-padded with 0; the tokens and logits of one row."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(r)) + list(r) for r in rows])
    mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows])
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=steps,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    scores = getattr(out, "logits", None) or out.scores
    tokens = out.sequences[row, longest:].tolist()
    return tokens, torch.stack([s[row].float() for s in scores])[: len(tokens)]


# ---- scenarios: (model) -> prompt, (tokens, logits) of the run on trial -------------------------------------------------


def left_pad(model):
    """A short row beside a long one, left-padded, in generate."""
    short, long = ids_of(7, 3), ids_of(15, 4)
    return short, generate(model, [short, long], N)


def cached(model):
    """One prompt, generate with its cache."""
    prompt = ids_of(12, 3)
    return prompt, generate(model, [prompt], N, use_cache=True)


def window(model):
    """One prompt that is shorter than the window and grows past it, with the cache."""
    prompt = ids_of(5, 3)
    return prompt, generate(model, [prompt], 10, use_cache=True)


def static(model):
    """generate's own static cache."""
    prompt = ids_of(12, 3)
    return prompt, generate(model, [prompt], N, cache_implementation="static")


LONG = 60


def after_long(model):
    """A short request after a long one; no cache is handed over: does anything stay in the model?"""
    prompt = ids_of(7, 3)
    generate(model, [ids_of(LONG, 5)], 3)
    return prompt, generate(model, [prompt], N)


PREFIX, FIRST, SECOND = ids_of(9, 3), ids_of(5, 5), ids_of(4, 6)


@torch.no_grad()
def borrowed(model, lend):
    """A prefix cache lent to one request with use_cache=False, then used for another: the second is on trial."""
    cache = _dynamic()
    model(input_ids=torch.tensor([PREFIX]), past_key_values=cache, use_cache=True)
    model(input_ids=torch.tensor([FIRST]), past_key_values=lend(cache), use_cache=False)
    ids, tokens, out = SECOND, [], []
    for _ in range(N):
        logits = model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1]
        tokens.append(int(logits.argmax()))
        out.append(logits.float())
        ids = [tokens[-1]]
    return PREFIX + SECOND, (tokens, torch.stack(out))


def prefix_no_cache(model):
    """The cache itself is lent."""
    return borrowed(model, lambda cache: cache)


def prefix_copied(model):
    """A copy is lent: the way round."""
    return borrowed(model, copy.deepcopy)


@torch.no_grad()
def own_cache(model):
    """A DynamicCache that is handed in and relied upon to be filled in place."""
    prompt, cache, at, tokens, out = ids_of(12, 3), _dynamic(), 0, [], []
    ids = prompt
    for _ in range(N):
        where = torch.arange(at, at + len(ids))[None]
        logits = model(input_ids=torch.tensor([ids]), past_key_values=cache, position_ids=where, use_cache=True).logits[0, -1]
        at += len(ids)
        tokens.append(int(logits.argmax()))
        out.append(logits.float())
        ids = [tokens[-1]]
    return prompt, (tokens, torch.stack(out))


def _dynamic():
    if not hasattr(tf, "DynamicCache"):
        raise NotThere("no DynamicCache in this release")
    return tf.DynamicCache()


def lookup(model):
    """Prompt lookup decoding on a prompt that repeats itself."""
    prompt = ids_of(6, 3) * 3
    return prompt, generate(model, [prompt], N, prompt_lookup_num_tokens=3, eos_token_id=-1)  # no eos crashes some releases


def assisted(model):
    """Assisted by a perturbed copy of itself, so that some candidates are accepted and some are not."""
    helper = copy.deepcopy(model)
    with torch.no_grad():
        for p in helper.parameters():
            p.mul_(1 + 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(5)))
    prompt = ids_of(12, 3)
    return prompt, generate(model, [prompt], N, assistant_model=helper)


def paged_forward(model):
    """The model is switched to a paged attention (as continuous batching does) and then used for a plain forward."""
    prompt = ids_of(12, 3)
    switch = getattr(model, "set_attn_implementation", None)
    if switch is None:
        raise NotThere("no set_attn_implementation in this release")
    for name in ("paged|sdpa", "sdpa_paged"):
        try:
            switch(name)
            break
        except (ValueError, ImportError):
            continue
    else:
        raise NotThere("no paged attention in this release")
    return prompt, recompute(model, prompt, N)


def beams(model):
    """Beam search; the logits the winning beam was built from, against the same tokens computed again."""
    prompt = ids_of(12, 3)
    ids = torch.tensor([prompt])
    options = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": N,
        "num_beams": 4,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    out = model.generate(ids, output_logits=True, use_cache=True, **options)
    if not getattr(out, "logits", None):
        raise NotThere("this release's generate gives no logits of its beams")
    tokens, beam = out.sequences[0, 12:].tolist(), out.beam_indices[0].tolist()
    found = tokens, torch.stack([s[b].float() for s, b in zip(out.logits, beam)])
    try:
        plain = model.generate(ids, use_cache=False, **options).sequences[0, 12:].tolist()
    except Exception:
        plain = None
    return prompt, found, {"forced": True, "plain": plain}


SCENARIOS = {
    f.__name__: f
    for f in (
        left_pad,
        cached,
        window,
        static,
        after_long,
        prefix_no_cache,
        prefix_copied,
        own_cache,
        lookup,
        assisted,
        paged_forward,
        beams,
    )
}


# ---- twins: a reference with one hypothesis and its number built in, fed the suspect's tokens ------------------------------


@contextlib.contextmanager
def attention(change):
    """torch's attention with its (query, key, value, mask) passed through `change` first."""
    plain = torch.nn.functional.scaled_dot_product_attention

    def changed(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
        q, k, v, attn_mask, is_causal = change(q, k, v, attn_mask, is_causal)
        return plain(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, **more)

    torch.nn.functional.scaled_dot_product_attention = changed
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = plain


@torch.no_grad()
def stepwise(model, prompt, tokens):
    """Over a cache of its own, step by step, fed `tokens`: the logits."""
    cache, ids, at, out = None, prompt, 0, []
    for token in tokens:
        where = torch.arange(at, at + len(ids))[None]
        seen = model(input_ids=torch.tensor([ids]), past_key_values=cache, position_ids=where, use_cache=True)
        cache, at, ids = seen.past_key_values, at + len(ids), [token]
        out.append(seen.logits[0, -1].float())
    return torch.stack(out)


def unwritten(slots):
    """Each cached query also sees the buffer's unwritten slots: zeros, up to `slots` in all."""

    def change(q, k, v, mask, causal):
        if q.shape[2] == 1 and slots > k.shape[2]:
            empty = torch.zeros(*k.shape[:2], slots - k.shape[2], k.shape[3])
            return q, torch.cat([k, empty], 2), torch.cat([v, empty], 2), None, False
        return q, k, v, mask, causal

    return change


def twin_static(arch, prompt, tokens):
    for slots in (0, 19, 20, 21):
        with attention(unwritten(slots)):
            yield slots, stepwise(build(arch), prompt, tokens)


def twin_pads_read(arch, prompt, tokens):
    for pads in (0, 7, 8, 9):
        yield pads, recompute(build(arch), prompt, len(tokens), forced=tokens, before=[0] * pads)[1]


@torch.no_grad()
def twin_pads_counted(arch, prompt, tokens):
    """XGLM counts from the length of its cache: each cached step is fed at a position that many further on."""
    for pads in (0, 7, 8, 9):
        model, past, ids, out = build(arch), None, prompt, []
        plain = model.model.embed_positions.forward
        model.model.embed_positions.forward = lambda i=None, e=None, n=0: plain(i, e, n + pads * (n > 0))  # noqa: B023
        for token in tokens:
            seen = model(input_ids=torch.tensor([ids]), past_key_values=past, use_cache=True)
            past, ids = seen.past_key_values, [token]
            out.append(seen.logits[0, -1].float())
        yield pads, torch.stack(out)


@torch.no_grad()
def twin_own_tokens_missing(arch, prompt, tokens):
    for kept in (0, 1, len(prompt) + len(tokens)):
        model, ids, out = build(arch), list(prompt), []
        for step, token in enumerate(tokens):
            shown = ids if step == 0 else ids[-1 - kept :]
            where = torch.arange(len(ids) - len(shown), len(ids))[None]
            out.append(model(input_ids=torch.tensor([shown]), position_ids=where, use_cache=False).logits[0, -1].float())
            ids.append(token)
        yield kept, torch.stack(out)


def twin_others_tokens(arch, prompt, tokens):
    for left in range(len(FIRST) + 1):
        seen = PREFIX + FIRST[:left] + SECOND
        yield left, recompute(build(arch), seen, len(tokens), forced=tokens)[1]


def twin_others_length(arch, prompt, tokens):
    """The rotary frequencies of a request of that length, for all lengths."""
    for length in (0, LONG, LONG + 1, LONG + 2, LONG + 3):
        base = 10000.0 * max(1.0, 4.0 * length / 32 - 3.0) ** (16 / 14)
        modern = int(tf.__version__.split(".")[0]) >= 5
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": base}} if modern else {"rope_theta": base}
        yield length, recompute(build("llama", **rope), prompt, len(tokens), forced=tokens)[1]


def twin_not_causal(arch, prompt, tokens):
    for seen in (0, 1):
        with attention((lambda q, k, v, mask, causal: (q, k, v, None, False)) if seen else (lambda *same: same)):
            yield seen, recompute(build(arch), prompt, len(tokens), forced=tokens)[1]


TWINS = {
    ("static", "llama"): twin_static,
    ("left_pad", "mamba"): twin_pads_read,
    ("left_pad", "xglm"): twin_pads_counted,
    ("own_cache", "llama"): twin_own_tokens_missing,
    ("prefix_no_cache", "llama"): twin_others_tokens,
    ("after_long", "llama_dyn"): twin_others_length,
    ("paged_forward", "llama"): twin_not_causal,
}


def play(scenario, arch):
    """One case: the run on trial, then on a fresh model (it must not see what the suspect left behind) all others."""
    prompt, suspect, *more = SCENARIOS[scenario](build(arch))
    note = dict(*more)
    model, steps = build(arch), len(suspect[0])
    forced = suspect[0] if note.get("forced") else None
    runs = {"reference": recompute(model, prompt, steps, forced=forced), "suspect": suspect}
    runs.update(healthy(model, prompt, steps, forced))
    try:
        for number, logits in TWINS[scenario, arch](arch, prompt, suspect[0]) if (scenario, arch) in TWINS else ():
            runs[f"twin.{number}"] = suspect[0], logits
    except Exception as error:
        note["twin"] = f"{type(error).__name__}: {str(error)[:200]}"
    return prompt, runs, note


if __name__ == "__main__":
    main(play, "transformers " + tf.__version__, L)
