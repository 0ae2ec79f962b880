"""Values as plain data. The side that decodes never runs anything that the other side sent: there is no pickle here.

What is passed: None, bool, int, float, str, list, tuple, dict, set, tensors, arrays, and the fields of the course's own
dataclasses. Anything else becomes an `Opaque`, equal to nothing. A list that occurs twice is one list afterwards too: sharing
one table between two requests is a mistake that a check looks for.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from typing import Any


class Garbled(ValueError):
    """Data that `encode` did not write."""


@dataclasses.dataclass(frozen=True, eq=False)
class Opaque:
    """Stands for a value that cannot be passed on."""

    type_name: str

    def __repr__(self) -> str:
        return f"<{self.type_name}>"


@dataclasses.dataclass(eq=False)
class Fields:
    """The fields of an object of the course, by name."""

    values: dict[str, Any]

    def __repr__(self) -> str:
        return "<an object of the course>"


# ---- the untrusted side ----------------------------------------------------------------------------------------------


def encode(value: Any) -> bytes:
    """The value as UTF-8 JSON. Raises whatever a hostile object raises."""
    return json.dumps(_tree(value, {})).encode()


def _tree(value: Any, seen: dict[int, tuple[int, Any]]) -> Any:
    if value is None or isinstance(value, bool | str):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, tuple):
        return {"tuple": [_tree(item, seen) for item in value]}
    if id(value) in seen:
        return {"again": seen[id(value)][0]}
    number = len(seen)
    seen[id(value)] = number, value  # the value too: an id is only good while its object lives
    if isinstance(value, list):
        return {"list": [_tree(item, seen) for item in value], "n": number}
    if isinstance(value, dict):
        return {"dict": [[_tree(key, seen), _tree(item, seen)] for key, item in value.items()], "n": number}
    if isinstance(value, set | frozenset):
        return {"set": [_tree(item, seen) for item in value], "n": number}
    if hasattr(value, "detach") and hasattr(value, "untyped_storage"):
        return {"tensor": _tensor(value), "n": number}
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):
        content = [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]
        return {"array": content, "n": number}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _tree(getattr(value, field.name), seen) for field in dataclasses.fields(value)}
        return {"fields": fields, "n": number}
    return {"opaque": type(value).__name__, "n": number}


def _tensor(value: Any) -> list:
    import torch

    flat = value.detach().cpu().contiguous().reshape(-1)
    content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return [str(value.dtype).removeprefix("torch."), list(value.shape), base64.b64encode(content).decode()]


# ---- the trusted side ------------------------------------------------------------------------------------------------

DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "complex64",
    "complex128",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)


def decode(content: bytes) -> Any:
    """The value of `encode`. Raises Garbled."""
    try:
        return _value(json.loads(content), {})
    except Garbled:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, RuntimeError, MemoryError) as error:
        raise Garbled(f"{type(error).__name__}: {error}") from None


def _value(tree: Any, seen: dict[int, Any]) -> Any:
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if not isinstance(tree, dict):
        raise Garbled("a value that is none")
    if "tuple" in tree:
        return tuple(_value(item, seen) for item in tree["tuple"])
    if "again" in tree:
        return seen[tree["again"]]
    number = tree["n"]
    if "list" in tree:
        made = seen[number] = []
        made.extend(_value(item, seen) for item in tree["list"])
        return made
    if "dict" in tree:
        made = seen[number] = {}
        made.update((_value(key, seen), _value(item, seen)) for key, item in tree["dict"])
        return made
    if "fields" in tree:
        made = seen[number] = Fields({})
        made.values.update((name, _value(item, seen)) for name, item in tree["fields"].items())
        return made
    if "set" in tree:
        made = {_value(item, seen) for item in tree["set"]}
    elif "tensor" in tree:
        made = _as_tensor(*tree["tensor"])
    elif "array" in tree:
        made = _as_array(*tree["array"])
    else:
        made = Opaque(str(tree["opaque"])[:80])
    seen[number] = made
    return made


def _as_tensor(dtype: str, shape: list[int], content: str) -> Any:
    import torch

    if dtype not in DTYPES:
        return Opaque(f"tensor of {str(dtype)[:40]}")
    raw = bytearray(base64.b64decode(content))
    kind = getattr(torch, dtype)
    if len(raw) != math.prod(shape) * torch.empty(0, dtype=kind).element_size():
        raise Garbled("a tensor whose size is not its shape's")
    return torch.frombuffer(raw, dtype=kind).reshape(shape) if raw else torch.empty(shape, dtype=kind)


def _as_array(dtype: str, shape: list[int], content: str) -> Any:
    import numpy

    kind = numpy.dtype(dtype)
    if kind.kind not in "biufc":
        return Opaque(f"array of {kind.name}")
    return numpy.frombuffer(base64.b64decode(content), dtype=kind).reshape(shape)


def adopt(old: Any, new: Any) -> None:
    """Make `old`, an argument, what it became on the other side: what was changed there in place is changed here in place."""
    if isinstance(old, list) and isinstance(new, list):
        old[:] = new
    elif isinstance(old, dict) and isinstance(new, dict):
        old.clear()
        old.update(new)
    elif isinstance(old, tuple) and isinstance(new, tuple):
        for ours, theirs in zip(old, new):
            adopt(ours, theirs)
    elif hasattr(old, "untyped_storage") and hasattr(new, "untyped_storage"):
        old.set_(new.to(old.dtype) if new.dtype != old.dtype else new)
    elif dataclasses.is_dataclass(old) and isinstance(new, Fields) and not type(old).__dataclass_params__.frozen:
        for field in dataclasses.fields(old):
            if field.name in new.values:
                setattr(old, field.name, new.values[field.name])
