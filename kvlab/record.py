"""Run and Manifest: the only way a figure or a number reaches the book.

An experiment returns a :class:`Run`: its data (plain JSON values) and a :class:`Manifest` that says what produced it. Runs
are saved one file per experiment and kind of device under ``results/``; chapters load them and never type a number.
"""

from __future__ import annotations

import datetime
import gzip
import json
import os
import platform
import re
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvlab.errors import KvlabError

FORMAT = 1

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class RunError(KvlabError):
    """A recorded run that cannot be read, found or saved."""


@dataclass(frozen=True)
class Manifest:
    """What produced a run. `model` maps a model's name to the sha256 of its weights; `seconds` is wall time."""

    experiment: str
    command: str
    model: dict[str, str]
    dtypes: list[str]
    device: dict[str, Any]
    versions: dict[str, str]
    seed: int
    created: str
    seconds: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def sentence(self) -> str:
        """One line for a figure's caption."""
        threads = self.device["threads"]
        models = ", ".join(f"{name} ({sha[:8]})" for name, sha in self.model.items())
        return (
            f"{models}, {'/'.join(self.dtypes)}, {self.device['name']}, {threads} thread{'s' * (threads != 1)}, "
            f"torch {self.versions['torch']}, transformers {self.versions['transformers']}, seed {self.seed}, {self.created}"
        )


def device_info(device: str) -> dict[str, Any]:
    """Kind (`cpu`, `cuda`, `mps`), human name and thread counts of a torch device string."""
    import torch

    kind = str(device).split(":")[0]
    name = torch.cuda.get_device_name(device) if kind == "cuda" else cpu_name()
    return {"kind": kind, "name": name, "threads": torch.get_num_threads(), "cores": os.cpu_count()}


def cpu_name() -> str:
    """The processor's own name where the system tells it, else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of everything that can move a logit."""
    import torch
    import transformers

    from kvlab import __version__

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "kvlab": __version__,
        "system": f"{platform.system()} {platform.machine()}",
    }


def manifest(
    experiment: str, loaded: Any, *, dtypes: list[str], seed: int, settings: dict | None = None, flags: str = ""
) -> Manifest:
    """The manifest of a run on `loaded` (a :class:`kvlab.runtime.Loaded`), made at its start; `flags`: of the command line."""
    return Manifest(
        experiment=experiment,
        command=f"kvlab run {experiment}{flags and ' ' + flags}",
        model={loaded.name: loaded.sha256},
        dtypes=list(dtypes),
        device=device_info(loaded.device),
        versions=versions(),
        seed=seed,
        created=datetime.date.today().isoformat(),
        settings=dict(settings or {}),
    )


@dataclass(frozen=True)
class Run:
    """One experiment's outcome. `data` holds plain JSON values: lists, dicts, numbers, strings, None."""

    manifest: Manifest
    data: dict[str, Any]

    @property
    def experiment(self) -> str:
        return self.manifest.experiment

    def save(self, folder: str | Path | None = None) -> Path:
        """Write the run as `<experiment>-<device kind>.json.gz`; same run, same bytes. Written whole or not at all."""
        folder = Path(folder) if folder else results_folder()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.experiment}-{self.manifest.device['kind']}.json.gz"
        body = {"format": FORMAT, "manifest": asdict(self.manifest), "data": self.data}
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        temporary = path.with_suffix(".part")
        temporary.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))
        temporary.replace(path)
        return path


def results_folder() -> Path:
    """`KVLAB_RESULTS`, else `results/` of the checkout kvlab was imported from, else of the current folder."""
    if os.environ.get("KVLAB_RESULTS"):
        return Path(os.environ["KVLAB_RESULTS"])
    beside = Path(__file__).resolve().parents[1] / "results"
    return beside if beside.is_dir() else Path("results")


def load(experiment: str, device: str = "cpu", folder: str | Path | None = None) -> Run:
    """The recorded run of `experiment` on `device`. Raises RunError, with the command that records it, when there is none."""
    path = (Path(folder) if folder else results_folder()) / f"{experiment}-{device.split(':')[0]}.json.gz"
    if not path.exists():
        raise RunError(
            f"there is no recorded run of {experiment!r} on {device!r} in {path.parent}.",
            f"Record it: `kvlab run {experiment}`.",
        )
    return read(path)


def read(path: str | Path) -> Run:
    """A run from its file. Raises RunError for a damaged file or another format."""
    remedy = "Record it again with `kvlab run`."
    try:
        body = json.loads(gzip.decompress(Path(path).read_bytes()))
        if body["format"] != FORMAT:
            raise RunError(f"{path} has format {body['format']!r}; this kvlab reads {FORMAT}.", remedy)
        return Run(Manifest(**body["manifest"]), body["data"])
    except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError, zlib.error) as error:
        raise RunError(f"{path} is not a readable run: {error}.", remedy) from error


def recorded(folder: str | Path | None = None) -> list[Run]:
    """Every recorded run there is, by file name."""
    return [read(path) for path in sorted((Path(folder) if folder else results_folder()).glob("*.json.gz"))]


def short(value: float, digits: int = 4) -> float:
    """`value` with `digits` significant digits: what a recorded run keeps of a measured float."""
    return float(f"{value:.{digits}g}")


def number(value: float | None) -> str:
    """Two significant digits, or all of a number from 100 on; small ones as 2.2·10⁻⁵."""
    if value is None:
        return "–"
    if value >= 99.5:
        return f"{value:,.0f}"
    return f"{value:.2g}" if value == 0 or value >= 0.001 else powers(f"{value:.1e}")


def powers(text: str) -> str:
    """The text with its small numbers as people write them: 2.2·10⁻⁵ for 2.2e-05."""
    return re.sub(r"(?<=\d)e([+-]\d+)", lambda found: "·10" + str(int(found[1])).translate(RAISED), text)
