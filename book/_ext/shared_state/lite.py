"""JupyterLite beside the site: labs whose exercises need no PyTorch, in a notebook that runs in the reader's browser.

Under `lite/` lie JupyterLite itself, built by its own builder; `files/`, the labs, each behind a cell that says where one is;
and `wheels/`, what the kernel imports. Those are the packages of this environment, as pip put them here, packed again; so the
notebooks run the versions that requirements.txt pins, and nothing is fetched from elsewhere, now or later. Python itself is the
page's own (see `vendor`).

A lab is here if its solution marks cells with the tag `model`. These cells show in the browser what the worked lab gave when
the site was built (`kvlab.inbrowser`).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jupytext
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util import logging

from kvlab import __version__ as version
from kvlab.inbrowser import key

from .live import library_files

LOG = logging.getLogger(__name__)

KERNEL = "@jupyterlite/pyodide-kernel-extension"
FRONT = ("@jupyter-widgets/jupyterlab-manager", "jupyterlab-plotly", KERNEL)  # what the front end shows and runs with
APPS = ("notebooks", "tree", "lab")
FOR_KERNEL = ("comm", "ipython", "jedi")
START = ("ipykernel", "pyodide-kernel", "micropip", "piplite", *FOR_KERNEL)  # loaded before the first cell
FOR_LABS = ("plotly", "ipywidgets", "tqdm")  # what kvlab imports here
# not needed where nothing is drawn, served or compiled by Python itself
LEFT_OUT = re.compile(
    r"__pycache__|\.so$|(^|/)tests?/|^\.\.|^plotly/(package_data/(?!templates)|labextension)|/(RECORD|INSTALLER|REQUESTED|direct_url\.json)$"
    r"|^jedi/third_party/django|^kvlab/classroom/"
)
PYTHON = {"sys_platform": "emscripten", "platform_system": "Emscripten", "os_name": "posix", "python_version": "3.14",
          "python_full_version": "3.14.0", "implementation_name": "cpython", "platform_machine": "wasm32", "extra": ""}  # fmt: skip
MODEL_CELL = re.compile(r"^:tags: \[[^\]]*\bmodel\b", re.MULTILINE)
THEN = (1980, 1, 1, 0, 0, 0)  # the age of every file in a wheel: same files, same bytes
DATE = 1796000000  # what JupyterLite takes for the age of the notebooks, late in 2026; it shows it
WELCOME = """\
*This copy of the lab runs in your browser.* Python starts by itself, which takes a while. The exercises, their checks and all cells that only count run here, on what you write. A browser runs no PyTorch: cells that need the model show what was \
recorded with the worked lab, and nothing you write reaches them.

Your work is kept by this browser alone, and Python forgets when the page is closed: after coming back, *Run → Run All Cells*. A cell that never ends is ended by *Kernel → Restart Kernel*. To keep your work elsewhere or hand it in: *File → Download*. \
The downloaded notebook runs in Jupyter and Colab too, where the model runs, and where lines that begin with `!` or `%pip` and the command `kvlab` do.
"""
HOOK = """

from kvlab import inbrowser  # noqa: E402

inbrowser.start()
"""


# ---- the notebooks -----------------------------------------------------------------------------------------------------


def labs(root: Path) -> list[str]:
    """The labs that can be opened in the browser, by the names of their files."""
    return [path.stem for path in sorted((root / "solutions").glob("[0-9]*.md")) if MODEL_CELL.search(path.read_text("utf8"))]


def notebook(root: Path, lab: str) -> str:
    """The lab as an .ipynb file's text, behind a word on where it runs."""
    made = json.loads((root / "labs" / f"{lab}.ipynb").read_text("utf8"))
    made["cells"].insert(0, {"cell_type": "markdown", "id": "in-your-browser", "metadata": {}, "source": WELCOME})
    # a kernel of this name is what the page has; Jupyter asks for its own when the notebook is opened there
    made["metadata"]["kernelspec"] = {"display_name": "Python (Pyodide)", "language": "python", "name": "python"}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


