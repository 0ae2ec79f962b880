"""A PagedCache that is continued, copied, or asked for what any Cache answers: against a DynamicCache, in logits."""

import copy
import gc
import weakref

import pytest
import torch
from test_paged import EPSILON, close, pool_for, prompts, tiny, truth
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from kvlab.core.blocks import OutOfBlocks
from kvlab.runtime.paged import PagedCache, PagedPool

SHAPES = {"full": "llama", "full, learned positions": "gpt2", "windowed": "mistral, window 8", "mixed": "qwen2, mixed"}
FIRST, SECOND, THIRD = prompts(9, 7, 5)


@pytest.fixture(params=SHAPES)
def model(request):
    return tiny(SHAPES[request.param])


@pytest.fixture
def llama():
    return tiny("llama")


def ids(*rows):
    return torch.tensor(rows)


def forward(model, tokens, cache):
    return model(ids(tokens), cache=cache, use_cache=True).logits[0]


def generate(model, tokens, cache, new=6, **options):
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(tokens, cache=cache, output_logits=True, return_dict_in_generate=True, **options)


def both(model, play, pool=None, first=FIRST):
    """`play(model, cache)` on a DynamicCache and on a PagedCache that both hold `first`: the same logits, then tokens."""
    outs = []
    for cache in (DynamicCache(config=model.config), PagedCache(pool or pool_for(model, 256))):
        forward(model, first, cache)
        outs.append(play(model, cache))
    right, ours = outs
    apart = max(float((a - b).abs().max()) for a, b in zip(right.logits, ours.logits, strict=True))
    assert apart <= EPSILON, f"max |difference of logits| is {apart:.2g}"
    assert torch.equal(right.sequences, ours.sequences)
    return ours


# ---- what is continued ----------------------------------------------------------------------------------------------


def a_turn(model, cache):
    whole = ids(FIRST + SECOND)
    return generate(model, whole, cache, attention_mask=torch.ones_like(whole))


def two_turns(model, cache):
    said = a_turn(model, cache).sequences
    return generate(model, torch.cat([said, ids(THIRD)], 1), cache)


def a_turn_in_pieces(model, cache):
    return generate(model, ids(FIRST + SECOND), cache, prefill_chunk_size=3)


def only_what_is_new(model, cache):
    return generate(model, ids(SECOND), cache, attention_mask=torch.ones(1, 16, dtype=torch.long))


def embeddings(model, cache):
    return generate(model, None, cache, inputs_embeds=model.get_input_embeddings()(ids(FIRST + SECOND)))


def prompt_lookup(model, cache):
    return generate(model, ids(FIRST * 3), cache, new=12, prompt_lookup_num_tokens=3)


def a_draft_models_tokens(model, cache):
    return generate(model, ids(FIRST + SECOND), cache, new=12, assistant_model=model)


def beams(model, cache):
    cache.batch_repeat_interleave(3)
    return generate(model, ids(FIRST + SECOND), cache, num_beams=3)


def a_copy_for_each_question(model, cache):
    generate(model, ids(FIRST + SECOND), copy.deepcopy(cache))
    return generate(model, ids(FIRST + THIRD), copy.deepcopy(cache))


def the_prefix_itself_after_a_copy(model, cache):
    generate(model, ids(FIRST + THIRD), copy.deepcopy(cache))
    return a_turn(model, cache)


def beams_on_a_copy(model, cache):
    return beams(model, copy.deepcopy(cache))


PLAYS = (
    *(a_turn, two_turns, a_turn_in_pieces, only_what_is_new, embeddings, prompt_lookup, a_draft_models_tokens, beams),
    *(a_copy_for_each_question, the_prefix_itself_after_a_copy, beams_on_a_copy),
)


@pytest.mark.parametrize("play", PLAYS, ids=lambda play: play.__name__)
def test_continued_as_a_dynamic_cache_is(model, play):
    pool = pool_for(model, 256)
    both(model, play, pool)
    pool.manager.check()


