"""Verdicts of lab 5, a hand-written block manager: from the recorded run `blocks`."""

from __future__ import annotations

from kvlab import record
from kvlab.claims import Verdict
from kvlab.core import workload
from kvlab.experiments import allocators, bookkeeping
from kvlab.experiments.allocators import PAPER


def verdicts() -> list[Verdict]:
    """One verdict for each claim that lab 5 settles alone or first."""
    run = record.load("blocks")
    data = run.data
    scenes, sizes, leak, equal = data["scenes"], data["block_sizes"], data["leak"], data["equal"]

    def verdict(claim: str, kind: str, finding: str) -> Verdict:
        return Verdict(claim, kind, finding, 5, "blocks")

    def told(name: str) -> int:
        return sum(row["sick"]["said"] != "none" for row in scenes[name]["rows"])

    def count(name: str) -> int:
        return len(scenes[name]["rows"])

    def least(name: str) -> float:
        return min(row["sick"]["delta"] for row in scenes[name]["rows"])

    def caught(name: str, by: str) -> int:
        return sum(bool(row[by]) for row in scenes[name]["rows"])

    def leaks(name: str) -> str:
        return f"{told(name)} of {count(name)} times the victim says Ada's password (|Δlogit| from {least(name):.2g})"

    everything = [row for scene in scenes.values() for row in scene["rows"]]
    healthy = max(row["healthy"]["delta"] for row in everything)
    quiet = not any(row["healthy_caught"] for row in everything)
    off = f"With the fault off the victim's logits are its own within {healthy:.1g} (ε {equal['epsilon']:.2g})"
    calm = healthy <= equal["epsilon"] and not any(row["healthy"]["said"] != "none" for row in everything)
    cow, fork, cancel, stale = "no-copy-on-write", "fork-without-reference", "freed-on-cancel", "stale-hash"

    low = {workload: by["1.0"] if "1.0" in by else next(iter(by.values())) for workload, by in data["utilisation"].items()}
    contiguous = [p for p in PAPER if p != "paged"]
    every = [found for by in data["utilisation"].values() for found in by.values()]
    held = [found[p]["of_held"] for found in every for p in contiguous]
    paged = [found["paged"]["of_held"] for found in every]
    in_range = all(0.2 <= share <= 0.4 for share in held) and min(paged) > 0.9
    share = low["ShareGPT"]

    lost = sum(not block[3] for block in leak["sharing, leaking"]["blocks"])
    shown = leak["sharing, leaking"]["complaint"]
    more = max(leak["sharing, leaking"]["held"]) > max(leak["copies"]["held"]) > max(leak["sharing"]["held"])

    return [
        verdict(
            "B6",
            "confirmed" if told(cow) and calm else "refuted",
            f"{off}; without copy-on-write {leaks(cow)}. A read-only rule is what copy-on-write leaves of a shared block.",
        ),
        verdict(
            "B15",
            "confirmed" if more and shown and lost else "refuted",
            f"A reference that is not taken back: after {leak['sharing, leaking']['served']} requests the pool is full and {lost} blocks are counted by "
            f"nobody's table. Without sharing the same day needs at most {max(leak['copies']['held'])} blocks, with sharing {max(leak['sharing']['held'])}. "
            f"Creation and last access single the lost blocks out; check() names the rule at request {shown['request'] if shown else '?'}.",
        ),
        verdict(
            "B18",
            "refined" if told(cancel) and told(stale) else "refuted",
            f"True, and not enough. A block freed while a table names it is handed out: {leaks(cancel)}. But also an unreferenced block, "
            f"evicted rightly, leaks if its hash stays: {leaks(stale)}. Evict means unmap.",
        ),
        verdict(
            "B23",
            "refined",
            "Its life: a block outlives who wrote it and ends at count 0, as claimed; but it may be found until its slot is needed, after the "
            f"last reference. Its boundary: the tokens, as the index knows them. Where an index entry outlived the contents, {leaks(stale)}. "
            "Positions: lab 6.",
        ),
        verdict(
            "C1",
            "refined" if told(fork) and told(cancel) else "refuted",
            f"It is one root of four. Reference not raised: {leaks(fork)}. Freed early on cancel: {told(cancel)} of {count(cancel)}. But with every "
            f"count right, {told(cow)} of {count(cow)} leak without copy-on-write and {told(stale)} of {count(stale)} through a stale hash.",
        ),
        verdict(
            "C7",
            "confirmed" if in_range else "refined",
            f"Of what they hold, contiguous reservations use {min(held):.0%} to {max(held):.0%} and paging {min(paged):.0%} to {max(paged):.0%}, over two length "
            f"distributions and three spreads. At ShareGPT's means and σ 1: "
            + ", ".join(f"{p} {share[p]['of_held']:.0%}" for p in PAPER)
            + " of what is held. The range depends on the lengths: reserving the maximum is far worse for short answers.",
        ),
        verdict(
            "C9",
            "confirmed" if told(cow) == count(cow) and calm else "refined",
            f"Two branches of one prompt whose last block is half full: {leaks(cow)} when blocks are not copied. At a block boundary nothing has to "
            f"be copied: the continuation starts in a block of its own.",
        ),
        verdict("C15", "refined", _block_size(sizes, data["token_bytes"], share)),
        verdict(
            "C18",
            "confirmed" if told(cancel) == count(cancel) and calm else "refined",
            f"A second sample of Ben's request is cancelled and Ada comes in. One path with counting: Ben's logits stay within {healthy:.1g}. A cancel path that "
            f"frees whatever it holds: {told(cancel)} of {count(cancel)} times Ben says her password.",
        ),
        verdict(
            "C21",
            "confirmed" if told(cow) and calm else "refuted",
            f"Of {count(cow)} runs with shared blocks written in place, {told(cow)} leak, the smallest |Δlogit| {least(cow):.2g}; of {len(everything)} with "
            f"copy-on-write none does. What lies between the two, a write that the others happen not to read, is luck.",
        ),
        verdict(
            "C24",
            "refined",
            f"Several owners are no fault: every shared prompt has them. What the scan must look for is a write, a hand-out or a find against the owners; read "
            f"from the log alone it finds {sum(caught(name, 'findings') for name in scenes)} of {len(everything)} faults, check() finds "
            f"{sum(caught(name, 'complaint') for name in scenes)}, and both stay quiet on all {len(everything)} healthy runs."
            if quiet
            else "The scan accused a healthy run.",
        ),
    ]


def _block_size(sizes: dict, token_bytes: int, share: dict) -> str:
    ratios = [found["step_ratio"] for found in sizes.values()]
    typical = allocators.typical_length(workload.requests("ShareGPT", bookkeeping.REQUESTS, 1.0, bookkeeping.SEED))
    return (
        f"The size: at 16 tokens {1 - sizes['16']['of_held']:.1%} of what is held is empty, at 1 none, at 256 {1 - sizes['256']['of_held']:.0%}. The table is no cost in "
        f"memory: 4 bytes an entry are {4 / token_bytes:.3%} of a token's K/V even at size 1, and a decode step here costs {min(ratios):.2f} to "
        f"{max(ratios):.2f} times that of size 16 at every size (a GPU kernel may differ: not measured here). What a large block costs is emptiness and, in lab 6, "
        f"hits. The batch: total over K/V per request foresees {allocators.SLOTS / typical:.0f} requests if a request counts with the {typical:.0f} tokens it has at a "
        f"random moment, and {share['paged']['running']:.0f} run; counted with the maximum it foresees {allocators.SLOTS // workload.MAX_LENGTH}, and that is what "
        f"maximum-length reservation runs ({share['max length']['running']:.0f}). The watermark: labs 2 and 7."
    )
