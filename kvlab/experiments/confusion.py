"""What the recorded password run says about the verdict: ε, the confusion table, the misses, and where differences fall.

ε is calibrated on the healthy arms of the even prompts and judged on the odd ones, healthy and sick.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvlab.compare import judge, noise_bound, possible
from kvlab.experiments.password import ARMS, difference_of
from kvlab.faults import ZOO
from kvlab.record import Run

PLACES = ("near the end", "punctuation", "start of a repetition")
NEAR_END = 4  # the last four tokens of a text count as "near max length"
ALPHA_Z = 1.96  # two-sided 95 %


def wilson(hits: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion (Wilson 1927). Raises ValueError for a count below 1."""
    if count < 1:
        raise ValueError("wilson: no trials, no proportion")
    p, z2 = hits / count, ALPHA_Z**2
    middle = (p + z2 / (2 * count)) / (1 + z2 / count)
    half = ALPHA_Z / (1 + z2 / count) * math.sqrt(p * (1 - p) / count + z2 / (4 * count**2))
    low = 0.0 if hits == 0 else middle - half  # exact at the ends, where rounding would leave a trace
    high = 1.0 if hits == count else middle + half
    return low, high


def epsilons(run: Run) -> dict[str, float]:
    """ε per dtype, from the healthy arms of the even prompts."""
    return {
        dtype: noise_bound(
            difference_of(row) for name, rows in arms.items() if ARMS[name].kind == "healthy" for row in rows[0::2]
        )
        for dtype, arms in run.data["arms"].items()
    }


def judged(run: Run, *, replay: bool = True) -> list[dict]:
    """Every run of the odd prompts with its verdict. `replay`: low-precision runs in which no fault was found are replayed in fp32.

    `ended_before`: a token flipped, which ends the comparison, before the step at which the fault acts in fp32.
    """
    epsilon = epsilons(run)
    out = []
    for dtype, arms in run.data["arms"].items():
        for name, rows in arms.items():
            for index in range(1, len(rows), 2):
                difference, log = difference_of(rows[index]), rows[index][4]
                in_fp32 = difference_of(run.data["arms"]["float32"][name][index])
                again = (in_fp32, epsilon["float32"]) if replay and dtype != "float32" else None
                verdict = judge(difference, epsilon[dtype], replay=again)
                acts_at = in_fp32.onset(epsilon["float32"])
                fault = ZOO[ARMS[name].fault] if ARMS[name].fault else None
                out.append(
                    {
                        "dtype": dtype,
                        "arm": name,
                        "sick": fault is not None,
                        "prompt": index,
                        "delta": difference.delta,
                        "flip": difference.first is not None,
                        "margin": difference.margin,
                        "ended_before": acts_at is not None and len(difference.deltas) <= acts_at,
                        "kind": verdict.kind,
                        "accused": verdict.kind == "state fault",
                        "replayed": verdict.replayed,
                        "family": fault.family if fault else None,
                        "by_log": log,
                        "by_onset": possible(verdict.step)[0] if verdict.kind == "state fault" else None,
                    }
                )
    return out


def confusion(run: Run) -> list[dict]:
    """One row per dtype and arm: runs judged, accused or unclear, without and with the fp32 replay; intervals, families right."""
    first, second = judged(run, replay=False), judged(run)
    rows = []
    for dtype, arms in run.data["arms"].items():
        for name in arms:
            plain = [v for v in first if (v["dtype"], v["arm"]) == (dtype, name)]
            replayed = [v for v in second if (v["dtype"], v["arm"]) == (dtype, name)]
            caught = [v for v in replayed if v["accused"]]
            rows.append(
                {
                    "dtype": dtype,
                    "arm": name,
                    "sick": ARMS[name].kind == "sick",
                    "runs": len(plain),
                    "accused": sum(v["accused"] for v in plain),
                    "accused_after_replay": len(caught),
                    "unclear": sum(v["kind"] == "unclear" for v in plain),
                    "unclear_after_replay": sum(v["kind"] == "unclear" for v in replayed),
                    "interval": wilson(len(caught), len(replayed)),
                    "flips": sum(v["flip"] for v in plain),
                    "delta_max": max(v["delta"] for v in plain),
                    "delta_min": min(v["delta"] for v in plain),
                    "family_by_log": sum(v["by_log"] == v["family"] for v in caught) if caught else None,
                    "family_by_onset": sum(v["by_onset"] == v["family"] for v in caught) if caught else None,
                }
            )
    return rows


def totals(run: Run) -> dict[str, dict]:
    """Per dtype: healthy runs accused and sick runs caught, and those left unclear, before and after the replay, with intervals."""
    out = {}
    table = confusion(run)
    for dtype in run.data["arms"]:
        rows = [row for row in table if row["dtype"] == dtype]
        out[dtype] = {}
        for kind, sick in (("healthy", False), ("sick", True)):
            chosen = [row for row in rows if row["sick"] == sick]
            runs = sum(row["runs"] for row in chosen)
            for key in ("accused", "accused_after_replay", "unclear", "unclear_after_replay"):
                hits = sum(row[key] for row in chosen)
                out[dtype][f"{kind}_{key}"] = {"hits": hits, "runs": runs, "interval": wilson(hits, runs)}
        caught = [row for row in rows if row["sick"]]
        for key in ("family_by_log", "family_by_onset"):
            hits, runs = sum(row[key] or 0 for row in caught), sum(row["accused_after_replay"] for row in caught)
            out[dtype][key] = {"hits": hits, "runs": runs, "interval": wilson(hits, runs) if runs else None}
    return out