def test_only_what_is_new_is_fed(model):
    """transformers#32019, #34232, #27546: 9 tokens are held, 16 are given."""
    fed, cache = [], PagedCache(pool_for(model))
    forward(model, FIRST, cache)
    model.get_input_embeddings().register_forward_hook(lambda module, args, out: fed.append(out.shape[1]))
    generate(model, ids(FIRST + SECOND), cache, new=4, attention_mask=torch.ones(1, 16, dtype=torch.long))
    assert fed == [7, 1, 1, 1] and cache.get_seq_length() == 16 + 3


def test_padded_rows_are_continued(model):
    rows = ids([0] * 4 + prompts(5)[0], prompts(9, seed=2)[0])
    more = torch.cat([rows, ids(SECOND, SECOND)], 1)
    outs = []
    for cache in (DynamicCache(config=model.config), PagedCache(pool_for(model, 128))):
        generate(model, rows, cache, new=1, attention_mask=(rows > 0).long())
        outs.append(generate(model, more, cache, attention_mask=(more > 0).long()))
    for a, b in zip(*(out.logits for out in outs), strict=True):
        close(a, b)


@pytest.mark.model
@pytest.mark.parametrize("play", [a_turn, prompt_lookup, beams, a_copy_for_each_question], ids=lambda play: play.__name__)
def test_the_bundled_model_is_continued(loaded, play):
    both(loaded.model, play, PagedPool(loaded.spec, 32))


# ---- copies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_is_a_fork(llama, duplicate):
    pool = pool_for(llama)
    cache = PagedCache(pool)
    forward(llama, FIRST, cache)
    held, nbytes = pool.held_nbytes, pool.nbytes
    twin = duplicate(cache)
    assert twin.pool is pool and pool.held_nbytes == held and pool.nbytes == nbytes, "blocks are shared, nothing is copied"
    close(forward(llama, SECOND, twin), truth(llama, FIRST + SECOND, first=9))
    assert (cache.get_seq_length(), twin.get_seq_length()) == (9, 16)
    close(forward(llama, THIRD, cache), truth(llama, FIRST + THIRD, first=9))
    close(forward(llama, THIRD, twin), truth(llama, FIRST + SECOND + THIRD, first=16))
    twin.reset()
    close(forward(llama, SECOND, cache), truth(llama, FIRST + THIRD + SECOND, first=14))
    cache.reset()
    pool.manager.check()
    assert pool.manager.num_free_blocks == 64


def test_a_copy_that_does_not_copy_on_write_shows(llama, monkeypatch):
    from kvlab.core.blocks import BlockManager

    monkeypatch.setattr(BlockManager, "_must_copy", lambda self, i: False)
    cache = PagedCache(pool_for(llama))
    forward(llama, FIRST, cache)
    forward(llama, SECOND, copy.deepcopy(cache))
    forward(llama, THIRD, twin := copy.deepcopy(cache))
    forward(llama, SECOND, cache)
    wrong = forward(llama, [5], twin)[-1]
    assert (wrong - truth(llama, [*FIRST, *THIRD, 5])[-1]).abs().max() > 1000 * EPSILON


def test_what_is_not_copied(llama):
    pool = pool_for(llama)
    with pytest.raises(TypeError, match="copy a PagedCache"):
        copy.deepcopy(pool)
    pool.manager.allocate("a", FIRST)
    inputs = pool.inputs(["a"])
    with pytest.raises(ValueError, match=r"copy is for rows without a name.*pool\.manager"):
        copy.deepcopy(inputs)
    assert copy.deepcopy(PagedCache(pool)).get_seq_length() == 0
    assert pool.manager.sequences == ["a"]


def test_rows_of_a_cache_that_is_gone_make_room(llama):
    """As people use it: a new cache, or a new copy, for each question, and none is reset."""
    pool = pool_for(llama, num_blocks=12)
    prefix = PagedCache(pool)
    forward(llama, FIRST, prefix)
    for _ in range(8):
        generate(llama, ids(FIRST + SECOND), copy.deepcopy(prefix))
        generate(llama, ids(THIRD), PagedCache(pool))
    assert len(pool.manager.sequences) <= 3, "the prefix, and what the last question left"
    PagedCache(pool).reset()
    pool.sweep()
    assert pool.manager.sequences == prefix.seqs
    close(forward(llama, SECOND, prefix), truth(llama, FIRST + SECOND, first=9))