def executed(cache: Path, source: Path) -> list[dict]:
    """The code cells of a solution as the build executed them, from jupyter-cache; found by their text, as myst-nb finds them.

    Raises ExtensionError if there is no such run.
    """
    from jupyter_cache import get_cache

    wanted = [cell.source.strip() for cell in jupytext.read(source, fmt="md:myst").cells if cell.cell_type == "code"]
    kept = get_cache(str(cache))
    for record in sorted(kept.list_cache_records(), key=lambda record: record.created, reverse=True):
        if record.uri.endswith(source.name):
            cells = [cell for cell in kept.get_cache_bundle(record.pk).nb.cells if cell["cell_type"] == "code"]
            if [_text(cell["source"]).strip() for cell in cells] == wanted:
                return cells
    raise ExtensionError(
        f"{source.name}, as it is now, was not executed: build the site with its notebooks (nb_execution_mode: cache)"
    )


def recorded(cells: Iterable[dict]) -> str:
    """What the cells tagged `model` gave, as the JSON that `kvlab.inbrowser` reads."""
    found = {}
    for cell in cells:
        if "model" in cell["metadata"].get("tags", []):
            found[key(_text(cell["source"]))] = [
                _bundle(output) for output in cell["outputs"] if output["output_type"] != "error"
            ]
    return json.dumps(found, ensure_ascii=False, indent=0) + "\n"


def _bundle(output: dict) -> dict[str, Any]:
    """An output as a MIME bundle. Text for people who see no figure goes with it."""
    if output["output_type"] == "stream":
        return {"text/plain": _text(output["text"]).rstrip("\n")}
    return {kind: data if kind.endswith("json") else _text(data) for kind, data in output["data"].items()}


def _text(source: str | list[str]) -> str:
    return source if isinstance(source, str) else "".join(source)


# ---- the packages ------------------------------------------------------------------------------------------------------


def needed(names: Iterable[str]) -> dict[str, list[str]]:
    """Every installed package that these packages need in the browser, with what each needs itself."""
    found: dict[str, list[str]] = {}
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found or name in ("ipykernel", "widgetsnbextension"):  # the kernel brings stand-ins of these
            continue
        wanted = (Requirement(text) for text in importlib.metadata.distribution(name).requires or ())
        found[name] = [canonicalize_name(w.name) for w in wanted if w.marker is None or w.marker.evaluate(PYTHON)]
        waiting += found[name]
    return dict(sorted(found.items()))


