"""Old releases as folders: fetched with pip at a pinned version into kvlab's cache folder, put on another process's PYTHONPATH.

    releases/<package>-<version>/     what pip put there; a folder with its final name is whole
    releases/part/                    work in progress, swept by the next process that fetches
    releases/lock

One torch serves all releases: it is the running environment's. Where pip looks for packages is pip's own configuration.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvlab.errors import KvlabError
from kvlab.runtime import weights

NETWORK = (
    "NewConnectionError",
    "ConnectTimeout",
    "name resolution",
    "Connection refused",
    "ProxyError",
    "No matching distribution",
)


def home() -> Path:
    """Where the releases lie."""
    return weights.home() / "releases"


def folder(package: str, version: str) -> Path:
    """Where this release lies, or will lie."""
    return home() / f"{package}-{version}"


def here(package: str, version: str) -> bool:
    """Whether the running environment itself has this very release."""
    try:
        return importlib.metadata.version(package) == version
    except importlib.metadata.PackageNotFoundError:
        return False


def have(pins: Sequence[tuple[str, str]]) -> bool:
    """Whether all of these can be used without fetching."""
    return all(here(*pin) or folder(*pin).is_dir() for pin in pins)


def path(pins: Sequence[tuple[str, str]]) -> list[str]:
    """The folders of these releases, in order, for PYTHONPATH; what is missing is fetched first.

    Raises KvlabError with the remedy when pip cannot fetch one.
    """
    found = []
    for package, version in pins:
        if here(package, version):
            continue
        if not folder(package, version).is_dir():
            fetch(package, version)
        found.append(str(folder(package, version)))
    return found


def fetch(package: str, version: str) -> None:
    """Have pip put one release, without what it depends on, into its folder: whole or not at all."""
    from filelock import FileLock

    home().mkdir(parents=True, exist_ok=True)
    with FileLock(home() / "lock"):
        if folder(package, version).is_dir():
            return
        part = home() / "part"
        shutil.rmtree(part, ignore_errors=True)  # of a process that was cut
        target = part / "files"
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile", "--disable-pip-version-check"]
        command += ["--no-input", "--progress-bar", "off", "--quiet", "--retries", "2", "--target", str(target)]
        pip = subprocess.run([*command, f"{package}=={version}"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if pip.returncode or not target.is_dir():
            raise failed(package, version, pip.stderr)
        os.replace(target, folder(package, version))
        shutil.rmtree(part, ignore_errors=True)


def failed(package: str, version: str, log: str) -> KvlabError:
    """The error to raise when pip has failed, from what it said."""
    what = f"cannot fetch {package}=={version}"
    if "No module named pip" in log:
        return KvlabError(f"{what}: this Python has no pip.", "Run `python -m ensurepip`.")
    if "No space left on device" in log or "Errno 28" in log:
        return KvlabError(
            f"{what}: the disk that holds {home()} is full.", "Free some space, or set KVLAB_HOME to a folder on another disk."
        )
    remedy = "Run the same command again: it goes on where it was."
    if any(sign in log for sign in NETWORK):
        return KvlabError(f"{what}: pip reaches no package index that has it.", f"Connect, or set pip up for one. {remedy}")
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    return KvlabError(f"{what}: {(errors or ['pip said nothing'])[-1].rstrip('.')}.", remedy)