def test_a_step_of_named_rows_sweeps_too(llama):
    pool = pool_for(llama)
    forward(llama, FIRST, PagedCache(pool))
    pool.manager.allocate("a", SECOND)
    assert len(pool.manager.sequences) == 2
    pool.inputs(["a"])
    assert pool.manager.sequences == ["a"]


def test_the_pool_goes_with_its_last_user(llama):
    """No circle: on a GPU the memory would stay until the collector comes by."""
    gc.disable()
    try:
        pool = pool_for(llama)
        cache = PagedCache(pool)
        forward(llama, FIRST, cache)
        alive = weakref.ref(pool)
        del pool, cache
        assert alive() is None
    finally:
        gc.enable()


# ---- what goes wrong leaves all as it was ---------------------------------------------------------------------------


def state(cache):
    m = cache.pool.manager
    return [m.block_table(seq) for seq in cache.seqs], cache.get_seq_length(), m.num_free_blocks


def test_no_room_in_the_middle_of_a_second_turn(llama):
    """Four rows share a prefix whose last block is half full; there is room for two copies of it, three are needed."""
    pool = pool_for(llama, num_blocks=5)
    cache = PagedCache(pool)
    forward(llama, FIRST, cache)
    cache.batch_repeat_interleave(4)
    before = state(cache)
    assert before[2] == 2
    with pytest.raises(OutOfBlocks, match=r"1 blocks short.*reset\(\) a PagedCache"):
        llama(ids([1], [2], [3], [4]), cache=cache, use_cache=True)
    assert state(cache) == before
    cache.batch_select_indices(torch.tensor([0, 1, 2]))
    logits = llama(ids([1], [2], [3]), cache=cache, use_cache=True).logits
    for row, token in zip(logits, (1, 2, 3), strict=True):
        close(row, truth(llama, [*FIRST, token]))
    assert pool.manager.num_free_blocks == 0


def test_the_count_of_blocks_is_exact(llama):
    """Whatever is shared, `_require` says yes exactly when every append then succeeds."""
    for blocks in range(3, 12):
        pool = pool_for(llama, num_blocks=blocks)
        cache = PagedCache(pool)
        forward(llama, FIRST, cache)
        cache.batch_repeat_interleave(2)
        twin = copy.deepcopy(cache)
        before = state(cache)
        try:
            llama(ids(SECOND, SECOND), cache=cache, use_cache=True)
        except OutOfBlocks:
            assert state(cache) == before
            assert blocks < 7, "2 full blocks shared, then 2 of its own for each row"
        else:
            assert blocks >= 7
        assert twin.get_seq_length() == 9
        pool.manager.check()


@pytest.mark.parametrize("held", [0, 9])
def test_a_model_that_runs_its_blocks_twice_is_named(llama, held):
    pool = pool_for(llama)
    cache = PagedCache(pool)
    if held:
        forward(llama, FIRST, cache)
    before, k = state(cache), torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match=r"pool has 3 layers.*layer 4.*runs its blocks more than once"):
        for layer in range(6):
            cache.update(k, k, layer)
    assert state(cache) == before
    pool.manager.check()
    close(forward(llama, SECOND, cache), truth(llama, FIRST[:held] + SECOND, first=held))


def test_other_rows_than_are_held(llama):
    cache = PagedCache(pool_for(llama))
    forward(llama, FIRST, cache)
    before = state(cache)
    with pytest.raises(ValueError, match=r"1 rows, the model feeds 3.*batch_repeat_interleave"):
        generate(llama, ids(FIRST + SECOND), cache, num_beams=3)
    assert state(cache) == before


def test_nothing_is_trained_through_a_pool(llama):
    llama.requires_grad_(True)
    pool = pool_for(llama)
    cache = PagedCache(pool)
    forward(llama, FIRST, cache)
    assert not pool.keys.requires_grad and not pool.values.requires_grad
    close(forward(llama, SECOND, copy.deepcopy(cache)), truth(llama, FIRST + SECOND, first=9))


