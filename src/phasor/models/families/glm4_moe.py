"""GLM-4.5 to GLM-4.7: GLM-4 with a mixture of experts."""

from __future__ import annotations

from phasor.config import ModelConfig
from phasor.models.entries import GATES, Activation, Bias, Field, HeadDim, Switch
from phasor.models.families._llama import KVHeads
from phasor.models.families._routed import FirstDense, Routed
from phasor.models.rope import RopeParameters


class Glm4MoE(Routed):
    """Experts by sigmoid scores after the first layers, half of a head rotated, norms of queries and keys in some."""

    model_type = "glm4_moe"
    title = "GLM-4.5"
    architectures = {"lm": "Glm4MoeForCausalLM", "none": "Glm4MoeModel"}
    fields = Routed.fields | {
        "num_key_value_heads": KVHeads(8),
        "head_dim": HeadDim(),
        "max_position_embeddings": Field("max_length", default=131072),
        "hidden_act": Activation("silu", GATES),
        "attention_bias": Bias(False, ("q", "k", "v")),
        "use_qk_norm": Switch("attention.qk_norm", on="head", off="none", default=False),
        "rms_norm_eps": Field("norm.eps", default=1e-5),
        **Routed.mixture,
        "n_routed_experts": Field("feedforward.experts.num_experts", default=128, fallback="num_local_experts"),
        "num_experts_per_tok": Field("feedforward.experts.top_k", default=8),
        "norm_topk_prob": Field("feedforward.experts.normalize", default=True),
        "first_k_dense_replace": FirstDense(1),
        "rope_parameters": RopeParameters(partial=0.5),
    }
    # Which outputs are returned, and layers that predict further tokens, which are no part of the model.
    harmless = frozenset({"num_mtp_layers", "num_nextn_predict_layers", "output_router_logits"})

    def passthrough_patterns(self, config: ModelConfig) -> tuple[str, ...]:
        return (f"model.layers.{config.num_layers}.*",)


FAMILY = Glm4MoE()
