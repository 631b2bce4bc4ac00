"""Qwen 3 with a mixture of experts."""

from __future__ import annotations

from typing import Any

from phasor.config import ModelConfig
from phasor.models.entries import Bias, Draft, Field, Pinned
from phasor.models.families._experts import DenseLayers, WithExperts
from phasor.models.families._llama import KVHeads, score_classifiers
from phasor.models.fields import Fields
from phasor.models.rope import RopeParameters


class SwitchedWindow(Field):
    """`sliding_window`, the same in every layer, if `use_sliding_window` is true."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        if f.get("use_sliding_window", False):
            super().read(f, name, draft)

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        used = config.layer(0).attention.window is not None
        return {"use_sliding_window": used} | (super().write(name, config) if used else {})


class Qwen3MoE(WithExperts):
    """Qwen 3 with experts in some layers; a window is the same in every layer."""

    model_type = "qwen3_moe"
    title = "Qwen 3 MoE"
    architectures = {"lm": "Qwen3MoeForCausalLM", "none": "Qwen3MoeModel"}
    classifiers = score_classifiers("Qwen3Moe")
    parts = WithExperts.parts | {"attention.qk_norm": "head"}
    fields = WithExperts.fields | {
        "num_key_value_heads": KVHeads(4),
        "attention_bias": Bias(False),
        "qkv_bias": Pinned(False),
        "use_qk_norm": Pinned(True),
        "sliding_window": SwitchedWindow("attention.window", default=None, absent=4096),
        "num_experts": Field("feedforward.experts.num_experts", default=128, fallback="num_local_experts"),
        "num_experts_per_tok": Field("feedforward.experts.top_k", default=8),
        "moe_intermediate_size": Field("feedforward.experts.hidden_dim", default=768),
        "shared_expert_intermediate_size": Pinned(0),
        "mlp_only_layers": DenseLayers(),
        "rope_parameters": RopeParameters(),
    }


FAMILY = Qwen3MoE()
