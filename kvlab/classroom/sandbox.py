"""What a process that runs a student's code is kept from. Linux; each layer is tried, and says whether it holds.

files     Landlock (Linux 5.13): reads Python's library and the installed packages except the course; writes nothing.
          It also keeps the process from tracing or reading the one that grades.
others    namespaces: no network, no other process to be seen or signalled; whatever it starts ends with it.
limits    memory, processor time, the size of files, the number of processes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

READ_FILE, READ_DIR = 1 << 2, 1 << 3
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
ALL_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1}  # by ABI version; from 3 on there is truncate too
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWIPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
OURS = ("kvlab", "__editable__")


def supported() -> bool:
    """Whether this system can keep files from a process."""
    return sys.platform == "linux" and _libc().syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1) > 0


def limit(seconds: int, memory: int) -> None:
    """Processor time in seconds, memory in bytes; no file is written, no process started, no core dumped."""
    import resource  # Linux and macOS only

    for what, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),  # the superuser is exempt; the namespace ends what it starts
    ):
        resource.setrlimit(what, (value, value))


def leave_with_parent() -> None:
    """End when the parent ends, however it ends."""
    _libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def separate() -> bool:
    """Go on in a process that sees no network and no other process. True if that worked.

    The process that called this only waits for the other, and never returns.
    """
    if _libc().unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC) != 0:
        return False
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    leave_with_parent()
    return True


def forbid_files() -> bool:
    """From here on: read the library and the packages, nothing else. True if that holds."""
    libc = _libc()
    version = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    rights = ALL_FILE_RIGHTS.get(version, (1 << 15) - 1)
    ruleset = libc.syscall(CREATE_RULESET, struct.pack("=Q", rights), ctypes.c_size_t(8), 0)
    if ruleset < 0:
        return False
    for path, allowed in readable():
        _allow(libc, ruleset, path, allowed)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    holds = libc.syscall(RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return holds


def readable() -> Iterable[tuple[Path, int]]:
    """What may be read: each entry of the library's and the packages' folders, except the course's own."""
    paths = sysconfig.get_paths()
    folders = {Path(paths[key]) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    for folder in (folder for folder in folders if folder.is_dir()):
        yield folder, READ_DIR  # a name can be found; whether it can be read is said below
        for entry in folder.iterdir():
            if not entry.name.startswith(OURS) and entry.name not in ("site-packages", "dist-packages"):
                yield entry, READ_FILE | READ_DIR
    if multiarch := sysconfig.get_config_var("MULTIARCH"):
        for folder in (Path("/lib") / multiarch, Path("/usr/lib") / multiarch):
            yield folder, READ_FILE | READ_DIR
    yield Path("/dev/null"), READ_FILE
    yield Path("/dev/urandom"), READ_FILE


def _allow(libc: ctypes.CDLL, ruleset: int, path: Path, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not path.is_dir():
            rights &= ~READ_DIR  # Landlock refuses a folder's right on a file
        libc.syscall(ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, opened), 0)
    finally:
        os.close(opened)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
