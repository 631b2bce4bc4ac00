"""Qwen 3.5, its text models with a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phasor.models.entries import Field
from phasor.models.families._delta import Hybrid, LinearLayers
from phasor.models.families._experts import WithExperts
from phasor.models.families._llama import KVHeads
from phasor.models.families.qwen3_5_text import INTERLEAVED
from phasor.models.layout import Rule, StackedTransposed


class Qwen35MoEText(Hybrid, WithExperts):
    """Qwen 3.5 with experts in every layer, and one of them with a gate that every token takes."""

    model_type = "qwen3_5_moe_text"
    title = "Qwen 3.5 MoE (text)"
    architectures = {"lm": "Qwen3_5MoeForCausalLM", "none": "Qwen3_5MoeTextModel"}
    parts = Hybrid.parts | {"feedforward.experts.shared_gate": True}
    fields = {name: entry for name, entry in Hybrid.fields.items() if name != "intermediate_size"} | {
        "num_key_value_heads": KVHeads(2),
        "num_experts": Field("feedforward.experts.num_experts", default=256),
        "num_experts_per_tok": Field("feedforward.experts.top_k", default=8),
        "moe_intermediate_size": Field("feedforward.experts.hidden_dim", default=512),
        "shared_expert_intermediate_size": Field("feedforward.experts.shared_dim", default=512),
        "rope_parameters": INTERLEAVED,
        "layer_types": LinearLayers(),
    }
    harmless = Hybrid.harmless | {"intermediate_size"}

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        up, down = (
            Rule(f"{ours}.{own}", f"{theirs}.experts.{name}", StackedTransposed())
            for own, name in (("up", "gate_up_proj"), ("down", "down_proj"))
        )
        stacked = {"gate_proj": (up,), "up_proj": (), "down_proj": (down,)}
        for rule in super().feedforward(ours, theirs):
            name = rule.theirs.removeprefix(f"{theirs}.experts.{{e}}.").removesuffix(".weight")
            yield replace(rule, otherwise=stacked.get(name))


FAMILY = Qwen35MoEText()
