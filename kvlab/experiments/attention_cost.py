"""What attention costs: time per token against history, counted work, and both against this machine's own ceilings.

Times are of this machine and of this run. What is kept of them are ratios: to another time of the same run, or to a ceiling
measured in it. Arms take turns, and of several tries the least is taken: what else the machine does can only add.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch

from kvlab.core.ledger import token_bytes
from kvlab.runtime import Loaded

HISTORY = (128, 256, 512, 768, 1024, 2048)  # tokens, both arms; shorter products are not at speed yet
FARTHER = (1536, 3072, 4096)  # cached arm alone
PREFILL = (4, 16, 64, 256, 1024)  # tokens
ROWS = (1, 2, 4, 8, 16, 32, 64)  # of a decode batch
BEHIND = 128  # tokens of history in that batch
MATMUL, COPY = 2048, 2**26  # side of the matrices; numbers that are copied
TRIES, MOST = 4, 9  # rounds of all arms; more while the least times still fall
SEED = 2


def settings(quick: bool) -> dict:
    """What the run is told to do."""
    return {
        "history": list(HISTORY[:2] if quick else HISTORY),
        "farther": list((512,) if quick else FARTHER),
        "prefill": list(PREFILL[:2] if quick else PREFILL),
        "rows": list(ROWS[:3] if quick else ROWS),
        "behind": BEHIND,
        "tries": 2 if quick else TRIES,
    }


def measure(loaded: Loaded, quick: bool = False) -> dict:
    """Times, counted work and ceilings; seconds, FLOPs, bytes."""
    s = settings(quick)
    return {
        "kv_token_bytes": token_bytes(loaded.spec),
        "head_flops": 2 * loaded.model.config.hidden_size * loaded.spec.vocab,
        "weights_bytes": sum(parameter.nbytes for parameter in loaded.model.parameters()),
        "ceilings": ceilings(loaded, s["tries"]),
        "steps": steps(loaded, s["history"], s["farther"], s["tries"]),
        "counted": counted(loaded, s["history"][:3]),
        "roofline": roofline(loaded, s["prefill"], s["rows"], s["behind"], s["tries"]),
        "products": products(loaded, s["rows"], s["tries"]),
    }


# ---- taking times ------------------------------------------------------------------------------------------------------------


def take_turns(arms: dict[Hashable, Callable[[], Any]], tries: int, loaded: Loaded) -> dict[Hashable, list[float]]:
    """Seconds of each arm: rounds of all arms in turn, after one that does not count.

    `tries` rounds, and more, up to MOST, while one of the last two has lowered the least time of some arm by over 3 %.
    """
    out: dict[Hashable, list[float]] = {name: [] for name in arms}
    for turn in range(max(tries, MOST) + 1):
        if turn > tries and all(map(settled, out.values())):
            break
        for name, arm in arms.items():
            began = _now(loaded)
            arm()
            if turn:
                out[name].append(_now(loaded) - began)
    return out


def settled(times: Sequence[float]) -> bool:
    """The last two have not lowered the least by over 3 %. Two or fewer are taken as they are."""
    return len(times) < 3 or min(times[:-2]) <= 1.03 * min(times)


def _now(loaded: Loaded) -> float:
    if str(loaded.device).startswith("cuda"):
        torch.cuda.synchronize(loaded.device)
    return time.perf_counter()


def _timed(times: Sequence[float]) -> dict[str, float]:
    """The least, how far the middle one lies above it (a sign of how quiet the machine was), and how many there were."""
    return {"seconds": min(times), "spread": statistics.median(times) / min(times) - 1, "rounds": len(times)}


# ---- ceilings ------------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def ceilings(loaded: Loaded, tries: int) -> dict[str, float]:
    """FLOPs a second of a large matrix product and bytes a second of a large copy (read and written), the model's dtype."""
    kind = {"dtype": loaded.model.dtype, "device": loaded.model.device}
    a, b = torch.ones(MATMUL, MATMUL, **kind), torch.ones(MATMUL, MATMUL, **kind)
    c, source, target = torch.empty_like(a), torch.ones(COPY, **kind), torch.empty(COPY, **kind)
    times = take_turns({"matmul": lambda: torch.mm(a, b, out=c), "copy": lambda: target.copy_(source)}, 2 * tries, loaded)
    return {"flops": 2 * MATMUL**3 / min(times["matmul"]), "bytes": 2 * source.nbytes / min(times["copy"])}


# ---- work, counted ---------------------------------------------------------------------------------------------------------------


