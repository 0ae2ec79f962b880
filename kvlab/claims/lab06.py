"""Verdicts of lab 6, sharing a prefix: from the recorded run `prefix`."""

from __future__ import annotations

import statistics

from kvlab import record
from kvlab.claims import Verdict
from kvlab.core import ledger
from kvlab.core.spec import ModelSpec
from kvlab.experiments import lengths
from kvlab.experiments import prefix_results as results

LLAMA_7B = ModelSpec("a 7B model", 32, 32, 32, 128, "float16", "rope", 4096, 32000)


def verdicts() -> list[Verdict]:
    """One verdict for each claim that lab 6 settles, alone or in part."""
    run = record.load("prefix")
    kinds = record.load("lengths").data["kinds"]
    shared_blocks = next(iter(lengths.ARMS))
    by_length = {kind: kinds[kind]["arms"][shared_blocks]["delta"] for kind in ("dynamic", "longrope")}
    data, found, bound = run.data, results.arms(run), results.epsilon(run)
    block = data["shape"]["block"]

    def verdict(claim: str, kind: str, finding: str) -> Verdict:
        return Verdict(claim, kind, finding, 6, "prefix")

    def largest(*names: str) -> float:
        return max(found[name]["delta"][1] for name in names)

    def least(*names: str) -> float:
        return min(found[name]["delta"][0] for name in names)

    def caught(*names: str) -> bool:
        return all(found[name]["faults"] == found[name]["pairs"] for name in names)

    def quiet(*names: str) -> bool:
        return all(found[name]["faults"] == 0 for name in names)

    same = {row["shape"]: row for row in data["same_kv"]}
    behind = max(row["largest"] for shape, row in same.items() if "behind it" in shape)
    pieces = max(row["largest"] for shape, row in same.items() if shape.startswith("in pieces"))
    moved_kv = same["behind another beginning"]["largest"]
    later = same["with two suffixes behind it, against each other"]["largest"]
    changed = [results.edit(run, f"one character changed, {where}") for where in ("early", "halfway", "in the question")]
    still = ", ".join(str(row["shared"]) for row in changed)
    broke = ("3 saved cache, the object itself", "3 suffix positions from 0", "3½ shared block written", "3½ hit rounded up")
    overlap, moved = found["2 found by its own tokens"], found.get("2 moved, keys turned back")
    decisions = results.decisions(run)
    hold = sum(row[3] for row in decisions)

    together, n = data["together"], len(data["together"]["shared"]["ttft"])
    first = {name: statistics.fmean(together[name]["first_token_after"]) for name in ("isolated", "shared")}
    own = results.first_token(run)

    curve = data["boundary"]["curve"]
    suffix = run.manifest.settings["suffix"]
    exact = sum(computed == suffix + length % block for length, computed in curve)
    on_model = max(row["delta"] for row in data["boundary"]["checked"])

    stamp, late = results.edit(run, "a timestamp first"), results.edit(run, "a timestamp last, in the question")
    edited, short_one = results.edit(run, "its first turn edited"), results.edit(run, "a system prompt of a few words")
    goes_on = results.edit(run, "the conversation goes on")
    plain = results.edit(run, "the rules as plain text, and in the chat template")
    seams = [row for row in data["joins"] if "same" in row]
    special = next(row for row in data["joins"] if row["what"] == "add_special_tokens")["changes_ids"]
    split = [row for row in seams if not row["same"]]
    turns = data["turns"]
    kept = sum(row["kept"] >= row["prompt"] + row["answer"] for row in turns)

    sizes = {row["size"]: row for row in data["block_sizes"]}
    siblings = data["siblings"]
    long = data["long_prompt"]
    copies, one = long["books"]["isolated"]["blocks"], long["books"]["shared"]["blocks"]
    life = {row["when"]: row for row in data["life"]}
    outlives = life["both have ended"]

    return [
        verdict(
            "B3",
            "confirmed" if pieces == 0 and behind == 0 else "refined",
            f"The prefix's K/V computed twice in the same shape: a difference of {_number(same['the prefix alone, again']['largest'])}. With two different suffixes "
            f"behind it: {_number(later)}, so what comes later does not touch it. Computed in another shape: {_number(behind)} with a suffix behind it, {_number(pieces)} in "
            f"pieces{'' if pieces == 0 and behind == 0 else ': equal up to rounding, not to the bit'}. Behind another beginning it is another K/V: {moved_kv:.2g}. Reused, a "
            f"prefix moves logits by at most {largest('3 shared', '1 shared', '3 saved cache, copied'):.1g} (ε is {bound:.1g}). Not so where RoPE's "
            f"angles depend on the request's length (rope_type dynamic, longrope): there the blocks of a longer request move logits by "
            f"{by_length['dynamic']:.2g} and {by_length['longrope']:.2g} (chapter 4), and a pool must not share.",
        ),
        verdict(
            "B4",
            "confirmed" if caught("4 blocks not verified") and quiet("4 shared") else "refuted",
            f"One character changed: {still} of {changed[0]['length']} tokens are still shared (early, halfway, in the "
            f"question). Reused all the same, the logits move by {least('4 blocks not verified'):.2g} to {largest('4 blocks not verified'):.2g}; "
            f"the text changed in {found['4 blocks not verified']['texts']} of {found['4 blocks not verified']['pairs']} pairs.",
        ),
        verdict(
            "B5",
            "refuted" if quiet("3 shared", "3 saved cache, copied") and caught(*broke) else "confirmed",
            f"The same prefix before another context may be shared: |Δlogit| at most {largest('3 shared', '3 saved cache, copied', '3½ shared, copied on write'):.1g}, "
            f"within ε = {bound:.1g}, no token changed. What breaks is how it is shared: the saved cache object itself handed on ({_span(found[broke[0]])}; "
            f"B says A's password in {found[broke[0]]['leaks']} of {found[broke[0]]['pairs']} pairs), suffix positions from 0 ({_span(found[broke[1]])}), a "
            f"shared block written ({_span(found[broke[2]])}), a hit rounded up ({_span(found[broke[3]])}).",
        ),
        verdict(
            "B6",
            "confirmed" if caught("3½ shared block written") and quiet("3½ shared, copied on write") else "refuted",
            f"Two requests that write the partial block they share: {_span(found['3½ shared block written'])} for the one that wrote first. Copied before the "
            f"write: {largest('3½ shared, copied on write'):.1g}.",
        ),
        verdict(
            "B7",
            ("refined" if moved else "confirmed") if caught("2 found by its own tokens") else "refuted",
            f"{run.manifest.settings['prefix']} equal tokens at another start, reused: {_span(overlap)}. "
            + (
                f"Positions are only part of the reason: with the keys turned back to the right ones it is still {_span(moved)}, because K and V above the first "
                f"layer depend on what stood before."
                if moved
                else "This model's positions cannot be turned back, so position and context are not told apart."
            ),
        ),
        verdict(
            "B8",
            "refined" if hold == len(decisions) else "refuted",
            f"{hold} of the report's {len(decisions)} rows hold as measured, with two corrections: a block that may be written can still be shared if it is copied "
            f"before the write, and later contexts need not be alike.",
        ),
        verdict(
            "B10",
            "confirmed" if caught("3 suffix positions from 0") and quiet("3 shared") else "refuted",
            f"The suffix at positions from prefix_len on: {largest('3 shared'):.1g}. From 0 on: {_span(found['3 suffix positions from 0'])}.",
        ),
        verdict(
            "B11",
            "refined",
            f"Prefix {run.manifest.settings['prefix']}, {n} requests at once: the mean time to the first token falls by {1 - first['shared'] / first['isolated']:.0%}; one "
            f"request's own by {own:.1f} times, because {data['first_token']['computed']['shared']} tokens are computed in place of {data['first_token']['computed']['isolated']}. "
            f"The saving is the prefix's share of the prompt, no constant. Throughput is not settled here: it depends on how much is generated, and is lab 12's.",
        ),
        verdict(
            "B12",
            "confirmed" if exact == len(curve) and on_model <= bound else "refuted",
            f"At {exact} of {len(curve)} prefix lengths from {curve[0][0]} to {curve[-1][0]} a hit computes the suffix and exactly the prefix's remainder modulo {block}, "
            f"up to {block - 1} tokens; on the model |Δlogit| is at most {on_model:.1g}.",
        ),
        verdict(
            "B13",
            "refined",
            f"Group 1, shared: TTFT ÷{1 / found['1 shared']['ttft']:.1f}, K/V {found['1 shared']['held']:.0%} of isolated, the same text (report: ÷1.7, “consistent”). Group 2, "
            f"reused wrongly: {_span(overlap)}, as reported. Group 3 is no wrong sharing in itself: shared rightly it is ÷{1 / found['3 shared']['ttft']:.1f} "
            f"and the same text; the report's own code hands on one cache object, and that gives {_span(found[broke[0]])}.",
        ),
        verdict(
            "B16",
            "confirmed"
            if stamp["shared"] == 0 and short_one["shared"] == 0 and edited["shared"] < goes_on["shared"]
            else "refined",
            f"A timestamp first: {stamp['shared']} of {stamp['length']} tokens shared; last: {late['shared']} of {late['length']}. First turn edited: {edited['shared']} of "
            f"{edited['length']}, not edited: {goes_on['shared']}. A system prompt of a few words, {short_one['common']} common tokens: {short_one['shared']} shared.",
        ),
        verdict(
            "B17",
            "refined",
            f"The chat template and plain text of the same rules share {plain['shared']} of {plain['length']} tokens. add_special_tokens "
            f"{'changes' if special else 'changes nothing in'} this tokenizer's ids. Tokenised apart, {len(split)} of {len(seams)} seams give other ids, and the logits move by "
            f"{min(row['delta'] for row in split):.2g} to {max(row['delta'] for row in split):.2g} though the text is the same. Generated answers, tokenised anew by the next "
            f"turn, kept all ids in {kept} of {len(turns)} conversations.",
        ),
        verdict(
            "B20",
            "refined",
            f"Fixed text first, what changes last, copy-on-write, hit rate watched: borne out (B16, B6). Alignment saves at most {block - 1} tokens a request. Not to share the "
            f"history is wrong: a conversation that goes on shares {goes_on['shared']} of {goes_on['length']} tokens, history and all. After a change of the weights the old K/V is "
            f"wrong ({siblings[-1]['mixed']:.2g} at {siblings[-1]['sibling'].split()[-2]} % noise): the model belongs into the key.",
        ),
        verdict(
            "B21",
            "refined",
            f"Block size: from 1 to 16 the hit rate falls from {sizes[1]['hit_rate']:.1%} to {sizes[16]['hit_rate']:.1%}, at 256 to {sizes[256]['hit_rate']:.1%}, while table entries "
            f"fall by {sizes[1]['table_entries'] / sizes[16]['table_entries']:.0f} and {sizes[1]['table_entries'] / sizes[256]['table_entries']:.0f} times. Models of one family: even the "
            f"same weights rounded to bf16 move logits by {siblings[0]['mixed']:.2g}, {siblings[0]['mixed'] / bound:,.0f} ε. Across nodes: not measured here, lab 12.",
        ),
        verdict(
            "B23",
            "refined",
            f"The boundary is the token sequence, and positions go with it (B4, B7). The life is longer than the requests': after both ended no request held the blocks, and "
            f"{outlives['found']} tokens were still found, until another request needed their room ({life['a long request has needed some of the blocks']['found']} left). While a request "
            f"held them, none was taken.",
        ),
        verdict(
            "C8",
            "confirmed" if long["books"]["shared"]["references"] == long["requests"] else "refuted",
            f"{long['length']} tokens under {long['requests']} requests with {long['own']} of their own: {copies:,} blocks isolated, {one:,} shared, {copies / one:.0f} times fewer; "
            f"{long['books']['isolated']['computed'] / long['books']['shared']['computed']:.0f} times fewer tokens computed. In a 7B model of claim A4's shape the copies would take "
            f"{_gib(copies * block)} GiB, the one {_gib(one * block)}. On the model: |Δlogit| {long['model']['delta']:.1g}.",
        ),
    ]


def _gib(tokens: int) -> str:
    return f"{tokens * ledger.token_bytes(LLAMA_7B) / ledger.GIB:,.1f}"


def _span(found: dict) -> str:
    low, high = found["delta"]
    return f"|Δlogit| {low:.2g} to {high:.2g}" if f"{low:.2g}" != f"{high:.2g}" else f"|Δlogit| {high:.2g}"


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1g}"
