"""Solar Open."""

from __future__ import annotations

from phasor.models.entries import GATES, Activation, Bias, Field, Pinned
from phasor.models.families._llama import KVHeads
from phasor.models.families._routed import Routed
from phasor.models.rope import RopeParameters


class SolarOpen(Routed):
    """GLM-4.5 with experts in every layer and heads that are rotated whole."""

    model_type = "solar_open"
    title = "Solar Open"
    architectures = {"lm": "SolarOpenForCausalLM", "none": "SolarOpenModel"}
    fields = {name: entry for name, entry in Routed.fields.items() if name != "intermediate_size"} | {
        "num_key_value_heads": KVHeads(8),
        "head_dim": Field("head_dim", default=128),
        "max_position_embeddings": Field("max_length", default=131072),
        "hidden_act": Activation("silu", GATES),
        "attention_bias": Bias(False, ("q", "k", "v")),
        "rms_norm_eps": Field("norm.eps", default=1e-5),
        **Routed.mixture,
        "n_routed_experts": Field("feedforward.experts.num_experts", default=128, fallback="num_local_experts"),
        "num_experts_per_tok": Field("feedforward.experts.top_k", default=8),
        "moe_intermediate_size": Field("feedforward.experts.hidden_dim", default=1280),
        "norm_topk_prob": Field("feedforward.experts.normalize", default=True),
        "rope_parameters": RopeParameters(base=1e6),
        "first_k_dense_replace": Pinned(0),
    }
    harmless = frozenset({"intermediate_size", "output_router_logits"})


FAMILY = SolarOpen()
