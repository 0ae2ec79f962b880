"""The scheduler as a game: three collapses that are there in the numbers, remedies that mend them, and a seat nobody falls out of."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.core.schedule import POLICIES
from kvlab.core.simulate import card_cost
from kvlab.core.station import (
    BLOCK,
    COMING,
    LENGTHS,
    LIMITS,
    PRESETS,
    WORKLOADS,
    Settings,
    Station,
    arrivals,
    remedy_of,
    started,
)
from kvlab.core.station_board import CHIPS, ROWS, board, numbers_table

DRAWS = range(1, 6)
SMALL = Settings("short", count=6, rate=100.0, blocks=16, running=4, budget=32)


def before_and_after(number, draw=None):
    """The numbers of a collapse and of its remedy, of the page's draw or of another one."""
    preset = PRESETS[number - 1]
    begun = started(number) if draw is None else Station(replace(preset.settings, draw=draw), preset=preset)
    mended = begun.remedied()
    return mended.before[1], mended.numbers()


# ---- the three collapses, and what mends them --------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", [None, *DRAWS])
def test_a_large_decode_batch_makes_every_token_wait_and_brings_next_to_no_throughput(draw):
    bad, good = before_and_after(1, draw)
    assert bad.token_time > 1.5 * good.token_time and bad.gap > 1.2 * good.gap
    assert good.tokens_per_second > 0.9 * bad.tokens_per_second
    assert good.ttft > bad.ttft  # who pays
    assert bad.again == good.again == 0  # nobody was preempted: it is the batch


def test_the_cap_lies_at_the_knee_where_more_places_bring_nothing():
    speed, wait = {}, {}
    for running in (38, 76, 153, 306):
        station = Station(replace(PRESETS[0].settings, running=running))
        station.run()
        speed[running], wait[running] = station.numbers().tokens_per_second, station.numbers().token_time
    assert PRESETS[0].remedy == {"running": int(card_cost().flat)}
    assert (
        speed[76] > 1.7 * speed[38] and wait[76] < 1.2 * wait[38]
    )  # below the knee twice the places is nearly twice the tokens
    assert speed[306] < 1.1 * speed[153] and wait[306] > 1.4 * wait[153]


@pytest.mark.parametrize("draw", [None, *DRAWS])
def test_prefill_first_silences_those_who_talk_and_a_shared_budget_does_not(draw):
    bad, good = before_and_after(2, draw)
    assert bad.gap > 0.1 and good.gap < 0.02  # seconds; a step of decoding alone takes 0.008
    assert good.token_time < bad.token_time
    assert good.tokens_per_second == pytest.approx(bad.tokens_per_second, rel=0.03)  # throughput does not show it


@pytest.mark.parametrize("draw", [None, *DRAWS])
def test_a_pool_without_a_watermark_computes_again_and_again_what_a_watermark_keeps(draw):
    bad, good = before_and_after(3, draw)
    assert bad.preemptions >= 7 and bad.again > 3000
    assert good.preemptions <= 1 and good.again < 0.2 * bad.again
    assert good.gap < 0.3 * bad.gap
    assert good.tokens_per_second > 0.94 * bad.tokens_per_second


def test_a_remedy_changes_one_setting_and_serves_the_same_arrivals():
    for number, preset in enumerate(PRESETS, 1):
        begun = started(number)
        begun.run(40)
        begun.send("short")
        mended = begun.remedied()
        assert len(preset.remedy) == 1 and mended.settings == replace(preset.settings, **preset.remedy)
        assert mended.asked == begun.asked and len(mended.asked) == preset.settings.count + 1
        assert mended.over and mended.before == (begun.settings, begun.numbers())
        text = numbers_table(mended)
        assert "before: " in text and f"now: {remedy_of(preset)}" in text
        with pytest.raises(ValueError, match="the remedy is on already"):
            mended.remedied()


def test_the_collapses_come_out_the_same_each_time():
    for number in (1, 2, 3):
        assert before_and_after(number) == before_and_after(number)


def test_without_a_collapse_there_is_no_remedy():
    with pytest.raises(ValueError, match="choose one of the three collapses first"):
        Station(SMALL).remedied()
    assert remedy_of(None) == ""


# ---- what a driver does ------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(POLICIES),
    st.integers(6, 20),
    st.sampled_from([0.0, 0.1, 0.3]),
    st.integers(1, 8),
    st.integers(1, 200),
    st.lists(st.sampled_from([1, 20, "short"]), max_size=12),
)
def test_the_picture_holds_at_each_move(policy, blocks, watermark, running, budget, moves):
    """Nobody is drawn twice or left out, every second of a life is in one span, no block is wrong, in the end all are served."""
    station = Station(Settings("short", 6, 100.0, 1, policy, blocks, watermark, running, budget))
    for move in [*moves, None]:
        assert (station.send(move) if isinstance(move, str) else station.run(move)).endswith(".")
        station.scheduler.manager.check()
        html = board(station)
        assert len(station.spans) == len(station.lives)
        for life, spans in zip(station.lives, station.spans):
            assert spans[0].start == life.request.at
            assert all(a.end == pytest.approx(b.start) for a, b in zip(spans, spans[1:]))
            assert life.last == pytest.approx(spans[-1].end) or not life.done
        if not station.over:
            assert html.count('class="owner-') == len(station.spans) + sum(min(n, CHIPS) for n in placed(station)) + held(
                station
            )
    assert station.over and station.numbers().served == 6 + moves.count("short")
    through, needed = sum(station.scheduler.served.values()), sum(life.job.written for life in station.lives)
    assert station.numbers().again == through - needed


def placed(station):
    """How many run, wait, and were preempted."""
    s = station.scheduler
    thrown = sum(job.preemptions > 0 for job in s.waiting)
    return len(s.running), thrown, len(s.waiting) - thrown


