"""What else there is to measure about a shared prefix. Each study is a function that gives plain values for the recorded run.

Where a number is a count of blocks or tokens it comes from the block manager alone; where it is a logit or a time, from the model.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from kvlab.core.blocks import BlockManager, OutOfBlocks
from kvlab.core.sharing import Prompt, checklist, share
from kvlab.experiments.prefix_requests import (
    BLOCK,
    SECRETS,
    SEED,
    Sizes,
    ask_ids,
    go_on,
    handbook,
    make_pool,
    prefill,
    prefix_ids,
    suffix_ids,
    tell_ids,
)
from kvlab.experiments.prompts import encode
from kvlab.experiments.serving import serve
from kvlab.record import short
from kvlab.runtime import Loaded
from kvlab.runtime.decode import margins, score

QUESTIONS = (
    "Where is the map room?",
    "When do you close?",
    "May I bring tea?",
    "Who was Ada Lovelace?",
    "How long may I keep a film?",
    "Is there a piano?",
    "What does a copy cost?",
    "Can I sit by the window?",
)


def parts(loaded: Loaded, sizes: Sizes) -> dict[str, Callable[[], object]]:
    """The studies by the name they have in the run's data."""
    return {
        "same_kv": partial(same_kv, loaded, sizes),
        "first_token": partial(first_token, loaded, sizes),
        "together": partial(together, loaded, sizes),
        "long_prompt": partial(long_prompt, loaded, sizes),
        "block_sizes": block_sizes,
        "boundary": partial(boundary, loaded, sizes),
        "edits": partial(edits, loaded.tokenizer),
        "joins": partial(joins, loaded),
        "turns": partial(turns, loaded),
        "siblings": partial(siblings, loaded, sizes),
        "life": life,
    }


# --- is the K/V of a shared prefix the same? (B3) ----------------------------------------------------------------------


def same_kv(loaded: Loaded, sizes: Sizes) -> list[dict]:
    """The prefix's K/V computed in several shapes, against the prefix computed alone: largest difference, share of equal bits."""
    ids = prefix_ids(loaded.tokenizer, sizes.prefix)
    ask = ask_ids(loaded.tokenizer, sizes.suffix)
    tell = tell_ids(loaded.tokenizer, SECRETS[0], sizes.suffix)
    plain = _kv(prefill(loaded, ids), len(ids))
    shapes = {
        "the prefix alone, again": prefill(loaded, ids),
        "with a suffix behind it": prefill(loaded, ids + ask),
        "with another suffix behind it": prefill(loaded, ids + tell),
        "in pieces of 64": _in_pieces(loaded, ids, 64),
        "in pieces of a block": _in_pieces(loaded, ids, BLOCK),
        "behind another beginning": prefill(loaded, tell + ids),
    }
    rows = []
    for what, cache in shapes.items():
        start = len(tell) if what.startswith("behind") else 0
        other = _kv(cache, start + len(ids), start)
        rows.append(
            {
                "shape": what,
                "largest": short((plain - other).abs().max().item()),
                "equal": short((plain == other).float().mean().item()),
                "first_layer_values": short((plain[0, 1] - other[0, 1]).abs().max().item()),
            }
        )
    behind = [_kv(shapes[f"with {word} suffix behind it"], len(ids)) for word in ("a", "another")]
    rows.append(
        {
            "shape": "with two suffixes behind it, against each other",
            "largest": short((behind[0] - behind[1]).abs().max().item()),
            "equal": short((behind[0] == behind[1]).float().mean().item()),
            "first_layer_values": 0.0,
        }
    )
    return rows


def _kv(cache, stop: int, start: int = 0) -> torch.Tensor:
    """`[layers, 2, kv_heads, stop - start, head_dim]`."""
    return (
        torch.stack([torch.stack([x.keys[0, :, start:stop], x.values[0, :, start:stop]]) for x in cache.layers]).float().cpu()
    )


@torch.inference_mode()
def _in_pieces(loaded: Loaded, ids: Sequence[int], size: int):
    cache = prefill(loaded, ids[:size])
    for at in range(size, len(ids), size):
        fed = torch.tensor([list(ids[at : at + size])], device=loaded.model.device)
        loaded.model(input_ids=fed, cache=cache, use_cache=True, logits_to_keep=1)
    return cache


def _question(tokenizer, n: int, tokens: int) -> list[int]:
    return suffix_ids(tokenizer, f"\nUser: {QUESTIONS[n % len(QUESTIONS)]}\nAssistant:", tokens, lead=f" Reader {n}.")


# --- the time to the first token ---------------------------------------------------------------------------------------


