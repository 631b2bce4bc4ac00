"""Qwen3-VL with a mixture of experts, its text part."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.models.entries import Field, Pinned
from phasor.models.families._experts import DenseLayers
from phasor.models.families._llama import KVHeads
from phasor.models.families.qwen3_vl_text import Qwen3VLText
from phasor.models.layout import Rule, StackedEitherWay, linear


class Qwen3VLMoEText(Qwen3VLText):
    """Qwen3-VL with experts in some layers, whose weights are normalized and stored in two ways."""

    model_type = "qwen3_vl_moe_text"
    title = "Qwen3-VL MoE (text)"
    architectures = {"lm": "Qwen3VLMoeForConditionalGeneration", "none": "Qwen3VLMoeTextModel"}
    body = "Qwen3VLMoeTextModel"
    fields = Qwen3VLText.fields | {
        "num_key_value_heads": KVHeads(16),
        "head_dim": Field("head_dim", default=None),
        "tie_word_embeddings": Field("embedding.tied", default=True),
        "num_experts": Field("feedforward.experts.num_experts", default=60, fallback="num_local_experts"),
        "num_experts_per_tok": Field("feedforward.experts.top_k", default=4),
        "moe_intermediate_size": Field("feedforward.experts.hidden_dim", default=1408),
        "norm_topk_prob": Pinned(True),
        "mlp_only_layers": DenseLayers(),
    }
    harmless = frozenset({"output_router_logits", "router_aux_loss_coef"})  # which outputs are returned, and a loss

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from super().feedforward(ours, theirs)
        yield from linear(f"{ours}.router", f"{theirs}.gate")
        yield Rule(f"{ours}.up", f"{theirs}.experts.gate_up_proj", StackedEitherWay())
        yield Rule(f"{ours}.down", f"{theirs}.experts.down_proj", StackedEitherWay())


FAMILY = Qwen3VLMoEText()
