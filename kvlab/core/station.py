"""The scheduler as a game: requests come in, a click lets it take steps, and one sees who waits, who runs and who is thrown out.

All decisions are `Scheduler`'s, all seconds are `Simulation`'s. What this adds is the driver's seat: settings with their limits, three
presets in which serving goes wrong, each with the one setting that mends it, and the numbers of the same arrivals before and
after. The book's page runs this in the browser; `kvlab.core.station_board` draws it there and in the built page.
"""

from __future__ import annotations

import math
import random
from bisect import insort
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import median
from typing import NamedTuple

from kvlab.core.blocks import BlockManager
from kvlab.core.schedule import POLICIES, RUNNING, Job, Scheduler
from kvlab.core.simulate import Cost, Simulation, Tick, card_cost
from kvlab.core.workload import Request, poisson

BLOCK = 64  # tokens; four times the usual, so that a pool can be drawn
MOST_STEPS = 50_000  # a run to the end stops there, whatever was asked
# Lengths are made up, and evenly spread between these ends: tokens of the prompt, tokens of the answer
LENGTHS = {"short": ((16, 48), (60, 140)), "medium": ((300, 600), (100, 200)), "long": ((1500, 3000), (60, 140))}
WORKLOADS = (*LENGTHS, "mixed")  # mixed: every sixth is long, the others are short
COMING = ("workload", "count", "rate", "draw")  # the settings that decide who comes


class Limit(NamedTuple):
    """What a number may be, and what the reader calls it."""

    called: str
    least: float
    most: float


LIMITS = {
    "count": Limit("Requests that come", 1, 600),
    "rate": Limit("Arrivals a second", 0.1, 1000),
    "draw": Limit("Draw", 1, 999),
    "blocks": Limit("Blocks in the pool", 1, 1024),
    "watermark": Limit("Watermark", 0, 0.9),
    "running": Limit("At most running", 1, 512),
    "budget": Limit("Token budget of a step", 1, 8192),
}
CHOICES = {"workload": ("Workload", WORKLOADS), "policy": ("Policy", POLICIES)}


@dataclass(frozen=True)
class Settings:
    """Who comes, and how they are served. Raises ValueError for a value that is out of range, in the reader's words."""

    workload: str = "mixed"
    count: int = 24
    rate: float = 12.0
    draw: int = 1
    policy: str = "mixed"
    blocks: int = 256
    watermark: float = 0.0
    running: int = 32
    budget: int = 256

    def __post_init__(self) -> None:
        for name, (called, known) in CHOICES.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{called} is {value!r}; choose one of {', '.join(known)}")
        for field in fields(self):
            if field.name in LIMITS:
                called, least, most = LIMITS[field.name]
                value, whole = getattr(self, field.name), field.type == "int"
                number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
                if not number or not least <= value <= most:
                    kind = "a whole number" if whole else "a number"
                    raise ValueError(f"{called} must be {kind} from {least:,} to {most:,}, not {value!r}")

    def typed(self, **texts: str) -> Settings:
        """With what somebody typed into the fields of these names."""
        return replace(self, **{name: _number(text) if name in LIMITS else text for name, text in texts.items()})


class Preset(NamedTuple):
    """A way to serve badly: its settings, what to watch, and the one setting that mends it."""

    name: str
    settings: Settings
    ask: str
    remedy: dict[str, object]


PRESETS = (
    Preset(
        "decode batch too large",
        Settings("short", 480, 200.0, 1, "mixed", 1024, 0.0, 512, 512),
        "Everybody who comes may run. Watch the time per token as the batch grows.",
        {"running": 153},
    ),
    Preset(
        "prefill starves decode",
        Settings("mixed", 24, 12.0, 2, "prefill first", 256, 0.0, 32, 256),
        "A prompt of thousands of tokens comes while others talk. Watch their bars.",
        {"policy": "mixed"},
    ),
    Preset(
        "block churn",
        Settings("medium", 40, 20.0, 3, "mixed", 96, 0.0, 64, 512),
        "Whoever fits is let in, and then they grow. Watch the pool and the preempted.",
        {"watermark": 0.1},
    ),
)


