"""Lab 6, sharing a prefix: its checks, its faults, the recorded run, and what is concluded from it."""

import re
from dataclasses import replace
from pathlib import Path

import plotly.graph_objects as go
import pytest
import torch

from kvlab import claims, record
from kvlab.checks import Wrong
from kvlab.checks import prefix as checks
from kvlab.checks.prefix import key
from kvlab.core.sharing import Prompt, share
from kvlab.experiments import prefix, prefix_results, prefix_studies
from kvlab.experiments.serving import serve
from kvlab.faults import ZOO, fault
from kvlab.show import prefix as show

# ---- the checks: right answers, two ways each, none of them the library's own -------------------------------------------


def keys_by_loop(tokens, block_size, salt=None):
    keys, parent, block = [], None, []
    for token in tokens:
        block.append(token)
        if len(block) == block_size:
            parent = key(parent, block, salt if parent is None else None)
            keys.append(parent)
            block = []
    return keys


def keys_by_recursion(tokens, block_size, salt=None):
    full = len(tokens) // block_size
    if full == 0:
        return []
    before = keys_by_recursion(tokens[: (full - 1) * block_size], block_size, salt)
    last = tokens[(full - 1) * block_size : full * block_size]
    return [*before, key(before[-1], last) if before else key(None, last, salt)]


def find_by_loop(keys, index, num_tokens, block_size):
    blocks = []
    for n, k in enumerate(keys):
        if (n + 1) * block_size > num_tokens - 1:
            return blocks
        if index.get(k) is None:
            return blocks
        blocks.append(index[k])
    return blocks


def find_by_takewhile(keys, index, num_tokens, block_size):
    from itertools import takewhile

    allowed = len(range(block_size, num_tokens, block_size))
    return [index[k] for k in takewhile(index.__contains__, keys[:allowed])]


def positions_by_filter(num_tokens, num_cached):
    return [p for p in range(num_tokens) if p >= num_cached]


def positions_by_tensor(num_tokens, num_cached):
    return torch.arange(num_cached, num_tokens).tolist()


def shareable_by_blocks(first, second, block_size, same_salt=True):
    if not same_salt:
        return 0
    n = 0
    while n + block_size < len(second) and n + block_size <= len(first):
        if first[n : n + block_size] != second[n : n + block_size]:
            break
        n += block_size
    return n


def shareable_by_keys(first, second, block_size, same_salt=True):
    index = {k: n for n, k in enumerate(keys_by_loop(first, block_size, "x"))}
    keys = keys_by_loop(second, block_size, "x" if same_salt else "y")
    return len(find_by_loop(keys, index, len(second), block_size)) * block_size


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        (checks.BLOCK_KEYS, keys_by_loop),
        (checks.BLOCK_KEYS, keys_by_recursion),
        (checks.FIND_PREFIX, find_by_loop),
        (checks.FIND_PREFIX, find_by_takewhile),
        (checks.SUFFIX_POSITIONS, positions_by_filter),
        (checks.SUFFIX_POSITIONS, positions_by_tensor),
        (checks.SHAREABLE, shareable_by_blocks),
        (checks.SHAREABLE, shareable_by_keys),
    ],
)
def test_right_answers_pass(exercise, answer, capsys):
    exercise.check(answer)
    assert "right" in capsys.readouterr().out


# ---- wrong answers, written as somebody might ---------------------------------------------------------------------------


def hash_of_the_block(tokens, block_size, salt=None):
    return [
        key(None, tokens[i : i + block_size], salt if i == 0 else None)
        for i in range(0, len(tokens) - block_size + 1, block_size)
    ]


def partial_block_too(tokens, block_size, salt=None):
    keys, parent = [], None
    for i in range(0, len(tokens), block_size):
        parent = key(parent, tokens[i : i + block_size], salt if i == 0 else None)
        keys.append(parent)
    return keys


def forgets_the_salt(tokens, block_size, salt=None):
    return keys_by_loop(tokens, block_size)


def hits_everything(keys, index, num_tokens, block_size):
    found = []
    for k in keys:
        if k not in index:
            break
        found.append(index[k])
    return found


