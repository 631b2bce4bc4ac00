"""LFM2 with a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from phasor.models.entries import Field, FieldEntry
from phasor.models.families._routed import FirstDense
from phasor.models.families.lfm2 import LFM2
from phasor.models.layout import Rule, experts, linear


class LFM2MoE(LFM2):
    """LFM2 whose layers after the first have experts by sigmoid scores, with a correction of the choice."""

    model_type = "lfm2_moe"
    title = "LFM2 MoE"
    architectures = {"lm": "Lfm2MoeForCausalLM", "none": "Lfm2MoeModel"}
    parts = LFM2.parts | {"feedforward.experts.scores": "sigmoid", "feedforward.experts.normalize_eps": 1e-6}
    mixture: ClassVar[dict[str, FieldEntry]] = {
        "num_experts": Field("feedforward.experts.num_experts", default=32),
        "num_experts_per_tok": Field("feedforward.experts.top_k", default=4),
        "moe_intermediate_size": Field("feedforward.experts.hidden_dim", default=1792),
        "norm_topk_prob": Field("feedforward.experts.normalize", default=True),
        "routed_scaling_factor": Field("feedforward.experts.scale", default=1.0),
        "use_expert_bias": Field("feedforward.experts.correction", default=True),
    }
    fields = mixture | LFM2.fields
    fields |= {"intermediate_size": Field("hidden_dim", default=7168), "num_dense_layers": FirstDense(2)}
    harmless = LFM2.harmless | {"output_router_logits"}
    experts_at = "feed_forward.experts"

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from super().feedforward(ours, theirs)
        network = f"{theirs.removesuffix('mlp')}feed_forward"
        yield from linear(f"{ours}.router", f"{network}.gate")
        yield Rule(f"{ours}.correction", f"{network}.expert_bias")
        each = f"{network}.experts.{{e}}"
        yield from experts(ours, f"{each}.w1.weight", f"{each}.w3.weight", f"{each}.w2.weight")


FAMILY = LFM2MoE()
