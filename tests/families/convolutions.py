"""Random configurations of LFM2: gated short convolutions and softmax attention."""

from __future__ import annotations

import random
from typing import Any

import transformers
from transformers.models.lfm2 import modeling_lfm2

from .cases import Case, Cases, coin
from .llama_like import FULL, common_fields, eps, share_of_width
from .mamba import mask_projections

CONVOLUTION = "conv"


def lfm2(rng: random.Random, cls: str = "Lfm2ForCausalLM") -> Case:
    sizes = share_of_width(rng, common_fields(rng))
    fields = {name: value for name, value in sizes.items() if name != "hidden_act"}
    types = [CONVOLUTION, FULL, *(rng.choice([CONVOLUTION, FULL]) for _ in range(rng.choice([1, 2])))]
    rng.shuffle(types)
    fields |= {
        "num_hidden_layers": len(types),
        "norm_eps": eps(rng),
        "conv_L_cache": rng.choice([1, 3, 4]),
        "conv_bias": coin(rng),
        "block_auto_adjust_ff_dim": coin(rng),
        "block_multiple_of": rng.choice([8, 20]),
        "block_ffn_dim_multiplier": rng.choice([1.0, 1.3]),
    }
    indices = [i for i, kind in enumerate(types) if kind == FULL]
    listed = {"layer_types": types} if coin(rng) else {"full_attn_idxs": indices}
    config = transformers.Lfm2Config(**fields, **listed)
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


CASES: Cases = {
    "lfm2": lfm2,
    "lfm2/without head": lambda rng: lfm2(rng, "Lfm2Model"),
}
