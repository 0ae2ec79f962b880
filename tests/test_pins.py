"""The pinned sets: exact, complete for what the package asks, and silent about where packages come from."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PINS = [line for line in (ROOT / "requirements.txt").read_text("utf8").splitlines() if line and not line.startswith("#")]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]


def test_every_pin_is_exact() -> None:
    """`name==version` and no more: no address, no path, no local build such as +cpu."""
    assert not [pin for pin in PINS if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin)]


def test_pins_satisfy_the_package() -> None:
    """Whatever kvlab asks for, in any extra, is pinned at a version it accepts."""
    pins = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in (pin.split("==") for pin in PINS)}
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    for wanted in (Requirement(text) for group in groups for text in group):
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        if name != "kvlab":
            assert name in pins, f"{name} is not in requirements.txt"
            assert wanted.specifier.contains(pins[name]), f"{wanted} but {pins[name]} is pinned"


def test_npm_lock_is_exact_and_names_no_registry() -> None:
    """package-lock.json pins package.json's own versions and says nowhere to fetch them from."""
    lock = json.loads((ROOT / "package-lock.json").read_text("utf8"))["packages"]
    for name, version in json.loads((ROOT / "package.json").read_text("utf8"))["dependencies"].items():
        assert lock[f"node_modules/{name}"]["version"] == version
    assert not [name for name, entry in lock.items() if "resolved" in entry]
    assert all(entry.get("integrity", "").startswith("sha512-") for name, entry in lock.items() if name)
