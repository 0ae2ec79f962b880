"""The twin against the zoo: for every fault that moves logits, which hypothesis meets it, with which number, and how far others miss.

The scenes are the zoo's own (`kvlab.experiments.zoo`), played with the fault off and on. A search is given what a developer has:
the suspect's tokens and logits, the model, ε, and the tokens of the other requests that ran there. Not which fault it was.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvlab import record, twin
from kvlab.experiments import blocks as office
from kvlab.experiments import clients, leak, lengths, prefix, served, zoo
from kvlab.experiments.checkpoint import Checkpoint
from kvlab.experiments.zoo import ADA, LONG_TALK, NEW_TOKENS, SECRET, SYSTEM, Scene, Stage
from kvlab.faults import ZOO, fault
from kvlab.faults.twins import OUTSIDE, TWINS
from kvlab.runtime import load, parrot
from kvlab.runtime.decode import Trace, greedy

QUICK = ("cache-not-reset", "position-one-too-far", "mask-one-short", "window-one-too-wide", "tokenised-apart")


def others(stage: Stage, name: str, trace: Trace) -> list[list[int]]:
    """Token ids of the requests that ran beside or before the suspect in a fault's scene, prompt and answer."""
    made = _OTHERS.get(name)
    return [] if made is None else made(stage, trace)


def _texts(*texts: str) -> Callable:
    return lambda stage, trace: [stage.ids(text) for text in texts]


def _answered(text: str) -> Callable:
    def ids(stage, trace):
        asked = stage.ids(text)
        return [asked + greedy(stage.loaded, [asked], NEW_TOKENS)[0].tokens]

    return ids


def _on_system(stage: Stage, trace: Trace) -> list[list[int]]:
    return [stage.ids(SYSTEM) + stage.ids(" " + ADA)]


def _of_group(group: int, long: bool = False) -> Callable:
    """Request A of a group of lab 6, with its answer."""

    def ids(stage: Stage, trace: Trace):
        pair = prefix.make_pairs(stage.loaded.tokenizer, prefix.QUICK)[0]
        asked = (prefix._long_prefix(pair) if long else prefix.requests_of(group, pair))["A"]
        return [asked + greedy(stage.loaded, [asked], NEW_TOKENS)[0].tokens]

    return ids


def _in_the_office(lead: str, cut: int, text: str) -> Callable:
    return lambda stage, trace: [stage.ids(lead)[:cut] + stage.ids(text)]


def _at_the_engine(name: str) -> Callable:
    return lambda stage, trace: served.SCENES[name](stage.loaded, SECRET, NEW_TOKENS).others


_OTHERS: dict[str, Callable] = {
    "cache-not-reset": _texts(leak.USER_A),
    "static-cache-not-reset": _texts(ADA),
    "prefix-copied-shallow": _on_system,
    "length-is-live": _on_system,
    "look-writes": lambda stage, trace: [trace.prompt[:-1] + stage.ids(f" is {SECRET}. Please remember it. My bank password")],
    "fork-shares-the-buffer": _texts("Tom has one animal. It is a dog"),
    "prefix-of-another-length": lambda stage, trace: [lengths.prompts()[lengths.LONG]],
    "stale-buffer": _answered(LONG_TALK),
    "shift-without-rotation": _texts(LONG_TALK),
    "no-position-ids": lambda stage, trace: stage.asked(2, seed=5),
    "right-padding-misread": _texts(LONG_TALK),
    "prefix-unchained": _of_group(2),
    "blocks-not-verified": _of_group(4),
    "hit-rounded-up": _of_group(3, long=True),
    "suffix-positions-from-zero": _of_group(3),
    "prefix-cache-aliased": _of_group(3),
    "no-copy-on-write": _in_the_office(office.SYSTEM, office.BLOCK_SIZE + 1, f" The password is {SECRET}."),
    "fork-without-reference": _texts(f"Note: the password is {SECRET}. Keep it."),
    "freed-on-cancel": _texts(f"Note: the password is {SECRET}. Keep it."),
    "stale-hash": _in_the_office(office.LEAD, office.BLOCK_SIZE, f" The password is {SECRET}."),
}
for _name in ("pads-not-masked", "conventions-mixed", "one-offset-for-all", "steps-count-pads"):
    _OTHERS[_name] = _texts(LONG_TALK)