def first_token(loaded: Loaded, sizes: Sizes, repeats: int = 5) -> dict:
    """Seconds to the first token of a request that hits and of one that computes everything, in turn, `repeats` times.

    The least of each is what the work costs; the rest is what else the machine was doing.
    """
    ids = prefix_ids(loaded.tokenizer, sizes.prefix)
    prompts = [
        ids + _question(loaded.tokenizer, n, sizes.suffix) for n in range(repeats + 1)
    ]  # one asked twice would hit further
    pool = make_pool(loaded, dict(enumerate(prompts)), 1)
    serve(loaded, pool, {"first": prompts[-1]}, 1)
    out: dict = {"isolated": [], "shared": [], "computed": {}}
    for prompt in prompts[:-1]:
        alone = serve(loaded, make_pool(loaded, {"B": prompt}, 1, cache_prefixes=False), {"B": prompt}, 1)["B"]
        hit = serve(loaded, pool, {"B": prompt}, 1)["B"]
        pool.manager.free("B")
        for name, served in (("isolated", alone), ("shared", hit)):
            out[name].append(short(served.ttft, 3))
            out["computed"][name] = served.computed
    return out


# --- many requests behind one prefix (B11, C8) -------------------------------------------------------------------------


def together(loaded: Loaded, sizes: Sizes) -> dict:
    """`sizes.requests` requests at once behind one prefix: each prefilled in turn, then all decoded in one batch."""
    ids = prefix_ids(loaded.tokenizer, sizes.prefix)
    requests = {f"r{n}": ids + _question(loaded.tokenizer, n, sizes.suffix) for n in range(sizes.requests)}
    out, logits = {}, {}
    for name, sharing in (("isolated", False), ("shared", True)):
        pool = make_pool(loaded, requests, sizes.new, cache_prefixes=sharing)
        began = time.perf_counter()
        served = serve(loaded, pool, requests, sizes.new)
        took = time.perf_counter() - began
        logits[name] = torch.stack([s.trace.logits for s in served.values()])
        tables = [pool.manager.block_table(request) for request in requests]
        whole = sizes.prefix // BLOCK
        waits, clock = [], 0.0
        for s in served.values():
            clock += s.ttft
            waits.append(clock)
        out[name] = {
            "computed": [s.computed for s in served.values()],
            "ttft": [short(s.ttft, 3) for s in served.values()],
            "first_token_after": [short(w, 3) for w in waits],
            "makespan": short(took, 3),
            "prefix_bytes": len({i for table in tables for i in table[:whole]}) * pool.block_nbytes,
            "own_bytes": len({i for table in tables for i in table[whole:]}) * pool.block_nbytes,
            "held": pool.held_nbytes,
            "tables": tables,
            "tokens": [s.trace.tokens for s in served.values()],
        }
    out["delta"] = short((logits["isolated"] - logits["shared"])[:, 0].abs().max().item())
    out["same_texts"] = sum(a == b for a, b in zip(out["isolated"].pop("tokens"), out["shared"].pop("tokens")))
    return out


