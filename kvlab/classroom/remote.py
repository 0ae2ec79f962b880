"""A student's function, called from here, run elsewhere: in a process of its own that is shut off from everything.

`Remote` is called like the function. What it changes in its arguments is changed in ours, what it raises is raised here as
the same kind of error, and the checks of `kvlab.checks` judge it as they judge a function in a notebook.
"""

from __future__ import annotations

import builtins
import importlib
import marshal
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kvlab.checks import LabStop
from kvlab.classroom import sandbox, wire
from kvlab.errors import KvlabError

WORKER = Path(__file__).with_name("worker.py")
LARGEST_REPLY = 8 << 20


class Stopped(LabStop):
    """The answer cannot be judged further: it does not end, it ended its process, its cell fails."""


@dataclass(frozen=True)
class Limits:
    """What one answer may use: seconds over all its calls, GiB of memory. `confined`: refuse to run it unconfined."""

    seconds: float = 20.0
    memory_gib: float = 6.0
    start_seconds: float = 120.0
    confined: bool = True


DEFAULT = Limits()


class Remote:
    """The function `name` after the code cells of a notebook, in a process that lives as long as the `with` block.

    Args:
        cells: (source, whether it is the answer's own cell), in order.
        name: the function.
        samples: argument tuples that name every class which later arguments are made of.
        lends: "module.name" of what an answer may import from the course.
        hide: the course's own answer, which is not there in that process.

    Raises KvlabError on entering where the system cannot keep files from a process and `limits.confined` asks for it. Called, it
    raises Stopped when the answer ended, does not end, or is not there.
    """

    def __init__(
        self,
        cells: Sequence[tuple[str, bool]],
        name: str,
        *,
        samples: Sequence[tuple] = (),
        lends: Sequence[str] = (),
        hide: Callable | None = None,
        limits: Limits = DEFAULT,
    ) -> None:
        self.cells, self.name, self.samples, self.lends, self.hide, self.limits = cells, name, samples, lends, hide, limits
        self.over: str | None = None

    def __enter__(self) -> Self:
        if self.limits.confined and not sandbox.supported():
            raise KvlabError(
                "this system cannot keep files from a student's code (no Landlock: Linux 5.13 or newer has it).",
                "Grade on such a system, or in a container without the solutions, with c.Grade.confined = False.",
            )
        reply, reply_child = os.pipe()
        environment = {key: os.environ[key] for key in ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH") if key in os.environ}
        environment |= {
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(WORKER), str(reply_child)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=environment,
            pass_fds=(reply_child,),
            start_new_session=True,
        )
        os.close(reply_child)
        self._reply = reply
        os.set_blocking(self._process.stdin.fileno(), False)
        os.set_blocking(self._reply, False)
        self.left = self.limits.start_seconds
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.stdin.close()
        os.close(self._reply)
        self._process.wait()

    def _start(self) -> None:
        hidden = (self.hide.__module__, self.hide.__qualname__) if self.hide else None
        stage = {
            "path": [path for path in sys.path if path],
            "samples": [pickle.dumps(sample) for sample in self.samples],
            "lends": [_lent(name) for name in self.lends],
            "hide": hidden,
            "torch": any("torch" in source for source, _ in self.cells),  # its import takes seconds; they are not the answer's
            "cells": list(self.cells),
            "name": self.name,
            "seconds": int(self.limits.seconds) + 2,
            "memory": int(self.limits.memory_gib * (1 << 30)),
        }
        told = self._ask(pickle.dumps(stage))
        if self.over or not told.get("ready"):
            raise KvlabError("the process that runs an answer did not start.", "Look at memory and load, then grade again.")
        if self.limits.confined and told.get("files") is not True:
            raise KvlabError("files could not be kept from a student's code.", "Grade on Linux 5.13 or newer.")
        self.separate = told.get("separate") is True
        self.left = self.limits.seconds
        told = self._ask(b"")
        if "failed" in told:
            kind, says = told["failed"]
            self.over = f"its cell cannot be run: {kind}: {says}"
        elif "missing" in told:
            found = "there is no such name." if told["missing"] is None else f"it is {told['missing']}."
            self.over = f"the name {self.name} should be a function; {found}"

    def __call__(self, *arguments: Any) -> Any:
        if not self.over:
            told = self._ask(pickle.dumps(arguments))
        if self.over:
            raise Stopped(self.over)
        if "gave" in told:
            result, after = told["gave"]
            wire.adopt(arguments, after)
            return result
        wire.adopt(arguments, told.get("arguments"))
        raise _error(*told["raised"], self.lends)

    # ---- the pipe ----------------------------------------------------------------------------------------------------

    def _ask(self, request: bytes) -> dict:
        """Send a request (none if empty) and wait for one reply. Sets `over` when there is none."""
        start = time.monotonic()
        deadline = start + self.left
        try:
            if request:
                self._write(struct.pack("!I", len(request)) + request, deadline)
            (size,) = struct.unpack("!I", self._read(4, deadline))
            if size > LARGEST_REPLY:
                raise wire.Garbled
            told = wire.decode(self._read(size, deadline))
            known = isinstance(told, dict) and (told.keys() & {"ready", "defined", "failed", "missing", "gave", "raised"})
            if not known or ("gave" in told and len(told["gave"]) != 2) or ("raised" in told and len(told["raised"]) != 3):
                raise wire.Garbled
            return told
        except TimeoutError:
            self.over = f"it has not ended after {self.limits.seconds:.0f} seconds: is there a loop without an end?"
        except (EOFError, BrokenPipeError):
            self.over = "it ended the process that ran it, or took more memory or time than it may."
        except (wire.Garbled, TypeError):
            self.over = "it sent something that is no value."
        finally:
            self.left = max(0.0, self.left - (time.monotonic() - start))
        return {}

    def _read(self, size: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        while size:
            _wait(self._reply, select.POLLIN, deadline)
            part = os.read(self._reply, min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _write(self, content: bytes, deadline: float) -> None:
        pipe, sent = self._process.stdin.fileno(), 0
        while sent < len(content):
            _wait(pipe, select.POLLOUT, deadline)
            sent += os.write(pipe, content[sent : sent + (1 << 16)])


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _lent(name: str) -> tuple:
    """A name of the course as the worker takes it: a class by its place; a function as its code and what that code names."""
    module, _, last = name.rpartition(".")
    value = getattr(importlib.import_module(module), last)
    if not isinstance(value, types.FunctionType):
        return module, last, None, None, None
    names = {used for used in value.__code__.co_names if used in value.__globals__}
    needs = pickle.dumps({used: value.__globals__[used] for used in names})
    return module, last, marshal.dumps(value.__code__), value.__defaults__, needs


def _error(module: str, name: str, says: str, lends: Sequence[str]) -> Exception:
    """The error that was raised there, as one of ours: a built-in one, one of the course's, else a new class of that name."""
    says = str(says)
    kind = getattr(builtins, str(name), None) if module == "builtins" else None
    if kind is None and f"{module}.{name}" in lends:
        kind = getattr(importlib.import_module(module), name)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(says)
        except Exception:  # some take more than a sentence: UnicodeDecodeError
            pass
    return type(str(name)[:60] or "Error", (Exception,), {})(says)
