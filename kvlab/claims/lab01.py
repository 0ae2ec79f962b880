"""Verdicts of lab 1, attention with and without a memory: from the recorded run `attention`."""

from __future__ import annotations

from kvlab import record
from kvlab.claims import Verdict
from kvlab.experiments import attention_cost as cost


def verdicts() -> list[Verdict]:
    """One verdict for each claim that lab 1 settles alone or in part."""
    data = record.load("attention").data
    growth = cost.conclusions(data["cost"])
    found = {
        "A2": _a2(growth),
        "A3": _a3(data["past"], data["appended"]),
        "B1": _b1(growth),
        "B2": _b2(data["reads"]),
        "C2": _c2(data["reads"], data["twice"], data["outputs"]),
        "C5": _c5(cost.points(data["cost"]), cost.ridge(data["cost"]), data["cost"]["products"]),
    }
    return [Verdict(claim, kind, finding, 1, "attention") for claim, (kind, finding) in found.items()]


def _a2(growth: dict) -> tuple[str, str]:
    grows = growth["cached"]["degree"] > 0
    kind = "refuted" if growth["uncached"]["degree"] == 0 else "refined" if grows else "confirmed"
    linear, square, cube = growth["total_shares"]
    at = growth["at"]
    half = growth["equal_at"]
    where = "never half of it" if half is None else f"half of it at about {round(half, -2):,.0f}"
    if half and half > growth["longest"]:
        where += f" if the line holds beyond the {growth['longest']:,} that were measured"
    return kind, (
        f"Making {at:,} tokens without a cache feeds {at * (at + 1) // 2:,} tokens through the model, and by the fits takes {growth['total_ratio']:.0f} times as long as with one: "
        f"{square:.0%} of that time grows with the square of the length, {linear:.0%} is linear, {cube:.0%}, attention's own part, cubic. With a "
        f"cache a step is a constant and a part in proportion to the history: {growth['cached']['shares'][1]:.0%} of the step at {at:,} tokens, {where}. "
        f"What is O(1) is the work on the new token; its reading of the past is O(t)."
    )


def _a3(past: dict, appended: float) -> tuple[str, str]:
    def largest(arm: str) -> float:
        return max(max(values) for values in past[arm].values())

    same, other = largest("causal: another last token"), largest("causal: one token more")
    loose = past["every token sees every other: another last token"]
    moved = [max(pair) for pair in zip(loose["keys"], loose["values"])]
    kind = "refuted" if appended or same or not all(moved[1:]) else "confirmed"
    bits = "not one bit of" if other == 0 else f"by {other:.1g} of the largest number"
    return kind, (
        f"Feeding a token changes no cached number. Computed anew with another last token, all earlier keys and values are the same to the last bit; with "
        f"one token more, {bits if other else 'the same again'}. Without the mask they move in every layer but the first, by up to {max(moved):.0%} of the layer's largest number. "
        f"In the first layer {'they do not: there' if moved[0] == 0 else 'too: there'} a key is made from its own token alone, with or without a mask."
    )


def _b1(growth: dict) -> tuple[str, str]:
    uncached, cached = growth["uncached"], growth["cached"]
    kind = (
        "refuted"
        if cached["degree"] > 1
        else "confirmed"
        if uncached["degree"] == 2 and uncached["shares"][2] > 0.5
        else "refined"
    )
    return kind, (
        f"Time only (memory is lab 2's). The step without a cache does have a quadratic part, attention's scores, but it is {uncached['shares'][2]:.0%} of the fitted time at {growth['at']:,} tokens; "
        f"{uncached['shares'][1]:.0%} is linear, every earlier token computed anew, and that is what a cache saves. With one, a step is a constant and a linear part: a straight line foretells "
        f"a point it has not seen to {cached['held_out'][1]:.1%}, a constant to {cached['held_out'][0]:.0%}."
    )


def _b2(reads: dict) -> tuple[str, str]:
    right = reads["queries"] == 0 and min(reads["keys"], reads["values"]) > 1
    return "confirmed" if right else "refuted", (
        f"All three were kept and one at a time replaced by random numbers. The next step's logits move by {reads['keys']:.2g} for keys, {reads['values']:.2g} for values, "
        f"{reads['queries']:.2g} for queries. Keeping this model's queries too would make the cache "
        f"{1 + reads['bytes of queries'] / reads['bytes of keys and values']:.2g} times as large."
    )


def _c2(reads: dict, twice: dict, outputs: dict) -> tuple[str, str]:
    depends = min(twice["query swapped"]) > 0.05
    useless = outputs["the second"]["delta"] > 1
    history = max(twice["values"]) > 0.05  # K and V of one token differ between its occurrences as well: that is no reason
    kind = "refuted" if not (depends and useless) else "refined" if history else "confirmed"
    return kind, (
        f"It does depend on the query: asked with the one before, heads give outputs that are off by {min(twice['query swapped']):.0%} to {max(twice['query swapped']):.0%}. An output kept by "
        f"token and used again moves logits by {outputs['the second']['delta']:.2g}, and a second user hears how the first one's password begins. But depending on the context is not the "
        f"difference: the keys and values of one word at two places differ as well, by up to {max(twice['keys']):.0%} and {max(twice['values']):.0%}. The difference is that no later step "
        f"reads an old output."
    )


def _c5(points: list[dict], ridge: float, products: list[dict]) -> tuple[str, str]:
    prefill = [row for row in points if row["kind"] == "prefill"]
    decode = [row for row in points if row["kind"] == "decode"]
    one, many, long, short = decode[0], decode[-1], prefill[-1], prefill[0]
    if long["intensity"] < ridge or one["intensity"] > ridge:
        kind = "refuted"
    elif short["intensity"] < ridge or many["intensity"] > ridge or one["of_roof"] < 0.5:
        kind = "refined"
    else:
        kind = "confirmed"
    share = products[0]["seconds"] / one["seconds"]
    return kind, (
        f"On this machine the ceilings meet at {ridge:.1f} FLOPs a byte. A prefill of {long['size']:,} tokens does {long['intensity']:.0f} and reaches {long['reached']:.0%} of the matmul ceiling; one of "
        f"{short['size']} does {short['intensity']:.1f}. A decode step does {one['intensity']:.1f}; {share:.0%} of its time goes into reading the weights, at {one['of_roof']:.0%} of what a copy reaches: these matrices are small. "
        f"{many['size']} rows do {many['intensity']:.0f}, on prefill's side. A larger batch makes a step slower ({many['seconds'] / one['seconds']:.1f} times with {many['size']} rows), "
        f"and a row's share of it smaller (to {many['seconds'] / many['size'] / one['seconds']:.0%}). Throughput under load is lab 7's."
    )