class Span(NamedTuple):
    """What a request did from when to when: queued, prefill, decode, held up (it ran and was given no token), preempted, again."""

    kind: str
    start: float
    end: float


@dataclass(frozen=True)
class Numbers:
    """How it went so far. Times are seconds of the simulated clock; a time that nobody has had yet is None.

    ttft        95th percentile of the times to first token
    token_time  median over requests of the time per token behind the first
    gap         the longest wait of anybody between two tokens
    again       tokens that went through the model more than once
    places      share of the running places that were taken, over the time in which somebody ran
    """

    served: int
    came: int
    seconds: float
    tokens_per_second: float | None
    ttft: float | None
    token_time: float | None
    gap: float | None
    again: int
    preemptions: int
    places: float | None


class Station:
    """A pool, a scheduler, a clock, and everybody who has come so far.

    `asked`: who comes, instead of those that the settings draw. `before`: another station's settings and numbers to compare with.
    Raises ValueError for a request that the pool could never hold.
    """

    def __init__(
        self,
        settings: Settings = Settings(),
        asked: Sequence[Request] | None = None,
        *,
        before: tuple[Settings, Numbers] | None = None,
        preset: Preset | None = None,
        cost: Cost | None = None,
    ) -> None:
        self.settings, self.before, self.preset = settings, before, preset
        self.cost = card_cost() if cost is None else cost
        manager = BlockManager(settings.blocks, BLOCK, watermark=settings.watermark)
        how = {"max_running": settings.running, "budget": settings.budget, "policy": settings.policy}
        self.scheduler = Scheduler(manager, **how)
        self.asked = list(arrivals(settings) if asked is None else asked)
        for number, request in enumerate(self.asked, 1):
            self._fits(number, request)
        self.simulation = Simulation(self.scheduler, self.asked, self.cost)
        self.steps = 0
        self.spans: list[list[Span]] = []  # of each who came
        self._busy = self._taken = 0.0  # seconds in which somebody ran; times the places taken
        self._most: list[int] = []  # tokens of each that went through the model at least once
        self._out: list[int] = []  # tokens that came out for each
        self._talked: list[Job] = []  # who got a token in the last step
        self._again = 0

    @property
    def lives(self) -> list:
        """Everybody who has come, in order; number 1 is the first."""
        return self.simulation.lives

    @property
    def over(self) -> bool:
        """Whether everybody has been served."""
        return self.simulation.over

    # ---- moves --------------------------------------------------------------------------------------------------------------

    def send(self, kind: str) -> str:
        """One more request, now: "short", "medium" or "long". Later replays have it too."""
        if kind not in LENGTHS:
            raise ValueError(f"a request is {', '.join(LENGTHS)}, not {kind!r}")
        if len(self.asked) >= LIMITS["count"].most:
            raise ValueError(f"{len(self.asked)} requests are as many as this page takes; reset, and let fewer come")
        request = _drawn(random.Random(f"sent {len(self.asked)}"), kind, self.simulation.now)
        self._fits(len(self.asked) + 1, request)
        insort(self.asked, request, key=lambda one: one.at)
        return f"A {kind} request, {request.prompt:,} tokens of prompt and {request.output} to answer, is at the door."

    def run(self, steps: int | None = None) -> str:
        """So many steps, or all there are; say what happened in a sentence."""
        came, served, out = len(self.lives), self._served(), sum(self._out)
        ticks: list[Tick] = []
        while len(ticks) < (MOST_STEPS if steps is None else steps) and (tick := self.simulation.tick()) is not None:
            self.steps += 1
            self._watch(tick)
            ticks.append(tick)
        end = " Everybody has been served." if self.over else ""
        if not ticks:
            return "There is nothing left to do." + end
        if len(ticks) == 1:
            return self._told(ticks[0], len(self.lives) - came) + end
        thrown = sum(len(tick.step.preempted) for tick in ticks)
        return (
            f"{len(ticks)} steps, {seconds(ticks[-1].end - ticks[0].start)}: {sum(self._out) - out:,} tokens came out; "
            f"{_many(len(self.lives) - came, 'request')} came, {self._served() - served} ended, {_many(thrown, 'preemption')}.{end}"
        )

    def changed(self, settings: Settings) -> Station:
        """Another station with these settings, from the start: the same arrivals, where the settings leave them alone."""
        same = all(getattr(settings, name) == getattr(self.settings, name) for name in COMING)
        if not same:
            return Station(settings, cost=self.cost)
        before = (self.settings, self.numbers()) if self.over and self.lives else self.before
        return Station(settings, self.asked, before=before, preset=self.preset, cost=self.cost)

    def remedied(self) -> Station:
        """The preset's remedy on the same arrivals, run to the end; what went before is run to its end first."""
        if self.preset is None:
            raise ValueError("choose one of the three collapses first: a remedy belongs to one")
        if all(getattr(self.settings, name) == value for name, value in self.preset.remedy.items()):
            raise ValueError("the remedy is on already; choose the collapse again to see it without")
        self.run()
        if not self.over:
            raise ValueError(f"after {MOST_STEPS:,} steps not everybody was served; let fewer come, or a larger budget")
        other = self.changed(replace(self.settings, **self.preset.remedy))
        other.run()
        return other

    # ---- what came of it ----------------------------------------------------------------------------------------------------

    def numbers(self) -> Numbers:
        """How it went so far."""
        begun = [life for life in self.lives if life.first]
        waits = sorted(life.ttft for life in begun)
        many = [(life, out) for life, out in zip(self.lives, self._out) if out > 1]
        since = self.simulation.now - self.asked[0].at if self.lives else 0.0
        return Numbers(
            self._served(),
            len(self.lives),
            since,
            sum(self._out) / since if since > 0 else None,
            waits[math.ceil(0.95 * len(waits)) - 1] if waits else None,
            median((life.last - life.first) / (out - 1) for life, out in many) if many else None,
            max(life.gap for life, _ in many) if many else None,
            self._again,
            sum(life.job.preemptions for life in self.lives),
            self._taken / self._busy / self.settings.running if self._busy else None,
        )

    def _served(self) -> int:
        return sum(life.done for life in self.lives)

    def _fits(self, number: int, request: Request) -> None:
        """The simulation would refuse it too, but in the middle of a step."""
        grown, room = request.prompt + request.output, self.scheduler.longest
        if grown > room:
            raise ValueError(
                f"Request {number} would grow to {grown:,} tokens, and a pool of {self.settings.blocks} blocks with this watermark "
                f"has room for {room:,}: take more blocks, a lower watermark or shorter requests"
            )

    def _watch(self, tick: Tick) -> None:
        """Write down who did what in this step."""
        for life in self.lives[len(self.spans) :]:
            self._most.append(0)
            self._out.append(0)
            self.spans.append([Span("queued", life.request.at, life.request.at)])
        fed: set[Job] = set()
        self._talked = []
        for piece in tick.step.pieces:
            fed.add(piece.job)
            n, stop = piece.job.name, piece.start + piece.count
            twice = max(0, min(stop, self._most[n]) - piece.start)
            self._again += twice
            self._most[n] = max(self._most[n], stop)
            if (out := len(piece.job.tokens) - self.asked[n].prompt) > self._out[n]:
                self._out[n] = out
                self._talked.append(piece.job)
            self._mark(n, "again" if twice else "decode" if piece.decode else "prefill", tick)
        for job in self.scheduler.running:
            if job not in fed:
                self._mark(job.name, "held up", tick)
        for job in self.scheduler.waiting:
            self._mark(job.name, "preempted" if job.preemptions else "queued", tick)
        places = len(fed.union(self.scheduler.running))
        self._busy += tick.end - tick.start
        self._taken += places * (tick.end - tick.start)

    def _mark(self, n: int, kind: str, tick: Tick) -> None:
        spans = self.spans[n]
        if spans[-1].kind == kind:
            spans[-1] = Span(kind, spans[-1].start, tick.end)
        else:
            if spans[-1].kind == "queued":  # it came while a step ran, or just before this one
                spans[-1] = Span("queued", spans[-1].start, tick.start)
            spans.append(Span(kind, tick.start, tick.end))

    def _told(self, tick: Tick, came: int) -> str:
        """What one step did."""
        pieces = tick.step.pieces
        said = [f"{_many(came, 'request')} came"] if came else []
        said += [f"{_names([job])} found no room, gave its blocks back and waits" for job in tick.step.preempted]
        prompts = [piece for piece in pieces if not piece.decode]
        for twice in (False, True):
            if part := [piece for piece in prompts if bool(piece.job.preemptions) == twice]:
                what = "once more" if twice else f"of {'its prompt' if len(part) == 1 else 'their prompts'}"
                said.append(
                    f"{_names([piece.job for piece in part])} had {sum(piece.count for piece in part):,} tokens {what} computed"
                )
        if self._talked:
            said.append(f"{_names(self._talked)} got a token" + (" each" if len(self._talked) > 1 else ""))
        fed = {piece.job for piece in pieces}
        if held := [job for job in self.scheduler.running if job not in fed]:
            said.append(f"{_names(held)} ran and got none")
        if done := [piece.job for piece in pieces if piece.job.state != RUNNING]:
            said.append(f"{_names(done)} ended")
        text = "; ".join(said)
        return f"Step {self.steps}, {seconds(tick.end - tick.start)}: {text[:1].lower() + text[1:]}."


