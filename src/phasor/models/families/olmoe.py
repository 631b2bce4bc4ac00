"""OLMoE."""

from __future__ import annotations

from phasor.models.entries import Bias, Field, Pinned
from phasor.models.families._experts import WithExperts
from phasor.models.rope import RopeParameters


class Olmoe(WithExperts):
    """Experts in every layer, and norms over all queries and all keys."""

    model_type = "olmoe"
    title = "OLMoE"
    architectures = {"lm": "OlmoeForCausalLM", "none": "OlmoeModel"}
    parts = WithExperts.parts | {"attention.qk_norm": "whole"}
    fields = WithExperts.fields | {
        "max_position_embeddings": Field("max_length", default=4096),
        "attention_bias": Bias(False),
        "clip_qkv": Pinned(None),
        "num_experts": Field("feedforward.experts.num_experts", default=64, fallback="num_local_experts"),
        "num_experts_per_tok": Field("feedforward.experts.top_k", default=8),
        "rms_norm_eps": Field("norm.eps", default=1e-5),
        "rope_parameters": RopeParameters(),
    }


FAMILY = Olmoe()
