"""Finished parts of a long experiment, kept in a file: a run that was cut goes on where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from kvlab.record import Manifest

KEY = ("experiment", "model", "dtypes", "device", "versions", "seed", "settings")


class Checkpoint:
    """Finished parts of a run, one JSON line each. A file that belongs to another run (other manifest) is started anew.

    `path` None: nothing is kept, every part is computed.
    """

    def __init__(self, path: str | Path | None, manifest: Manifest):
        self.path = Path(path) if path else None
        self.began = time.perf_counter()
        self.before = 0.0  # seconds an earlier, cut run had taken when it finished its last part
        self.parts: dict[str, object] = {}
        everything = asdict(manifest)
        key = {name: everything[name] for name in KEY}
        if self.path and self.path.exists():
            lines = [_json_or_none(line) for line in self.path.read_text().splitlines()]  # a cut run leaves half a last line
            if lines and lines[0] == key:
                for part, value, seconds in filter(None, lines[1:]):
                    self.parts[json.dumps(part)] = value
                    self.before = max(self.before, seconds)
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = [[json.loads(part), value, self.before] for part, value in self.parts.items()]
            self.path.write_text("".join(json.dumps(line) + "\n" for line in [key, *kept]))

    def __contains__(self, part: list) -> bool:
        return json.dumps(part) in self.parts

    def keep(self, part: list, value: object) -> None:
        """`value` is what this part gives; it is in the file before this returns."""
        self.parts[json.dumps(part)] = value
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps([part, value, self.took()]) + "\n")

    def get(self, part: list, compute: Callable[[], object] | None = None) -> object:
        """The finished part, or what `compute` gives, which is then kept."""
        if part not in self:
            self.keep(part, compute())
        return self.parts[json.dumps(part)]

    def took(self) -> float:
        """Seconds so far: since this object was made, and before that in the run that was cut."""
        return round(self.before + time.perf_counter() - self.began, 1)


def _json_or_none(line: str):
    try:
        return json.loads(line)
    except ValueError:
        return None