def skips_holes(keys, index, num_tokens, block_size):
    return [index[k] for k in keys if k in index][: (num_tokens - 1) // block_size]


def from_zero(num_tokens, num_cached):
    return [n for n in range(num_tokens - num_cached)]  # noqa: C416


def one_late(num_tokens, num_cached):
    return [n + num_cached + 1 for n in range(num_tokens - num_cached)]


def not_rounded(first, second, block_size, same_salt=True):
    n = 0
    while n < min(len(first), len(second) - 1) and first[n] == second[n]:
        n += 1
    return n if same_salt else 0


def rounded_up(first, second, block_size, same_salt=True):
    n = not_rounded(first, second, block_size)
    blocks = (n + block_size - 1) // block_size if n == len(second) - 1 or n % block_size else n // block_size
    return min(blocks, (len(second) - 1) // block_size) * block_size if same_salt else 0


def whole_prompt(first, second, block_size, same_salt=True):
    n = 0
    while n < min(len(first), len(second)) and first[n] == second[n]:
        n += 1
    return n - n % block_size if same_salt else 0


def salt_unread(first, second, block_size, same_salt=True):
    return shareable_by_blocks(first, second, block_size)


@pytest.mark.parametrize(
    ("exercise", "answer", "says"),
    [
        (checks.BLOCK_KEYS, hash_of_the_block, "not chained"),
        (checks.BLOCK_KEYS, partial_block_too, "not full"),
        (checks.BLOCK_KEYS, forgets_the_salt, "salt is left out"),
        (checks.FIND_PREFIX, hits_everything, "at least the last token"),
        (checks.FIND_PREFIX, skips_holes, "hole"),
        (checks.FIND_PREFIX, lambda *a: find_by_loop(*a)[:-1], "always drops"),
        (checks.SUFFIX_POSITIONS, from_zero, "behind the prefix"),
        (checks.SUFFIX_POSITIONS, one_late, "one too late"),
        (checks.SUFFIX_POSITIONS, lambda n, c: n - c, "gave"),
        (checks.SHAREABLE, not_rounded, "whole blocks"),
        (checks.SHAREABLE, rounded_up, "rounds up"),
        (checks.SHAREABLE, whole_prompt, "last token must be computed"),
        (checks.SHAREABLE, salt_unread, "across salts"),
        (checks.SHAREABLE, lambda *a: None, "is there a return?"),
    ],
)
def test_wrong_answers_are_told_why(exercise, answer, says):
    with pytest.raises(Wrong, match=re.escape(says)):
        exercise.check(answer)


# ---- the arms, small, on the model --------------------------------------------------------------------------------------

SMALL = prefix.Sizes(prefix=64, suffix=32, new=3, pairs=1, requests=3, long=96, many=10)


@pytest.fixture(scope="module")
def pair(loaded):
    return prefix.make_pairs(loaded.tokenizer, SMALL)[0]


@pytest.fixture(scope="module")
def outcomes(loaded, pair):
    return {name: prefix.run_arm(loaded, arm, pair, SMALL.new) for name, arm in prefix.ARMS.items()}


@pytest.fixture(scope="module")
def epsilon(loaded, pair, outcomes):
    return prefix.epsilon_of(prefix.healthy_rows(loaded, pair, outcomes["3 isolated"], SMALL.new))


def verdicts(outcomes, epsilon, name):
    rows = prefix.differences(outcomes[prefix.reference_of(prefix.ARMS[name])], outcomes[name])
    return {who: prefix.verdict_of(row, epsilon) for who, row in rows.items()}


@pytest.mark.model
@pytest.mark.parametrize("name", [n for n, arm in prefix.ARMS.items() if arm.kind == "right"])
def test_shared_rightly_is_noise(outcomes, epsilon, name):
    assert {v.kind for v in verdicts(outcomes, epsilon, name).values()} <= {"identical", "noise"}
    assert outcomes[name].check is None


@pytest.mark.model
@pytest.mark.parametrize("name", [n for n, arm in prefix.ARMS.items() if arm.kind == "wrong"])
def test_shared_wrongly_is_caught(outcomes, epsilon, name):
    found = verdicts(outcomes, epsilon, name)
    assert any(v.kind == "state fault" for v in found.values())
    named = prefix.ARMS[name].fault
    if named and ZOO[named].breaks.split(":")[1].split(".")[0] in ("PrefixIndex", "BlockManager"):
        assert outcomes[name].check, "the audit sees it too"
    families = {v.family for v in found.values() if v.kind == "state fault"}
    if named and named != "no-copy-on-write":  # its log is in order: the onset leaves two families open
        assert families == {ZOO[named].family}


@pytest.mark.model
def test_the_isolated_twins_share_nothing_and_the_right_arms_do(outcomes, pair):
    for name, outcome in outcomes.items():
        if prefix.ARMS[name].kind == "isolated":
            assert all(s.computed == len(s.trace.prompt) for s in outcome.served.values()), name
    requests = prefix.requests_of(3, pair)
    for group in (1, 2, 3, 4, 5):
        requests = prefix.requests_of(group, pair)
        found = share(Prompt(requests["A"]), Prompt(requests["B"]), prefix.BLOCK)
        assert outcomes[f"{group} shared"].served["B"].computed == found.computed
    assert outcomes["2 shared"].served["B"].computed == len(prefix.requests_of(2, pair)["B"])


@pytest.mark.model
def test_who_is_hurt_by_the_written_block(outcomes, epsilon):
    found = verdicts(outcomes, epsilon, "3½ shared block written")
    assert found["A"].kind == "state fault" and found["B"].kind != "state fault"


@pytest.mark.model
def test_every_fault_of_this_lab_has_an_arm_and_is_off_afterwards(outcomes):
    used = {arm.fault for arm in prefix.ARMS.values() if arm.fault}
    module = {name for name, entry in ZOO.items() if entry.broken.__module__ == "kvlab.faults.prefix"}
    assert module <= used
    assert all(ZOO[name].cases and ZOO[name].detector for name in module)


@pytest.mark.model
def test_isolation_is_a_pair_same_salt_hits_other_salt_misses(loaded, pair):
    """A miss-only test passes with the cache off; a cold/warm test needs the hit counter."""
    ids = pair.prefix + pair.ask
    pool = prefix.make_pool(loaded, dict.fromkeys(range(3), ids), 1)

    def admit_as(salt):
        return lambda pool, name, ids: pool.manager.allocate(name, ids, salt=salt)

    computed = []
    for name, salt in (("cold", "x"), ("warm", "x"), ("stranger", "y")):
        computed.append(serve(loaded, pool, {name: ids}, 1, admit=admit_as(salt))[name].computed)
    assert computed == [len(ids), prefix.BLOCK, len(ids)]


@pytest.mark.model
def test_the_readers_functions_carry_the_model(loaded, pair, outcomes, epsilon):
    requests = prefix.requests_of(3, pair)
    mine = {"block_keys": keys_by_loop, "find_prefix": find_by_takewhile, "suffix_positions": positions_by_filter}
    pool = prefix.WrittenPool(loaded.spec, 20, **mine)
    served = serve(loaded, pool, requests, SMALL.new)
    assert {n: s.computed for n, s in served.items()} == {n: s.computed for n, s in outcomes["3 shared"].served.items()}
    rows = prefix.differences(outcomes["3 isolated"], prefix.Outcome(served, 0))
    assert prefix.verdict_of(rows["B"], epsilon).kind != "state fault"
    pool.manager.check()
    shifted = prefix.requests_of(2, pair)
    for keys, kind in ((keys_by_loop, "noise"), (hash_of_the_block, "state fault")):
        served = serve(loaded, prefix.WrittenPool(loaded.spec, 20, **mine | {"block_keys": keys}), shifted, 2)
        rows = prefix.differences(outcomes["2 isolated"], prefix.Outcome(served, 0))
        assert (prefix.verdict_of(rows["B"], epsilon).kind == "state fault") == (kind == "state fault")


@pytest.mark.model
def test_moved_keys_are_turned_by_the_models_own_rotation(loaded, pair):
    """In the first layer nothing but the position differs: turned back, the keys are those of position 0."""
    tell, ids = pair.tell, pair.prefix
    turned = prefix.moved(loaded, prefix.prefill(loaded, tell + ids), len(tell), len(tell) + len(ids))
    plain = prefix.prefill(loaded, ids)
    assert torch.allclose(turned.layers[0].keys, plain.layers[0].keys, atol=1e-3)
    assert not torch.allclose(turned.layers[5].keys, plain.layers[5].keys, atol=0.1)


@pytest.mark.model
def test_the_studies_run_small_and_leave_the_model_as_it_was(loaded):
    before = loaded.model.lm_head.weight.sum().item(), next(loaded.model.parameters()).sum().item()
    for name, part in prefix_studies.parts(loaded, SMALL).items():
        if name not in ("block_sizes", "turns", "joins"):
            assert part(), name
    assert before == (loaded.model.lm_head.weight.sum().item(), next(loaded.model.parameters()).sum().item())


# ---- the recorded run ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    return record.load("prefix")


def test_the_run_covers_what_it_must(run):
    s = run.manifest.settings
    assert (s["prefix"], s["suffix"], s["requests"], s["long"], s["many"]) == (512, 32, 16, 2000, 100)
    assert all(list(pair["arms"]) == list(prefix.ARMS) for pair in run.data["pairs"])
    assert run.manifest.command == "kvlab run prefix"


def test_the_expected_figures(run):
    """512 shared and 32 new: at most 48 tokens computed, TTFT at least 5 times lower, the shared part under 20 % of isolated's."""
    found = prefix_results.arms(run)
    assert found["3 shared"]["computed"] <= 48 and found["3½ hit rounded up"]["length"] == 552
    assert all(row["computed"] <= 48 for row in run.data["boundary"]["checked"])
    assert found["3 shared"]["ttft"] <= 1 / 5
    together = run.data["together"]
    assert together["shared"]["prefix_bytes"] < 0.2 * together["isolated"]["prefix_bytes"]
    assert max(together["shared"]["computed"][1:]) <= 48


def test_right_and_wrong_lie_apart(run):
    bound = prefix_results.epsilon(run)
    assert all(f["faults"] == 0 for f in prefix_results.right(run))
    assert all(f["faults"] == f["pairs"] for f in prefix_results.wrong(run))
    assert min(f["delta"][0] for f in prefix_results.wrong(run)) > 100 * bound
    assert prefix_results.arms(run)["3 saved cache, the object itself"]["leaks"] >= 1
    assert not any(f["leaks"] for f in prefix_results.right(run))


@pytest.mark.model
def test_the_recorded_arms_are_what_the_code_gives(loaded, run):
    sizes = prefix.Sizes(**run.manifest.settings)
    pair = prefix.make_pairs(loaded.tokenizer, sizes)[0]
    kept = run.data["pairs"][0]["arms"]
    new = run.manifest.settings["new"]  # A's answer is part of what a shared object holds
    isolated = prefix.run_arm(loaded, prefix.ARMS["3 isolated"], pair, new)
    bound = prefix_results.epsilon(run)
    for name in ("3 shared", "3 saved cache, the object itself"):
        outcome = prefix.run_arm(loaded, prefix.ARMS[name], pair, new)
        row, recorded = prefix.differences(isolated, outcome)["B"], kept[name]["requests"]["B"]
        assert outcome.served["B"].computed == recorded["computed"]
        if prefix.ARMS[name].kind == "right":
            assert max(row[2]) <= 5 * bound
        else:
            assert row[2][0] == pytest.approx(recorded["row"][2][0], rel=0.01) and row[4] == recorded["row"][4]


@pytest.mark.model
def test_the_recorded_bookkeeping_is_what_the_code_gives(loaded, run):
    assert prefix_studies.life() == run.data["life"]
    assert prefix_studies.edits(loaded.tokenizer) == run.data["edits"]
    assert prefix_studies.block_sizes() == run.data["block_sizes"]
    assert prefix_studies.workload(count=5) == prefix_studies.workload()[:5]


def test_every_claim_of_the_lab_has_a_verdict(run):
    given = {v.claim: v for v in claims.verdicts(6)}
    wanted = ["B3", "B4", "B5", "B7", "B8", "B11", "B12", "B13", "B16", "B17", "B20", "B21", "B23", "C8"]
    assert set(wanted) <= set(given)
    assert all(6 in claims.claims()[claim].labs and v.run == "prefix" for claim, v in given.items())
    assert given["B5"].kind == "refuted" and given["B12"].kind == "confirmed" and given["C8"].kind == "confirmed"


def test_verdicts_follow_the_run(run, monkeypatch):
    """A run in which sharing had gone wrong would say so."""
    broken = replace(run, data={**run.data, "pairs": [{**pair, "arms": dict(pair["arms"])} for pair in run.data["pairs"]]})
    for pair in broken.data["pairs"]:
        pair["arms"]["3 shared"] = pair["arms"]["3 suffix positions from 0"]
        pair["arms"]["4 blocks not verified"] = pair["arms"]["4 shared"]
    recorded = record.load
    monkeypatch.setattr(record, "load", lambda name: broken if name == "prefix" else recorded(name))
    given = {v.claim: v.kind for v in claims.verdicts(6)}
    assert given["B5"] != "refuted" and given["B4"] == "refuted" and given["B10"] == "refuted" and given["B8"] == "refuted"


# ---- figures and the chapter --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("figure", ["deltas", "memory", "waiting", "block_size", "boundary", "edits"])
def test_figures_have_data_and_a_name(run, figure):
    fig = getattr(show, figure)(run)
    assert isinstance(fig, go.Figure) and len(fig.data) >= 1 and len(fig.layout.meta["alt"]) > 40
    assert all(len(trace.x) and len(trace.y) for trace in fig.data)


TABLES = ["report", "groups", "texts", "decision", "same_kv", "joins", "siblings", "life", "long"]


@pytest.mark.parametrize("table", TABLES)
def test_tables_are_whole(run, table):
    lines = getattr(show, f"{table}_table")(run).splitlines()
    columns = {len(re.findall(r"(?<!\\)\|", line)) for line in lines}
    assert len(lines) > 3 and len(columns) == 1


def test_the_chapter_finds_every_number_it_says(run):
    text = (Path(prefix.__file__).parents[2] / "book" / "06-prefix.md").read_text(encoding="utf-8")
    used = set(re.findall(r"\{glue:text\}`(\w+)`", text)) - {"manifest"}
    facts = show.facts(run)
    assert used <= set(facts) and all(isinstance(value, str) and value for value in facts.values())


def test_by_hand_copies_are_copies():
    class Cache:
        def __init__(self):
            self.kept = [1]

    cache = Cache()
    assert prefix.hand_over(cache) is not cache and prefix.hand_over(cache).kept is not cache.kept
    with fault("prefix-cache-aliased"):
        assert prefix.hand_over(cache) is cache
