"""What the recorded run `released` says: the verdict of each pair, the calendar, what lies between noise and fault, the twins."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from kvlab.compare import BEYOND
from kvlab.experiments import released_cases as cases
from kvlab.experiments.released_cases import Case
from kvlab.record import Run

RIGHT, WRONG, UNCLEAR, REFUSES, ABSENT, UNJUDGED = "right", "wrong", "unclear", "refuses", "not there", "no verdict"
UNKNOWN = "`model_kwargs` are not used by the model"  # what generate says to an option it does not know
_STATES = {"identical": RIGHT, "noise": RIGHT, "unclear": UNCLEAR, "state fault": WRONG}


def table(run: Run) -> dict[tuple[str, str, str], dict[str, Any]]:
    """(package, release, case) → what was found."""
    return {(row["package"], row["version"], row["what"]): row for row in run.data["runs"]}


def state(row: dict[str, Any] | None) -> str:
    """Right, wrong, unclear; or that the release refuses the scenario, or does not have it."""
    says = "" if row is None else row.get("says", "")
    if row is None or row["outcome"] == "not there" or (UNKNOWN in says and "attention_mask" not in says):
        return ABSENT
    if row["outcome"] == "refused":
        return REFUSES
    return _STATES[row["verdict"]] if row["outcome"] == "ran" else UNJUDGED


def pair(run: Run, case: Case) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """What was found in the broken release and in the fixed one; None where it is not in the run."""
    found = table(run)
    return tuple(found.get((case.package, version, case.what)) for version in (case.broken, case.fixed))


def judged(run: Run) -> list[dict[str, Any]]:
    """Every run that has a verdict."""
    return [row for row in run.data["runs"] if row["outcome"] == "ran"]


def ratio(row: dict[str, Any]) -> float:
    """Δ in units of its ε: noise up to 1, a state fault from `BEYOND` on."""
    return row["delta"] / row["epsilon"]


def apart(run: Run) -> dict[str, Any]:
    """How far noise goes, where faults begin, and how many runs lie between: Δ in units of ε."""
    rows = judged(run)
    noise = [row for row in rows if state(row) == RIGHT]
    faults = [row for row in rows if state(row) == WRONG]
    between = [row for row in rows if state(row) == UNCLEAR]
    highest, least = max(noise, key=ratio), min(faults, key=ratio)
    return {
        "runs": len(rows),
        "noise": len(noise),
        "faults": len(faults),
        "between": len(between),
        "highest": highest,
        "least": least,
        "orders": math.log10(ratio(least) / ratio(highest)),
        "same_text": sum(row["same_text"] is True for row in faults),
        "beyond": BEYOND,
    }


def broken(run: Run) -> list[tuple[Case, dict[str, Any]]]:
    """Each bug with what was found in its broken release."""
    found = [(case, pair(run, case)[0]) for case in cases.BUGS]
    return [(case, row) for case, row in found if row is not None]


def calendar(run: Run) -> tuple[list[str], list[Case], dict[tuple[str, str], str]]:
    """(releases that were run, the rows, (release, case) → state), the releases the oldest first."""
    found = table(run)
    rows = list(cases.swept())
    releases = [version for version in cases.CALENDAR if any(("transformers", version, case.what) in found for case in rows)]
    states = {(v, case.what): state(found.get(("transformers", v, case.what))) for v in releases for case in rows}
    return releases, rows, states


def spans(run: Run, what: str) -> list[tuple[str, str, int]]:
    """The stretches of the calendar in which a case is wrong: first release, last release, how many. A refusal ends none."""
    releases, _, states = calendar(run)
    found: list[list[str]] = []
    ended = True
    for version in releases:
        now = states[version, what]
        if now == WRONG:
            if ended:
                found.append([])
            found[-1].append(version)
            ended = False
        elif now in (RIGHT, UNCLEAR):
            ended = True
    return [(stretch[0], stretch[-1], len(stretch)) for stretch in found]


def named(row: dict[str, Any]) -> tuple[str, float] | None:
    """The twin that meets the suspect within ε: its number and how far it is off. None if there is none, or more than one."""
    fits = [(number, delta) for number, delta in (row.get("twins") or {}).items() if delta <= row["epsilon"]]
    return fits[0] if len(fits) == 1 else None


def nearest_other(row: dict[str, Any]) -> float:
    """How near the next best twin comes."""
    found = named(row)
    return min(delta for number, delta in row["twins"].items() if found is None or number != found[0])


def left_out(run: Run) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Healthy arms that were sick themselves: (row, arm, why)."""
    for row in judged(run):
        for arm, why in row["left_out"].items():
            yield row, arm, why
