"""The decode loop against Transformers itself, and what it writes down."""

import pytest
import torch

from kvlab.compare import compare
from kvlab.runtime.decode import (
    attention_kernel,
    greedy,
    margins,
    pad_left,
    pieces,
    positions,
    reset,
    score,
    static_cache,
    threads,
)

pytestmark = pytest.mark.model
NOISE = 5e-4  # fp32, well over what was measured and four orders of magnitude under any fault


@pytest.fixture(scope="module")
def rows(loaded):
    texts = ["The password is: OAK-17. I repeat, the password is:", "Name a colour.", "One two three four five six seven eight"]
    return [loaded.tokenizer(text)["input_ids"] for text in texts]


@pytest.fixture(scope="module")
def plain(loaded, rows):
    return [greedy(loaded, [row], 4)[0] for row in rows]


def test_logits_are_those_of_one_forward_over_the_text(loaded, rows, plain):
    for row, trace in zip(rows, plain):
        logits = score(loaded, row + trace.tokens[:-1])[len(row) - 1 :]
        assert (logits - trace.logits).abs().max() < NOISE
        assert logits.argmax(-1).tolist() == trace.tokens


@pytest.mark.parametrize("options", [{"use_cache": False}, {"chunk": 1}, {"chunk": 3}, {"chunk": 100}])
def test_healthy_ways_agree(loaded, rows, plain, options):
    for row, trace in zip(rows, plain):
        found = compare(trace, greedy(loaded, [row], 4, **options)[0])
        assert found.delta < NOISE and found.first is None


def test_rows_of_a_batch_agree_with_rows_alone(loaded, rows, plain):
    for order in ([0, 1, 2], [2, 0, 1]):
        for index, trace in zip(order, greedy(loaded, [rows[i] for i in order], 4)):
            assert trace.prompt == rows[index]
            assert compare(plain[index], trace).delta < NOISE


def test_a_cache_handed_in_is_reset_and_a_buffer_need_not_be_zeroed(loaded, rows, plain):
    buffer = static_cache(loaded, 40)
    for index in (0, 1, 2, 0):
        trace = greedy(loaded, [rows[index]], 4, cache=buffer)[0]
        assert compare(plain[index], trace).delta < NOISE
    assert buffer.layers[0].keys[0, :, len(rows[0]) + 10 :].abs().sum() == 0, "slots nobody wrote stay zero"
    reset(buffer)
    assert int(buffer.get_seq_length()) == 0
    assert buffer.layers[0].keys.abs().sum() > 0, "reset forgets the length, not the values"


def test_the_log_says_what_was_fed(loaded, rows):
    long, short = greedy(loaded, [rows[0], rows[1]], 3)
    for trace in (long, short):
        assert [step.own for step in trace.steps] == [len(trace.prompt) + s for s in range(3)]
        assert all(step.position == step.own - 1 and step.visible == step.own for step in trace.steps)
        assert all(step.beyond == 0 and step.held == 0 for step in trace.steps)


def test_attention_and_threads_are_put_back(loaded, rows):
    before, count = loaded.model.config._attn_implementation, torch.get_num_threads()
    with pytest.raises(RuntimeError), attention_kernel(loaded, "eager"), threads(1):
        assert loaded.model.config._attn_implementation == "eager" and torch.get_num_threads() == 1
        raise RuntimeError
    assert (loaded.model.config._attn_implementation, torch.get_num_threads()) == (before, count)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([], 3), "prompts"),
        (([[]], 3), "prompts"),
        (([[1]], 0), "new_tokens"),
        (([[1]], 3, {"chunk": 0}), "chunk"),
        (([[1]], 3, {"use_cache": False, "cache": "any"}), "cache"),
    ],
)
def test_bad_input_is_refused(loaded, arguments, says):
    options = arguments[2] if len(arguments) > 2 else {}
    with pytest.raises(ValueError, match=says):
        greedy(loaded, *arguments[:2], **options)


def test_a_buffer_that_is_too_small_is_refused_and_left_alone(loaded, rows):
    buffer = static_cache(loaded, 8)
    with pytest.raises(ValueError, match="too few"):
        greedy(loaded, [rows[0]], 4, cache=buffer)
    assert int(buffer.get_seq_length()) == 0


def test_small_pieces():
    ids, is_token = pad_left([[7, 8, 9], [5]], pad=0)
    assert ids.tolist() == [[7, 8, 9], [0, 0, 5]]
    assert is_token.tolist() == [[True] * 3, [False, False, True]]
    assert positions(is_token, 0).tolist() == [[0, 1, 2], [0, 0, 0]]
    assert positions(is_token, 4).tolist() == [[4, 5, 6], [4, 4, 4]]
    assert pieces(0, 7, 3) == [(0, 3), (3, 6), (6, 7)] and pieces(2, 5, None) == [(2, 5)]
    assert margins(torch.tensor([[1.0, 5.0, 2.0]])).tolist() == [3.0]
