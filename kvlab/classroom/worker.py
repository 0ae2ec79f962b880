"""The process that runs an answer. Everything after `student` may be hostile; what it sends is data to the other side.

    python -I worker.py REPLY_FD        requests on standard input, replies on the descriptor

A request is its length in four bytes and a pickle (from the trusted side); a reply its length and `wire.encode`. The first
request sets the stage; each later one is a call: arguments in, (result, arguments afterwards) out, or what was raised.
"""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.abc
import io
import marshal
import os
import pickle
import struct
import sys
import time
import types
from collections.abc import Callable
from typing import Any

DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def main(reply_fd: int) -> None:
    """Set the stage, shut the doors, run the answer, take calls until the other side hangs up."""
    requests = os.fdopen(os.dup(0), "rb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    stage = pickle.loads(_read(requests))
    sys.path[:] = stage["path"]
    from kvlab.classroom import sandbox, wire

    sandbox.leave_with_parent()
    separate = sandbox.separate()  # while there is one thread: torch may start more
    if stage["torch"]:
        importlib.import_module("torch")
    classes = _Classes()
    for sample in stage["samples"]:
        classes.load(sample)
    modules = _facade(stage["lends"])
    _hide(stage["hide"])
    for name in [name for name in sys.modules if name.partition(".")[0] == "kvlab"]:
        del sys.modules[name]
    sys.modules.update(modules)
    sys.meta_path.insert(0, _NoCourse(sorted(f"{module}.{name}" for module, name, *_ in stage["lends"])))
    gc.collect()

    def reply(**content: Any) -> None:
        sent = wire.encode(content)
        os.write(reply_fd, struct.pack("!I", len(sent)))
        for start in range(0, len(sent), 1 << 16):
            os.write(reply_fd, sent[start : start + (1 << 16)])

    files = sandbox.forbid_files()
    sandbox.limit(int(time.process_time()) + stage["seconds"], stage["memory"])
    reply(ready=True, files=files, separate=separate)
    student(stage["cells"], stage["name"], requests, classes, reply)


def student(cells: list[tuple[str, bool]], name: str, requests: io.BufferedReader, classes: _Classes, reply: Callable) -> None:
    """Run the cells and take calls of the function `name`."""
    try:
        space = run(cells)
    except BaseException as error:
        return reply(failed=[type(error).__name__, str(error)[:1000]])
    if not callable(space.get(name)):
        return reply(missing=type(space[name]).__name__ if name in space else None)
    reply(defined=True)
    while content := _read(requests):
        arguments = classes.load(content)
        try:
            result = space[name](*arguments)
            reply(gave=(result, arguments))
        except BaseException as error:
            kind = type(error)
            reply(raised=[kind.__module__, kind.__qualname__, str(error)[:1000]], arguments=arguments)


def run(cells: list[tuple[str, bool]]) -> dict[str, Any]:
    """The names after the cells. The answer's cell is run whole; of the others only imports, definitions and constants,
    and what fails there is left out: a figure or a model is nothing an answer may need."""
    space: dict[str, Any] = {"__name__": "__main__"}
    for source, is_answer in cells:
        source = _plain(source)
        if is_answer:
            exec(compile(source, "<answer>", "exec"), space)
            continue
        try:
            statements = ast.parse(source).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for statement in filter(_keeps, statements):
            try:
                exec(compile(ast.Module([statement], []), "<cell>", "exec"), space)
            except Exception:
                continue
    return space


def _keeps(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return not _calls(statement)
    return isinstance(statement, DEFINITIONS)


def _calls(node: ast.AST) -> bool:
    """Whether running it calls something; what a lambda would call is called later."""
    if isinstance(node, ast.Call):
        return True
    return not isinstance(node, ast.Lambda) and any(map(_calls, ast.iter_child_nodes(node)))


def _plain(source: str) -> str:
    """Without IPython's magics: `%%time` goes, a cell in another language is empty, lines of % ! ? do nothing."""
    lines = source.splitlines()
    if lines and lines[0].startswith("%%"):
        if lines[0].split()[0] not in ("%%time", "%%timeit", "%%capture"):
            return ""
        lines = lines[1:]
    return "\n".join(
        line[: len(line) - len(line.lstrip())] + "pass" if line.lstrip()[:1] in ("%", "!", "?") else line for line in lines
    )


# ---- what of the course is there -------------------------------------------------------------------------------------


class _Classes:
    """Unpickles what the trusted side sends; after the samples no class is looked up any more."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], Any] = {}

    def load(self, content: bytes) -> Any:
        known = self.known

        class Unpickler(pickle.Unpickler):
            def find_class(self, module: str, name: str) -> Any:
                if (module, name) not in known:
                    known[module, name] = super().find_class(module, name)
                return known[module, name]

        return Unpickler(io.BytesIO(content)).load()


def _facade(lends: list[tuple]) -> dict[str, types.ModuleType]:
    """Modules of the course that hold only what an answer may use: classes, and functions without the module around them."""
    made: dict[str, types.ModuleType] = {}
    for module, name, code, defaults, needs in lends:
        if code is None:
            value = getattr(importlib.import_module(module), name)
        else:
            value = types.FunctionType(
                marshal.loads(code), {"__builtins__": __builtins__, **pickle.loads(needs)}, name, defaults
            )
        for parent in (module.rsplit(".", level)[0] for level in range(module.count(".") + 1)):
            made.setdefault(parent, types.ModuleType(parent)).__path__ = []
        setattr(made[module], name, value)
    for name, module in made.items():
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, module)
    return made


def _hide(where: tuple[str, str] | None) -> None:
    """Empty the course's own answer, wherever it is named: a module a class came from may hold it."""
    module, name = where or ("", "")
    function = getattr(sys.modules.get(module), name, None)
    if isinstance(function, types.FunctionType) and function.__closure__ is None:

        def hidden(*arguments, **named):
            raise ImportError("the course's own answer is not there while grading")

        function.__code__ = hidden.__code__


class _NoCourse(importlib.abc.MetaPathFinder):
    def __init__(self, lends: list[str]) -> None:
        self.lends = lends

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name.partition(".")[0] == "kvlab":
            raise ModuleNotFoundError(
                f"{name} is not there while grading; an answer may use {', '.join(self.lends) or 'nothing of it'}"
            )


def _read(stream: io.BufferedReader) -> bytes:
    head = stream.read(4)
    return stream.read(struct.unpack("!I", head)[0]) if len(head) == 4 else b""


if __name__ == "__main__":
    main(int(sys.argv[1]))
