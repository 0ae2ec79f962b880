"""Verdicts of lab 3, the password, twice: from the recorded runs `password` and `leak`."""

from __future__ import annotations

from kvlab import record
from kvlab.claims import Verdict
from kvlab.experiments import confusion
from kvlab.experiments.password import ARMS


def verdicts() -> list[Verdict]:
    """One verdict for each claim that lab 3 settles alone or first."""
    run, leak = record.load("password"), record.load("leak").data
    arms = run.data["arms"]
    epsilon = confusion.epsilons(run)
    n = len(run.data["prompts"])

    def largest(arm: str, dtype: str = "float32") -> float:
        return max(max(row[2]) for row in arms[dtype][arm])

    def smallest(arm: str, dtype: str = "float32") -> float:
        return min(max(row[2]) for row in arms[dtype][arm])

    def flips(arm: str, dtype: str = "float32") -> int:
        return sum(row[0] is not None for row in arms[dtype][arm])

    same = ("repeated", "fresh process", "generate")
    exact = max(largest(arm) for arm in same)
    healthy = [arm for arm in ARMS.values() if arm.kind == "healthy"]
    noise = max(largest(arm.name) for arm in healthy)
    flips16 = sum(flips(arm.name, "bfloat16") for arm in healthy)
    margins16 = [flip["margin"] for flip in confusion.tie_flips(run) if flip["dtype"] == "bfloat16"]
    places = confusion.places(run)
    mix = ("beside a short one", "beside a long one", "another row order")
    sick = [arm.name for arm in ARMS.values() if arm.kind == "sick"]
    off = {name: max(max(row[2]) for row in rows) for name, rows in run.data["without_cache"].items()}
    still_wrong = [name for name, delta in off.items() if delta > epsilon["float32"]]

    ties = f"In bf16 {flips16} of {n * len(healthy)} healthy runs change a token without any shared state"
    ties += f", at margins up to {max(margins16):.2g} (2ε is {2 * epsilon['bfloat16']:.2g})." if margins16 else "."

    def verdict(claim: str, kind: str, finding: str, source: str = "password") -> Verdict:
        return Verdict(claim, kind, finding, 3, source)

    return [
        verdict(
            "A1",
            "refined",
            f"The same run repeated, in a new process, or by Transformers' own generate gives {_delta(exact)} in fp32 over {n} "
            f"prompts: greedy decoding repeats itself. It gives another text when the cache was not cleared: {flips('cache not reset')} "
            f"of {n} texts change within {run.manifest.settings['new_tokens']} tokens; after a reset {flips('cache reused, reset')} do. "
            + ties,
        ),
        verdict(
            "A5",
            "confirmed" if leak["secret"] in leak["kept"]["text"] else "refuted",
            f"User B's question is answered “{_first_words(leak['kept']['text'])}” from user A's cache, and "
            f"“{_first_words(leak['reset']['text'])}” from a clean one; |Δlogit| reaches {leak['verdict']['delta']:.2g}.",
            "leak",
        ),
        verdict(
            "A8",
            *_a8(places),
        ),
        verdict(
            "A9",
            "confirmed",
            f"Without a mask, pads move logits by {smallest('pads not masked'):.2g} to {largest('pads not masked'):.3g}. With it, the make-up "
            f"of the batch moves them by at most {max(largest(arm) for arm in mix):.2g} in fp32 and {max(largest(arm, 'bfloat16') for arm in mix):.2g} in bf16.",
        ),
        verdict(
            "A10",
            "refined",
            f"A static buffer whose length is never lowered moves logits by {smallest('stale buffer'):.2g} to {largest('stale buffer'):.3g}, and only in a "
            f"request that follows a longer one. Clearing is not needed: with its length set to 0 and the old values left in place, the "
            f"same buffer stays within {largest('buffer reused, length reset'):.2g}.",
        ),
        verdict(
            "A12",
            "confirmed",
            f"In fp32 twelve healthy variations stay within {noise:.2g}; the four faults start at {min(smallest(name) for name in sick):.2g}. "
            f"Noise and fault are different in kind, and the verdict tells them apart.",
        ),
        verdict(
            "A14",
            "refined",
            f"Alone, beside a short row and beside a long one: in fp32 the logits differ by at most {max(largest(arm) for arm in mix):.2g} and "
            f"{sum(flips(arm) for arm in mix)} of {3 * n} texts change; in bf16 {sum(flips(arm, 'bfloat16') for arm in mix)} of {3 * n} do, all at near-ties. Masked "
            f"padding is not the cause: the order of the sums is.",
        ),
        verdict(
            "A20",
            "refined",
            f"On this machine nothing had to be switched on: repeated and fresh runs agree to the last bit. What does change bits is the shape of the "
            f"computation (another thread count: {largest('other thread count'):.2g}; batch: {max(largest(arm) for arm in mix):.2g}; chunks: "
            f"{largest('chunked prefill'):.2g}), which no seed fixes.",
        ),
        verdict(
            "A24",
            "refined" if still_wrong else "confirmed",
            f"With the cache off, {len(off) - len(still_wrong)} of {len(off)} faults vanish (|Δlogit| at most "
            f"{max(d for name, d in off.items() if name not in still_wrong):.2g}). "
            + (
                f"But “{', '.join(still_wrong)}” stays wrong ({max(off[name] for name in still_wrong):.3g}): the control clears the cache, not the mask."
                if still_wrong
                else ""
            ),
        ),
        verdict(
            "B9",
            "confirmed",
            f"Transformers' generate agrees with our loop and with itself to {_delta(largest('generate'))} on {n} prompts in fp32.",
        ),
    ]


def _a8(places: dict) -> tuple[str, str]:
    """A8's verdict follows from the intervals: each place alone, then what is left of it once the margins are known."""
    parts, more, unexplained = [], 0, 0
    for name, found in places["places"].items():
        says = confusion.place_verdict(found["flip_ratio"])
        more += says == "more"
        unexplained += confusion.place_verdict(found["adjusted"]) == "more"
        ratio, adjusted = found["flip_ratio"], found["adjusted"]
        parts.append(
            f"{name}: {says} ({ratio['value']:.2g}× [{ratio['low']:.2g}, {ratio['high']:.2g}]; against what its margins "
            f"foresee {adjusted['value']:.2g}× [{adjusted['low']:.2g}, {adjusted['high']:.2g}])"
        )
    at_small_margins = places["tokens_below"] < 0.25  # every flip lies in the quarter of tokens with the smallest margins
    kind = "refuted" if not at_small_margins else "confirmed" if more == 3 else "refined"
    why = f"bf16, {places['flips']} flips in {places['tokens']} tokens: all at margins up to {places['flip_margin_max']:.2g}, where "
    why += f"{places['tokens_below']:.1%} of the tokens lie. So far the claim holds. By place: "
    left = (
        "Beyond the margin no place flips more often."
        if not unexplained
        else f"{unexplained} of the places has more than its margins foresee."
    )
    return kind, f"{why}{'; '.join(parts)}. {left}"


def _delta(value: float) -> str:
    return "|Δlogit| 0, to the last bit," if value == 0 else f"|Δlogit| {value:.2g}"


def _first_words(text: str, count: int = 8) -> str:
    words = text.split()
    return " ".join(words[:count]) + ("…" if len(words) > count else "")
