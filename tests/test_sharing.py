"""The sharing policy: it says what the block manager does, its reasons add up, and bad input is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import cli
from kvlab.core.blocks import BlockManager
from kvlab.core.sharing import Overlap, Prompt, checklist, common_prefix, share

LONG = list(range(100, 164))  # 64 tokens, four blocks of 16


def rules(found):
    return [(limit.rule, limit.costs) for limit in found.limits]


def test_a_shared_beginning_in_whole_blocks():
    found = share(Prompt(LONG + [1, 2]), Prompt(LONG[:40] + [7] * 10))
    assert (found.tokens, found.blocks, found.common, found.computed) == (32, 2, 40, 18)
    assert rules(found) == [("tokens", 10), ("whole blocks", 8)]
    assert "position 40" in found.limits[0].why and "140 against 7" in found.limits[0].why


def test_the_last_token_is_never_shared():
    assert rules(share(Prompt(LONG), Prompt(LONG))) == [("last token", 16)]
    assert share(Prompt(LONG), Prompt(LONG)).tokens == 48
    assert share(Prompt(LONG), Prompt(LONG[:63])).tokens == 48
    assert share(Prompt(LONG + [1]), Prompt(LONG + [2])).tokens == 64
    assert share(Prompt([5]), Prompt([5]), 1).tokens == 0


def test_one_changed_token_ends_it_and_what_follows_is_named():
    changed = LONG[:20] + [7] + LONG[21:]
    found = share(Prompt(LONG), Prompt(changed))
    assert found.tokens == 16 and found.overlap == Overlap(21, 21, 43)
    found = share(Prompt([1, 2] + LONG), Prompt(LONG + [3]))
    assert found.tokens == 0 and found.overlap == Overlap(2, 0, 64)
    assert (
        "position 2 of the first and 0 of the second"
        in {c.rule: c.found for c in checklist(Prompt([1, 2] + LONG), Prompt(LONG))}["what changes comes last"]
    )


@pytest.mark.parametrize("field", ["model", "adapter", "salt"])
def test_another_domain_shares_nothing_and_the_same_one_does(field):
    ours, theirs = {field: "x"}, {field: "y"}
    assert share(Prompt(LONG, **ours), Prompt(LONG + [1], **ours)).tokens == 64
    found = share(Prompt(LONG, **ours), Prompt(LONG + [1], **theirs))
    assert found.tokens == 0 and rules(found) == [("domain", 65)]
    assert share(Prompt(LONG), Prompt(LONG + [1], **theirs)).tokens == 0


def test_the_checklist_finds_what_it_is_for():
    def kept(a, b, **domain):
        return {c.rule: c.kept for c in checklist(Prompt(a), Prompt(b, **domain))}

    every = {
        "one domain": True,
        "longer than a block": True,
        "what changes comes last": True,
        "aligned to the block size": True,
    }
    assert kept(LONG + [1], LONG + [2]) == every
    assert kept(LONG + [1], LONG + [2], salt="x") == every | {"one domain": False}
    assert kept(LONG[:8] + [1], LONG[:8] + [2]) == every | {"longer than a block": False, "aligned to the block size": False}
    assert kept([1] + LONG, [2] + LONG) == every | {"longer than a block": False, "what changes comes last": False}
    assert kept(LONG[:40] + [1], LONG[:40] + [2]) == every | {"aligned to the block size": False}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((Prompt([]), Prompt([1])), "first"),
        ((Prompt([1]), Prompt(["1"])), "second"),
        ((Prompt([1]), Prompt([1]), 0), "block_size"),
        ((Prompt([1], salt=1.5), Prompt([1])), "salt"),
    ],
)
def test_bad_input(arguments, says):
    with pytest.raises(ValueError, match=says):
        share(*arguments)


few = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@settings(deadline=None, max_examples=200)
@given(
    a=few,
    b=few,
    keep=st.integers(0, 30),
    block_size=st.integers(1, 5),
    salts=st.tuples(*[st.sampled_from([None, "x", "y"])] * 2),
)
def test_it_says_what_the_block_manager_does_and_the_costs_add_up(a, b, keep, block_size, salts):
    b = a[:keep] + b
    m = BlockManager(128, block_size)
    m.allocate("a", a, salt=salts[0])
    m.commit("a", len(a))
    found = share(Prompt(a, salt=salts[0]), Prompt(b, salt=salts[1]), block_size)
    assert found.tokens == m.allocate("b", b, salt=salts[1]).num_cached_tokens
    assert sum(limit.costs for limit in found.limits) == found.computed == len(b) - found.tokens
    assert found.common == common_prefix(a, b)


# ---- kvlab share -----------------------------------------------------------------------------------------------------


def says(capsys, *words):
    code = cli.main(["share", *words])
    return code, *capsys.readouterr()


def test_the_command_says_how_much_and_why_not_more(capsys, tmp_path):
    code, out, err = says(capsys, "--ids", "1,2,3,4,5", "1 2 3 9 5", "--block", "2")
    assert (code, err) == (0, "")
    assert "2 of 5 tokens may be shared (1 block of 2); 3 to compute." in out
    assert "−2     tokens: the tokens differ at position 3" in out and "−1     whole blocks" in out
    assert "'4' in the first and '9' in the second" in out
    assert "BROKEN aligned to the block size" in out and "kept   one domain" in out
    (tmp_path / "ids").write_text("1,2,3,4,5")
    assert says(capsys, "--ids", f"@{tmp_path / 'ids'}", "1 2 3 9 5", "--block", "2")[1] == out
    assert "0 of 3 tokens" in says(capsys, "--ids", "1,2,3", "1,2,3", "--block", "1", "--salts", "x", "y")[1]


@pytest.mark.model
def test_the_command_tokenises_and_uses_the_chat_template(capsys, loaded):
    plain = says(capsys, "Say one.", "Say two.")[1]
    chat = says(capsys, "Say one.", "Say two.", "--chat")[1]
    assert "' one' in the first and ' two' in the second" in plain and "0 of" in plain
    assert "16 of" in chat or "32 of" in chat, "the template's own system prompt is common"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--ids", "1,x", "2"], "'1,x' is no list of token ids"),
        (["--ids", "", "2"], "first must have token ids"),
        (["--ids", "1", "2", "--block", "0"], "block_size must be"),
        (["--ids", "@no/such/file", "2"], "cannot read no/such/file"),
    ],
)
def test_the_command_refuses_bad_input_in_words(capsys, words, named):
    code, out, err = says(capsys, *words)
    assert code == 2 and out == "" and named in err and len(err.splitlines()) == 2
