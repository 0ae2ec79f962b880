"""Lab 5: its checks, the functions by hand, the owner scan, the scenes on the real model, the recorded run."""

from functools import partial

import pytest

from kvlab import record
from kvlab.checks import Wrong
from kvlab.checks import blocks as checks
from kvlab.compare import compare
from kvlab.core import workload
from kvlab.core.blocks import BlockCopy, BlockManager, InvariantError, OutOfBlocks, UnknownSequence
from kvlab.core.scan import FOUND, HANDED_OUT, WRITTEN, owner_scan
from kvlab.core.trace import Trace as Log
from kvlab.experiments import blocks, bookkeeping
from kvlab.experiments.byhand import ByHand
from kvlab.faults import ZOO, fault

# ---- the checks ------------------------------------------------------------------------------------------------------


def allocate_by_loop(pool, seq, num_tokens, hits=()):
    table = []
    total = (num_tokens + pool.block_size - 1) // pool.block_size
    idle = [block for block in hits if not pool.ref_count[block]]
    if total - len(hits) + len(idle) > pool.num_free:
        raise OutOfBlocks("no")
    for block in hits:
        pool.ref_count[block] = pool.ref_count[block] + 1
        table.append(block)
    while len(table) < total:
        table.append(pool.take())
    pool.lengths[seq] = num_tokens
    pool.tables[seq] = table


def share_by_loop(pool, src, dst, prefix_len):
    table, covered = [], 0
    for block in pool.tables[src]:
        if covered >= prefix_len:
            break
        table.append(block)
        pool.ref_count[block] += 1
        covered += pool.block_size
    pool.tables[dst] = table
    pool.lengths[dst] = prefix_len


def append_by_cases(pool, seq):
    used = pool.lengths[seq] % pool.block_size
    last = pool.tables[seq][-1]
    if used and pool.ref_count[last] == 1:
        pool.lengths[seq] += 1
        return None
    if not pool.num_free:
        raise OutOfBlocks("no")
    new = pool.take()
    pool.lengths[seq] += 1
    if not used:
        pool.tables[seq].append(new)
        return None
    pool.ref_count[last] -= 1
    pool.tables[seq] = [*pool.tables[seq][:-1], new]
    return last, new


def free_in_order(pool, seq):
    del pool.lengths[seq]
    table = pool.tables.pop(seq)
    for block in table:
        pool.ref_count[block] -= 1
    pool.free += [block for block in table if not pool.ref_count[block] and block not in pool.keys]


def evict_by_sort(pool):
    idle = [block for block in pool.keys if pool.ref_count[block] == 0]
    block = sorted(idle, key=pool.last_access.__getitem__)[0]
    key = pool.keys[block]
    del pool.keys[block], pool.index[key]
    return block


RIGHT = {
    "allocate": allocate_by_loop,
    "share_prefix": share_by_loop,
    "append_token": append_by_cases,
    "free": free_in_order,
    "evict": evict_by_sort,
}


@pytest.mark.parametrize("exercise", checks.EXERCISES, ids=lambda e: e.name)
def test_right_answers_pass_however_they_are_written(exercise, capsys):
    for answer in (exercise.right, RIGHT[exercise.name]):
        exercise.check(answer)
    assert capsys.readouterr().out.count("right") == 2


@pytest.mark.parametrize("exercise", checks.EXERCISES, ids=lambda e: e.name)
def test_what_was_raised_is_said(exercise):
    with pytest.raises(Wrong, match="raised ZeroDivisionError"):
        exercise.check(lambda pool, *arguments: 1 / 0)


def test_an_answer_that_is_wrong_in_a_new_way_is_shown_the_case():
    with pytest.raises(Wrong) as told:
        checks.ALLOCATE.check(lambda pool, seq, num_tokens, hits=(): pool.tables.update({seq: [3, 2]}))
    call, *lines = str(told.value).splitlines()
    assert call.endswith("free=[3, 2, 1, 0]>, 'ada', 6):")
    assert lines == [  # what differs, and nothing else
        "  tables: got {'ada': [3, 2]}, should be {'ada': [0, 1]}",
        "  ref_count: got [0, 0, 0, 0], should be [1, 1, 0, 0]",
        "  free (sorted): got [0, 1, 2, 3], should be [2, 3]",
        "  lengths: got {}, should be {'ada': 6}",
    ]


def allocate_unasked_and_uncounted(pool, seq, num_tokens, hits=()):
    pool.tables[seq] = list(hits) + [pool.take() for _ in range(pool.blocks_for(num_tokens) - len(hits))]
    pool.lengths[seq] = num_tokens


