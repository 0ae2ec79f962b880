"""Runs on disk: the same bytes each time, and a clear word when one cannot be read."""

import gzip
import json
from dataclasses import replace

import pytest

from kvlab import record
from kvlab.record import Manifest, Run, RunError

MANIFEST = Manifest(
    "demo",
    "kvlab run demo",
    {"toy": "ab" * 32},
    ["float32"],
    {"kind": "cpu", "name": "a processor", "threads": 2, "cores": 2},
    {"python": "3.11", "torch": "2", "transformers": "5", "kvlab": "0", "system": "any"},
    1,
    "2026-01-01",
)
RUN = Run(MANIFEST, {"values": [1, 2.5, None, "ü"]})


def test_saved_and_loaded(tmp_path):
    path = RUN.save(tmp_path)
    assert path.name == "demo-cpu.json.gz"
    assert record.load("demo", folder=tmp_path) == RUN
    first = path.read_bytes()
    assert RUN.save(tmp_path).read_bytes() == first
    assert record.recorded(tmp_path) == [RUN]
    assert "toy (abababab)" in MANIFEST.sentence()


def test_what_cannot_be_written_leaves_the_old_run(tmp_path):
    RUN.save(tmp_path)
    with pytest.raises(ValueError):
        replace(RUN, data={"x": float("nan")}).save(tmp_path)
    with pytest.raises(TypeError):
        replace(RUN, data={"x": object()}).save(tmp_path)
    assert record.load("demo", folder=tmp_path) == RUN


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"not gzip",
        lambda raw: gzip.compress(b"not json"),
        lambda raw: gzip.compress(json.dumps({"format": 99, "manifest": {}, "data": {}}).encode()),
        lambda raw: gzip.compress(json.dumps({"format": 1, "manifest": {"odd": 1}, "data": {}}).encode()),
    ],
)
def test_a_damaged_run_says_so(tmp_path, damage):
    path = RUN.save(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RunError) as caught:
        record.read(path)
    assert "kvlab run" in caught.value.remedy


def test_a_missing_run_names_the_command(tmp_path):
    with pytest.raises(RunError, match="kvlab run nothing"):
        record.load("nothing", folder=tmp_path)


def test_short():
    assert record.short(0.000123456) == 0.0001235 and record.short(0.0) == 0.0
