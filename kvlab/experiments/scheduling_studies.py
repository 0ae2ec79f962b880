"""What the simulated clock alone can ask: thousands of requests, another device, pools and queues of any size.

Two costs: this machine's, fitted to recorded steps, and a card's (Llama 3.1 8B in bfloat16 on an A100 80 GB), computed from
stated ceilings and never measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from kvlab import record
from kvlab.core.blocks import BlockManager
from kvlab.core.schedule import Scheduler
from kvlab.core.simulate import Cost, Simulation, Work, card_cost
from kvlab.core.workload import Request, poisson, requests
from kvlab.engine.metrics import mean, percentile
from kvlab.experiments import allocators, days

SEED = 7
POLICIES = {"static": "decode first", "apart": "prefill first", "mixed": "mixed"}
CARD = "A100"
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
WATERMARKS = (0.0, 0.01, 0.05, 0.1, 0.2)
BLOCK_SIZES = (1, 4, 16, 64, 256)


def parts(own: Callable[[], Cost], quick: bool) -> dict[str, Callable[[], object]]:
    """The studies by name. `own`: this machine's cost, known only once it has been fitted."""
    many = 40 if quick else 1000
    return {
        "policies": lambda: {name: policies(cost, many) for name, cost in (("own", own()), (CARD, card_cost()))},
        "knees": lambda: {name: knees(cost) for name, cost in (("own", own()), (CARD, card_cost()))},
        "pools": lambda: pools({"own": own(), CARD: card_cost()}, 30 if quick else 400),
        "queues": lambda: queues(own(), 20 if quick else 200),
        "use": lambda: use(own(), 60 if quick else 1500),
    }


def policies(cost: Cost, many: int, places: int = 64, load: float = 0.7) -> dict:
    """Workload → load → policy → measures; lockstep besides, as static batches whose rows are all computed to the end."""
    out: dict = {}
    for workload in ("Alpaca", "ShareGPT"):
        asked = requests(workload, many, seed=SEED)
        out[workload] = {"saturated": {}, "arriving": {}}
        for when in out[workload]:
            if when == "arriving":
                capacity = out[workload]["saturated"]["mixed"]["tokens_per_second"]
                asked = poisson(asked, load * capacity / mean(r.output for r in asked), seed=SEED)
            for name, policy in POLICIES.items():
                day = days.simulated(asked, cost, 64 * 2048 // 16, max_running=places, budget=512, policy=policy)
                out[workload][when][name] = days.brief(day)
        out[workload]["saturated"]["lockstep"] = lockstep(cost, requests(workload, many, seed=SEED), places)
    return out


def lockstep(cost: Cost, asked: list[Request], places: int) -> dict:
    """Padded batches in order of arrival: every row is computed, and reads as much as the longest, until the longest answer ends."""
    seconds, computed = 0.0, 0
    for first in range(0, len(asked), places):
        batch = asked[first : first + places]
        prompt, steps, rows = max(r.prompt for r in batch), max(r.output for r in batch), len(batch)
        seconds += cost.seconds(Work(rows * prompt, 0, rows * prompt * (prompt + 1) // 2))
        seconds += sum(cost.seconds(Work(rows, rows * (prompt + k), 0)) for k in range(1, steps))
        computed += rows * steps
    tokens = sum(r.output for r in asked)
    return {
        "seconds": record.short(seconds),
        "tokens_per_second": record.short(tokens / seconds),
        "places": record.short(tokens / computed),
    }


def knees(cost: Cost, contexts: tuple[int, ...] = (64, 1024)) -> dict:
    """Rows against tokens a second and seconds a step, behind histories of two lengths; and `flat`, where arithmetic catches up."""
    table = {
        str(context): [
            [rows, record.short(rows / seconds), record.short(seconds)]
            for rows in ROWS
            if (seconds := cost.seconds(Work(rows, rows * context, 0)))
        ]
        for context in contexts
    }
    return {"flat": record.short(cost.flat), "rows": table}


def pools(costs: Mapping[str, Cost], many: int) -> list[dict]:
    """Block size and watermark against preemptions and, by cost, tokens a second: PagedAttention's workload in a pool too small for all."""
    asked, out = requests("ShareGPT", many, seed=SEED), []
    for size in BLOCK_SIZES:
        for watermark in WATERMARKS if size == 16 else (0.01,):
            row: dict = {"size": size, "watermark": watermark, "speed": {}}
            for name, cost in costs.items():
                day = days.simulated(
                    asked, cost, allocators.SLOTS // size, size, watermark=watermark, max_running=64, budget=512
                )
                found = days.brief(day)
                row["speed"][name] = found["tokens_per_second"]
                row |= {
                    key: found[key] for key in ("preemptions", "again", "running")
                }  # all wait at once: the same by any clock
            out.append(row)
    return out


def queues(cost: Cost, many: int) -> dict:
    """One owner sends everything at once, another a request now and then: first come, first served against least served first."""
    flood = [replace(one, owner="floods") for one in requests("Alpaca", many, seed=SEED)]
    quiet = [replace(one, owner="quiet") for one in requests("Alpaca", max(4, many // 10), seed=SEED + 1)]
    alone = {}
    for name, who in (("floods", flood), ("quiet", quiet)):
        alone[name] = days.brief(days.simulated(who, cost, 1024, max_running=16, budget=128))["seconds"]
    quiet = poisson(quiet, len(quiet) / alone["floods"], seed=SEED)
    asked, out = [*flood, *quiet], {}
    for name, fair in (("first come", False), ("least served first", True)):
        day = days.simulated(asked, cost, 1024, max_running=16, budget=128, fair=fair, keep=False)
        out[name] = {
            who: {
                "ttft_mean": record.short(mean(s.ttft for s in day.served if s.asked.owner == who)),
                "ttft_p95": record.short(percentile((s.ttft for s in day.served if s.asked.owner == who), 95)),
                "last": record.short(max(s.last for s in day.served if s.asked.owner == who)),
            }
            for who in ("floods", "quiet")
        }
    return out


def use(cost: Cost, many: int, block_size: int = 16) -> dict:
    """Slots of taken blocks that hold a token, on PagedAttention's workload: the scheduler serves it."""
    manager = BlockManager(allocators.SLOTS // block_size, block_size, watermark=0.01)
    scheduler = Scheduler(manager, max_running=256, budget=512)
    tokens = slots = pool = 0

    def watch(tick) -> None:
        nonlocal tokens, slots, pool
        tokens += sum(manager.num_tokens(job.name) for job in scheduler.running)
        slots += tick.held * block_size
        pool += allocators.SLOTS

    Simulation(scheduler, requests("ShareGPT", many, seed=SEED), cost).run(watch)
    return {
        "of_taken": record.short(tokens / slots),
        "of_pool": record.short(tokens / pool),
        "paper": allocators.PAPER["paged"] / 100,
    }
