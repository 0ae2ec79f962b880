"""The fault of a memory ledger: it counts heads that keep nothing."""

from __future__ import annotations

from kvlab.faults.zoo import Fault, add


def _query_heads(spec, cache=None) -> int:
    return spec.heads


add(
    Fault(
        name="query-heads-counted",
        breaks="kvlab.core.ledger:kv_heads",
        broken=_query_heads,
        symptom="The plan for a model with grouped heads is several times what it uses: too few requests are let in, and the card stays empty.",
        mechanism="The ledger multiplies by the query heads. Keys and values are kept for the K/V heads, of which there are fewer.",
        family="accounting",
        detector="The plan held against the bytes of the tensors: equal, or wrong. On a model with as many K/V heads as query heads it is silent.",
        fix="Read num_key_value_heads; where a config has none, it is the number of query heads.",
        cases=(
            "jranaraki/vllm-fit#2",
            "vllm-project/vllm#29736",
            "hahnyuan/LLM-Viewer#12",
            "meta-pytorch/torchtune#38",
        ),
        claims=("C3", "C4", "C11"),
    )
)
