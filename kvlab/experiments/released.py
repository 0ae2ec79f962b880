"""Caught in released software: old releases of four packages, each in a process of its own, judged here.

A probe (`probes/`, with `kvlab/probe.py` copied beside it) runs in an old release's process and writes run files; the parent
judges them (`compare.judge_runs`) and keeps the small numbers. Releases are fetched with pip at pinned versions into the cache folder
(`packages`): about 3 GB for all of them. What is finished is kept in the checkpoint, one line for each release and case.

The models are tiny, with random weights from a fixed seed; one case runs on the bundled model's real weights. All in fp32, on the CPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvlab import compare, probe, record
from kvlab.errors import KvlabError
from kvlab.experiments import packages
from kvlab.experiments import released_cases as cases
from kvlab.experiments.checkpoint import Checkpoint
from kvlab.runtime import decode, load, weights

SEED = 1
PROBES = Path(__file__).with_name("probes")
PROMPT = "The three primary colours are red, yellow and blue. The colour of the sky on a clear day is"
NEW_TOKENS = 12  # of the run on real weights
BEHIND = range(1, 31)  # a twin of that run is looked for among buffers this many slots longer than the prompt
SECONDS = 160  # for one case, and as much to start


# ---- playing a case in a release --------------------------------------------------------------------------------------------


def sources() -> list[Path]:
    """What is copied into the folder a probe runs from."""
    return [Path(probe.__file__), *sorted(path for path in PROBES.glob("*.py") if path.name != "__init__.py")]


def script(package: str, what: str) -> str:
    """The probe that plays a case."""
    special = {cases.REAL.what: "smollm.py", cases.NAMED.what: "mistral.py"}
    return special.get(what) or cases.PROBES[package]


def part(package: str, version: str, what: str) -> list[str]:
    """The name of a finished part in the checkpoint: with another probe it is another part."""
    used = {"probe.py", "common.py", script(package, what)}
    if package == "transformers":
        used.add("hf.py")  # which the others import
    text = b"".join(path.read_bytes() for path in sources() if path.name in used)
    return [package, version, what, hashlib.sha256(text).hexdigest()[:12]]


def play(package: str, version: str, whats: Sequence[str], out: Path, extra: dict[str, str] | None = None) -> None:
    """Run the cases in that release's own process; each leaves its run files and a note in a folder of `out`.

    The child sees the release's folders on its PYTHONPATH and nothing of kvlab but a copy of `probe.py`.
    """
    whats = list(whats)
    own = packages.here(package, version)  # then what it needs is here as well
    path = [] if own else packages.path(cases.pins(package, version))
    with tempfile.TemporaryDirectory(prefix="kvlab-probe-") as folder:
        for source in sources():
            shutil.copy(source, folder)
        env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        env |= {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-s", script(package, whats[0]), str(out.resolve()), *whats]
        with contextlib.suppress(subprocess.TimeoutExpired):  # the cases it did not come to have no note
            done = subprocess.run(
                command,
                cwd=folder,
                env=env | (extra or {}),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=SECONDS * (len(whats) + 1),
            )
            out.mkdir(parents=True, exist_ok=True)
            (out / "log.txt").write_text(done.stdout + done.stderr)


def read(folder: Path) -> dict[str, Any]:
    """What a case's folder says, judged: small numbers only. `outcome` is "ran", "refused", "not there" or "no verdict"."""
    try:
        note = json.loads((folder / "note.json").read_text())
    except (OSError, ValueError):
        log = folder.parent / "log.txt"
        lines = [line for line in (log.read_text().splitlines() if log.exists() else []) if line.strip()]
        last = " ".join(lines[-1].split())[:300] if lines else "it was not done in time"
        return {"outcome": "refused", "says": f"the process ended without an answer: {last}"}
    if note["outcome"] != "ran":
        return note
    try:
        runs = {path.stem: probe.load(path) for path in sorted(folder.glob("*.npz"))}
        healthy = {name.removeprefix("healthy."): run for name, run in runs.items() if name.startswith("healthy.")}
        text = text_only(runs, note)
        return note | judged(runs["reference"], healthy, runs["suspect"], runs) | text
    except ValueError as error:  # a run without a number, or no healthy arm that can be believed
        return {"outcome": "no verdict", "says": str(error)[:300]}