def flops(loaded: Loaded, new: int, past: int, rows: int = 1) -> int:
    """Multiplications and additions of one forward of `new` tokens after `past`, logits of the last token only.

    2 for each weight a token passes, and 4·heads·head_dim for each (query, key) pair of a layer, as torch counts them: the
    half of a prefill's pairs that a causal mask hides are counted too.
    """
    config, spec = loaded.model.config, loaded.spec
    kv, wide = spec.kv_heads * spec.head_dim, spec.heads * spec.head_dim
    layer = 2 * config.hidden_size * wide + 2 * config.hidden_size * kv + 3 * config.hidden_size * config.intermediate_size
    pairs = 4 * wide * new * (past + new)
    return rows * (spec.layers * (2 * layer * new + pairs) + 2 * config.hidden_size * spec.vocab)


def least_bytes(loaded: Loaded, new: int, past: int, rows: int = 1) -> int:
    """Bytes that one forward must move at least: all weights once, K and V of the past read, those of the new tokens written.

    Activations are left out, as if they stayed in the processor's own cache.
    """
    weights = sum(parameter.nbytes for parameter in loaded.model.parameters())
    return weights + rows * (past + new) * token_bytes(loaded.spec)


@torch.inference_mode()
def counted(loaded: Loaded, history: Sequence[int]) -> list[dict]:
    """FLOPs as torch's own counter sees them, in the model's own code, against :func:`flops`."""
    from torch.utils.flop_counter import FlopCounterMode

    from kvlab.runtime.decode import attention_kernel

    out = []
    with attention_kernel(loaded, "eager"):  # written out in matrix products, which the counter knows
        for past in history:
            for arm, new, before in (("cached", 1, past), ("uncached", past + 1, 0)):
                step = _step(loaded, new, before)
                with FlopCounterMode(display=False) as counter:
                    step()
                out.append(
                    {"arm": arm, "past": past, "counted": counter.get_total_flops(), "formula": flops(loaded, new, before)}
                )
    return out


# ---- times -----------------------------------------------------------------------------------------------------------------------


def filled(loaded: Loaded, past: int, rows: int = 1) -> Any:
    """A DynamicCache that holds `past` made-up tokens a row: what they are does not matter to the time of a step."""
    from transformers import DynamicCache

    spec, draw = loaded.spec, torch.Generator().manual_seed(SEED)
    cache = DynamicCache(config=loaded.model.config)
    shape = (rows, spec.kv_heads, past, spec.head_dim)
    for layer in range(spec.layers):
        k = torch.randn(shape, generator=draw).to(loaded.model.device, loaded.model.dtype)
        cache.update(k, k.clone(), layer)
    return cache


def _step(loaded: Loaded, new: int, past: int, rows: int = 1) -> Callable[[], None]:
    """A forward of `new` tokens after `past`, that leaves the cache as it was and can be taken again."""
    ids = torch.randint(0, loaded.spec.vocab, (rows, new), generator=torch.Generator().manual_seed(SEED)).to(
        loaded.model.device
    )
    cache = filled(loaded, past, rows) if past else None

    def step() -> None:
        loaded.model(input_ids=ids, cache=cache, use_cache=cache is not None, logits_to_keep=1)
        if cache is not None:
            cache.crop(-new)

    return step


def _append(loaded: Loaded, past: int) -> Callable[[], None]:
    """What of a cached step is only the cache's growing: a DynamicCache copies all it holds into new tensors."""
    spec, cache = loaded.spec, filled(loaded, past)
    one = torch.zeros(1, spec.kv_heads, 1, spec.head_dim, device=loaded.model.device, dtype=loaded.model.dtype)

    def append() -> None:
        for layer in range(spec.layers):
            cache.update(one, one, layer)
        cache.crop(-1)

    return append


@torch.inference_mode()
def steps(loaded: Loaded, history: Sequence[int], farther: Sequence[int], tries: int) -> list[dict]:
    """Seconds of one token after a history, with a cache and without, and of the append alone."""
    arms: dict[Hashable, Callable[[], None]] = {}
    for past in (*history, *farther):
        arms["cached", past] = _step(loaded, 1, past)
        arms["append", past] = _append(loaded, past)
        if past in history:
            arms["uncached", past] = _step(loaded, past + 1, 0)
    times = take_turns(arms, tries, loaded)
    return [{"arm": arm, "past": past, **_timed(found)} for (arm, past), found in times.items()]


@torch.inference_mode()
def roofline(loaded: Loaded, prefill: Sequence[int], rows: Sequence[int], behind: int, tries: int) -> list[dict]:
    """Prefills of several lengths and decode steps of several rows: seconds, FLOPs, least bytes."""
    points = [("prefill", tokens, 0, 1) for tokens in prefill] + [("decode", 1, behind, n) for n in rows]
    times = take_turns({point: _step(loaded, *point[1:]) for point in points}, tries, loaded)
    return [
        {
            "kind": kind,
            "size": rows if kind == "decode" else new,
            "flops": flops(loaded, new, past, rows),
            "bytes": least_bytes(loaded, new, past, rows),
            **_timed(times[kind, new, past, rows]),
        }
        for kind, new, past, rows in points
    ]


