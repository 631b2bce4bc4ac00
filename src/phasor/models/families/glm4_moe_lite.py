"""GLM-4.7-Flash."""

from __future__ import annotations

from phasor.models.entries import Field
from phasor.models.families._latent import ExpertsByLayer
from phasor.models.families.deepseek_v3 import DeepSeekV3


class GLM4MoELite(DeepSeekV3):
    """As DeepSeek V3, with wider values and experts from the second layer on."""

    model_type = "glm4_moe_lite"
    title = "GLM-4.7-Flash"
    architectures = {"lm": "Glm4MoeLiteForCausalLM", "none": "Glm4MoeLiteModel"}
    fields = {name: entry for name, entry in DeepSeekV3.fields.items() if name != "first_k_dense_replace"} | {
        "max_position_embeddings": Field("max_length", default=202752),
        "q_lora_rank": Field("attention.q_rank", default=None, absent=768),
        "rms_norm_eps": Field("norm.eps", default=1e-5),
        "n_routed_experts": Field("feedforward.experts.num_experts", default=64, fallback="num_local_experts"),
        "num_experts_per_tok": Field("feedforward.experts.top_k", default=4),
        "moe_intermediate_size": Field("feedforward.experts.hidden_dim", default=1536),
        "n_group": Field("feedforward.experts.num_groups", default=1),
        "topk_group": Field("feedforward.experts.top_groups", default=1),
        "routed_scaling_factor": Field("feedforward.experts.scale", default=1.8),
        "mlp_layer_types": ExpertsByLayer(1),
    }


FAMILY = GLM4MoELite()
