"""The sweep over every causal language model of Transformers: nothing but equal and refused, and able to see a wrong ledger."""

from dataclasses import replace

import pytest
import torch
import transformers

from kvlab import record
from kvlab.core import layers as readings
from kvlab.core import ledger
from kvlab.core.spec import ModelSpec
from kvlab.experiments import shapes
from kvlab.faults import fault
from kvlab.show import shapes as show


@pytest.fixture(scope="module")
def rows():
    return shapes.sweep()


@pytest.fixture(scope="module")
def run():
    return record.load("shapes")


def named(row):
    return row["type"], row["class"], row["setting"]


def test_every_class_is_equal_or_refused(rows):
    assert shapes.findings(rows) == []
    assert {(row["type"], row["class"]) for row in rows} >= {(c.model_type, m.__name__) for c, m in shapes.classes()}


def test_a_refusal_names_a_key_or_the_type(rows):
    for row in rows:
        if row["outcome"] == "refused":
            assert (
                row["type"].removesuffix("_assistant") in row["why"] or " is set" in row["why"] or "layer_types" in row["why"]
            ), row


def test_every_kind_of_layer_a_class_has_by_default_is_among_the_tiny_ones():
    """Or the sweep would prove a part of it."""
    for config_class, _ in shapes.classes():
        try:
            default = set(ModelSpec.from_config(config_class(), "bfloat16").caches)
        except Exception:
            continue
        tiny = ModelSpec.from_config(shapes.tiny(config_class), "bfloat16").caches
        assert {cache.kind for cache in default} <= {cache.kind for cache in tiny}, config_class.model_type


def test_the_families_that_are_read_are_those_that_were_run(rows):
    """No rule without its proof: a family stands in the table because a model of it was weighed."""
    inner = {"mllama_text_model": "mllama", "emu3_text_model": "emu3", "moshi": "moshi"}
    read = {row["type"] for row in rows if row["outcome"] == "equal"}
    assert {inner.get(name, name) for name in readings.FAMILIES} - read == set()


def test_the_recorded_run_is_what_the_code_gives(rows, run):
    if run.manifest.versions["transformers"] != transformers.__version__:
        pytest.skip("recorded with another Transformers")
    recorded = {named(row): row for row in run.data["rows"]}
    for row in rows:
        kept = recorded[named(row)]
        assert {key: row.get(key) for key in kept if key != "device"} == {key: kept[key] for key in kept if key != "device"}
    assert len(recorded) == len(rows)


# ---- the sweep can fail -------------------------------------------------------------------------------------------------


def outcomes(*only):
    return {row["type"]: row["outcome"] for row in shapes.sweep(only) if not row["setting"]}


def test_it_sees_query_heads_counted():
    with fault("query-heads-counted"):
        assert outcomes("llama", "gpt2") == {"llama": "differs", "gpt2": "equal"}  # gpt2 has as many K/V heads: the blind spot


@pytest.mark.parametrize(
    ("layer_type", "kept_as", "family"),
    [
        ("linear_attention", ("full",), "jamba"),  # every layer counted as attention
        ("linear_attention", ("none",), "qwen3_next"),  # the state forgotten
        ("hybrid", ("full",), "falcon_h1"),
        ("sliding_attention", ("full",), "gemma2"),  # no cap
        ("cross_attention", ("full",), "mllama"),
        ("shared", ("full",), "gemma3n_text"),
        ("moe", ("full",), "nemotron_h"),
    ],
)
def test_it_sees_a_layer_taken_for_another(monkeypatch, layer_type, kept_as, family):
    monkeypatch.setitem(readings._LAYER_KINDS, layer_type, kept_as)
    assert outcomes(family) == {family: "differs"}


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("mimo_v2_flash", {"shape": readings._plain}),  # values as wide as keys
        ("deepseek_v3", {"shape": readings._plain}),  # expanded heads in place of the latent
        ("deepseek_v32", {"shape": lambda read, kind: (*readings._latent(read, "")[:3], 0)}),  # no index key
        ("bamba", {"state": lambda read: tuple(reversed(readings._BAMBA(read)))}),  # float32 for the wrong part
        ("lfm2", {"state": lambda read: (readings._conv(read)[0] + 1, 0)}),
        ("zamba2", {"state": lambda read: (0, readings._BAMBA(read)[1]) if read("mamba_n_heads") else (0, 0)}),
    ],
)
def test_it_sees_a_wrong_rule(monkeypatch, family, change):
    monkeypatch.setitem(readings.FAMILIES, family, replace(readings.FAMILIES[family], **change))
    assert outcomes(family) == {family: "differs"}


