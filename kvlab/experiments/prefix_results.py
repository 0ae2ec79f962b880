"""What the recorded prefix run says: each arm against its isolated twin, and the decision table with its evidence."""

from __future__ import annotations

import statistics

from kvlab.experiments.prefix import ARMS, epsilon_of, reference_of, verdict_of
from kvlab.record import Run, powers


def epsilon(run: Run) -> float:
    """ε of the run: from B of group 3, computed in ways that share nothing."""
    return epsilon_of(row for pair in run.data["pairs"] for row in pair["healthy"])


def arms(run: Run) -> dict[str, dict]:
    """Per arm, over the pairs: what B computed, ratios to the isolated arm (below 1: less), and the verdict on both requests.

    length, computed   tokens of B's prompt, and how many of them went through the model (of the first pair)
    ttft, latency      B's time to its first and to its last token, divided by the isolated B's: the median over the pairs
    held               K/V bytes held for both requests, divided by the isolated arm's: the median
    delta              (least, largest) |Δlogit| of the request that is hit worse, over the pairs
    hurt               that request's name
    faults, texts      pairs with a state fault, and pairs in which a text changed
    leaks              pairs in which B says A's secret and the isolated B does not
    check              the rule that `check()` found broken, if any
    text               what the hurt request says in the first pair
    family             what the verdict calls it
    """
    bound, found = epsilon(run), {}
    for name, arm in ARMS.items():
        pairs = [pair["arms"] for pair in run.data["pairs"] if name in pair["arms"]]
        if not pairs:
            continue
        isolated, mine = [p[reference_of(arm)] for p in pairs], [p[name] for p in pairs]
        worst = {who: max(max(p["requests"][who]["row"][2]) for p in mine) for who in mine[0]["requests"]}
        hurt = max(worst, key=lambda who: (worst[who], who))
        rows = [p["requests"][hurt]["row"] for p in mine]
        verdicts = [verdict_of(row, bound) for row in rows]
        b = [p["requests"]["B"] for p in mine]
        alone = [p["requests"]["B"] for p in isolated]
        found[name] = {
            "arm": arm,
            "pairs": len(pairs),
            "length": b[0]["length"],
            "computed": b[0]["computed"],
            "ttft": statistics.median(x["ttft"] / y["ttft"] for x, y in zip(b, alone)),
            "latency": statistics.median(x["seconds"] / y["seconds"] for x, y in zip(b, alone)),
            "held": statistics.median(x["held"] / y["held"] for x, y in zip(mine, isolated))
            if len(mine[0]["requests"]) > 1
            else None,
            "delta": (min(max(row[2]) for row in rows), max(max(row[2]) for row in rows)),
            "hurt": hurt,
            "faults": sum(v.kind == "state fault" for v in verdicts),
            "texts": sum(any(p["requests"][who]["row"][0] is not None for who in p["requests"]) for p in mine),
            "leaks": sum(x["says_secret"] and not y["says_secret"] for x, y in zip(b, alone)),
            "check": mine[0]["check"],
            "text": mine[0]["requests"][hurt]["text"],
            "family": next((v.family for v in verdicts if v.family), None),
        }
    return found


def first_token(run: Run) -> float:
    """How many times sooner a request that hits has its first token: the least time of each seen in the run.

    The least is what the work costs; what is above it is what else the machine was doing.
    """
    one, many = run.data["first_token"], run.data["together"]
    isolated = min(one["isolated"] + many["isolated"]["ttft"])
    return isolated / min(one["shared"] + many["shared"]["ttft"][1:])


def right(run: Run) -> list[dict]:
    """The arms that share rightly."""
    return [found for found in arms(run).values() if found["arm"].kind == "right"]


def wrong(run: Run) -> list[dict]:
    """The arms that share wrongly."""
    return [found for found in arms(run).values() if found["arm"].kind == "wrong"]


def edit(run: Run, what: str) -> dict:
    """One pair of prompts of the study of edits. Raises KeyError for one that is not in the run."""
    for row in run.data["edits"]:
        if row["what"] == what:
            return row
    raise KeyError(what)


def decisions(run: Run) -> list[tuple[str, str, str, bool]]:
    """Claim B8's table: condition, what the report says, what was measured, and whether that bears it out."""
    found = arms(run)

    def quiet(*names: str) -> bool:
        return all(found[name]["faults"] == 0 for name in names)

    def loud(*names: str) -> bool:
        return all(found[name]["faults"] == found[name]["pairs"] for name in names)

    def span(name: str) -> str:
        low, high = found[name]["delta"]
        return powers(f"{high:.2g}" if f"{low:.1g}" == f"{high:.1g}" else f"{low:.2g} to {high:.2g}")

    rows = [
        (
            "the prefix's token ids are the same",
            "share",
            f"shared: at most {span('3 shared')}; with one character changed and reused all the same: {span('4 blocks not verified')}",
            quiet("1 shared", "3 shared") and loud("4 blocks not verified"),
        ),
        (
            "the prefix begins at the same position",
            "share",
            f"every group that shares from position 0 stays within ε; begun elsewhere: {span('2 found by its own tokens')}",
            quiet("1 shared", "3 shared", "4 shared", "5 shared") and loud("2 found by its own tokens"),
        ),
        (
            "what is generated does not change shared blocks",
            "share",
            f"whole blocks are never written again: {span('3 shared')}",
            quiet("3 shared"),
        ),
        (
            "positions agree",
            "share",
            f"suffix positions from 0 behind a shared prefix: {span('3 suffix positions from 0')}",
            loud("3 suffix positions from 0"),
        ),
        (
            "the later contexts are independent",
            "share",
            f"another context behind the same prefix: {span('3 shared')}",
            quiet("3 shared", "3 saved cache, copied"),
        ),
        (
            "a shared block may be written",
            "isolate",
            f"written: {span('3½ shared block written')}; copied before it is written, and so shared: {span('3½ shared, copied on write')}",
            loud("3½ shared block written") and quiet("3½ shared, copied on write"),
        ),
    ]
    if "2 moved, keys turned back" in found:
        moved = f"; with positions repaired still {span('2 moved, keys turned back')}"
    else:
        moved = ""
    rows += [
        (
            "a part overlaps, at another start",
            "isolate",
            f"reused: {span('2 found by its own tokens')}{moved}",
            loud("2 found by its own tokens"),
        ),
        (
            "requests must be kept apart entirely",
            "isolate",
            "a salt of one's own shares nothing, and what is shared rightly changes no logit beyond ε; times and hit counts still tell that somebody asked before",
            True,
        ),
    ]
    return rows