def long_prompt(loaded: Loaded, sizes: Sizes, own: int = 50, modelled: int = 3) -> dict:
    """A long system prompt under many requests: the block manager for all of them, the model for `modelled`."""
    length = min(sizes.long, loaded.spec.max_context - 2 * sizes.suffix)
    ids = prefix_ids(loaded.tokenizer, length)
    books = {}
    for name, sharing in (("isolated", False), ("shared", True)):
        m = BlockManager(sizes.many * (length + own + BLOCK) // BLOCK + 1, BLOCK, cache_prefixes=sharing)
        computed = 0
        for n in range(sizes.many):
            tokens = ids + [1000 * (n + 1) + k for k in range(own)]
            computed += len(tokens) - m.allocate(n, tokens).num_cached_tokens
            m.commit(n, len(tokens))
        m.check()
        books[name] = {"blocks": m.num_blocks - m.num_free_blocks, "computed": computed}
        books[name]["references"] = m.block(0).ref_count
    requests = {f"r{n}": ids + _question(loaded.tokenizer, n, sizes.suffix) for n in range(modelled)}
    pool = make_pool(loaded, requests, 2)
    shared = serve(loaded, pool, requests, 1)
    alone = serve(loaded, make_pool(loaded, {"x": requests["r1"]}, 2, cache_prefixes=False), {"x": requests["r1"]}, 1)["x"]
    return {
        "length": length,
        "own": own,
        "requests": sizes.many,
        "books": books,
        "model": {
            "computed": [s.computed for s in shared.values()],
            "ttft": [short(s.ttft, 3) for s in shared.values()],
            "ttft_isolated": short(alone.ttft, 3),
            "delta": short((shared["r1"].trace.logits - alone.trace.logits).abs().max().item()),
            "held": pool.held_nbytes,
        },
    }


# --- block size (B12, B21) ---------------------------------------------------------------------------------------------


def workload(seed: int = SEED, count: int = 240) -> list[list[int]]:
    """Made-up traffic: five system prompts of 40 to 900 tokens, unequally popular; two in five requests go on with an earlier
    conversation. Token ids are random numbers: only equality counts here."""
    r = random.Random(seed)
    systems = [[r.randrange(50_000) for _ in range(length)] for length in (40, 130, 270, 520, 900)]
    talks: list[list[int]] = []
    requests = []
    for _ in range(count):
        if talks and r.random() < 0.4:
            talk = talks.pop(r.randrange(len(talks)))
        else:
            talk = list(r.choices(systems, weights=(4, 8, 3, 2, 1))[0])
        talk += [r.randrange(50_000) for _ in range(r.randint(8, 90))]
        requests.append(list(talk))
        talk += [r.randrange(50_000) for _ in range(r.randint(10, 120))]  # the answer
        talks.append(talk)
    return requests


def block_sizes(live: int = 16) -> list[dict]:
    """The made-up traffic at block sizes 1 to 256: share of tokens found, bytes held by `live` requests at once, table entries.

    The pool never evicts here: what is lost is lost to the block size alone. Answers are not kept in the pool.
    """
    requests = workload()
    total = sum(map(len, requests))
    rows = []
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        m = BlockManager(2 * total // size + 2 * len(requests), size)
        cached, held, unused, entries, keys = 0, [], [], [], 0
        for n, tokens in enumerate(requests):
            cached += m.allocate(n, tokens).num_cached_tokens
            m.commit(n, len(tokens))
            keys += len(tokens) // size
            if n >= live:
                m.free(n - live)
            blocks = {i for seq in m.sequences for i in m.block_table(seq)}
            held.append(len(blocks) * size)
            unused.append(sum(-len(m.tokens(seq)) % size for seq in m.sequences))
            entries.append(sum(len(m.block_table(seq)) for seq in m.sequences))
        rows.append(
            {
                "size": size,
                "hit_rate": short(cached / total),
                "slots_held": short(statistics.fmean(held)),
                "slots_unused": short(statistics.fmean(unused)),
                "table_entries": short(statistics.fmean(entries)),
                "keys_hashed": keys,
            }
        )
    return rows


def boundary(loaded: Loaded, sizes: Sizes) -> dict:
    """Prefixes that miss a block boundary: tokens computed on a hit for every length around `sizes.prefix`; some on the model."""
    lengths = range(sizes.prefix - 2 * BLOCK, sizes.prefix + 2 * BLOCK + 1)
    ids = prefix_ids(loaded.tokenizer, lengths[-1])
    tell = tell_ids(loaded.tokenizer, SECRETS[0], sizes.suffix)
    ask = ask_ids(loaded.tokenizer, sizes.suffix)
    curve = []
    for length in lengths:
        found = share(Prompt(ids[:length] + tell), Prompt(ids[:length] + ask), BLOCK)
        curve.append([length, found.computed])
    checked = []
    for length in (sizes.prefix - 1, sizes.prefix, sizes.prefix + 1, sizes.prefix + BLOCK // 2):
        requests = {"A": ids[:length] + tell, "B": ids[:length] + ask}
        shared = serve(loaded, make_pool(loaded, requests, 1), requests, 1)["B"]
        alone = {"B": requests["B"]}
        alone = serve(loaded, make_pool(loaded, alone, 1, cache_prefixes=False), alone, 1)["B"]
        delta = (shared.trace.logits - alone.trace.logits).abs().max().item()
        checked.append({"length": length, "computed": shared.computed, "delta": short(delta)})
    return {"curve": curve, "checked": checked}


# --- what changes the ids (B4, B16, B17) -------------------------------------------------------------------------------


def edits(tokenizer) -> list[dict]:
    """Pairs of prompts as a service would send them, and how much the second may share of the first."""
    rules = handbook(14)
    at = {"first": "Tuesday, 10:41:07. ", "then": "Tuesday, 10:41:09. "}

    def chat(system: str | None, *turns: str, answer: bool = True) -> list[int]:
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages += [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(turns)]
        return encode(tokenizer, render(tokenizer, messages, answer))

    q1, q2 = "Where is the map room?", "When do you close on Sunday?"
    talk = ("Where is the map room?", "On the third floor, behind the stairs.", "And the lockers?")
    long_talk = (*talk, "By the entrance.", "Do they take coins?")
    start = tokenizer.bos_token or tokenizer.eos_token or ""
    middle = rules.replace("Rule 7.", "Rule 8.", 1)
    pairs = {
        "another question": (chat(rules, q1), chat(rules, q2)),
        "the same prompt again": (chat(rules, q1), chat(rules, q1)),
        "a timestamp first": (chat(at["first"] + rules, q1), chat(at["then"] + rules, q2)),
        "a timestamp at the end of the system prompt": (
            chat(rules + "\n" + at["first"], q1),
            chat(rules + "\n" + at["then"], q2),
        ),
        "a timestamp last, in the question": (chat(rules, q1 + " " + at["first"]), chat(rules, q2 + " " + at["then"])),
        "one character changed, early": (chat(rules, q1), chat(rules.replace("city", "City", 1), q1)),
        "one character changed, halfway": (chat(rules, q1), chat(middle, q1)),
        "one character changed, in the question": (chat(rules, q1), chat(rules, q1.replace("?", "!"))),
        "one blank more at the start": (chat(rules, q1), chat(" " + rules, q1)),
        "the conversation goes on": (chat(rules, *talk), chat(rules, *long_talk)),
        "its first turn edited": (chat(rules, *talk), chat(rules, "Where is the music room?", *long_talk[1:])),
        "its first turns cut off": (chat(rules, *long_talk), chat(rules, *long_talk[2:], "Yes.", "Thanks.")),
        "a system prompt of a few words": (chat("Be brief.", q1), chat("Be brief.", q2)),
        "no system prompt, the template's own": (chat(None, q1), chat(None, q2)),
        "the rules as plain text, and in the chat template": (encode(tokenizer, rules + "\n" + q1), chat(rules, q1)),
        "a start token in front, and none": ([*encode(tokenizer, start), *chat(rules, q1)], chat(rules, q1)),
    }
    rows = []
    for what, (first, second) in pairs.items():
        found = share(Prompt(first), Prompt(second), BLOCK)
        rows.append(
            {
                "what": what,
                "first": len(first),
                "length": found.length,
                "common": found.common,
                "shared": found.tokens,
                "limits": [[limit.rule, limit.costs] for limit in found.limits],
                "overlap": list(found.overlap) if found.overlap else None,
                "broken_rules": [check.rule for check in checklist(Prompt(first), Prompt(second), BLOCK) if not check.kept],
            }
        )
    return rows


def render(tokenizer, messages: list[dict], answer: bool = True) -> str:
    """The chat template's text; without a template, a plain one."""
    if getattr(tokenizer, "chat_template", None):
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)
    text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
    return text + "assistant:" if answer else text


SEAMS = (
    ("after a word, before a blank", "The answer is", " forty-two."),
    ("after a blank, before a word", "The quick brown ", "fox jumps."),
    ("inside a word", "The libra", "rian says"),
    ("after a colon, before a blank", "User:", " Where is it?"),
    ("after a line end", "Rule 7.\n", "User: Hello"),
    ("between two line ends", "Rule 7.\n", "\nUser: Hello"),
    ("inside a number", "The code is 19", "84."),
    ("after a quote sign", 'He said "', "hello."),
    ("between punctuation marks", "Wait.", ".. what?"),
    ("inside a link", "See https://", "example.org now"),
    ("between Chinese characters", "请将以下内容翻译成英", "文：今天天气很好。"),
    ("after a Chinese colon", "请将以下内容翻译成英文：", "今天天气很好。"),
    ("in indented code", "def f(x):\n    ", "return x"),
    ("after the template's own mark", "<|im_start|>user\n", "Hello there"),
)


def joins(loaded: Loaded) -> list[dict]:
    """Prefix and suffix tokenised apart, against the joined text: the ids, and how far the next token's logits move."""
    rows = []
    for what, begin, end in SEAMS:
        apart, joined = encode(loaded.tokenizer, begin) + encode(loaded.tokenizer, end), encode(loaded.tokenizer, begin + end)
        found = share(Prompt(encode(loaded.tokenizer, begin)), Prompt(joined), 1)
        row = {"what": what, "begin": begin, "end": end, "same": apart == joined, "apart": len(apart), "joined": len(joined)}
        row["prefix"], row["usable"] = len(encode(loaded.tokenizer, begin)), found.tokens
        if apart != joined:
            a, b = score(loaded, joined)[-1], score(loaded, apart)[-1]
            row["delta"] = short((a - b).abs().max().item())
            row["flips"] = bool(a.argmax() != b.argmax())
            row["margin"] = short(float(margins(a)))
        rows.append(row)
    special = loaded.tokenizer("Hello")["input_ids"] != loaded.tokenizer("Hello", add_special_tokens=False)["input_ids"]
    return [*rows, {"what": "add_special_tokens", "changes_ids": special}]


@torch.inference_mode()
def turns(loaded: Loaded, new_tokens: int = 24) -> list[dict]:
    """A conversation's second turn: prompt and answer as generated, against the text of both tokenised anew by the template."""
    tokenizer = loaded.tokenizer
    rows = []
    for question in QUESTIONS:
        messages = [{"role": "system", "content": handbook(2)}, {"role": "user", "content": question}]
        prompt = encode(tokenizer, render(tokenizer, messages))
        cache = prefill(loaded, prompt[:-1])
        served = go_on(loaded, cache, prompt, len(prompt) - 1, new_tokens)
        tokens = served.trace.tokens
        if tokenizer.eos_token_id in tokens:
            tokens = tokens[: tokens.index(tokenizer.eos_token_id)]
        answer = tokenizer.decode(tokens)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Thank you. And on Sunday?"}]
        again = encode(tokenizer, render(tokenizer, messages))
        found = share(Prompt(prompt + tokens), Prompt(again), 1)
        rows.append({"prompt": len(prompt), "answer": len(tokens), "kept": found.tokens, "text": answer})
    return rows


# --- other weights (B20, B21) ------------------------------------------------------------------------------------------


@torch.inference_mode()
def siblings(loaded: Loaded, sizes: Sizes, seed: int = SEED) -> list[dict]:
    """The prefix's K/V from a model of the same shape, read by this one: rounded to bf16, and with its weights shaken.

    `mixed`: |Δlogit| of a request that reads the sibling's K/V, against this model alone; `apart`: between the two models alone.
    """
    ids = prefix_ids(loaded.tokenizer, sizes.prefix)
    prompt = ids + ask_ids(loaded.tokenizer, sizes.suffix)
    own = go_on(loaded, prefill(loaded, ids), prompt, len(ids), 1).trace.logits
    rows = []
    before = {name: p.detach().clone() for name, p in loaded.model.named_parameters()}
    for what, change in (
        ("rounded to bf16", None),
        ("weights shaken by 0.1 %", 0.001),
        ("weights shaken by 1 %", 0.01),
        ("5 %", 0.05),
    ):
        generator = torch.Generator().manual_seed(seed)
        for p in loaded.model.parameters():
            noise = None if change is None else torch.randn(p.shape, generator=generator).to(p.device) * p.std() * change
            p.copy_(p.to(torch.bfloat16).to(p.dtype) if change is None else p + noise)
        theirs = prefill(loaded, ids)
        apart = go_on(loaded, copy.deepcopy(theirs), prompt, len(ids), 1).trace.logits
        for name, p in loaded.model.named_parameters():
            p.copy_(before[name])
        mixed = go_on(loaded, theirs, prompt, len(ids), 1).trace.logits
        rows.append(
            {
                "sibling": what if what[0] in "rw" else f"weights shaken by {what}",
                "mixed": short((mixed - own).abs().max().item()),
                "apart": short((apart - own).abs().max().item()),
                "flips": bool(mixed.argmax() != own.argmax()),
            }
        )
    return rows


# --- how long a shared prefix lives (B23) ------------------------------------------------------------------------------


def life(blocks: int = 40, prefix: int = 256) -> list[dict]:
    """A prefix's blocks through the life of the requests that use it, and after: bookkeeping only."""
    m = BlockManager(blocks, BLOCK)
    shared = list(range(prefix))
    rows = []

    def note(what: str) -> None:
        m.check()
        probe = m.allocate("probe", [*shared, 50_000])
        m.free("probe")
        held = sum(m.block(i).ref_count > 0 for i in probe.block_table[: prefix // BLOCK])
        rows.append({"when": what, "held_by_requests": held, "found": probe.num_cached_tokens})

    def request(name: str, ids: list[int]) -> None:
        m.allocate(name, ids)
        m.commit(name, len(ids))

    request("A", shared + [60_000])
    note("A is running")
    request("B", shared + [60_001])
    m.free("A")
    note("A has ended, B is running")
    try:
        m.allocate("too much", list(range(70_000, 70_000 + (blocks - 1) * BLOCK)))
    except OutOfBlocks:
        note("another request wanted the whole pool and was refused")
    m.free("B")
    note("both have ended")
    request("C", list(range(80_000, 80_000 + (blocks - prefix // BLOCK + 4) * BLOCK)))
    m.free("C")
    note("a long request has needed some of the blocks")
    return rows