def judged(reference: Any, healthy: dict[str, Any], suspect: Any, runs: dict[str, Any]) -> dict[str, Any]:
    """The verdict and where its bound comes from, as plain numbers; and how far each twin is from the suspect."""
    found = compare.judge_runs(reference, healthy, suspect, dtype="float32")
    short = record.short
    twins = {
        name.removeprefix("twin."): short(compare.compare(run, suspect).delta)
        for name, run in runs.items()
        if name.startswith("twin.") and found.verdict.kind == "state fault"
    }
    return {
        "verdict": found.verdict.kind,
        "delta": short(found.difference.delta),
        "epsilon": short(found.bound.epsilon),
        "floor": short(found.bound.floor),
        "ceiling": short(found.bound.ceiling),
        "arms": {name: short(delta) for name, delta in found.bound.arms.items()},
        "left_out": found.bound.left_out,
        "onset": found.verdict.step,
        "first": found.difference.first,
        "margin": None if found.difference.margin is None else short(found.difference.margin),
        "deltas": [short(delta) for delta in found.difference.deltas],
        "steps": len(suspect.tokens),
        "possible": list(found.verdict.possible),
        "twins": dict(sorted(twins.items(), key=lambda pair: int(pair[0]))),
        "engine": suspect.manifest.get("engine"),
        "packages": suspect.manifest.get("packages"),
    }


def text_only(runs: dict[str, Any], note: dict[str, Any]) -> dict[str, Any]:
    """What a test that compares texts would have seen. Where the tokens were given, the release's own plain search is its text."""
    plain = note.pop("plain", None)
    note.pop("forced", None)
    if runs["suspect"].forced:
        return {"same_text": None if plain is None else plain == runs["suspect"].tokens}
    return {"same_text": runs["reference"].tokens == runs["suspect"].tokens}


# ---- the twin on the real model -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def unwritten(slots: int) -> Iterator[None]:
    """A hypothesis built in: each cached query also reads the unwritten slots of a buffer of `slots`. An unwritten slot holds zeros.

    `slots` counts the whole buffer, written and unwritten; a buffer no longer than what is written changes nothing.
    """
    import torch

    plain = torch.nn.functional.scaled_dot_product_attention

    def attention(q, k, v, attn_mask=None, **options):
        if q.shape[2] == 1 and slots > k.shape[2]:
            empty = k.new_zeros(*k.shape[:2], slots - k.shape[2], k.shape[3])
            k, v, attn_mask = torch.cat([k, empty], 2), torch.cat([v, empty], 2), None
        return plain(q, k, v, attn_mask=attn_mask, **options)

    torch.nn.functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = plain


@contextlib.contextmanager
def moved(by: int) -> Iterator[None]:
    """Another hypothesis: each cached step is fed at a position `by` further on than its place in the request."""
    plain = decode.step_positions
    decode.step_positions = lambda history: plain(history) + by
    try:
        yield
    finally:
        decode.step_positions = plain


def twin(loaded: Any, prompt: Sequence[int], steps: int, slots: int = 0, *, by: int = 0) -> decode.Trace:
    """A healthy run of `prompt` with a hypothesis built in: cached queries see `slots` slots, or stand `by` positions further on."""
    with unwritten(slots), moved(by):
        return decode.greedy(loaded, [list(prompt)], steps)[0]


# ---- the files of lab 13 ------------------------------------------------------------------------------------------------------

UNNAMED = Path(__file__).with_name("unnamed")
LAB_PROMPT = "A fox and a crow lived in the same forest. One day the crow found a piece of cheese and flew up to"
LAB_NEW, LAB_STEPS = 23, 4


def unnamed(name: str) -> Path:
    """A run file of lab 13: "reference", "rows2", "behind" or "suspect". All of one prompt, on the bundled weights, in fp32."""
    return UNNAMED / f"{name}.npz"


def record_unnamed(loaded: Any) -> None:
    """Make the run files of lab 13 anew: the static cache on real weights, in a release that their manifests do not name."""
    UNNAMED.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvlab-released-") as work:
        ids = loaded.tokenizer(LAB_PROMPT)["input_ids"]
        play_real(cases.REAL.broken, ids, LAB_NEW, LAB_STEPS, Path(work))
        for name in ("reference", "healthy.rows2", "healthy.behind", "suspect"):
            made = probe.load(Path(work) / cases.REAL.what.replace(" ", "-") / f"{name}.npz")
            about = {"python": "", "system": "", "command": "", "packages": {}, "engine": "a release"}
            where = unnamed(name.removeprefix("healthy."))
            probe.save(where, made.prompt, made.tokens, made.scores, dtype="float32", layers=loaded.spec.layers, **about)


# ---- the experiment -----------------------------------------------------------------------------------------------------------