# ---- every public member of Cache -----------------------------------------------------------------------------------

LAYERS = range(3)
SAME = {  # what a DynamicCache that keeps all tokens answers
    "batch_size": lambda c: c.batch_size,
    "get_mask_sizes": lambda c: [c.get_mask_sizes(5, i) for i in LAYERS] + [c.get_mask_sizes(5, 99)],
    "get_max_length": lambda c: [c.get_max_length(), c.get_max_length(0), c.get_max_length(99)],
    "get_query_offset": lambda c: c.get_query_offset(),
    "get_seq_length": lambda c: [c.get_seq_length(), *(c.get_seq_length(i) for i in LAYERS), c.get_seq_length(99)],
    "is_compileable": lambda c: c.is_compileable,
    "is_croppable": lambda c: c.is_croppable,
    "is_dummy": lambda c: c.is_dummy,
    "is_initialized": lambda c: c.is_initialized,
    "is_linear": lambda c: c.is_linear,
    "is_recording_past": lambda c: c.is_recording_past(0),
    "is_sliding": lambda c: c.is_sliding,
    "layer_class_to_replicate": lambda c: c.layer_class_to_replicate,
    "layers": lambda c: len(c.layers),
    "offloading": lambda c: c.offloading,
    # for layers with another kind of state: refused in the same way
    "get_conv_state": lambda c: c.get_conv_state(0),
    "get_recurrent_state": lambda c: c.get_recurrent_state(0),
    "has_previous_state": lambda c: c.has_previous_state(),
    "update_conv_state": lambda c: c.update_conv_state(torch.zeros(1), 0),
    "update_indexer": lambda c: c.update_indexer(torch.zeros(1), 0),
    "update_recurrent_state": lambda c: c.update_recurrent_state(torch.zeros(1), 0),
}
ABOUT_STORAGE = {"get_mask_sizes", "get_max_length", "is_sliding", "is_recording_past"}  # a window's layers keep less
ACTS = {  # what changes a cache: after it, a forward gives the same logits
    "activate_past_recording": lambda c: c.activate_past_recording(),
    "batch_repeat_interleave": lambda c: c.batch_repeat_interleave(2),
    "batch_select_indices": lambda c: c.batch_select_indices(torch.tensor([1, 0, -1])),
    "crop": lambda c: c.crop(-2) if c.get_seq_length() else c.crop(0),
    "early_initialization": lambda c: c.early_initialization(2, 2, 8, torch.float32, torch.device("cpu")),
    "reorder_cache": lambda c: c.reorder_cache(torch.tensor([1, 1])),
    "reset": lambda c: c.reset(),
    "update": lambda c: None,  # by the forward itself
}
REFUSED = {"offload": lambda c: c.offload(0), "prefetch": lambda c: c.prefetch(0)}
OF_A_LAYER = {  # the same two kinds
    "get_mask_sizes": lambda x: x.get_mask_sizes(5),
    "get_max_length": lambda x: x.get_max_length(),
    "get_seq_length": lambda x: x.get_seq_length(),
    "is_compileable": lambda x: x.is_compileable,
    "is_croppable": lambda x: x.is_croppable,
    "is_initialized": lambda x: x.is_initialized,
    "keys": lambda x: None if not x.get_seq_length() else x.keys.tolist(),
    "lazy_initialization": lambda x: x.lazy_initialization(torch.zeros(2, 2, 0, 8), torch.zeros(2, 2, 0, 8)),
    "supports_early_init": lambda x: x.supports_early_init,
    "update": lambda x: None,  # below
    "values": lambda x: None if not x.get_seq_length() else x.values.tolist(),
}
REFUSED_BY_A_LAYER = {
    "batch_repeat_interleave": lambda x: x.batch_repeat_interleave(2),
    "batch_select_indices": lambda x: x.batch_select_indices(torch.tensor([0])),
    "crop": lambda x: x.crop(-1),
    "offload": lambda x: x.offload(),
    "prefetch": lambda x: x.prefetch(),
    "reorder_cache": lambda x: x.reorder_cache(torch.tensor([0])),
    "reset": lambda x: x.reset(),
}


