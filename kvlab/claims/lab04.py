"""Verdicts of lab 4, padding and positions: from the recorded run `padding`."""

from __future__ import annotations

from kvlab import record
from kvlab.claims import Verdict
from kvlab.experiments.padding import ARMS, KINDS, epsilon, largest, outcome


def verdicts() -> list[Verdict]:
    """One verdict for each claim that lab 4 settles alone or in part."""
    run = record.load("padding")
    grid = run.data["grid"]

    def out(arm: str) -> tuple[str, str]:
        return tuple(outcome(run, kind, arm) for kind in KINDS)

    def span(arm: str, kind: str, pads: int | None = None) -> str:
        """|Δlogit| of an arm, least to most over prompts and paddings of at least `pads`."""
        one = grid[kind]["float32"][arm]
        deltas = [row[3] for count, rows in zip(one["pads"], one["rows"]) if count >= (pads or 0) for row in rows]
        return f"{min(deltas):.2g} to {max(deltas):.2g}"

    def both(arm: str, pads: int | None = None) -> str:
        return f"{span(arm, 'rope', pads)} with RoPE, {span(arm, 'learned', pads)} with learned positions"

    def texts(arm: str, kind: str) -> str:
        rows = [row for each in grid[kind]["float32"][arm]["rows"] for row in each]
        return f"{sum(row[0] is None for row in rows)} of {len(rows)}"

    noise = {kind: max(largest(run, kind, name) for name, arm in ARMS.items() if arm.healthy) for kind in KINDS}
    quiet = all(noise[kind] <= epsilon(run, kind) for kind in KINDS)
    wrong = {"always", "with pads"}

    def verdict(claim: str, kind: str, finding: str) -> Verdict:
        return Verdict(claim, kind, finding, 4, "padding")

    return [
        verdict(
            "A6",
            "confirmed" if quiet and set(out("steps from 0")) <= wrong else "refuted",
            f"Cached steps at position 0 move logits by {both('steps from 0')}. One position too far is enough: {both('steps one too far')}; with "
            f"RoPE {texts('steps one too far', 'rope')} of these texts are the same all the same, so a test of answers may pass. Where a step stands must follow from "
            f"the prefill: counted from 1 in both is a fault for learned positions only ({span('both from 1', 'rope')} with RoPE).",
        ),
        verdict("A7", *_a7(out, both)),
        verdict(
            "A9",
            "confirmed" if quiet and set(out("mask omitted")) <= wrong else "refuted",
            f"Pads that are not masked move logits by {both('mask omitted', 1)}, from one pad on. Masked, up to {max(grid['rope']['float32']['left, masked']['pads'])} of them "
            f"move logits by at most {noise['rope']:.2g} with RoPE, {noise['learned']:.2g} with learned positions: the shape of the sums.",
        ),
        verdict("A11", *_a11(run)),
        verdict("A18", *_a18(run)),
        verdict(
            "B10",
            "refined"
            if quiet and set(out("steps one too far")) <= wrong and set(out("steps count pads")) <= wrong
            else "refuted",
            f"Right if prefix_len counts the row's tokens: then the cached steps agree with the uncached run within {max(noise.values()):.2g}. The length of the cache is "
            f"another number: in a padded row it counts the pads, and steps that start there move logits by {both('steps count pads', 1)}.",
        ),
    ]


def _a7(out, both) -> tuple[str, str]:
    kinds = out("one offset for all")
    finding = f"The first row's position for all moves logits by {both('one offset for all', 1)}. "
    if set(kinds) == {"with pads"}:
        return (
            "confirmed",
            finding
            + "With rows of one length nothing is wrong, and alone nothing is: it shows from one token of difference on.",
        )
    return "refined" if "harmless" not in kinds else "refuted", finding + f"By kind of model: {', '.join(kinds)}."


def _a11(run: record.Run) -> tuple[str, str]:
    found = run.data["positions"]
    moved, errors = found["moved"]["variants"], found["angles"]["errors"]
    fp32, low, tables = moved["all in fp32"], moved["angles in bf16"], moved["cos and sin in bf16"]
    loses = low[-1][0] > 10 * low[1][0] or low[-1][0] > 100 * fp32[-1][0]
    paths, bound = max(row[3] for row in low), 10 * max(row[3] for row in fp32)
    apart = paths > bound
    finding = (
        f"Large positions do lose precision where angles are held in 16 bits: {found['distinct']['bfloat16']['values']} of 8192 positions stay apart in bf16, a cosine is off by up to "
        f"{max(errors['angles in bf16']):.2g}, and logits by {low[-1][0]:.2g} at {found['moved']['offsets'][-1]}. In fp32, as Transformers computes them, by {fp32[-1][0]:.2g}; with only cosine and sine in bf16 by "
        f"{min(row[0] for row in tables[1:]):.2g} to {max(row[0] for row in tables[1:]):.2g}, wherever the prompt stands. The error belongs to the position: "
    )
    if apart:
        finding += f"cached and uncached runs differ by {paths:.2g} there."
    else:
        finding += f"cached and uncached runs compute the same angle and agree within {paths:.2g} even then."
    turns = found["turns"]["bfloat16"]
    finding += f" What does accumulate is a sum: a key turned again and again ({turns[0]:.1%} after one turn, {turns[-1]:.1%} after {len(turns)}), a bf16 counter that stops at {found['distinct']['bfloat16']['counter']}."
    if not loses:
        return "refuted", finding
    return "confirmed" if apart else "refined", finding


def _a18(run: record.Run) -> tuple[str, str]:
    by_name, bounds = run.data["library"], {kind: epsilon(run, kind) for kind in KINDS}

    def right(name: str) -> list[bool]:
        return [by_name[kind][name][3] <= bounds[kind] for kind in KINDS]

    given, none = right("`generate`, left, mask given"), right("forward by forward, mask, no positions")
    mixed = right("forward by forward, mask, positions in the prefill only")
    version = run.manifest.versions["transformers"]
    finding = (
        f"Transformers {version}. `generate` with a mask: {_words(given)}. Forwards with a mask and no positions, where columns are counted: {_words(none)}. "
        f"Positions in the prefill only: {_words(mixed)}. So by hand they must be passed, in every forward or, with RoPE, in none."
    )
    if all(given) and none == [True, False] and not any(mixed):
        return "refined", finding
    return ("confirmed" if not any(none) else "refuted"), finding


def _words(right: list[bool]) -> str:
    kinds = list(KINDS.values())
    if all(right) or not any(right):
        return "right in both kinds of model" if all(right) else "wrong in both"
    good = kinds[right.index(True)]
    return f"right with {good}, wrong with {kinds[right.index(False)]}"