def plan(quick: bool = False) -> list[tuple[str, str, list[str]]]:
    """(package, release, cases) of every child process, the pairs first, then the calendar."""
    if quick:
        return [("transformers", _installed(), [cases.OPEN[0].what, cases.SOUND.what])]
    jobs: dict[tuple[str, str], list[str]] = {}

    def add(package: str, version: str, what: str) -> None:
        jobs.setdefault((package, version), [])
        if what not in jobs[package, version]:
            jobs[package, version].append(what)

    for case in (*cases.BUGS, cases.ACQUITTED, *cases.OPEN, cases.SOUND):
        for version in filter(None, (case.broken, case.fixed)):
            add(case.package, version, case.what)
    pairs = [(*key, list(whats)) for key, whats in jobs.items()]
    pairs.append((cases.NAMED.package, cases.NAMED.broken, [cases.NAMED.what]))  # a probe of its own, so a process of its own
    jobs.clear()
    for version in cases.CALENDAR:
        for case in cases.swept():
            add("transformers", version, case.what)
    return pairs + [(*key, whats) for key, whats in jobs.items()]


def _installed() -> str:
    return importlib.metadata.version("transformers")


def play_real(version: str, prompt: Sequence[int], new: int, steps: int, out: Path) -> None:
    """The bundled weights with generate's static cache in that release: `new` tokens are asked for, `steps` written down."""
    extra = {
        "KVLAB_WEIGHTS": str(weights.folder(weights.BUNDLED[weights.DEFAULT])),
        "KVLAB_PROMPT": " ".join(map(str, prompt)),
        "KVLAB_NEW": str(new),
        "KVLAB_STEPS": str(steps),
    }
    play("transformers", version, [cases.REAL.what], out, extra)


def _real(loaded: Any, prompt: list[int], version: str, kept: Checkpoint, work: Path) -> None:
    """The static cache on the bundled weights; of a wrong run also the twin, for many numbers of slots."""
    key = part("transformers", version, cases.REAL.what)
    if key in kept:
        return
    play_real(version, prompt, NEW_TOKENS, NEW_TOKENS, work)
    folder = work / cases.REAL.what.replace(" ", "-")
    found = read(folder)
    if found.get("verdict") == "state fault":
        suspect = probe.load(folder / "suspect.npz")
        deltas = {}
        for slots in (len(prompt) + more for more in BEHIND):
            deltas[str(slots)] = record.short(compare.compare(twin(loaded, prompt, NEW_TOKENS, slots), suspect).delta)
        found["twins"] = deltas
        found["text"] = loaded.tokenizer.decode(suspect.tokens)
    kept.keep(key, found)


def run(
    name: str | None = None, *, device: str | None = None, quick: bool = False, checkpoint=None, progress: bool = True
) -> record.Run:
    """Play every case of `released_cases` and judge it. `quick`: one small pair on the installed Transformers, nothing fetched.

    Raises KvlabError for another model than the bundled one, another device than the CPU, or a release that cannot be fetched.
    """
    if device not in (None, "cpu"):
        raise KvlabError(f"device: released runs on the CPU only, not on {device!r}.", "Leave --device out.")
    if weights.find(name) is None:
        raise KvlabError(f"model: released runs on the bundled model only, not on {name!r}.", "Leave --model out.")
    from tqdm.auto import tqdm

    loaded = load(name, device="cpu", dtype="float32")
    settings = {"new_tokens": NEW_TOKENS, "prompt": PROMPT}
    manifest = record.manifest(
        "released", loaded, dtypes=["float32"], seed=SEED, settings=settings, flags="--quick" if quick else ""
    )
    kept = Checkpoint(checkpoint, manifest)
    jobs, rows = plan(quick), {}
    prompt = loaded.tokenizer(PROMPT)["input_ids"]
    with tqdm(total=len(jobs), desc="releases", disable=not progress) as bar:
        for package, version, whats in jobs:
            bar.set_postfix_str(f"{package} {version}")
            missing = [what for what in whats if part(package, version, what) not in kept]
            if missing:
                with tempfile.TemporaryDirectory(prefix="kvlab-released-") as work:
                    play(package, version, missing, Path(work))
                    for what in missing:
                        kept.keep(part(package, version, what), read(Path(work) / what.replace(" ", "-")))
            if not quick and version in (cases.REAL.broken, cases.REAL.fixed) and package == "transformers":
                with tempfile.TemporaryDirectory(prefix="kvlab-released-") as work:
                    _real(loaded, prompt, version, kept, Path(work))
                whats = [*whats, cases.REAL.what]
            for what in whats:
                rows[package, version, what] = kept.get(part(package, version, what))
            bar.update()
    data = {
        "runs": [{"package": p, "version": v, "what": w, **row} for (p, v, w), row in rows.items()],
        "prompt_tokens": len(prompt),
        "bugs": [asdict(case) for case in cases.BUGS],
    }
    return record.Run(replace(manifest, seconds=kept.took()), data)
