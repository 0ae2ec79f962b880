"""The claim ledger: every claim of the field reports, and the verdict a recorded run supports.

The claims are in `claims.toml`. Each lab has a module here that computes its verdicts from recorded runs; nothing in a verdict
is typed that a run can say.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

from kvlab.record import RunError, powers

KINDS = ("confirmed", "refined", "refuted", "not measured here")


@dataclass(frozen=True)
class Claim:
    """A claim in our words and the labs that settle it."""

    id: str
    text: str
    labs: tuple[int, ...]


@dataclass(frozen=True)
class Verdict:
    """What a lab found: one of KINDS, the finding in a sentence or two with its numbers, and the run it rests on."""

    claim: str
    kind: str
    finding: str
    lab: int
    run: str

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"{self.claim}: verdict {self.kind!r} is none of {', '.join(KINDS)}")


@functools.cache
def claims() -> dict[str, Claim]:
    """All claims, by id, in the order of the reports."""
    text = (Path(__file__).parent / "claims.toml").read_text(encoding="utf-8")
    return {key: Claim(key, value["text"], tuple(value["labs"])) for key, value in tomllib.loads(text).items()}


def verdicts(lab: int | None = None) -> list[Verdict]:
    """The verdicts of all labs that have one, or of one lab (RunError if its runs are not recorded). Computed each time."""
    found = []
    for module in sorted(name for _, name, _ in pkgutil.iter_modules(__path__) if name.startswith("lab")):
        if lab is None or int(module.removeprefix("lab")) == lab:
            try:
                found += importlib.import_module(f"{__name__}.{module}").verdicts()
            except RunError:  # a lab whose runs are not on record has no verdict yet
                if lab is not None:
                    raise
    order = list(claims())
    return sorted(found, key=lambda verdict: order.index(verdict.claim))


def table(lab: int | None = None) -> str:
    """Markdown: the verdicts of one lab; or the whole ledger, with "not yet" for what no lab has settled."""
    lines = []
    given = verdicts(lab)
    for claim in claims().values():
        mine = [verdict for verdict in given if verdict.claim == claim.id]
        if not mine and lab is None:
            planned = " and ".join(map(str, claim.labs))
            lines.append(f"- **{claim.id}** *{claim.text}.* Not yet: lab {planned}.")
        for verdict in mine:
            where = "" if lab else f" (lab {verdict.lab}, run `{verdict.run}`)"
            lines.append(f"- **{claim.id}** *{claim.text}.* **{verdict.kind.capitalize()}.** {powers(verdict.finding)}{where}")
    return "\n".join(lines)