def test_it_sees_loops_that_are_not_counted(monkeypatch):
    monkeypatch.setattr(readings, "_repeated", lambda read, kinds: list(enumerate(kinds)))
    assert outcomes("dory") == {"dory": "differs"}


def test_it_sees_a_dict_that_is_read_otherwise(monkeypatch):
    """A dict's class asked for another pattern of windows."""
    right = readings._through_class
    monkeypatch.setattr(readings, "_through_class", lambda config: right({**config, "layer_types": ["full_attention"] * 4}))
    assert outcomes("cohere2") == {"cohere2": "differs"}


def test_it_sees_a_dict_that_is_guessed_at(monkeypatch):
    """Without Transformers a family whose class derives windows is read as if it had none: the column `alone`."""
    monkeypatch.setitem(readings.FAMILIES, "gemma2", replace(readings.FAMILIES["gemma2"], needs=("num_key_value_heads",)))
    config = shapes.tiny(transformers.Gemma2Config)
    right = config.to_dict
    config.to_dict = lambda: {key: value for key, value in right().items() if key != "layer_types"}
    row = shapes.line(transformers.Gemma2ForCausalLM, config)
    assert row["alone"] == row["outcome"] == "differs"


def test_a_class_that_cannot_be_run_is_a_finding(monkeypatch):
    def broken(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(shapes, "measured", broken)
    found = shapes.sweep(("llama",))
    assert [row["outcome"] for row in shapes.findings(found)] == ["not run"] and found[0]["why"] == "RuntimeError: no"


def test_a_cache_is_weighed_wherever_its_tensors_stand():
    cache = transformers.DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    cache.more = {"a": [torch.zeros(5), torch.zeros(2, dtype=torch.int64)], "again": cache.layers[0].keys}
    assert sum(tensor.nbytes for tensor in shapes.tensors(cache)) == (2 * 24 + 5) * 4


# ---- the page ------------------------------------------------------------------------------------------------------------


def test_tables_and_facts_are_of_the_run(run):
    facts = show.facts(run)
    assert facts["shapes_other"] == "0" and int(facts["shapes_equal"]) + int(facts["shapes_refused"]) == len(run.data["rows"])
    for table in (show.summary_table(run), show.rows_table(run), show.refused_table(run)):
        assert len({line.count("|") - line.count("\\|") for line in table.splitlines()}) == 1
    changed = record.Run(run.manifest, {"rows": [run.data["rows"][0] | {"outcome": "differs"}, *run.data["rows"][1:]]})
    assert show.facts(changed)["shapes_other"] == "1"
    assert show.alike("Llama 3.1 8B") == 1 and show.alike("Jamba v0.1") == 8
    assert ledger.token_bytes(ModelSpec.from_config(shapes.tiny(transformers.LlamaConfig), "bfloat16")) == 256


# ---- a dict read by the core alone says what its class would ---------------------------------------------------------------

ALONE = [name for name, family in readings.FAMILIES.items() if family.needs is not None]


def least(name):
    """The smallest dict of a family that the core reads with no Transformers there: the sizes, and what the rule needs."""
    config = shapes.tiny(transformers.CONFIG_MAPPING[name])
    whole = config.to_dict()
    keys = [key for row in readings._SIZES for key in row[1:] if key in whole] + list(readings.FAMILIES[name].needs)
    found = {"model_type": name} | {key: whole[key] if key in whole else getattr(config, key) for key in keys}
    return found | {key: getattr(config, key) for key in readings._lacks(found)}


@pytest.mark.parametrize("name", ALONE)
def test_the_least_dict_means_the_same_without_its_class(name, monkeypatch):
    config = least(name)
    through_class = ModelSpec.from_config(transformers.AutoConfig.for_model(**config), "bfloat16", name)
    monkeypatch.setattr(readings.importlib.util, "find_spec", lambda _: None)
    assert ModelSpec.from_config(config, "bfloat16", name) == through_class


@pytest.mark.parametrize("name", ALONE)
def test_a_needed_key_left_out_is_never_guessed_without_its_class(name, monkeypatch):
    """Either the class would have said the same, or the dict is refused."""
    whole = least(name)
    for key in whole.keys() - {"model_type"}:
        config = {k: value for k, value in whole.items() if k != key}
        monkeypatch.undo()
        try:
            right = ModelSpec.from_config(transformers.AutoConfig.for_model(**config), "bfloat16", name)
        except Exception:
            right = None  # the class refuses it too
        monkeypatch.setattr(readings.importlib.util, "find_spec", lambda _: None)
        try:
            assert ModelSpec.from_config(config, "bfloat16", name) == right, key
        except ValueError as error:
            assert "leaves out" in str(error) or "does not say" in str(error)