def arrivals(settings: Settings) -> list[Request]:
    """Who comes under these settings: the same for the same `COMING`."""
    draw = random.Random(settings.draw)
    kinds = [
        ("long" if i % 6 == 3 else "short") if settings.workload == "mixed" else settings.workload
        for i in range(settings.count)
    ]
    return poisson([_drawn(draw, kind, 0.0) for kind in kinds], settings.rate, settings.draw)


def started(number: int) -> Station:
    """The `number`-th collapse, 1 to 3, before its first step."""
    preset = PRESETS[number - 1]
    return Station(preset.settings, preset=preset)


def remedy_of(preset: Preset | None) -> str:
    """As in "watermark 0.1"; empty where there is none."""
    return ", ".join(f"{_called(name).lower()} {plain(value)}" for name, value in preset.remedy.items()) if preset else ""


def differences(old: Settings, new: Settings) -> dict[str, tuple[object, object]]:
    """The settings that are not the same, by what the reader calls them."""
    a, b = asdict(old), asdict(new)
    return {_called(name): (a[name], b[name]) for name in a if a[name] != b[name]}


def plain(value: object) -> str:
    """A setting as it is typed."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def seconds(time: float) -> str:
    """As in "7.9 ms" or "1.25 s"."""
    return f"{time:,.2f} s" if time >= 0.9995 else f"{1e3 * time:.0f} ms" if time >= 0.0995 else f"{1e3 * time:.1f} ms"


def _called(name: str) -> str:
    return LIMITS[name].called if name in LIMITS else CHOICES[name][0]


def _drawn(draw: random.Random, kind: str, at: float) -> Request:
    prompt, output = LENGTHS[kind]
    return Request(draw.randint(*prompt), draw.randint(*output), at)


def _number(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _names(jobs: Sequence[Job]) -> str:
    if len(jobs) > 4:
        return f"{len(jobs)} requests"
    names = [str(job.name + 1) for job in jobs]
    return f"request{'' if len(names) == 1 else 's'} {', '.join(names[:-1])}{' and ' * (len(names) > 1)}{names[-1]}"