def public(*objects):
    return {name for thing in objects for name in dir(thing) if not name.startswith("_")}


def test_every_public_member_of_a_cache_has_been_thought_about():
    """A new Transformers that adds one fails here: put it into one of the tables, and mend what it shows."""
    assert public(Cache, Cache(layers=[])) == set(SAME) | set(ACTS) | set(REFUSED)
    layer = DynamicCache(config=tiny("llama").config).layers[0]
    known = public(CacheLayerMixin) | {"keys", "values", "is_initialized", "crop", "batch_repeat_interleave"}
    known |= {"batch_select_indices"}  # of DynamicLayer, which Cache calls on every layer
    assert known == set(OF_A_LAYER) | set(REFUSED_BY_A_LAYER)
    assert public(layer) - known <= {"device", "is_sliding"}


def filled(model, cache, stage):
    """Empty; after a prefill; after a second forward; reset."""
    if stage > 0:
        model(ids(FIRST, FIRST[::-1]), cache=cache, use_cache=True)
    if stage > 1:
        model(ids(THIRD, THIRD[::-1]), cache=cache, use_cache=True)
    if stage > 2:
        cache.reset()
    return cache


def answer(look, thing):
    try:
        return look(thing)
    except Exception as error:
        return type(error)


def twins(model, stage):
    return (filled(model, c, stage) for c in (DynamicCache(config=model.config), PagedCache(pool_for(model))))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", SAME)
def test_it_answers_as_a_dynamic_cache(llama, name, stage):
    right, ours = (answer(SAME[name], c) for c in twins(llama, stage))
    assert ours == right


@pytest.mark.parametrize("name", sorted(set(SAME) - ABOUT_STORAGE))
def test_with_windows_too(name):
    for shape in ("mistral, window 8", "qwen2, mixed"):
        right, ours = (answer(SAME[name], c) for c in twins(tiny(shape), 2))
        assert ours == right


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", ACTS)
def test_it_is_changed_as_a_dynamic_cache(llama, name, stage):
    caches = list(twins(llama, stage))
    for cache in caches:
        ACTS[name](cache)
    rows = {"batch_repeat_interleave": 4, "batch_select_indices": 3}.get(name, 2) if caches[1].seqs else 2
    fed = ids(*prompts(*[4] * rows, seed=3))
    right, ours = (llama(fed, cache=cache, use_cache=True).logits for cache in caches)
    close(ours, right)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_not_offloaded(llama, name):
    cache = filled(llama, PagedCache(pool_for(llama)), 1)
    before = state(cache)
    with pytest.raises(ValueError, match="its pool lies on one device"):
        REFUSED[name](cache)
    assert state(cache) == before


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", OF_A_LAYER)
def test_its_layers_answer_as_a_dynamic_caches(llama, name, stage):
    right, ours = ([answer(OF_A_LAYER[name], layer) for layer in c.layers] for c in twins(llama, stage))
    assert ours == right


@pytest.mark.parametrize("name", REFUSED_BY_A_LAYER)
def test_what_only_the_whole_cache_does(llama, name):
    cache = filled(llama, PagedCache(pool_for(llama)), 1)
    before = state(cache)
    with pytest.raises(ValueError, match="PagedCache"):
        REFUSED_BY_A_LAYER[name](cache.layers[0])
    assert state(cache) == before


def test_a_layers_update_is_the_caches(llama):
    pool = pool_for(llama)
    cache, k = PagedCache(pool), torch.randn(2, 2, 4, 8)
    keys, values = zip(*(layer.update(k + i, k - i) for i, layer in enumerate(cache.layers)))
    for i in LAYERS:
        assert torch.equal(keys[i], k + i) and torch.equal(values[i], k - i) and torch.equal(cache.layers[i].keys, k + i)
    assert "2 rows, 4 columns, 3 layers" in repr(cache)