def tie_flips(run: Run) -> list[dict]:
    """Every token a healthy run chose differently from the reference: dtype, arm, step, margin, ε of the dtype."""
    epsilon = epsilons(run)
    return [
        {"dtype": dtype, "arm": name, "prompt": index, "step": row[0], "margin": row[1], "epsilon": epsilon[dtype]}
        for dtype, arms in run.data["arms"].items()
        for name, rows in arms.items()
        if ARMS[name].kind == "healthy"
        for index, row in enumerate(rows)
        if row[0] is not None and row[1] is not None
    ]


# --- claim A8: do differences fall near the end, at punctuation, where a repetition starts? ------------------------------


def places(run: Run, dtype: str = "bfloat16", resamples: int = 2000, seed: int = 0) -> dict:
    """For each place of A8, against all other tokens: rate of flips and of low margins, and their ratio, with 95 % intervals.

    A token flips when the dtype's first choice is not fp32's, in the same context. A margin is low when it is under the
    median margin of the tokens that flipped. Intervals come from a bootstrap over prompts: tokens of one text are not
    independent. `adjusted` compares flips with what the margins alone foresee: observed flips at the place divided by the
    flips expected there if each token flipped as often as tokens of its margin do everywhere.
    """
    import numpy as np

    texts, flips = run.data["places"]["texts"], run.data["places"]["flips"][dtype]
    margin = np.array([text["margins"] for text in texts])
    flip = np.array([[c == "1" for c in row] for row in flips])
    at = {
        "near the end": np.broadcast_to(np.arange(margin.shape[1]) >= margin.shape[1] - NEAR_END, margin.shape),
        "punctuation": np.array([[c == "1" for c in text["punctuation"]] for text in texts]),
        "start of a repetition": np.array([[c == "1" for c in text["repetition"]] for text in texts]),
    }
    low_bound = float(np.median(margin[flip])) if flip.any() else 0.0
    expected = _expected_flips(margin, flip)
    low = margin <= low_bound
    r = np.random.default_rng(seed)
    samples = r.integers(0, len(texts), size=(resamples, len(texts)))
    widest = float(margin[flip].max()) if flip.any() else 0.0
    out = {"tokens": int(margin.size), "flips": int(flip.sum()), "low_margin": low_bound, "places": {}}
    out |= {"flip_margin_max": widest, "tokens_below": float((margin <= widest).mean())}
    for name, where in at.items():
        out["places"][name] = {
            "tokens": int(where.sum()),
            "flips": int(flip[where].sum()),
            "flip_rate": float(flip[where].mean()),
            "flip_rate_elsewhere": float(flip[~where].mean()),
            "flip_ratio": _interval(
                lambda i, w=where: _ratio(flip[i][w[i]].mean(), flip[i][~w[i]].mean()), len(texts), samples
            ),
            "low_rate": float(low[where].mean()),
            "low_rate_elsewhere": float(low[~where].mean()),
            "low_ratio": _interval(lambda i, w=where: _ratio(low[i][w[i]].mean(), low[i][~w[i]].mean()), len(texts), samples),
            "adjusted": _interval(lambda i, w=where: _ratio(flip[i][w[i]].sum(), expected[i][w[i]].sum()), len(texts), samples),
        }
    return out


def _expected_flips(margin, flip):
    """For each token the flip rate of the tokens whose margins are nearest to its own (equal-count bins of the margin)."""
    import numpy as np

    order = np.argsort(margin, axis=None)
    expected = np.empty(margin.size)
    # fine bins where flips live: halve the remaining tokens until a bin would hold fewer than 50
    edges, left = [margin.size], margin.size
    while left > 100:
        left //= 2
        edges.append(left)
    edges.append(0)
    for high, low in zip(edges, edges[1:]):
        members = order[low:high]
        expected[members] = flip.reshape(-1)[members].mean() if len(members) else 0.0
    return expected.reshape(margin.shape)


def _ratio(a: float, b: float) -> float:
    return float(a) / float(b) if b else math.inf if a else math.nan


def _interval(statistic, count: int, samples: Sequence) -> dict[str, float]:
    """The statistic over all prompts and its 95 % percentile bootstrap interval."""
    import numpy as np

    with np.errstate(invalid="ignore"):
        values = np.array([statistic(sample) for sample in samples])
    values = values[np.isfinite(values)]
    low, high = np.percentile(values, [2.5, 97.5]) if len(values) else (math.nan, math.nan)
    return {"value": statistic(np.arange(count)), "low": float(low), "high": float(high)}


def place_verdict(interval: dict[str, float]) -> str:
    """What an interval of a ratio says: more, fewer, or no difference shown."""
    if interval["low"] > 1:
        return "more"
    if interval["high"] < 1:
        return "fewer"
    return "no difference shown"
