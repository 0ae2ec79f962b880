"""RoPE whose angles depend on the request's length: read from a config, refused by the pool, measured, and a fault of the zoo."""

import pytest
import torch
from transformers import DynamicCache, Gemma3TextConfig, LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvlab import record
from kvlab.core.blocks import BlockManager
from kvlab.core.layers import reader
from kvlab.core.spec import LengthRope, ModelSpec, _rope_by_length
from kvlab.experiments import lengths
from kvlab.experiments.lengths import LONG, MIDDLE, SHORT, TRAINED, tiny
from kvlab.faults import fault
from kvlab.runtime.paged import PagedCache, PagedPool
from kvlab.show import lengths as show

EPSILON = 6e-5
BY_LENGTH = {"dynamic", "longrope"}
PLAIN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50, "max_position_embeddings": 64}


# ---- what a config says ---------------------------------------------------------------------------------------------


def scaled(**parameters):
    return PLAIN | {"rope_scaling": parameters}


@pytest.mark.parametrize(
    ("config", "right"),
    [
        (PLAIN | {"rope_theta": 1e4}, None),
        (scaled(type="linear", factor=2.0), None),
        (scaled(rope_type="yarn", factor=2.0), None),
        (scaled(rope_type="llama3", factor=2.0), None),
        (scaled(type="dynamic", factor=2.0), ("dynamic", 64)),
        (scaled(rope_type="dynamic", factor=2.0), ("dynamic", 64)),
        (PLAIN | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ("dynamic", 64)),
        (scaled(type="dynamic", factor=1.0, alpha=1000.0), None),  # HunYuan
        (scaled(rope_type="longrope", short_factor=[1], long_factor=[2]), ("longrope", 64)),
        (
            scaled(rope_type="longrope", short_factor=[1], long_factor=[2], original_max_position_embeddings=16),
            ("longrope", 16),
        ),
        (
            scaled(type="longrope", short_factor=[1], long_factor=[2], original_max_position_embeddings=16)
            | {"original_max_position_embeddings": 8},
            ("longrope", 8),
        ),
        # Phi-3 as it was published: other names, and the trained length beside the parameters
        *(
            (scaled(type=name, short_factor=[1], long_factor=[2]) | {"original_max_position_embeddings": 16}, ("longrope", 16))
            for name in ("su", "yarn", "longrope")
        ),
        (PLAIN | {"use_dynamic_ntk": True, "seq_length": 32}, ("dynamic", 32)),  # Qwen 1
        (
            PLAIN | {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_theta": 1e4}}},
            ("dynamic", 64),
        ),
        (PLAIN | {"rope_parameters": {"full_attention": {"rope_type": "linear"}, "sliding_attention": None}}, None),
    ],
)
def test_what_a_config_json_says(config, right):
    found = _rope_by_length(reader(config))
    assert found == right and (right is None or isinstance(found, LengthRope))


def test_what_a_config_object_says():
    shape = PLAIN | {"intermediate_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16} | factors
    phi = Phi3Config(**shape, original_max_position_embeddings=16, rope_parameters=rope)
    assert ModelSpec.from_config(phi).rope_by_length == ("longrope", 16)
    llama = LlamaConfig(**shape, rope_scaling={"type": "dynamic", "factor": 2.0})
    assert ModelSpec.from_config(llama).rope_by_length == ("dynamic", 64)
    as_published = PLAIN | {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert ModelSpec.from_config(as_published).rope_by_length == ("dynamic", 64)
    assert ModelSpec.from_config(phi.to_dict()).rope_by_length == ("longrope", 16)
    base = {"rope_theta": 10000.0}
    by_layer = {
        "full_attention": {"rope_type": "dynamic", "factor": 2.0} | base,
        "sliding_attention": {"rope_type": "default"} | base,
    }
    gemma = Gemma3TextConfig(**shape, head_dim=8, rope_parameters=by_layer)
    assert ModelSpec.from_config(gemma).rope_by_length == ("dynamic", 64)
    assert ModelSpec.from_config(Gemma3TextConfig(**shape, head_dim=8)).rope_by_length is None


def test_attention_in_both_directions_is_refused():
    """There a token's K/V depends on the tokens behind it: a shared prefix moved logits by 0.7 on a tiny Gemma 3."""
    shape = PLAIN | {"intermediate_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    both = Gemma3TextConfig(**shape, head_dim=8, use_bidirectional_attention=True)
    for config in (both, both.to_dict()):
        with pytest.raises(ValueError, match="both directions.*use_bidirectional_attention"):
            ModelSpec.from_config(config)
    vision = Gemma3TextConfig(**shape, head_dim=8).to_dict() | {"use_bidirectional_attention": "vision"}
    assert ModelSpec.from_config(vision).layers == 2


def turned(kind, *fed):
    """Cosines of the first nine positions after forwards over so many tokens, the last of them kept."""
    rotary = tiny(kind).model.model.rotary_emb
    for count in fed:
        cos, _ = rotary(torch.zeros(1), torch.arange(count)[None])
    return cos[0, :SHORT]


@pytest.mark.parametrize("kind", lengths.ROPES)
def test_the_spec_says_what_transformers_computes(kind):
    same = torch.equal(turned(kind, SHORT), turned(kind, LONG))
    assert same == (tiny(kind).spec.rope_by_length is None) == (kind not in BY_LENGTH)


@pytest.mark.parametrize("kind", BY_LENGTH)
@pytest.mark.parametrize("pair", [(SHORT, TRAINED), (SHORT, TRAINED + 1), (MIDDLE, LONG), (MIDDLE, MIDDLE)])
def test_which_lengths_have_the_same_angles(kind, pair):
    rope = tiny(kind).spec.rope_by_length
    assert torch.equal(*(turned(kind, length) for length in pair)) == (rope.angles(pair[0]) == rope.angles(pair[1]))


def test_every_kind_of_rope_has_been_thought_about():
    """A new Transformers that adds one fails here: does K still follow from the tokens before it?"""
    proportional = {"proportional"}  # Gemma 4's: a share of the frequencies, the same for every length
    assert set(ROPE_INIT_FUNCTIONS) == set(lengths.ROPES) - {"default"} | proportional


# ---- the pool -------------------------------------------------------------------------------------------------------


def pool_for(loaded, **options):
    return PagedPool(loaded.spec, 64, 4, **options)


def step(loaded, pool, seqs, limit=None):
    with torch.inference_mode():
        return loaded.model(**pool.inputs(seqs, limit=limit)).logits[:, -1]


def alone(kind, *pieces):
    """Last logits of pieces of a request, fed one after another to a DynamicCache of a model that has seen nothing else."""
    loaded = tiny(kind)
    cache = DynamicCache(config=loaded.model.config)
    with torch.inference_mode():
        for piece in pieces:
            logits = loaded.model(torch.tensor([piece]), cache=cache, use_cache=True).logits[0, -1]
    return logits


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_nothing_is_shared(kind):
    """transformers#25104: the prefix of a request of 40 tokens under one of 9."""
    loaded, asked = tiny(kind), lengths.prompts()
    pool = pool_for(loaded)
    for length in (LONG, SHORT):
        assert pool.manager.allocate(length, asked[length]).num_cached_tokens == 0
        logits = step(loaded, pool, [length])
        assert (logits[0] - alone(kind, asked[length])).abs().max() <= EPSILON
    for options in ({"cache_prefixes": True}, {"manager": BlockManager(64, 4)}):
        with pytest.raises(ValueError, match=rf"{next(iter(options))}: under rope_type '{kind}'.*cache_prefixes=False"):
            pool_for(loaded, **options)
    assert pool_for(loaded, manager=BlockManager(64, 4, cache_prefixes=False)).manager.num_free_blocks == 64


def test_other_kinds_share_as_ever():
    for kind in set(lengths.ROPES) - BY_LENGTH:
        loaded, asked = tiny(kind), lengths.prompts()
        pool = pool_for(loaded)
        pool.manager.allocate("long", asked[LONG])
        step(loaded, pool, ["long"])
        assert pool.manager.allocate("short", asked[SHORT]).num_cached_tokens == 8
        pool.append("long", [5])
        assert (step(loaded, pool, ["short", "long"])[0] - alone(kind, asked[SHORT])).abs().max() <= EPSILON


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_rows_that_need_other_angles_are_refused_and_nothing_changes(kind):
    loaded, asked = tiny(kind), lengths.prompts()
    pool = pool_for(loaded)
    for length in (LONG, SHORT):
        pool.manager.allocate(length, asked[length])
    with pytest.raises(ValueError, match=rf"seqs: rows of 9, 40 tokens.*rope_type '{kind}'.*longer than 16 alone"):
        pool.inputs([LONG, SHORT])
    assert [pool.manager.num_committed(seq) for seq in (LONG, SHORT)] == [0, 0]
    for length in (LONG, SHORT):
        assert (step(loaded, pool, [length])[0] - alone(kind, asked[length])).abs().max() <= EPSILON
    pool.manager.check()


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_rows_of_the_same_angles_run_together(kind):
    """Within the trained length any; beyond it those of one length, for longrope any that are beyond."""
    loaded, asked = tiny(kind), lengths.prompts()
    for rows in ([asked[SHORT], asked[LONG][:5]], [asked[MIDDLE], asked[LONG][:MIDDLE]]):
        pool = pool_for(loaded)
        for name, row in enumerate(rows):
            pool.manager.allocate(name, row)
        for row, logits in zip(rows, step(loaded, pool, [0, 1]), strict=True):
            assert (logits - alone(kind, row)).abs().max() <= EPSILON
    pool = pool_for(loaded)
    pool.manager.allocate("a", asked[MIDDLE]), pool.manager.allocate("b", asked[LONG])
    if kind == "longrope":
        assert (step(loaded, pool, ["a", "b"])[0] - alone(kind, asked[MIDDLE])).abs().max() <= EPSILON
    else:
        with pytest.raises(ValueError, match="rope_type"):
            pool.inputs(["a", "b"])


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_alone_it_is_a_dynamic_cache_that_was_fed_the_same_pieces(kind):
    """Across the trained length old keys keep their angles, in both caches."""
    ids = lengths.prompts()[LONG]
    pieces = [ids[:14], *([token] for token in ids[14:20]), ids[20:30]]
    right = alone(kind, *pieces)
    loaded = tiny(kind)
    pool = pool_for(loaded)
    pool.manager.allocate("a", pieces[0])
    logits = step(loaded, pool, ["a"])
    for piece in pieces[1:]:
        pool.append("a", piece)
        logits = step(loaded, pool, ["a"])
    assert (logits[0] - right).abs().max() <= EPSILON
    loaded = tiny(kind)
    cache = PagedCache(pool_for(loaded))
    with torch.inference_mode():
        for piece in pieces:
            logits = loaded.model(torch.tensor([piece]), cache=cache, use_cache=True).logits[0, -1]
    assert (logits - right).abs().max() <= EPSILON


# ---- the faults, the experiment, the chapter ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    return record.load("lengths")


@pytest.mark.parametrize("kind", lengths.ROPES)
def test_the_recorded_run_again(run, kind):
    told, kept = lengths.study(kind), run.data["kinds"][kind]
    assert told["by_length"] == kept["by_length"] and lengths.refusal(kind) == kept["refusal"]
    assert told["arms"].keys() == kept["arms"].keys()
    assert max(told["epsilon"], kept["epsilon"]) < EPSILON
    for name, arm in told["arms"].items():
        was = kept["arms"][name]
        assert (arm["hit"], arm["first"]) == (was["hit"], was["first"])
        if was["delta"] > 1e-3:
            assert arm["delta"] == pytest.approx(was["delta"], rel=0.02)
        else:
            assert max(arm["delta"], was["delta"]) <= min(told["epsilon"], kept["epsilon"])


def test_what_is_wrong_is_far_beyond_epsilon_and_what_kvlab_does_is_right(run):
    for kind, told in run.data["kinds"].items():
        sick = show.wrong(run, kind)
        assert bool(sick) == (kind in BY_LENGTH)
        assert show.KVLAB not in sick
        assert all(told["arms"][name]["delta"] > 1000 * told["epsilon"] for name in sick)
    assert set(show.wrong(run, "dynamic")) == set(lengths.ARMS) - {show.KVLAB}
    assert set(show.wrong(run, "longrope")) == set(lengths.ARMS) - {show.KVLAB, show.AFTER}


def test_the_fault_leaves_nothing_behind():
    asked = lengths.prompts()
    with fault("prefix-of-another-length"):
        assert PagedPool(tiny("dynamic").spec, 8, 4).manager.cache_prefixes
    assert not PagedPool(tiny("dynamic").spec, 8, 4).manager.cache_prefixes
    before = alone("dynamic", asked[SHORT])
    with fault("angles-not-set-back"):
        alone("dynamic", asked[LONG])
    assert torch.equal(alone("dynamic", asked[SHORT]), before)


def test_the_table_is_the_runs(run):
    text = show.table(run)
    assert text.count("\n") == len(lengths.ROPES) + 1
    assert text.count("**") == 2 * sum(len(show.wrong(run, kind)) for kind in lengths.ROPES)
