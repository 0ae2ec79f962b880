"""The table and the numbers of chapter 4's section on angles that depend on the request's length."""

from __future__ import annotations

from kvlab.experiments.lengths import ARMS
from kvlab.record import Run, number

BLOCKS, KVLAB, BESIDE, AFTER, ACROSS, PIECES = ARMS


def wrong(run: Run, kind: str) -> list[str]:
    """The arms in which this kind of RoPE is beyond its ε."""
    told = run.data["kinds"][kind]
    return [name for name, arm in told["arms"].items() if arm["delta"] > told["epsilon"]]


def table(run: Run) -> str:
    """Markdown: every kind of RoPE in every arm, |Δlogit|; bold beyond ε."""
    lines = [
        f"| RoPE | {' | '.join(ARMS)} | ε |",
        "|---|" + "---:|" * (len(ARMS) + 1),
    ]
    for kind, told in run.data["kinds"].items():
        cells = []
        for name, arm in told["arms"].items():
            said = number(arm["delta"])
            said = f"**{said}**" if name in wrong(run, kind) else said
            cells.append(said if arm["hit"] is None else f"{said}, {arm['hit']} found")
        lines.append(f"| `{kind}` | {' | '.join(cells)} | {number(told['epsilon'])} |")
    return "\n".join(lines)


def facts(run: Run) -> dict[str, str]:
    """The numbers of the prose, as text."""
    kinds, settings = run.data["kinds"], run.manifest.settings
    by_length = [kind for kind, told in kinds.items() if told["by_length"]]
    others = [kind for kind in kinds if kind not in by_length]
    found = {f"length_{key}": str(settings[key]) for key in ("trained", "long", "middle", "short", "shared")}
    found |= {
        f"length_{key}_{kind}": number(kinds[kind]["arms"][name]["delta"])
        for kind in by_length
        for key, name in (("blocks", BLOCKS), ("beside", BESIDE), ("after", AFTER), ("across", ACROSS), ("pieces", PIECES))
    }
    return found | {
        "length_by_length": " and ".join(by_length),
        "length_others": ", ".join(others),
        "length_others_most": number(max(arm["delta"] for kind in others for arm in kinds[kind]["arms"].values())),
        "length_kvlab_most": number(max(kinds[kind]["arms"][KVLAB]["delta"] for kind in kinds)),
        "length_transformers": run.manifest.versions["transformers"],
    }