def share_and_trim(pool, src, dst, prefix_len):
    del pool.tables[src][pool.blocks_for(prefix_len) :]
    return pool.tables.update({dst: pool.tables[src]})


def append_and_count_when_there_is_no_room(pool, seq):
    pool.lengths[seq] += 1
    if not pool.num_free:
        raise OutOfBlocks
    pool.lengths[seq] -= 1
    return append_by_cases(pool, seq)


def free_all(pool, seq):
    for block in pool.tables.pop(seq):
        pool.ref_count[block] -= 1
        pool.free.append(block)
    del pool.lengths[seq]


def evict_into_the_free_list(pool):
    pool.free.append(evict_by_sort(pool))


@pytest.mark.parametrize(
    ("exercise", "answer", "says"),
    [
        (checks.ALLOCATE, allocate_unasked_and_uncounted, "OutOfBlocks has to be raised, before anything is changed"),
        (checks.SHARE_PREFIX, share_and_trim, "tables that are one list object: got ['ben', 'ada'], should be []"),
        (checks.APPEND_TOKEN, append_and_count_when_there_is_no_room, "although no block is needed"),
        (checks.FREE, free_all, "frees the block in any case"),
        (checks.EVICT, evict_into_the_free_list, "into pool.free as well"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_mistakes_in_other_words_are_said(exercise, answer, says):
    with pytest.raises(Wrong) as told:
        exercise.check(answer)
    assert says in str(told.value) and "99" not in str(told.value)


# ---- by hand ---------------------------------------------------------------------------------------------------------


def by_hand(**functions):
    return partial(ByHand, **{**RIGHT, **functions})


@pytest.mark.parametrize("manager", [ByHand, by_hand()], ids=["worked", "written differently"])
def test_the_five_functions_do_what_the_block_manager_does_block_by_block(manager):
    ours, theirs = bookkeeping.working_day(seed=11), bookkeeping.working_day(seed=11, manager=manager)
    assert ours["requests"] == theirs["requests"] > 15 and ours["turned_away"] == theirs["turned_away"]
    if manager is ByHand:  # the order of the free list is the same too, so every block is
        assert ours["states"] == theirs["states"]
    for a, b in zip(ours["states"], theirs["states"], strict=True):
        assert sorted(a) == sorted(b)


def test_by_hand_copies_before_a_shared_block_is_written():
    m = ByHand(8, 4)
    m.allocate("a", [1, 2, 3, 4, 5, 6])
    m.fork("a", "b")
    assert m.append("b", [7, 8, 9]) == [BlockCopy(1, 2)] and m.block_table("b") == [0, 2, 3]
    assert m.append("a", [7]) == [] and m.tokens("a")[-1] == 7
    m.check()
    assert owner_scan(m.trace) == []


def test_by_hand_fails_without_a_change():
    m = ByHand(2, 4)
    m.allocate("a", [1, 2, 3, 4, 5, 6])
    m.fork("a", "b")
    before = (m.pool.tables, list(m.pool.ref_count), list(m.pool.free), m.tokens("a"), m.tokens("b"))
    for call in (lambda: m.append("b", [7]), lambda: m.append("a", [7] * 9), lambda: m.allocate("c", [1] * 9)):
        with pytest.raises(OutOfBlocks):
            call()
        assert before == (m.pool.tables, list(m.pool.ref_count), list(m.pool.free), m.tokens("a"), m.tokens("b"))
    assert not m.can_allocate([1] * 9)
    with pytest.raises(UnknownSequence):
        m.free("nobody")
    with pytest.raises(ValueError, match="exists"):
        m.allocate("a", [1])
    with pytest.raises(ValueError, match="prefix_len"):
        m.share_prefix("a", "c", 7)


def test_by_hand_forgets_what_a_findable_block_held_when_it_is_written():
    m = ByHand(8, 4)
    m.allocate("a", [1, 2, 3, 4, 5])
    m.commit("a", 5)
    m.share_prefix("a", "b", 3)
    m.free("a")
    m.append("b", [9])
    assert m.allocate("c", [1, 2, 3, 4, 5]).num_cached_tokens == 0
    m.check()


def mistake(exercise, words):
    return next(mistake.code for mistake in exercise.mistakes if words in mistake.says)


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        ({"free": lambda pool, seq: (pool.tables.pop(seq), pool.lengths.pop(seq))}, "references"),
        ({"share_prefix": mistake(checks.SHARE_PREFIX, "does not raise ref_count")}, "references"),
        ({"free": mistake(checks.FREE, "puts a findable block")}, "pool"),
        ({"evict": mistake(checks.EVICT, "forgets pool.index")}, "index"),
    ],
)
def test_its_audit_names_a_broken_rule(broken, rule):
    with pytest.raises(InvariantError) as error:
        bookkeeping.working_day(manager=partial(ByHand, **broken))
    assert error.value.rule == rule


# ---- the owner scan --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_the_scan_is_quiet_on_a_healthy_day(seed):
    log = Log()
    bookkeeping.working_day(seed=seed, manager=lambda *size, trace: BlockManager(*size, trace=log))
    assert {"hit", "copy", "share", "evict", "release"} <= {event.what for event in log}
    assert owner_scan(log) == []


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("no-copy-on-write", WRITTEN),
        ("fork-without-reference", HANDED_OUT),
        ("freed-on-cancel", HANDED_OUT),
        ("stale-hash", FOUND),
    ],
)
def test_the_scan_and_the_audit_find_each_fault_on_a_working_day(name, rule, monkeypatch):
    log = Log()
    with fault(name), pytest.raises(InvariantError):
        bookkeeping.working_day(manager=lambda *size, trace: BlockManager(*size, trace=log))
    log = Log()
    monkeypatch.setattr(BlockManager, "check", lambda self: None)
    with fault(name):
        try:
            bookkeeping.working_day(manager=lambda *size, trace: BlockManager(*size, trace=log))
        except (KeyError, IndexError, AttributeError):
            pass  # bookkeeping that contradicts itself may fall over; what is in the log counts
    assert rule in {finding.rule for finding in owner_scan(log)}


