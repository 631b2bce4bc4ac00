"""Granite 3 with a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.models.entries import Field
from phasor.models.families.granite import Granite
from phasor.models.layout import Rule, StackedTransposed, linear


class GraniteMoE(Granite):
    """Granite with experts in every layer, whose weights are the softmax over those chosen."""

    model_type = "granitemoe"
    title = "Granite 3 MoE"
    experts_at = "block_sparse_moe.experts"
    architectures = {"lm": "GraniteMoeForCausalLM", "none": "GraniteMoeModel"}
    fields = {name: entry for name, entry in Granite.fields.items() if name != "mlp_bias"} | {
        "num_local_experts": Field("feedforward.experts.num_experts", default=8),
        "num_experts_per_tok": Field("feedforward.experts.top_k", default=2),
    }
    harmless = frozenset({"output_router_logits", "router_aux_loss_coef"})  # which outputs are returned, and a loss

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        mixture = f"{theirs.removesuffix('mlp')}block_sparse_moe"
        yield from linear(f"{ours}.router", f"{mixture}.router.layer")
        yield Rule(f"{ours}.up", f"{mixture}.input_linear.weight", StackedTransposed())
        yield Rule(f"{ours}.down", f"{mixture}.output_linear.weight", StackedTransposed())


FAMILY = GraniteMoE()
