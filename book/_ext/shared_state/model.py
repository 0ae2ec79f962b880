"""The weights beside the site, for the page that runs the model itself: only when asked, with `MODEL_IN_SITE=1 make site`.

They are written as raw parts of 8 MiB, so that any file server will do and a cut download goes on at the next part, with an
index that has the size and the SHA-256 of the whole and of each part. Without the variable the folder is removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import ExtensionError

VARIABLE = "MODEL_IN_SITE"
FOLDER = "model"
PART = 8 << 20  # bytes
# what kvlab.show.inpage writes into the page, and what it becomes where the weights are beside it
WITHOUT, WITH = 'data-carried="no"', 'data-carried="yes"'


def wanted() -> bool:
    """Whether this build was asked for the weights."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def write_parts(source: Path, folder: Path, size: int = PART) -> dict[str, Any]:
    """Write a file as numbered parts of `size` bytes and their index; return the index.

    A part that is there already, byte for byte, is left alone; a damaged one is written anew; what else is there goes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    whole, parts = hashlib.sha256(), []
    with source.open("rb") as file:
        while chunk := file.read(size):
            path = folder / f"part-{len(parts):02}.bin"
            if not path.is_file() or path.read_bytes() != chunk:
                path.write_bytes(chunk)
            whole.update(chunk)
            parts.append({"name": path.name, "bytes": len(chunk), "sha256": hashlib.sha256(chunk).hexdigest()})
    total = sum(part["bytes"] for part in parts)
    index = {"name": source.name, "bytes": total, "sha256": whole.hexdigest(), "parts": parts}
    (folder / "index.json").write_text(json.dumps(index, indent=1) + "\n", "utf8")
    for path in folder.iterdir():
        if path.name not in {"index.json", *(part["name"] for part in parts)}:
            path.unlink()
    return index


def note_wish(app: Sphinx, config: Config) -> None:
    """Make the wish part of the configuration: a page says whether the weights are beside it."""
    config.shared_state_model = wanted()


def place_model(app: Sphinx, exception: Exception | None) -> None:
    """Write the parts at the end of a build that was asked for them, or remove the folder."""
    if exception is not None or app.builder.format != "html":
        return
    folder = Path(app.outdir, "_static", FOLDER)
    if not app.config.shared_state_model:
        shutil.rmtree(folder, ignore_errors=True)
        return
    from kvlab.runtime import weights  # which brings no PyTorch

    bundled = weights.find(None)
    source = weights.gguf_path(bundled)
    if not source.is_file():
        raise ExtensionError(f"{VARIABLE} is set and {source} is not there: run `kvlab model fetch`")
    if write_parts(source, folder)["sha256"] != bundled.sha256:
        shutil.rmtree(folder)
        raise ExtensionError(f"{source} is damaged: run `kvlab model fetch`, which makes it anew")


def tell_page(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Tell the page that the weights are beside it."""
    if app.config.shared_state_model and "body" in context:
        context["body"] = context["body"].replace(WITHOUT, WITH)


def setup(app: Sphinx) -> None:
    """Connect to the configuration, the pages and the end of the build."""
    app.add_config_value("shared_state_model", False, "html")  # a change writes every page again
    app.connect("config-inited", note_wish)
    app.connect("html-page-context", tell_page)
    app.connect("build-finished", place_model)