def test_a_finding_names_the_block_the_writer_and_the_others():
    log = Log()
    log.log("reserve", "ben", block=3)
    log.log("share", "cyd", block=3)
    log.log("append", "ada", block=3)
    (finding,) = owner_scan(log)
    assert (finding.rule, finding.block, finding.request_id, finding.others) == (HANDED_OUT, 3, "ada", ("ben", "cyd"))
    assert str(finding) == "block 3 was handed out while held: by ada (held by ben, cyd), line 3 of the log"


# ---- a leaking count -------------------------------------------------------------------------------------------------


def test_a_leaked_reference_fills_the_pool_and_no_table_names_what_is_lost():
    healthy, sick = bookkeeping.leaking(True, False), bookkeeping.leaking(True, True)
    assert healthy["served"] == 120 and healthy["complaint"] is None and all(block[3] for block in healthy["blocks"])
    assert sick["served"] < 120 and sick["held"][-1] > 2 * max(healthy["held"])
    assert "references" in sick["complaint"]["says"]
    lost = [block for block in sick["blocks"] if not block[3]]
    oldest_live = min(block[2] for block in sick["blocks"] if block[3])
    assert len(lost) > 100 and sum(block[2] < oldest_live for block in lost) > 0.9 * len(lost)


def test_without_sharing_there_is_nothing_to_leak():
    assert bookkeeping.leaking(False, True)["held"] == bookkeeping.leaking(False, False)["held"]


# ---- on the real model -----------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize("name", blocks.SCENES)
def test_each_fault_makes_ben_say_adas_password_and_nothing_else_does(loaded, name):
    healthy, sick = (blocks.play(loaded, name, broken, new_tokens=9) for broken in (False, True))
    secret = blocks.secrets(1)[0]
    reference = blocks.alone(loaded, healthy)
    assert compare(reference, healthy.trace).delta < 1e-4 and healthy.trace.tokens == reference.tokens
    assert blocks.said(secret, healthy.text) == "none" and healthy.complaint is None and healthy.findings == []
    assert sick.victim.startswith("ben") and sick.trace.prompt == healthy.trace.prompt
    assert blocks.said(secret, sick.text) == "all" and compare(reference, sick.trace).delta > 1
    assert sick.complaint["rule"] in ZOO[name].detector and sick.findings


@pytest.mark.model
def test_the_model_on_five_functions_by_hand(loaded):
    from kvlab.runtime.decode import greedy

    rows = [
        list(loaded.tokenizer(text)["input_ids"]) for text in ("The door code is 4711. Once more, the door code is", "A b c d")
    ]
    reference = [greedy(loaded, [row], 3)[0] for row in rows]
    for arm, traces in blocks.paged_arms(loaded, rows, 3, manager=by_hand()).items():
        for a, b in zip(reference, traces, strict=True):
            assert compare(a, b).delta < 1e-4 and a.tokens == b.tokens, arm


