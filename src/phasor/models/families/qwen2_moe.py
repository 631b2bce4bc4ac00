"""Qwen 1.5 and 2 with a mixture of experts."""

from __future__ import annotations

from phasor.models.entries import Bias, Field
from phasor.models.families._experts import DenseLayers, WithExperts
from phasor.models.families._llama import KVHeads, score_classifiers
from phasor.models.layer_types import LayerTypes
from phasor.models.rope import RopeParameters


class Qwen2MoE(WithExperts):
    """Qwen 2 with experts in some layers, one of which every token takes, and windows in every other layer."""

    model_type = "qwen2_moe"
    title = "Qwen 2 MoE"
    architectures = {"lm": "Qwen2MoeForCausalLM", "none": "Qwen2MoeModel"}
    classifiers = score_classifiers("Qwen2Moe")
    parts = WithExperts.parts | {"feedforward.experts.shared_gate": True}
    fields = WithExperts.fields | {
        "num_key_value_heads": KVHeads(16),
        "qkv_bias": Bias(True, ("q", "k", "v")),
        "num_experts": Field("feedforward.experts.num_experts", default=60),
        "num_experts_per_tok": Field("feedforward.experts.top_k", default=4),
        "moe_intermediate_size": Field("feedforward.experts.hidden_dim", default=1408),
        "shared_expert_intermediate_size": Field("feedforward.experts.shared_dim", default=5632),
        "mlp_only_layers": DenseLayers(),
        "rope_parameters": RopeParameters(),
        "layer_types": LayerTypes(
            lambda f, draft, i: i % 2 == 0 and i < f.get("max_window_layers", 28), absent=4096, switch=True
        ),
    }


FAMILY = Qwen2MoE()
