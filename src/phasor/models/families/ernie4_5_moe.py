"""ERNIE 4.5 with a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import ModelConfig
from phasor.models.entries import Draft, Field, FieldEntry, HeadDim, Pinned
from phasor.models.families._llama import KVHeads, LlamaLike
from phasor.models.families._routed import SharedExperts, routed_experts
from phasor.models.families.ernie4_5 import Ernie45
from phasor.models.fields import Fields
from phasor.models.layout import AsRow, Rule


class ExpertLayers(FieldEntry):
    """Every `moe_layer_interval`-th layer from one index to another has experts."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        config = draft.config()
        start, end, step = f.get(name, 1), f.get("moe_layer_end_index", -1), f.positive("moe_layer_interval", 1)
        end = config.num_layers - 1 if end == -1 else end
        draft.layers["feedforward.experts"] = [
            config.feedforward.experts if start <= i <= end and (i + 1) % step == 0 else None
            for i in range(config.num_layers)
        ]

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        routed = [i for i in range(config.num_layers) if config.layer(i).feedforward.experts is not None]
        start, end = routed[0], routed[-1]
        step = routed[1] - start if len(routed) > 1 else start + 1
        if routed != [i for i in range(start, end + 1) if (i + 1) % step == 0]:
            raise ValueError("its layers with experts are not at equal intervals between a first and a last one")
        return {name: start, "moe_layer_end_index": end, "moe_layer_interval": step}


class Ernie45MoE(Ernie45):
    """ERNIE 4.5 with experts in some layers, whose choice is corrected, and shared ones."""

    model_type = "ernie4_5_moe"
    title = "ERNIE 4.5 MoE"
    architectures = {"lm": "Ernie4_5_MoeForCausalLM", "none": "Ernie4_5_MoeModel"}
    parts = Ernie45.parts | {"feedforward.experts.correction": True}
    fields = {name: entry for name, entry in Ernie45.fields.items() if name != "rope_parameters"} | {
        "num_key_value_heads": KVHeads(4),
        "head_dim": HeadDim(),
        "use_bias": Pinned(False),
        "moe_num_experts": Field("feedforward.experts.num_experts", default=64, fallback="num_experts"),
        "moe_k": Field("feedforward.experts.top_k", default=6, fallback="num_experts_per_tok"),
        "moe_intermediate_size": Field("feedforward.experts.hidden_dim", default=1536),
        "moe_num_shared_experts": SharedExperts(2),
        "moe_norm_min": Pinned(1e-12),
        "moe_layer_start_index": ExpertLayers(),
        "rope_parameters": Ernie45.fields["rope_parameters"],
    }
    # Which outputs are returned, a loss, and how many layers predict further tokens, which are no part of the model.
    harmless = frozenset({"output_router_logits", "router_aux_loss_coef", "num_nextn_predict_layers"})
    passthrough = ("model.mtp_*",)

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from LlamaLike.feedforward(self, ours, theirs)
        yield from routed_experts(ours, theirs, "moe_statics.e_score_correction_bias", AsRow())
        yield from LlamaLike.feedforward(self, f"{ours}.shared", f"{theirs}.shared_experts")


FAMILY = Ernie45MoE()