def held(station):
    manager = station.scheduler.manager
    return manager.num_blocks - manager.num_free_blocks


def test_a_step_is_told_in_a_sentence():
    station = started(3)
    assert (
        station.run(1)
        == "Step 1, 21.8 ms: 1 request came; request 1 had 421 tokens of its prompt computed; request 1 got a token."
    )
    assert station.run(1) == "Step 2, 7.9 ms: request 1 got a token."
    said = [station.run(1) for _ in range(200)]
    assert any("found no room, gave its blocks back and waits" in text for text in said)
    assert any("tokens once more computed" in text for text in said)
    assert station.run(20).startswith("20 steps, ")
    assert station.run().endswith("ended, 9 preemptions. Everybody has been served.")
    assert station.run(1) == "There is nothing left to do. Everybody has been served."


def test_those_who_run_and_get_no_token_are_named():
    station = started(2)
    said = [station.run(1) for _ in range(80)]
    assert any("of its prompt computed; requests" in text and text.endswith("ran and got none.") for text in said)
    assert any(span.kind == "held up" for spans in station.spans for span in spans)


def test_a_request_that_was_sent_comes_again_in_a_replay():
    station = Station(SMALL)
    station.run(5)
    assert station.send("short").startswith("A short request, ")
    station.run()
    again = station.changed(replace(SMALL, policy="decode first"))
    assert again.asked == station.asked and len(again.asked) == 7 and again.steps == 0
    assert again.before == (SMALL, station.numbers())
    again.run()
    assert [len(life.job.tokens) for life in again.lives] == [len(life.job.tokens) for life in station.lives]


def test_a_setting_that_decides_who_comes_draws_others_and_compares_with_nothing():
    station = started(3)
    station.run()
    for name, value in {"workload": "short", "count": 5, "rate": 3.0, "draw": 9}.items():
        assert name in COMING
        other = station.changed(replace(station.settings, **{name: value}))
        assert other.asked != station.asked and other.before is None and other.preset is None


def test_the_same_settings_draw_the_same_requests():
    for workload in WORKLOADS:
        drawn = arrivals(Settings(workload, blocks=1024))
        assert drawn == arrivals(Settings(workload, blocks=64)) and len(drawn) == 24
        kinds = {kind for kind, ((low, high), _) in LENGTHS.items() for one in drawn if low <= one.prompt <= high}
        assert kinds == ({"short", "long"} if workload == "mixed" else {workload})


# ---- what is typed wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ({"blocks": ""}, "Blocks in the pool must be a whole number from 1 to 1,024, not ''"),
        ({"blocks": "20.5"}, "Blocks in the pool must be a whole number from 1 to 1,024, not 20.5"),
        ({"rate": "0"}, "Arrivals a second must be a number from 0.1 to 1,000, not 0"),
        ({"rate": "nan"}, "Arrivals a second must be a number"),
        ({"watermark": "1"}, "Watermark must be a number from 0 to 0.9, not 1"),
        ({"policy": "fair"}, "Policy is 'fair'; choose one of mixed, prefill first, decode first"),
        ({"workload": ""}, "Workload is ''; choose one of short, medium, long, mixed"),
    ],
)
def test_a_bad_value_is_refused_in_the_readers_words(typed, said):
    with pytest.raises(ValueError, match=said):
        SMALL.typed(**typed)


def test_every_limit_holds_at_both_ends():
    for name, (_, least, most) in LIMITS.items():
        for value in (least, most):
            assert getattr(SMALL.typed(**{name: str(value)}), name) == value
        for value in (least - 1, most + 1):
            with pytest.raises(ValueError, match=LIMITS[name].called):
                SMALL.typed(**{name: str(value)})


def test_a_pool_too_small_for_a_request_is_refused_and_nothing_is_lost():
    station = Station(Settings())
    station.run(30)
    picture = board(station)
    with pytest.raises(
        ValueError, match=r"Request 4 would grow to 2,540 tokens, and a pool of 20 blocks .* has room for 1,280"
    ):
        station.changed(replace(station.settings, blocks=20))
    small = Station(SMALL)
    with pytest.raises(ValueError, match=f"Request 7 would grow to .* has room for {16 * BLOCK:,}: take more blocks"):
        small.send("long")
    with pytest.raises(ValueError, match="a request is short, medium, long, not 'huge'"):
        small.send("huge")
    assert board(station) == picture and len(small.asked) == 6


# ---- the picture -------------------------------------------------------------------------------------------------------------


class Outline(HTMLParser):
    """Tags that were opened and not closed, and the text that is read out for each row."""

    def __init__(self, html):
        super().__init__()
        self.open, self.text = [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_board_is_well_formed_before_within_and_at_the_end(number):
    station = started(number)
    for steps in (0, 1, 150, None):
        station.run(steps)
        outline = Outline(board(station))
        assert not outline.open
        assert board(station).count('class="kvs-bar"') == board(station).count("visually-hidden") <= ROWS
    assert "Everybody" not in "".join(outline.text) and "in the end" in outline.text


def test_where_more_come_than_can_be_drawn_the_picture_says_so():
    station = started(1)
    station.run()
    assert "One row in 13 is drawn, of 480." in board(station)
    station = started(1)
    station.run(100)
    assert "and 172 more" in board(station) and "data-small" in board(station)


def test_a_row_says_what_is_drawn():
    station = started(3)
    station.run(191)
    said = Outline(board(station)).text
    row = said[said.index("Simulated time, from the first arrival on.") :]
    told = row[row.index("14") + 1]
    assert told.startswith("queued ") and "preempted " in told and "decode " in told and "ended" not in told