@pytest.mark.model
def test_one_line_less_in_a_readers_code_and_ben_says_it(loaded):
    careless = by_hand(append_token=mistake(checks.APPEND_TOKEN, "another table names"))
    told = blocks.play(loaded, "no-copy-on-write", False, manager=careless, new_tokens=9)
    assert blocks.said(blocks.secrets(1)[0], told.text) == "all" and told.findings[0].startswith(
        "block 1 was written while shared"
    )
    careful = blocks.play(loaded, "no-copy-on-write", False, manager=by_hand(), new_tokens=9)
    assert blocks.said(blocks.secrets(1)[0], careful.text) == "none" and careful.findings == []


def test_said_tells_all_from_part_from_none():
    assert blocks.said("WBFD-5736", "It is WBFD-5736.") == "all"
    assert blocks.said("WBFD-5736", "It is 5736") == "part"
    assert blocks.said("WBFD-5736", "It is 123456") == "none"


# ---- the recorded run ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    return record.load("blocks")


def test_the_recorded_bookkeeping_is_what_the_code_does(run):
    assert run.data["day"] == bookkeeping.working_day()
    assert run.data["leak"]["sharing, leaking"] == bookkeeping.leaking(True, True)
    recorded = run.data["utilisation"]["ShareGPT"]["1.0"]["oracle"]
    again = bookkeeping._usage(
        blocks.allocators.simulate(
            "oracle",
            workload.requests("ShareGPT", bookkeeping.REQUESTS, 1.0, bookkeeping.SEED),
            steps=run.manifest.settings["steps"],
        )
    )
    assert {key: recorded[key] for key in again} == again


BEFORE_BEN_ASKS = {
    "no-copy-on-write": "ada goes on",
    "fork-without-reference": "ben is forked into ben's second sample",
    "freed-on-cancel": "ben's second sample is cancelled",
    "stale-hash": "ada starts",
}


def test_the_recorded_run_holds_what_the_chapter_says(run):
    equal, scenes = run.data["equal"], run.data["scenes"]
    assert set(scenes) == set(blocks.SCENES) and equal["block_bytes"]["measured"] == equal["block_bytes"]["predicted"]
    for arm in equal["arms"].values():
        assert arm["delta"] <= equal["epsilon"] and arm["flips"] == 0
    for name, scene in scenes.items():
        for row in scene["rows"]:
            assert row["healthy"]["delta"] <= equal["epsilon"] < 1 < row["sick"]["delta"], (name, row)
            assert row["healthy"]["said"] == "none" and not row["healthy_caught"]
            assert row["complaint"]["rule"] in ZOO[name].detector and row["findings"]
            assert row["complaint"]["when"] == BEFORE_BEN_ASKS[name]
        assert sum(row["sick"]["said"] != "none" for row in scene["rows"]) > len(scene["rows"]) / 2, name


def test_every_claim_of_the_lab_has_a_verdict_from_the_run(run):
    from kvlab import claims

    found = {verdict.claim: verdict for verdict in claims.verdicts(5)}
    assert set(found) == {"B6", "B15", "B18", "B23", "C1", "C7", "C9", "C15", "C18", "C21", "C24"}
    assert all(5 in claims.claims()[claim].labs for claim in found)
    assert all("nan" not in verdict.finding for verdict in found.values())


def test_the_figures_are_drawn_from_the_run(run):
    from kvlab.show import blocks as show

    figures = [show.pool_map(run), show.utilisation(run), show.sweep(run), show.leak(run), show.separation(run)]
    for figure in figures:
        assert figure.layout.meta["alt"] and len(figure.data)
    frames = figures[0].frames
    assert len(frames) == len(run.data["day"]["states"]) == len(figures[0].layout.sliders[0].steps)
    assert "block 0" in frames[-1].data[0].hovertext[0][0] and "tick" in frames[-1].data[0].hovertext[0][0]
    shown = [bar for bar in figures[1].data if bar.visible and bar.type == "bar"]
    totals = [sum(values) for values in zip(*(bar.x for bar in shown))]
    assert totals == pytest.approx([1] * 4, abs=2e-3)
    assert all(text for text in show.facts(run).values())
    for table in (show.equal_table(run), show.scenes_table(run), show.zoo_table(), show.spreads_table(run)):
        assert len({line.replace("\\|", "").count("|") for line in table.splitlines()}) == 1
