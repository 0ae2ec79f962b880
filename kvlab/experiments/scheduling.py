"""The engine at work: batches that wait for their longest against batches that refill, phases apart, the knee, and three collapses.

Every day is served by the real engine on the real model (`days.real`). From its steps a cost is fitted (`stepcosts`), and the
simulated clock says beforehand what the other days took; what it alone can ask is in `scheduling_studies`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from transformers import DynamicCache

from kvlab import record
from kvlab.core.simulate import Cost
from kvlab.core.workload import Request, poisson, requests
from kvlab.engine.metrics import mean
from kvlab.experiments import beside, days, dispatch, scheduling_studies, stepcosts
from kvlab.experiments.checkpoint import Checkpoint
from kvlab.experiments.days import Moment, WorkClock
from kvlab.runtime import Loaded, load
from kvlab.runtime.decode import pad_left, threads

SEED = 7
BLOCKS = 1024  # room for everybody, unless a day says otherwise


@dataclass(frozen=True)
class Sizes:
    """How large the experiment is. `longest`: answers are cut there. `load`: arrivals, as a share of what the mixed policy serves when everybody waits at once."""

    requests: int = 48
    longest: int = 2048
    places: int = 16
    budget: int = 128
    load: float = 0.7
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    new: int = 24
    prefix: int = 512
    long: int = 768


QUICK = Sizes(requests=6, longest=8, places=3, rows=(1, 2), new=4, prefix=64, long=96)
POLICIES = {"static": "decode first", "apart": "prefill first", "mixed": "mixed"}


# ---- what is saved of a day ------------------------------------------------------------------------------------------------


def steps_of(moments: Sequence[Moment]) -> list[list]:
    """What a cost is fitted to: seconds, tokens, K/V read, pairs."""
    return [[record.short(m.seconds, 5), *asdict(m.work).values()] for m in moments]


# ---- days ------------------------------------------------------------------------------------------------------------------


def mixed_steps(loaded: Loaded, sizes: Sizes) -> list[Moment]:
    """Steps of many kinds, for the fit: few and many rows, short and long histories, pieces of prompts beside rows."""
    short, long = Request(12, sizes.new), Request(sizes.long // 2, sizes.new)
    out = []
    for asked, places, budget in (
        (asked_by(sizes)[: sizes.requests // 3], sizes.places // 2 or 1, 64),
        ([long] * max(1, sizes.places // 3) + [short] * sizes.places, sizes.places, sizes.budget),
        ([replace(short, output=sizes.new // 2)] * (2 * sizes.rows[-1]), sizes.rows[-1], sizes.budget),
    ):
        out += days.real(loaded, asked, 4 * BLOCKS, max_running=places, budget=budget).moments
    return out


@torch.inference_mode()
def lockstep(loaded: Loaded, asked: Sequence[Request], places: int) -> dict:
    """Batches in order of arrival, padded to the longest prompt; all rows go on until the longest answer is done."""
    model, device, pad = loaded.model, loaded.model.device, loaded.tokenizer.pad_token_id
    clock, prompts = WorkClock(loaded.device), days.prompts_of(asked, loaded.spec.vocab, 7)
    began, useful, computed = clock(), 0, 0
    for first in range(0, len(asked), places):
        rows, ask = prompts[first : first + places], asked[first : first + places]
        ids, mask = (t.to(device) for t in pad_left(rows, pad))
        cache, steps = DynamicCache(config=model.config), max(one.output for one in ask)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        for _ in range(steps):
            out = model(ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1)
            ids, positions = out.logits[:, -1].argmax(-1, keepdim=True), mask.sum(-1, keepdim=True)
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
        computed += len(rows) * steps
        useful += sum(one.output for one in ask)
    seconds = clock() - began
    return {
        "seconds": record.short(seconds),
        "tokens_per_second": record.short(useful / seconds),
        "places": record.short(useful / computed),
    }


def asked_by(sizes: Sizes) -> list[Request]:
    """The requests of the first two days, all there at once."""
    return [replace(one, output=min(one.output, sizes.longest)) for one in requests("Alpaca", sizes.requests, seed=SEED)]


def saturated(loaded: Loaded, sizes: Sizes) -> dict:
    """Everybody waits at once: lockstep, static batches of packed rows, prefill and decode apart, both mixed."""
    asked = asked_by(sizes)
    out = {"lockstep": lockstep(loaded, asked, sizes.places)}
    for name, policy in POLICIES.items():
        out[name] = days.brief(days.real(loaded, asked, BLOCKS, max_running=sizes.places, budget=sizes.budget, policy=policy))
    return out


def arriving(loaded: Loaded, sizes: Sizes, capacity: float) -> dict:
    """The same requests, arriving one by one. `capacity`: tokens a second of the mixed policy when all wait."""
    asked = arrivals(sizes, capacity)
    out: dict = {"rate": record.short(len(asked) / asked[-1].at)}
    for name, policy in POLICIES.items():
        out[name] = days.whole(days.real(loaded, asked, BLOCKS, max_running=sizes.places, budget=sizes.budget, policy=policy))
    return out


def arrivals(sizes: Sizes, capacity: float) -> list[Request]:
    """Poisson arrivals at a share of the capacity, in answer tokens a second."""
    asked = asked_by(sizes)
    return poisson(asked, sizes.load * capacity / mean(one.output for one in asked), seed=SEED)


def knee(loaded: Loaded, sizes: Sizes) -> list[dict]:
    """Concurrency from 1 on: as many requests at once as there are places, each with a short prompt."""
    out = []
    for rows in sizes.rows:
        day = days.real(loaded, [Request(16, sizes.new)] * rows, 4 * BLOCKS, max_running=rows, budget=16 * rows)
        full = sorted(m.seconds for m in day.moments if m.decode == rows)
        out.append(
            {
                "rows": rows,
                "step": record.short(full[len(full) // 2]),
                "tokens_per_second": record.short(rows / full[len(full) // 2]),
            }
        )
    return out


def starving(loaded: Loaded, sizes: Sizes) -> dict:
    """Eight who talk, and long prompts that come in between: whole, or in pieces of two sizes."""
    talkers = [Request(16, 3 * sizes.new, owner="talks")] * min(8, sizes.places)
    arms = {
        "whole prompts": {"policy": "prefill first", "budget": 2 * sizes.long},
        "pieces of 128": {"policy": "mixed", "budget": sizes.budget},
        "pieces of 32": {"policy": "mixed", "budget": sizes.budget // 4},
    }
    gap = knee_step(loaded, talkers)
    asked = [*talkers, *(Request(sizes.long, sizes.new // 3, at=k * sizes.new * gap / 1.5, owner="long") for k in (1, 2, 3))]
    out = {}
    for name, options in arms.items():
        day = days.real(loaded, asked, BLOCKS, max_running=sizes.places, **options)
        talk, long = ([s for s in day.served if s.asked.owner == who] for who in ("talks", "long"))
        out[name] = days.whole(day) | {
            "talkers_stall": record.short(max(s.stall for s in talk)),
            "talkers_tpot": record.short(mean(s.tpot for s in talk)),
            "long_ttft": record.short(mean(s.ttft for s in long)),
        }
    return {"step": record.short(gap), "arms": out}


def knee_step(loaded: Loaded, asked: Sequence[Request]) -> float:
    """Seconds of a step in which all of these decode."""
    day = days.real(loaded, [replace(one, output=6) for one in asked], BLOCKS)
    return min(m.seconds for m in day.moments if m.decode == len(asked))


def crowded(loaded: Loaded, sizes: Sizes) -> list[dict]:
    """A burst of short requests, with more and more of them at once: what each waits for its first token, and for each next one."""
    most = sizes.rows[-1]
    out = []
    for places in sizes.rows[2:] or sizes.rows:
        day = days.real(loaded, [Request(16, sizes.new)] * most, 4 * BLOCKS, max_running=places, budget=sizes.budget)
        times = [[record.short(s.ttft), record.short(s.tpot)] for s in day.served]
        out.append({"places": places, **days.brief(day), "times": times})
    return out


def churning(loaded: Loaded, sizes: Sizes) -> dict:
    """Requests that come one after the other and grow to several times their prompt, in a pool that holds half of what they grow to."""
    one = Request(16, 4 * sizes.new)
    grown = -(-(one.prompt + one.output) // 16)
    gap = 4 * knee_step(loaded, [one] * max(1, sizes.places // 2))
    asked = [replace(one, at=n * gap) for n in range(3 * sizes.places // 2)]
    tight = {"blocks": max(grown * sizes.places // 2, 2 + grown), "max_running": sizes.places, "watermark": 0.0}
    arms = {
        "roomy pool": tight | {"blocks": len(asked) * grown + 1},
        "tight pool": tight,
        "tight, watermark 0.1": tight | {"watermark": 0.1},
        "tight, half the places": tight | {"max_running": max(1, sizes.places // 2)},
        "tight, swapped out": tight | {"swap": True},
        "tight, blocks of 64": tight | {"blocks": max(2, tight["blocks"] // 4), "block_size": 64},
    }
    out = {}
    for name, options in arms.items():
        out[name] = days.whole(days.real(loaded, asked, budget=sizes.budget, **options)) | {"blocks": options["blocks"]}
    return out


def small_blocks(loaded: Loaded, sizes: Sizes) -> list[dict]:
    """What managing small blocks costs: the same day with blocks of 1, 4, 16, 64."""
    asked = [Request(16, 2 * sizes.new)] * (2 * sizes.places)
    out = []
    for size in (1, 4, 16, 64):
        day = days.real(loaded, asked, 64 * BLOCKS // size, block_size=size, max_running=2 * sizes.places, budget=sizes.budget)
        decode = sorted((m for m in day.moments if m.decode == m.work.tokens), key=lambda m: m.seconds)
        out.append(
            {
                "size": size,
                "step": record.short(decode[len(decode) // 2].seconds),
                "plan": record.short(sorted(m.plan for m in decode)[len(decode) // 2]),
            }
        )
    return out


def prefix(loaded: Loaded, sizes: Sizes) -> dict:
    """Claim B11: as many requests as places behind one prefix, with and without the prefix cache."""
    draw = torch.Generator().manual_seed(SEED)
    ids = lambda n: torch.randint(3, loaded.spec.vocab, (n,), generator=draw).tolist()  # noqa: E731
    shared = ids(sizes.prefix)
    first, rest = [*shared, *ids(8)], [[*shared, *ids(16)] for _ in range(sizes.places)]
    asked = [Request(len(first), 1), *(Request(len(p), sizes.new, at=1e-9) for p in rest)]
    out = {}
    for name, reuse in (("off", False), ("on", True)):
        day = days.real(
            loaded,
            asked,
            BLOCKS,
            prompts=[first, *rest],
            reuse=reuse,
            max_running=1 + sizes.places,
            budget=1024,
            policy="mixed",
        )
        # the first has filled the cache; the others are what is measured
        began, others = day.served[0].last, day.served[1:]
        seconds = max(s.last for s in others) - began
        out[name] = {
            "seconds": record.short(seconds),
            "tokens_per_second": record.short(sum(s.asked.output for s in others) / seconds),
            "ttft_mean": record.short(mean(s.first - began for s in others)),
            "computed": sum(m.work.tokens for m in day.moments),
        }
    return out


# ---- the run ---------------------------------------------------------------------------------------------------------------


def parts(loaded: Loaded, sizes: Sizes, data: dict) -> dict[str, Callable[[], object]]:
    """The parts of the run in their order; later ones read what earlier ones put into `data`."""

    def fitted() -> dict:
        moments = mixed_steps(loaded, sizes)
        cost = stepcosts.fit(moments[::2])
        roof, ceilings = stepcosts.own_roofline(loaded)
        return {
            "fitted": asdict(cost),
            "held_out": stepcosts.errors(cost, moments[1::2]),
            "steps": steps_of(moments),
            "roofline": asdict(roof),
            "ceilings": ceilings,
        }

    def foreseen() -> dict:
        """What the simulated clock says of the days that were served, with the cost fitted to other days."""
        cost = Cost(**data["cost"]["fitted"])
        said: dict = {"saturated": {}, "arriving": {}}
        for name, policy in POLICIES.items():
            for when, asked in (
                ("saturated", asked_by(sizes)),
                ("arriving", arrivals(sizes, data["saturated"]["mixed"]["tokens_per_second"])),
            ):
                said[when][name] = days.brief(
                    days.simulated(asked, cost, BLOCKS, max_running=sizes.places, budget=sizes.budget, policy=policy)
                )
        return said

    return {
        "cost": fitted,
        "saturated": lambda: saturated(loaded, sizes),
        "arriving": lambda: arriving(loaded, sizes, data["saturated"]["mixed"]["tokens_per_second"]),
        "foreseen": foreseen,
        "linear": lambda: stepcosts.linear_seconds(loaded, sorted({*sizes.rows, 3})),
        "knee": lambda: knee(loaded, sizes),
        "crowded": lambda: crowded(loaded, sizes),
        "starving": lambda: starving(loaded, sizes),
        "churning": lambda: churning(loaded, sizes),
        "small_blocks": lambda: small_blocks(loaded, sizes),
        "prefix": lambda: prefix(loaded, sizes),
        "equal": lambda: dispatch.equal(loaded, *((2, 4) if sizes == QUICK else ())),
        "beside": lambda: beside.compared(loaded, turns=1 if sizes == QUICK else 3),
        "overhead": lambda: beside.overhead(loaded),
        **scheduling_studies.parts(lambda: Cost(**data["cost"]["fitted"]), sizes == QUICK),
    }


def run(
    name: str | None = None, *, device: str | None = None, quick: bool = False, checkpoint=None, progress: bool = True
) -> record.Run:
    """All days and all studies, in fp32, on one thread. `checkpoint`, a file, keeps finished parts: a cut run goes on there."""
    from tqdm.auto import tqdm

    sizes = QUICK if quick else Sizes()
    loaded = load(name, device=device, dtype="float32")
    with threads(1):
        manifest = record.manifest(
            "scheduling", loaded, dtypes=["float32"], seed=SEED, settings=asdict(sizes), flags="--quick" if quick else ""
        )
        kept, data = Checkpoint(checkpoint, manifest), {}
        days.real(loaded, [Request(16, 4)] * 2, BLOCKS)  # warm: the first forward pays for what all use
        todo = parts(loaded, sizes, data)
        for part in (bar := tqdm(todo, unit="part", disable=not progress)):
            bar.set_description(part)
            data[part] = kept.get([part], todo[part])
    return record.Run(replace(manifest, seconds=kept.took()), data)
