"""The picture of a `Station` as HTML without a script: the queue, the pool, a bar for each request, and the numbers.

What is drawn is also said: every bar has its sentence for a screen reader, the pool is named by its counts. Where more came than
can be drawn, every so-manieth is, and the picture says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

from kvlab.core.schedule import PREEMPTED, Job
from kvlab.core.station import BLOCK, Numbers, Settings, Span, Station, differences, plain, seconds

ROWS = 40  # bars that are drawn
CHIPS = 12  # requests that are listed one by one, in each place
COLOURS = 6
NUMBERED = 128  # blocks up to which each shows whose it is
KINDS = {
    "queued": "queued",
    "prefill": "prefill",
    "decode": "decode",
    "held up": "running, no token",
    "preempted": "preempted",
    "again": "computed once more",
}


def board(station: Station) -> str:
    """All of it; in the end, when nobody is left in the queue and the pool is empty, the numbers and the bars."""
    numbers = '<h2 class="kvb-title">The numbers</h2>' + numbers_table(station)
    if station.over:
        return numbers + bars(station)
    return _queue(station) + _pool(station) + bars(station) + numbers


def numbers_table(station: Station) -> str:
    """The numbers; beside those of the same arrivals under other settings, if there are any."""
    columns = [(_heading(station), station.settings, station.numbers())]
    if station.before is not None:
        settings, numbers = station.before
        old, new = _changes(settings, station.settings)
        now = f"now: {new}" if new else "now"
        columns = [(f"before: {old}" if old else "before", settings, numbers), (now, *columns[0][1:])]
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title, _, _ in columns)
    cells = [_figures(settings, numbers) for _, settings, numbers in columns]
    rows = "".join(
        f'<tr><th scope="row">{label}</th>{"".join(f"<td>{column[label]}</td>" for column in cells)}</tr>' for label in cells[0]
    )
    return (
        '<div class="pst-scrollable-table-container" tabindex="0" role="region" '
        f'aria-label="The numbers"><table class="kvs-numbers"><thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _heading(station: Station) -> str:
    return "in the end" if station.over else f"after {station.steps} steps"


def _changes(old: Settings, new: Settings) -> tuple[str, str]:
    found = differences(old, new)
    return tuple(", ".join(f"{name.lower()} {plain(pair[side])}" for name, pair in found.items()) for side in (0, 1))


def _figures(settings: Settings, numbers: Numbers) -> dict[str, str]:
    def time(value: float | None) -> str:
        return "–" if value is None else seconds(value)

    return {
        "served": f"{numbers.served} of {numbers.came}",
        "simulated time": seconds(numbers.seconds),
        "tokens per second": "–" if numbers.tokens_per_second is None else f"{numbers.tokens_per_second:,.0f}",
        "time to first token, 95th percentile": time(numbers.ttft),
        "time per token, median": time(numbers.token_time),
        "longest gap between two tokens": time(numbers.gap),
        "tokens computed more than once": f"{numbers.again:,}",
        "preemptions": str(numbers.preemptions),
        "running places in use": "–" if numbers.places is None else f"{numbers.places:.0%} of {settings.running}",
    }


# ---- who is where ----------------------------------------------------------------------------------------------------------------


def _colour(n: int) -> str:
    return f"owner-{'abcdef'[n % COLOURS]}"


def _queue(station: Station) -> str:
    s = station.scheduler
    out = [job for job in s.waiting if job.state == PREEMPTED]
    places = [
        ("Running", "running", list(s.running), f"{len(s.running)} of at most {s.max_running}"),
        ("Preempted", "preempted", out, f"{len(out)}, first in line" if out else ""),
        ("Waiting", "waiting", [job for job in s.waiting if job.state != PREEMPTED], ""),
    ]
    still = len(station.asked) - len(station.lives)
    ended = sum(life.done for life in station.lives)
    return (
        f'<h2 class="kvb-title">The queue</h2><p class="kvs-counts">{still} still to come, {ended} served.</p><div class="kvs-queue">'
        + "".join(
            f'<section class="kvs-place" data-place="{key}"><h3>{title} <span>{said or len(jobs)}</span></h3>{_chips(station, jobs)}</section>'
            for title, key, jobs, said in places
        )
        + "</div>"
    )


def _chips(station: Station, jobs: list[Job]) -> str:
    if not jobs:
        return '<p class="kvs-none">nobody</p>'
    items = "".join(_chip(station, job) for job in jobs[:CHIPS])
    more = f'<li class="kvs-more">and {len(jobs) - CHIPS} more</li>' if len(jobs) > CHIPS else ""
    return f'<ol class="kvs-chips">{items}{more}</ol>'


def _chip(station: Station, job: Job) -> str:
    request = station.asked[job.name]
    out = len(job.tokens) - request.prompt
    if job.state == PREEMPTED:
        done, of, says = out, request.output, f"{out} of {request.output} out, {len(job.tokens):,} to compute anew"
    elif out:
        done, of, says = out, request.output, f"{out} of {request.output} out"
    else:
        done, of, says = job.written, request.prompt, f"prompt: {job.written:,} of {request.prompt:,}"
    return (
        f'<li class="{_colour(job.name)}" style="--p:{100 * done / of:.0f}%"><b>{job.name + 1}</b> '
        f'<span class="kvs-says">{says}</span></li>'
    )


# ---- whose blocks ----------------------------------------------------------------------------------------------------------------


def _pool(station: Station) -> str:
    manager = station.scheduler.manager
    owner: dict[int, int] = {}
    for name in manager.sequences:
        owner.update(dict.fromkeys(manager.block_table(name), name))
    held, total = len(owner), manager.num_blocks
    kept = f" Admission leaves {manager.watermark_blocks} free." if manager.watermark_blocks else ""
    many = len(manager.sequences)
    says = f"{held:,} of {total:,} blocks are held, by {many} request{'' if many == 1 else 's'}."
    numbered = total <= NUMBERED
    cells = "".join(
        f'<i class="{_colour(owner[i])}">{owner[i] + 1 if numbered else ""}</i>' if i in owner else "<i></i>"
        for i in range(total)
    )
    return (
        f'<h2 class="kvb-title">The pool, in blocks of {BLOCK} tokens</h2><p class="kvs-counts">{says}{kept}</p>'
        f'<div class="kvs-pool" role="img" aria-label="{says}"{" data-small" * (not numbered)}>{cells}</div>'
    )


# ---- who was served when ---------------------------------------------------------------------------------------------------------


def bars(station: Station) -> str:
    """One row for each request, over simulated time."""
    lives = station.lives
    every = max(1, math.ceil(len(lives) / ROWS))
    while math.gcd(every, COLOURS) > 1:  # or neighbours would all have one colour
        every += 1
    end = max(station.simulation.now, 1e-9)
    # the clock starts at the first arrival: what lies before it is empty
    begin = lives[0].request.at if lives else 0.0
    drawn = range(0, len(station.spans), every)
    rows = "".join(_row(n, station.spans[n], begin, end, lives[n].done) for n in drawn)
    note = f' <span class="kvs-every">One row in {every} is drawn, of {len(lives)}.</span>' if every > 1 else ""
    key = "".join(f'<li><i data-k="{kind}"></i>{said}</li>' for kind, said in KINDS.items())
    body = (
        f'<div class="kvs-axis" aria-hidden="true">{_axis(end - begin)}</div><ol class="kvs-rows">{rows}</ol>'
        if rows
        else '<p class="kvs-none">Nobody has come yet.</p>'
    )
    return (
        f'<h2 class="kvb-title">Who was served when</h2><ul class="kvs-key" aria-label="What the bars mean">{key}</ul>'
        f'<p class="kvs-counts">Simulated time, from the first arrival on.{note}</p><div class="kvs-bars">{body}</div>'
    )


def _row(n: int, spans: Iterable[Span], begin: float, end: float, done: bool) -> str:
    def percent(time: float) -> float:
        return 100 * time / (end - begin)

    drawn, spent = "", dict.fromkeys(KINDS, 0.0)
    for kind, start, stop in spans:
        spent[kind] += stop - start
        if percent(stop - start) > 0.02:
            drawn += f'<i data-k="{kind}" style="left:{percent(start - begin):.2f}%;width:{percent(stop - start):.2f}%"></i>'
    said = ", ".join(f"{KINDS[kind]} {seconds(time)}" for kind, time in spent.items() if time > 0) or "just arrived"
    return (
        f'<li class="{_colour(n)}"><b>{n + 1}</b><span class="kvs-bar" aria-hidden="true">{drawn}</span>'
        f'<span class="visually-hidden">{said}{"; ended" if done else ""}</span></li>'
    )


def _axis(length: float) -> str:
    """Marks at round times, three to five of them."""
    if length <= 0:
        return ""
    step = 10 ** math.floor(math.log10(length))
    step = next(step * part for part in (0.2, 0.25, 0.5, 1, 2) if length / (step * part) <= 5)
    return "".join(
        f'<span style="left:{100 * k * step / length:.1f}%">{f"{k * step:g} s" if step >= 0.1 else f"{1e3 * k * step:g} ms"}</span>'
        for k in range(int(length / step * 0.97) + 1)
    )