for _name in served.SCENES:
    _OTHERS[_name] = _at_the_engine(_name)


def _plain(stage: Stage, one: Scene, trace: Trace) -> Trace:
    """What the prompt gives alone: with another context's shift too, since that is what the request's tokens would say."""
    if one.fault == "shift-without-rotation":
        return stage.alone(trace)
    return one.reference(stage, trace)


def _weights(stage: Stage, name: str):
    return clients.adapter(stage.loaded) if name == "old-weights-cache" else contextlib.nullcontext()


def examine(stage: Stage, name: str, *, broken: bool = True, progress: bool = False) -> twin.Twin:
    """The search on one fault's scene, played with the fault on, or off."""
    one = zoo.SCENES[name]
    with fault(name if broken else None):
        trace = one.play(stage).trace
    loaded = getattr(stage, one.model)
    reference = None if name == "beams-not-reordered" else _plain(stage, one, trace)
    epsilon, beside = stage.epsilon(loaded, one.shifted), others(stage, name, trace)
    with _weights(stage, name):
        return twin.search(loaded, reference, trace, epsilon, others=beside, progress=progress)


def plain(found: twin.Twin) -> dict:
    """A search's outcome as plain values."""

    def number(value):
        return list(value) if isinstance(value, tuple) else value

    def one(made: twin.Try) -> dict:
        return {
            "hypothesis": made.hypothesis,
            "families": list(made.families),
            "number": number(made.number),
            "says": made.sentence,
            "miss": _short(made.miss),
            "tried": made.tried,
        }

    return {
        "kind": found.kind,
        "met": [one(made) for made in found.met],
        "neighbours": [[name, number(n), _short(miss)] for (name, n), miss in found.neighbours.items()],
        "tried": [one(made) for made in found.tried],
        "left_out": found.left_out,
        "distance": _short(found.distance),
        "epsilon": _short(found.epsilon),
        "runs": found.runs,
        "seconds": found.seconds,
        "sentence": found.sentence,
    }


def _short(value: float) -> float | None:
    return record.short(value) if value < float("inf") else None


def right(name: str, found: dict) -> bool:
    """Whether the outcome is what the zoo knows: the right hypothesis alone or among several, or none for a fault outside."""
    if name in OUTSIDE:
        return not found["met"]
    return TWINS[name] in [one["hypothesis"] for one in found["met"]]


def faults() -> list[str]:
    """The faults whose scenes have logits, in the zoo's order."""
    return [name for name in ZOO if zoo.SCENES[name].reference is not None]


def run(
    name: str | None = None, *, device: str | None = None, quick: bool = False, checkpoint=None, progress: bool = True
) -> record.Run:
    """Every fault that moves logits, with the fault on and off. Some twenty minutes on two cores; `quick`: five faults."""
    from tqdm.auto import tqdm

    began = time.perf_counter()
    loaded = load(name, device=device, dtype="float32")
    names: Sequence[str] = QUICK if quick else faults()
    settings = {"new_tokens": NEW_TOKENS, "most": twin.MOST, "faults": len(names), "hypotheses": len(twin.HYPOTHESES)}
    manifest = record.manifest("twins", loaded, dtypes=["float32"], seed=zoo.SEED, settings=settings)
    manifest = replace(manifest, model=manifest.model | {parrot.NAME: parrot.verify()})
    kept, stage, out = Checkpoint(checkpoint, manifest), Stage(loaded), {}
    bar = tqdm(names, unit="fault", disable=not progress)
    for one in bar:
        bar.set_description(one)
        out[one] = {
            "sick": kept.get([one, "on"], lambda one=one: plain(examine(stage, one))),
            "healthy": kept.get([one, "off"], lambda one=one: plain(examine(stage, one, broken=False))),
        }
    seconds = kept.took() if checkpoint else round(time.perf_counter() - began, 1)
    return record.Run(replace(manifest, seconds=seconds), {"faults": out})
