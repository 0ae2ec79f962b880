"""Shapes of public models, memory of common cards, and one card's ceilings, each with its source.

A model's entry is the part of its Hugging Face config that decides its shape; `tests/test_ledger.py` builds each one without
weights and finds `parameters` again, which a wrong entry would not survive. A card's memory is what its driver reports as
total: the number on its box in GiB, or a little less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvlab.core.ledger import MIB
from kvlab.core.spec import ModelSpec

LITGPT = "Lightning-AI/litgpt, litgpt/config.py at 2685705, after the config.json of {}"
MODAL = "modal-labs/modal-client#2797"


@dataclass(frozen=True)
class PublicModel:
    """A public model: its name, the facts of its config, its number of weights, and where the facts come from."""

    name: str
    config: Mapping[str, Any]
    parameters: int
    source: str

    @cached_property
    def spec(self) -> ModelSpec:
        """Its shape, with K and V in bfloat16."""
        return ModelSpec.from_config(self.config, "bfloat16", self.name)

    @property
    def kind(self) -> str:
        """MHA (every query head has its own K and V), MQA (all share one), GQA (groups share one) or MLA (one latent for all)."""
        s = self.spec
        if any(cache.why == "kv_lora_rank" for cache in s.caches):
            return "MLA"
        return "MHA" if s.kv_heads == s.heads else "MQA" if s.kv_heads == 1 else "GQA"


@dataclass(frozen=True)
class Card:
    """A card: its name, the memory its driver reports, in bytes, and a public listing of it."""

    name: str
    memory: int
    source: str


@dataclass(frozen=True)
class Ceilings:
    """What a card does at best: dense bf16 arithmetic in FLOP a second, memory traffic in bytes a second; and who says so."""

    flops: float
    bandwidth: float
    source: str


def _llama(layers, hidden, inner, heads, kv_heads, vocab, context, kind="llama", **more) -> dict[str, Any]:
    """The config keys that Llama and its relatives share."""
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        **more,
    }


def _alternating(layers: int, near: int, far: int = 1) -> list[str]:
    """`near` layers with a window, then `far` without, over and over."""
    pattern = ["sliding_attention"] * near + ["full_attention"] * far
    return [pattern[i % len(pattern)] for i in range(layers)]


MODELS: dict[str, PublicModel] = {
    model.name: model
    for model in (
        PublicModel(
            "SmolLM2-135M",
            _llama(30, 576, 1536, 9, 3, 49152, 8192, tie_word_embeddings=True),
            134_515_008,
            LITGPT.format("HuggingFaceTB/SmolLM2-135M") + "; the bundled model",
        ),
        PublicModel(
            "GPT-2",
            {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024},
            124_439_808,
            "openai/gpt-2, src/model.py; the defaults of Transformers' GPT2Config",
        ),
        PublicModel(
            "Gemma 2B",
            _llama(18, 2048, 16384, 8, 1, 256000, 8192, "gemma", head_dim=256),
            2_506_172_416,
            "google/gemma_pytorch, gemma/config.py at 03e6575",
        ),
        PublicModel(
            "Qwen3 4B",
            _llama(36, 2560, 9728, 32, 8, 151936, 40960, "qwen3", head_dim=128, tie_word_embeddings=True),
            4_022_468_096,
            LITGPT.format("Qwen/Qwen3-4B"),
        ),
        PublicModel(
            "Llama 2 7B",
            _llama(32, 4096, 11008, 32, 32, 32000, 4096),
            6_738_415_616,
            LITGPT.format("meta-llama/Llama-2-7b-hf"),
        ),
        PublicModel(
            "Falcon 7B",
            {
                "model_type": "falcon",
                "num_hidden_layers": 32,
                "hidden_size": 4544,
                "num_attention_heads": 71,
                "multi_query": True,
                "new_decoder_architecture": False,
                "vocab_size": 65024,
                "max_position_embeddings": 2048,
                "tie_word_embeddings": True,
            },
            6_921_720_704,
            LITGPT.format("tiiuae/falcon-7b"),
        ),
        PublicModel(
            "Mistral 7B v0.1",
            _llama(32, 4096, 14336, 32, 8, 32000, 32768, "mistral", sliding_window=4096),
            7_241_732_096,
            LITGPT.format("mistralai/Mistral-7B-v0.1") + "; context and window: its model card",
        ),
        PublicModel(
            "Qwen2.5 7B",
            _llama(28, 3584, 18944, 28, 4, 152064, 131072, "qwen2", use_sliding_window=False),
            7_615_616_512,
            LITGPT.format("Qwen/Qwen2.5-7B"),
        ),
        PublicModel(
            "Llama 3.1 8B",
            _llama(32, 4096, 14336, 32, 8, 128256, 131072),
            8_030_261_248,
            "meta-llama/llama-models, models/sku_list.py at 084b88e",
        ),
        PublicModel(
            "Gemma 2 9B",
            _llama(
                42,
                3584,
                14336,
                16,
                8,
                256000,
                8192,
                "gemma2",
                head_dim=256,
                sliding_window=4096,
                layer_types=_alternating(42, 1),
            ),
            9_241_705_984,
            "google/gemma_pytorch, gemma/config.py at 03e6575",
        ),
        PublicModel(
            "Phi-4",
            _llama(40, 5120, 17920, 40, 10, 100352, 16384, "phi3", sliding_window=None),
            14_659_507_200,
            LITGPT.format("microsoft/phi-4"),
        ),
        PublicModel(
            "Gemma 3 27B",
            _llama(
                62,
                5376,
                21504,
                32,
                16,
                262144,
                131072,
                "gemma3_text",
                head_dim=128,
                sliding_window=1024,
                layer_types=_alternating(62, 5),
            ),
            27_009_002_240,
            LITGPT.format("google/gemma-3-27b-it") + " (its text model)",
        ),
        PublicModel(
            "Jamba v0.1",
            _llama(
                32,
                4096,
                14336,
                32,
                8,
                65536,
                262144,
                "jamba",
                attn_layer_period=8,
                attn_layer_offset=4,
                mamba_d_state=16,
                mamba_d_conv=4,
                mamba_expand=2,
            ),
            51_570_323_328,
            "the defaults of Transformers' JambaConfig, after ai21labs/Jamba-v0.1: a state-space hybrid",
        ),
        PublicModel(
            "Qwen3 32B",
            _llama(64, 5120, 25600, 64, 8, 151936, 40960, "qwen3", head_dim=128),
            32_762_123_264,
            LITGPT.format("Qwen/Qwen3-32B"),
        ),
        PublicModel(
            "Llama 3.1 70B",
            _llama(80, 8192, 28672, 64, 8, 128256, 131072),
            70_553_706_496,
            "meta-llama/llama-models, models/sku_list.py at 084b88e",
        ),
        PublicModel(
            "Qwen3-Next 80B",
            _llama(
                48,
                2048,
                5632,
                16,
                2,
                151936,
                262144,
                "qwen3_next",
                head_dim=256,
                layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 12,
                linear_num_key_heads=16,
                linear_num_value_heads=32,
                linear_key_head_dim=128,
                linear_value_head_dim=128,
                linear_conv_kernel_dim=4,
            ),
            79_674_391_296,
            "the defaults of Transformers' Qwen3NextConfig, after Qwen/Qwen3-Next-80B-A3B-Instruct; context: its config.json",
        ),
        PublicModel(
            "gpt-oss-120b",
            _llama(
                36,
                2880,
                2880,
                64,
                8,
                201088,
                131072,
                "gpt_oss",
                head_dim=64,
                num_local_experts=128,
                sliding_window=128,
                rope_theta=150000.0,
                layer_types=_alternating(36, 1),
            ),
            116_829_156_672,
            "openai/gpt-oss, gpt_oss/torch/model.py at 0568dfc",
        ),
        PublicModel(
            "MiMo-V2-Flash",
            _llama(
                48,
                4096,
                16384,
                64,
                4,
                152576,
                131072,
                "mimo_v2_flash",
                head_dim=192,
                v_head_dim=128,
                sliding_window=129,
                layer_types=["full_attention" if i == 0 or i % 6 == 5 else "sliding_attention" for i in range(48)],
            ),
            308_778_768_832,
            "the defaults of Transformers' MiMoV2FlashConfig; K/V heads and widths: ROCm/ATOM#560",
        ),
        PublicModel(
            "Llama 3.1 405B",
            _llama(126, 16384, 53248, 128, 8, 128256, 131072),
            405_853_388_800,
            "meta-llama/llama-models, models/sku_list.py at 084b88e",
        ),
        PublicModel(
            "DeepSeek-V3",
            _llama(
                61,
                7168,
                18432,
                128,
                128,
                129280,
                131072,
                "deepseek_v3",
                kv_lora_rank=512,
                qk_rope_head_dim=64,
            ),
            671_026_404_352,
            "the defaults of Transformers' DeepseekV3Config, after deepseek-ai/DeepSeek-V3; context: arXiv 2412.19437",
        ),
    )
}

CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        Card("RTX 3060 12 GB", 12288 * MIB, "geerlingguy/raspberry-pi-pcie-devices#790"),
        Card("T4 16 GB", 15360 * MIB, MODAL),
        Card("L4 24 GB", 23034 * MIB, MODAL),
        Card("RTX 3090 24 GB", 24576 * MIB, "noonghunna/club-3090#1128"),
        Card("RTX 4090 24 GB", 24564 * MIB, "vllm-project/vllm#7553"),
        Card("RTX 5090 32 GB", 32607 * MIB, "noonghunna/club-3090#1261"),
        Card("A100 40 GB", 40960 * MIB, MODAL),
        Card("L40S 48 GB", 46068 * MIB, MODAL),
        Card("A100 80 GB", 81920 * MIB, MODAL),
        Card("H100 80 GB", 81559 * MIB, MODAL),
    )
}

# By the vendor's data sheet: nobody has measured them here.
CEILINGS: dict[str, Ceilings] = {
    "A100 80 GB": Ceilings(
        312e12, 2.039e12, "NVIDIA's A100 data sheet, the SXM module: BF16 without sparsity, GPU memory bandwidth"
    ),
}