@torch.inference_mode()
def products(loaded: Loaded, rows: Sequence[int], tries: int) -> list[dict]:
    """Seconds of the products with the weights alone, one token in each row: every linear map of the model once, nothing else."""
    maps = [module for module in loaded.model.modules() if isinstance(module, torch.nn.Linear)]

    def arm(count: int) -> Callable[[], None]:
        kind = {"dtype": loaded.model.dtype, "device": loaded.model.device}
        fed = {wide: torch.ones(count, 1, wide, **kind) for wide in {module.in_features for module in maps}}
        return lambda: [module(fed[module.in_features]) for module in maps]

    times = take_turns({count: arm(count) for count in rows}, tries, loaded)
    return [{"rows": count, **_timed(found)} for count, found in times.items()]


# ---- what follows from them ---------------------------------------------------------------------------------------------------------


def fit(x: Sequence[float], y: Sequence[float], degree: int) -> list[float]:
    """Coefficients c0, c1, … of the polynomial that fits y best, in relative error."""
    powers = np.vander(np.asarray(x, float), degree + 1, increasing=True)
    y = np.asarray(y, float)
    scale = np.abs(powers).max(0)
    found, *_ = np.linalg.lstsq(powers / scale / y[:, None], np.ones(len(y)), rcond=None)
    return (found / scale).tolist()


def held_out(x: Sequence[float], y: Sequence[float], degree: int) -> float:
    """How well a polynomial of this degree foretells a point it was not fitted to: root mean square of the relative errors."""
    errors = []
    for out in range(len(x)):
        rest = [i for i in range(len(x)) if i != out]
        c = fit([x[i] for i in rest], [y[i] for i in rest], degree)
        errors.append(sum(c[k] * x[out] ** k for k in range(degree + 1)) / y[out] - 1)
    return float(np.sqrt(np.mean(np.square(errors))))


def series(data: dict, arm: str) -> tuple[list[int], list[float]]:
    """Histories and seconds of one arm of the recorded steps."""
    rows = sorted((row["past"], row["seconds"]) for row in data["steps"] if row["arm"] == arm)
    return [past for past, _ in rows], [seconds for _, seconds in rows]


def conclusions(data: dict, at: int = 1024) -> dict:
    """What the recorded times say about growth, in ratios only; `data` as :func:`measure` gives it."""
    out: dict[str, Any] = {"at": at}
    for arm, degree in (("cached", 1), ("uncached", 2), ("append", 1)):
        x, y = series(data, arm)
        c = fit(x, y, degree)
        whole = sum(c[k] * at**k for k in range(degree + 1))
        out[arm] = {
            "coefficients": c,
            "shares": [c[k] * at**k / whole for k in range(degree + 1)],
            "held_out": [held_out(x, y, k) for k in range(4)] if len(x) > 5 else None,
        }
        out[arm]["degree"] = least_degree(out[arm]["held_out"])
    cached, uncached = out["cached"]["coefficients"], out["uncached"]["coefficients"]
    out["equal_at"] = cached[0] / cached[1] if cached[1] > 0 else None  # history whose reading costs as much as all the rest
    out["append_share"] = out["append"]["coefficients"][1] / cached[1] if cached[1] > 0 else None
    out["step_ratio"] = sum(uncached[k] * at**k for k in range(3)) / (cached[0] + cached[1] * at)
    totals = [uncached[k] * at ** (k + 1) / (k + 1) for k in range(3)]
    out["total_shares"] = [part / sum(totals) for part in totals]  # linear, quadratic, cubic part of generating `at` tokens
    out["total_ratio"] = sum(totals) / (cached[0] * at + cached[1] * at**2 / 2)
    out["longest"] = max(series(data, "cached")[0])
    once = data["kv_token_bytes"] / data["ceilings"]["bytes"]  # seconds to move a token's K and V once
    out["times_moved"] = cached[1] / once
    return out


def least_degree(errors: Sequence[float] | None, slack: float = 1.5) -> int | None:
    """The lowest degree whose held-out error is within `slack` of the best one; None where there were too few points."""
    if errors is None:
        return None
    return next(degree for degree, error in enumerate(errors) if error <= slack * min(errors))


def points(data: dict) -> list[dict]:
    """The roofline's points: FLOPs per byte, and what was reached as a share of the matmul ceiling and of the roof there."""
    top, copy = data["ceilings"]["flops"], data["ceilings"]["bytes"]
    out = []
    for row in data["roofline"]:
        intensity = row["flops"] / row["bytes"]
        reached = row["flops"] / row["seconds"] / top
        roof = min(1.0, intensity * copy / top)
        out.append({**row, "intensity": intensity, "reached": reached, "roof": roof, "of_roof": reached / roof})
    return out


def ridge(data: dict) -> float:
    """FLOPs per byte where the two ceilings meet: below it the memory limits, above it the arithmetic."""
    return data["ceilings"]["flops"] / data["ceilings"]["bytes"]
