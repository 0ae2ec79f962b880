"""Verdicts of lab 2, the KV memory ledger: from the recorded run `ledger`, and from the ledger itself where a claim is arithmetic."""

from __future__ import annotations

from dataclasses import replace

from kvlab import record
from kvlab.claims import Verdict
from kvlab.core import ledger
from kvlab.core.cards import CARDS, MODELS
from kvlab.core.ledger import GB, GIB, human
from kvlab.experiments.ledger import mismatches


def verdicts() -> list[Verdict]:
    """One verdict for each claim that lab 2 settles alone or in part."""
    data = record.load("ledger").data
    seven = replace(MODELS["Llama 2 7B"].spec, dtype="float16")
    token = ledger.token_bytes(seven)
    at_2048, at_4096 = (ledger.request_bytes(seven, n) for n in (2048, 4096))
    measured = data["caches"] + data["grid"] + data["decoding"]
    exact = f"On the loaded model the formula meets the tensors to the byte in {len(measured) - len(mismatches(measured))} of {len(measured)} caches."

    def verdict(claim: str, kind: str, finding: str) -> Verdict:
        return Verdict(claim, kind, finding, 2, "ledger")

    return [
        verdict(
            "A4",
            "refined" if at_2048 != GB else "confirmed",
            f"The example is {at_2048:,} bytes: {at_2048 / GIB:g} GiB, which is {at_2048 / GB:.3f} GB. {exact} "
            f"But H in it has to be the K/V heads: with its {MODELS['Mistral 7B v0.1'].spec.kv_heads} of 32, Mistral 7B takes "
            f"{human(ledger.request_bytes(replace(MODELS['Mistral 7B v0.1'].spec, dtype='float16'), 2048))} where the claim's formula says "
            f"{human(at_2048)}.",
        ),
        verdict("B1", *_b1(data["growth"], data["shapes"])),
        verdict("C3", *_c3(token, at_4096, exact)),
        verdict("C4", *_c4(seven, data["shapes"])),
        verdict("C11", *_c11()),
        verdict("C15", *_c15(data["fits"])),
        verdict("C20", *_c20(data["decoding"], data["forked"])),
        verdict("C22", *_c22(data["grid"])),
    ]


def _b1(growth: dict[str, list[int]], shapes: list[dict]) -> tuple[str, str]:
    grows = growth["DynamicCache"]
    steps = {b - a for a, b in zip(grows, grows[1:])}
    linear = steps == {grows[0]}
    pool, fixed = set(growth["pool, in use"]), set(growth["StaticCache"])
    window = next(row for row in shapes if row["window"] and row["windowed"] == 4 and row["cache"] == "DynamicCache")
    kind = "refuted" if not linear else "refined"
    return kind, (
        f"Memory only (time per step is lab 1's): a DynamicCache grows by {grows[0]:,} bytes a token, each of {len(grows)} times. "
        f"The same tokens take {len(pool)} sizes in a pool of blocks, a staircase, and {len(fixed)} in a StaticCache, which is full-sized from the first "
        f"token. With a sliding window of {window['window']} growth ends there."
    )


