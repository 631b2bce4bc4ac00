"""DeepSeek V2."""

from __future__ import annotations

from typing import Any

from phasor.config import ModelConfig
from phasor.models.entries import Draft, Field, FieldEntry, Pinned, get_path
from phasor.models.families._latent import AdjacentRope, LatentLike
from phasor.models.families._routed import FirstDense, SharedExperts
from phasor.models.fields import Fields


class ChoiceMethod(FieldEntry):
    """`topk_method`: the best experts of all, or of the `topk_group` best of `n_group` groups."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        groups, chosen = f.get("n_group", None), f.get("topk_group", None)
        if f.choose(name, {"greedy": False, "group_limited_greedy": True}, "greedy"):
            draft["feedforward.experts.num_groups"], draft["feedforward.experts.top_groups"] = groups, chosen

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        if (groups := get_path(config, "feedforward.experts.num_groups")) == 1:
            return {name: "greedy"}
        chosen = get_path(config, "feedforward.experts.top_groups")
        return {name: "group_limited_greedy", "n_group": groups, "topk_group": chosen}


class DeepSeekV2(LatentLike):
    """Latent attention; experts chosen by softmax scores, among the best groups of them."""

    model_type = "deepseek_v2"
    title = "DeepSeek V2"
    architectures = {"lm": "DeepseekV2ForCausalLM", "none": "DeepseekV2Model"}
    parts = LatentLike.parts | {
        "feedforward.experts.scores": "softmax",
        "feedforward.experts.correction": False,
        "feedforward.experts.group_score": "max",
        "feedforward.experts.normalize": False,
    }
    fields = {name: entry for name, entry in LatentLike.fields.items() if name not in ("n_group", "topk_group")} | {
        "n_routed_experts": Field("feedforward.experts.num_experts", default=64, fallback="num_experts"),
        "num_experts_per_tok": Field("feedforward.experts.top_k"),
        "moe_intermediate_size": Field("feedforward.experts.hidden_dim", default=1407),
        "n_shared_experts": SharedExperts(2),
        "topk_method": ChoiceMethod(),
        "routed_scaling_factor": Field("feedforward.experts.scale", default=1.0),
        "first_k_dense_replace": FirstDense(0),
        "mlp_bias": Pinned(False),
        "rope_parameters": AdjacentRope(),
        "use_mla": Pinned(True),
        "scoring_func": Pinned("softmax"),
        "norm_topk_prob": Pinned(False),
    }


FAMILY = DeepSeekV2()
