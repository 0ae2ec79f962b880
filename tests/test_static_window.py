"""A static buffer on a model with a sliding window: it runs as a DynamicCache does, or the window is named."""

from types import SimpleNamespace

import pytest
import torch
from test_paged import CONFIGS, close, prompts, tiny
from transformers import StaticCache

from kvlab.core.spec import ModelSpec
from kvlab.faults import fault
from kvlab.runtime.decode import buffer_mask, greedy, static_cache, windows

SHAPES = ("llama", "gpt2", "mistral, window 8", "qwen2, mixed", "gemma2", "gemma3")
ROWS = prompts(6, 19, 11)


@pytest.fixture(params=SHAPES)
def loaded(request):
    return bench(request.param)


def bench(name):
    model = tiny(name)
    return SimpleNamespace(
        model=model, tokenizer=SimpleNamespace(pad_token_id=0), spec=ModelSpec.from_config(model.config, "float32")
    )


def same(right, ours):
    for a, b in zip(right, ours, strict=True):
        close(b.logits, a.logits)


@pytest.mark.parametrize("options", [{}, {"chunk": 3}], ids=str)
def test_it_runs(loaded, options):
    """A prompt within the window, one across, one beyond; alone and in a batch; the buffer is used again."""
    buffer = static_cache(loaded, 64)
    for rows in ([ROWS[1]], [ROWS[0]], ROWS):
        if buffer.layers[0].is_initialized and buffer.layers[0].keys.shape[0] != len(rows):
            buffer = static_cache(loaded, 64)
        same(greedy(loaded, rows, 9), greedy(loaded, rows, 9, cache=buffer, **options))


def test_the_field_case():
    """Mistral with a window of 8, 6 prompt and 4 new tokens, 64 slots: it said that 8 slots are too few."""
    loaded = bench("mistral, window 8")
    same(greedy(loaded, [ROWS[0]], 4), greedy(loaded, [ROWS[0]], 4, cache=static_cache(loaded, 64)))


@pytest.mark.parametrize("name", ["mistral, window 8", "qwen2, mixed", "gemma3"])
def test_transformers_own_buffer_is_named(name):
    loaded = bench(name)
    buffer = StaticCache(config=loaded.model.config, max_cache_len=64)
    with pytest.raises(ValueError, match=r"cache: its layers with a sliding window keep 8 slots.*static_cache\(loaded"):
        greedy(loaded, [ROWS[0]], 4, cache=buffer)
    assert int(buffer.get_seq_length()) == 0
    small = StaticCache(config=loaded.model.config, max_cache_len=8)  # no longer than the window: every layer keeps all
    same(greedy(loaded, [ROWS[0]], 3), greedy(loaded, [ROWS[0]], 3, cache=small))


def test_too_few_slots_is_still_said():
    loaded = bench("mistral, window 8")
    with pytest.raises(ValueError, match="8 slots are too few for 6 prompt and 4 new tokens"):
        greedy(loaded, [ROWS[0]], 4, cache=static_cache(loaded, 8))


def test_the_log_is_the_same_as_without_a_buffer():
    loaded = bench("qwen2, mixed")
    for a, b in zip(greedy(loaded, ROWS, 4), greedy(loaded, ROWS, 4, cache=static_cache(loaded, 64)), strict=True):
        assert a.steps == b.steps


def test_a_stale_buffer_is_still_caught_behind_a_window():
    loaded = bench("mistral, window 8")
    buffer = static_cache(loaded, 64)
    with fault("stale-buffer"):
        greedy(loaded, [ROWS[1]], 4, cache=buffer)
        sick = greedy(loaded, [ROWS[0]], 4, cache=buffer)[0]
    assert (sick.logits - greedy(loaded, [ROWS[0]], 4)[0].logits).abs().max() > 1e-2
    assert any(step.beyond for step in sick.steps)


def test_the_windows_of_a_model():
    assert windows(bench("llama")) == {"full_attention": None}
    assert windows(bench("mistral, window 8")) == {"sliding_attention": 8}
    assert windows(bench("qwen2, mixed")) == {"full_attention": None, "sliding_attention": 8}
    with pytest.raises(ValueError, match="chunked_attention"):
        windows(SimpleNamespace(model=SimpleNamespace(config=chunked())))


def test_two_windows_of_one_kind_are_named(monkeypatch):
    from kvlab.runtime import decode

    two = (["sliding_attention"] * 2, [{"sliding_window": 8}, {"sliding_window": 16}])
    monkeypatch.setattr(decode, "get_layer_types_and_kwargs", lambda config: two)
    with pytest.raises(ValueError, match="sliding_attention.*16"):
        windows(bench("llama"))


def chunked():
    from transformers import Llama4TextConfig

    return Llama4TextConfig(num_hidden_layers=4, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, vocab_size=50)


def test_the_windows_edge():
    """Itself and seven before it: the mask Transformers makes for a window of 8."""
    mask = buffer_mask(torch.ones(1, 12), 11, 16, 0, torch.float32, 8)[0, 0, 0] == 0
    assert mask.nonzero().flatten().tolist() == list(range(4, 12))
    assert CONFIGS["mistral, window 8"]().sliding_window == 8