def _c3(token: int, at_4096: int, exact: str) -> tuple[str, str]:
    eight = 8 * at_4096
    right = (token, at_4096, eight) == (GIB // 2048, 2 * GIB, 16 * GIB)
    return "refined" if right else "refuted", (
        f"{token:,} bytes a token, {human(at_4096)} at 4096, {human(eight)} for 8 requests: right in powers of 1024. In powers of 1000 it "
        f"is {eight / GB:.2f} GB, {eight / (16 * GB) - 1:.1%} more than 16 GB, into which {16 * GB // at_4096} of the 8 fit. {exact}"
    )


def _c4(seven, shapes: list[dict]) -> tuple[str, str]:
    full = ledger.token_bytes(seven)
    ratios = {heads: full / ledger.token_bytes(replace(seven, kv_heads=heads)) for heads in (1, 8)}
    small = {row["shape"]: row["measured"] for row in shapes if row["cache"] == "DynamicCache"}
    return "confirmed" if ratios == {1: 32, 8: 4} else "refuted", (
        f"With 32 query heads: 1/{ratios[1]:g} with one K/V head, 1/{ratios[8]:g} with 8. The factor is K/V heads over query heads. Measured on models of 8 "
        f"query heads: 1/{small['MHA'] / small['GQA']:g} with 2 K/V heads, 1/{small['MHA'] / small['MQA']:g} with one."
    )


def _c11() -> tuple[str, str]:
    groups = {
        kind: sorted({m.spec.heads // m.spec.kv_heads for m in MODELS.values() if m.kind == kind}) for kind in ("GQA", "MQA")
    }
    within = [m.name for m in MODELS.values() if m.kind == "GQA" and 4 <= m.spec.heads // m.spec.kv_heads <= 8]
    count = sum(m.kind == "GQA" for m in MODELS.values())
    right = len(within) == count and groups["MQA"] == [32]
    return "confirmed" if right else "refined", (
        f"Of {count} public models with grouped heads {len(within)} lie from 1/4 to 1/8; the list runs from 1/{groups['GQA'][0]} to 1/{groups['GQA'][-1]}. With one "
        f"K/V head it is one over the number of query heads, here {' and '.join(f'1/{n}' for n in groups['MQA'])}: 1/32 is the case of 32 heads."
    )


def _c15(fits: dict) -> tuple[str, str]:
    met = fits["predicted"] == fits["admitted"]
    model, card = MODELS["Llama 3.1 8B"], CARDS["RTX 4090 24 GB"]
    plan = ledger.Setting(model.spec, model.parameters, card.memory, 8192)
    at = {share: ledger.ledger(replace(plan, watermark=share)).requests for share in (0.9, 0.85)}
    return "refined" if met else "refuted", (
        f"The formula, with the watermark taken of the whole card and the request rounded up to blocks, says {fits['predicted']} requests of {fits['tokens']} tokens; "
        f"the pool lets in {fits['admitted']}. Without the rounding it says {fits['without_blocks']}, without the watermark {fits['without_watermark']}. "
        f"{model.name} on {card.name} at 8,192 tokens: {at[0.9]} requests at 0.9, {at[0.85]} at 0.85. That 16 is the block size to take is lab 5's question."
    )


def _c20(decoding: list[dict], forked: dict) -> tuple[str, str]:
    sampled = [row for row in decoding if row["copies"] == 1]
    same = all(row["contents"] == 0 and row["measured"] == sampled[0]["measured"] for row in sampled)
    beams = next(row for row in decoding if row["how"].endswith("beams"))
    several = next(row for row in decoding if row["how"].endswith("samples"))
    times = beams["measured"] / sampled[0]["measured"]
    saved = forked["measured"] < forked["apart"]
    right = same and times == beams["copies"] and not mismatches(decoding)
    return ("refined" if saved else "confirmed") if right else "refuted", (
        f"Temperature, top-p and top-k leave bytes and contents as they were: {len(sampled)} ways to choose a token, largest difference of a cached number "
        f"{max(row['contents'] for row in sampled):.1g} from a run that is fed the same tokens. {beams['copies']} beams take {times:g} times the memory in Transformers, "
        f"{several['copies']} samples {several['measured'] / sampled[0]['measured']:g} times. It need not be: on the pool {forked['beams']} beams share their prompt and take "
        f"{human(forked['measured'])}, not {human(forked['apart'])}."
    )


def _c22(grid: list[dict]) -> tuple[str, str]:
    base = min(grid, key=lambda row: row["measured"])
    sizes = ("tokens", "rows", "beams")
    product = all(
        row["measured"] * base["tokens"] * base["rows"] * base["beams"]
        == base["measured"] * row["tokens"] * row["rows"] * row["beams"]
        for row in grid
    )

    def at(factor: int, *grown: str) -> float:
        want = {size: base[size] * (factor if size in grown else 1) for size in sizes}
        return next(row["measured"] for row in grid if all(row[k] == v for k, v in want.items())) / base["measured"]

    return "refuted" if product else "confirmed", (
        f"They multiply: {len(grid)} measured combinations are the product, to the byte. Doubling one factor gives {at(2, 'tokens'):g} times the memory, doubling all three "
        f"{at(2, *sizes):g} times, quadrupling all three {at(4, *sizes):g} times: the third power of the factor, no exponential in any of them."
    )
