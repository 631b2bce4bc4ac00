"""Qwen3-Next."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.models.entries import Field
from phasor.models.families._delta import Hybrid, LinearLayers
from phasor.models.families._experts import DenseLayers, WithExperts
from phasor.models.families._llama import KVHeads, score_classifiers
from phasor.models.layout import Rule
from phasor.models.rope import RopeParameters


class Qwen3Next(Hybrid, WithExperts):
    """Gated delta attention in three of four layers, experts in most, a quarter of each head of the others rotated."""

    model_type = "qwen3_next"
    title = "Qwen3-Next"
    architectures = {"lm": "Qwen3NextForCausalLM", "none": "Qwen3NextModel"}
    classifiers = score_classifiers("Qwen3Next")
    parts = Hybrid.parts | {"feedforward.experts.shared_gate": True}
    fields = Hybrid.fields | {
        "num_key_value_heads": KVHeads(2),
        "norm_topk_prob": Field("feedforward.experts.normalize", default=True),
        "num_experts": Field("feedforward.experts.num_experts", default=512),
        "num_experts_per_tok": Field("feedforward.experts.top_k", default=10),
        "moe_intermediate_size": Field("feedforward.experts.hidden_dim", default=512),
        "shared_expert_intermediate_size": Field("feedforward.experts.shared_dim", default=512),
        "mlp_only_layers": DenseLayers(),
        "rope_parameters": RopeParameters(partial=0.25),
        "layer_types": LinearLayers(),
    }

    def inputs(self, ours: str, theirs: str) -> Iterator[Rule]:
        """The projections of the input, whose rows are in the order of ours."""
        yield Rule(f"{ours}.qkvz.weight", f"{theirs}.in_proj_qkvz.weight")
        yield Rule(f"{ours}.gates.weight", f"{theirs}.in_proj_ba.weight")


FAMILY = Qwen3Next()