def archive(files: dict[str, bytes]) -> bytes:
    """A zip file of these paths; the same files give the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as made:
        for path, data in sorted(files.items()):
            made.writestr(zipfile.ZipInfo(path, THEN), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def wheel(name: str, version: str, files: dict[str, bytes]) -> bytes:
    """A wheel of these files, less what LEFT_OUT leaves out."""
    stem = f"{name.replace('-', '_')}-{version}"
    about = {
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{stem}.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: shared_state\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    return archive({path: data for path, data in (about | files).items() if not LEFT_OUT.search(path)})


def installed(name: str) -> tuple[str, dict[str, bytes]]:
    """The version and the files of a package of this environment."""
    package = importlib.metadata.distribution(name)
    if not package.files:
        raise ExtensionError(f"{name} does not say which files it has; install it again with pip")
    files = {path.as_posix(): path for path in package.files if not LEFT_OUT.search(path.as_posix())}
    return package.version, {name: path.locate().read_bytes() for name, path in files.items() if path.locate().is_file()}


def course(root: Path, cache: Path) -> dict[str, bytes]:
    """The library for the browser: see `live` for the faults that need PyTorch; and what was recorded for each lab."""
    texts = {path.relative_to(root).as_posix(): path.read_text("utf8") for path in (root / "kvlab").rglob("*.py")}
    texts |= library_files(root)
    texts["kvlab/__init__.py"] += HOOK
    for lab in labs(root):
        texts[f"kvlab/recorded/{lab}.json"] = recorded(executed(cache, root / "solutions" / f"{lab}.md"))
    return {path: text.encode() for path, text in texts.items()}


def write_wheels(root: Path, cache: Path, kept: Path, folder: Path) -> None:
    """Fill `folder` with wheels and the lock file that tells the kernel about them. Wheels already in `kept` are not packed again.

    A file's name tells its content, so that a browser that was here before never takes an old one for a new one.
    """
    lock = json.loads((root / "node_modules/pyodide/pyodide-lock.json").read_text("utf8")) | {"packages": {}}
    kept = kept / hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]  # other rules pack other wheels
    folder.mkdir(parents=True, exist_ok=True)
    kept.mkdir(parents=True, exist_ok=True)
    names = set()

    def enter(name: str, version: str, data: bytes, needs: Iterable[str]) -> None:
        digest = hashlib.sha256(data).hexdigest()
        file = f"{name.replace('-', '_')}-{version}-0{digest[:10]}-py3-none-any.whl"
        if not (folder / file).exists():
            _write(folder / file, data)
        names.add(file)
        inside = {Path(entry).parts[0] for entry in zipfile.ZipFile(io.BytesIO(data)).namelist()}
        lock["packages"][name] = {
            "name": name,
            "version": version,
            "file_name": file,
            "install_dir": "site",
            "sha256": digest,
            "package_type": "package",
            "imports": sorted(entry.removesuffix(".py") for entry in inside if not entry.endswith(".dist-info")),
            "depends": list(needs),
            "unvendored_tests": False,
        }

    for name, needs in needed([*FOR_KERNEL, *FOR_LABS]).items():
        version_here = importlib.metadata.version(name)
        path = kept / f"{name}-{version_here}.whl"
        if not path.exists():
            _write(path, wheel(name, *installed(name)))
        enter(name, version_here, path.read_bytes(), needs)
    for path in sorted(_extension(KERNEL).glob("static/pypi/*.whl")):
        name, version_of = path.name.split("-")[:2]
        if name != "piplite" and not (name == "widgetsnbextension" and version_of.startswith("3")):
            enter(canonicalize_name(name), version_of, path.read_bytes(), {"pyodide_kernel": ["comm", "ipython"]}.get(name, []))
    no_pip, nbformat = Path(__file__).with_name("nopip.py").read_bytes(), importlib.metadata.version("nbformat")
    made = {
        "piplite": (
            "1",
            {"piplite/__init__.py": no_pip, "piplite/piplite.py": b"", "piplite/cli.py": b"from piplite import *\n"},
        ),
        "micropip": ("1", {"micropip.py": no_pip}),
        "nbformat": (
            nbformat,
            {"nbformat.py": f'"""For plotly, which asks no more of it."""\n__version__ = "{nbformat}"\n'.encode()},
        ),
        "kvlab": (version, course(root, cache)),
    }
    for name, (made_version, files) in made.items():
        enter(name, made_version, wheel(name, made_version, files), FOR_LABS if name == "kvlab" else ())
    lock["packages"]["plotly"]["depends"].append("nbformat")
    (folder / "pyodide-lock.json").write_text(json.dumps(lock, indent=1) + "\n", "utf8")
    for stale in folder.glob("*.whl"):
        if stale.name not in names:
            stale.unlink()


def _write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    aside = path.with_suffix(".part")
    aside.write_bytes(data)
    aside.replace(path)


def _extension(name: str) -> Path:
    for prefix in (sys.prefix, sys.base_prefix):
        folder = Path(prefix, "share/jupyter/labextensions", name)
        if folder.is_dir():
            return folder
    raise ExtensionError(f"JupyterLab's extension {name} is not installed: pip install -r requirements.txt")


# ---- JupyterLite -------------------------------------------------------------------------------------------------------


def settings() -> dict[str, Any]:
    """JupyterLite's configuration: the page's Python, our packages, no index of packages elsewhere."""
    kernel = {
        "pyodideUrl": "./../_static/vendor/pyodide/pyodide.mjs",
        "disablePyPIFallback": True,
        "loadPyodideOptions": {"lockFileURL": "./wheels/pyodide-lock.json", "packages": list(START)},
    }
    return {
        "jupyter-lite-schema-version": 0,
        "jupyter-config-data": {
            "appName": "Shared State",
            "exposeAppInBrowser": True,
            "disabledExtensions": ["@jupyter-notebook/notebook-extension:trusted"],  # there is nobody to trust but the reader
            "litePluginSettings": {f"{KERNEL}:kernel": kernel},
        },
    }


OVERRIDES = {
    "@jupyterlab/apputils-extension:themes": {"adaptive-theme": True},
    "@jupyterlab/notebook-extension:tracker": {"autoStartDefaultKernel": True},  # there is one: no need to ask
}


def build(root: Path, work: Path, cache: Path, out: Path) -> bool:
    """Build or renew `out`. Returns whether JupyterLite itself had to be built. Raises ExtensionError with the builder's words."""
    notebooks = {f"{lab}.ipynb": notebook(root, lab) for lab in labs(root)}
    versions = [
        importlib.metadata.version(name) for name in ("jupyterlite-core", "jupyterlite-pyodide-kernel", "plotly", "ipywidgets")
    ]
    said = json.dumps([settings(), OVERRIDES, APPS, FRONT, versions, notebooks])
    stamp, digest = out / ".built", hashlib.sha256(said.encode()).hexdigest()
    fresh = not stamp.exists() or stamp.read_text("utf8") != digest
    if fresh:
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(work / "project", ignore_errors=True)
        project = work / "project"
        (project / "labs").mkdir(parents=True)
        for name, text in notebooks.items():
            (project / "labs" / name).write_text(text, "utf8")
        (project / "jupyter-lite.json").write_text(json.dumps(settings(), indent=1), "utf8")
        (project / "overrides.json").write_text(json.dumps(OVERRIDES), "utf8")
        config = {
            "LiteBuildConfig": {
                "apps": APPS,
                "contents": ["labs"],
                "federated_extensions": [str(_extension(name)) for name in FRONT],
                "ignore_sys_prefix": ["federated_extensions"],
                "no_sourcemaps": True,
                "no_unused_shared_packages": True,
                "cache_dir": str(work / "cache"),
                "output_dir": str(out),
                "source_date_epoch": DATE,
            }
        }
        (project / "jupyter_lite_config.json").write_text(json.dumps(config), "utf8")
        command = [sys.executable, "-m", "jupyterlite_core", "build", "--lite-dir", str(project), "--output-dir", str(out)]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True)
        if done.returncode:
            raise ExtensionError(f"JupyterLite was not built:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    write_wheels(root, cache, work / "wheels", out / "wheels")
    stamp.write_text(digest, "utf8")
    return fresh


def build_lite(app: Sphinx, exception: Exception | None) -> None:
    """Build JupyterLite into the site, when its pages are written and its notebooks executed."""
    # a draft of the pages, built with -D nb_execution_mode=off, leaves what is there
    if exception is not None or app.builder.name != "html" or app.config.nb_execution_mode == "off":
        return
    if labs(Path(app.confdir)):
        out = Path(app.outdir)
        fresh = build(Path(app.confdir), out.parent / "lite", Path(app.env.mystnb_config.execution_cache_path), out / "lite")
        LOG.info("JupyterLite %s", "built" if fresh else "is up to date")


def setup(app: Sphinx) -> None:
    """Connect to the end of the build."""
    app.connect("build-finished", build_lite)
