"""Random configurations of LFM2: gated short convolutions and softmax attention."""

from __future__ import annotations

import random
from typing import Any

import transformers
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.lfm2_moe import modeling_lfm2_moe

from .cases import Case, Cases, coin
from .llama_like import FULL, common_fields, eps, hub_case, share_of_width
from .mamba import mask_projections
from .routed import correct

CONVOLUTION = "conv"


def hybrid_fields(rng: random.Random) -> dict[str, Any]:
    """Sizes, and both kinds of layers in no order."""
    sizes = share_of_width(rng, common_fields(rng))
    fields = {name: value for name, value in sizes.items() if name != "hidden_act"}
    types = [CONVOLUTION, FULL, *(rng.choice([CONVOLUTION, FULL]) for _ in range(rng.choice([1, 2])))]
    rng.shuffle(types)
    return fields | {
        "layer_types": types,
        "num_hidden_layers": len(types),
        "norm_eps": eps(rng),
        "conv_L_cache": rng.choice([1, 3, 4]),
        "conv_bias": coin(rng),
    }


def lfm2(rng: random.Random, cls: str = "Lfm2ForCausalLM") -> Case:
    fields = hybrid_fields(rng)
    fields |= {
        "block_auto_adjust_ff_dim": coin(rng),
        "block_multiple_of": rng.choice([8, 20]),
        "block_ffn_dim_multiplier": rng.choice([1.0, 1.3]),
    }
    if coin(rng):
        fields["full_attn_idxs"] = [i for i, kind in enumerate(fields.pop("layer_types")) if kind == FULL]
    config = transformers.Lfm2Config(**fields)
    adjusted = ("intermediate_size", "block_auto_adjust_ff_dim", "block_multiple_of", "block_ffn_dim_multiplier")
    case = Case(getattr(transformers, cls), config, may_differ=(*adjusted, "full_attn_idxs"))
    case.patch = lambda patch: mask_projections(patch, modeling_lfm2.Lfm2ShortConv)
    if coin(rng):

        def older(data: dict[str, Any]) -> dict[str, Any]:
            """As files of before transformers 5 on the hub have it."""
            data["rope_theta"] = data.pop("rope_parameters")["rope_theta"]
            data["block_ff_dim"], data["tie_embedding"] = data["intermediate_size"], data.pop("tie_word_embeddings")
            return data | {"block_dim": data["hidden_size"], "use_pos_enc": True}

        if config.rope_parameters["rope_type"] == "default":
            case.older, case.may_differ = older, (*case.may_differ, "block_dim", "use_pos_enc")
    return case


def lfm2_moe(rng: random.Random, cls: str = "Lfm2MoeForCausalLM") -> Case:
    config = transformers.Lfm2MoeConfig(
        **hybrid_fields(rng),
        num_experts=rng.choice([4, 6]),
        num_experts_per_tok=rng.choice([1, 2, 3]),
        moe_intermediate_size=rng.choice([16, 24]),
        num_dense_layers=rng.choice([0, 1]),
        use_expert_bias=coin(rng),
        norm_topk_prob=coin(rng),
        routed_scaling_factor=rng.choice([1.0, 2.5]),
    )
    case = correct(hub_case(rng, cls, config), "expert_bias")
    case.patch = lambda patch: mask_projections(patch, modeling_lfm2_moe.Lfm2MoeShortConv)
    return case


CASES: Cases = {
    "lfm2": lfm2,
    "lfm2/without head": lambda rng: lfm2(rng, "Lfm2Model"),
    "lfm2_moe": lfm2_moe,
    "lfm2_moe/without head": lambda rng: lfm2_moe(rng, "Lfm2MoeModel"),
}
