"""Random configurations of mixtures of experts: GLM-4.5, dots.llm1, MiniMax M2, ERNIE 4.5, OLMoE and Granite MoE."""

from __future__ import annotations

import random
from typing import Any

import torch
import transformers

from .cases import Case, Cases, coin, partial_rotary_factor
from .llama_like import FULL, SLIDING, common_fields, eps, hub_case


def correct(case: Case, ending: str = "e_score_correction_bias") -> Case:
    """Corrections of the choice that change it and do not decide it alone."""

    def is_correction(name: str) -> bool:
        return name.endswith(ending)

    def draw(model: Any) -> None:
        generator = torch.Generator().manual_seed(3)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if is_correction(name):
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))

    case.buffers, case.touch = is_correction, draw
    return case


def groups(rng: random.Random) -> dict[str, Any]:
    """DeepSeek's fields of experts, in groups or not."""
    count, size = rng.choice([(1, 5), (2, 3), (3, 4)])
    remain = rng.randint(1, count)
    return {
        "n_routed_experts": count * size,
        "n_group": count,
        "topk_group": remain,
        "num_experts_per_tok": rng.randint(1, min(4, remain * size)),
        "moe_intermediate_size": rng.choice([16, 24]),
        "n_shared_experts": rng.choice([1, 2]),
        "norm_topk_prob": coin(rng),
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
        "first_k_dense_replace": rng.choice([0, 1]),
    }


def glm4_moe(rng: random.Random, cls: str = "Glm4MoeForCausalLM") -> Case:
    fields = common_fields(rng) | groups(rng)
    fields["rope_parameters"]["partial_rotary_factor"] = partial_rotary_factor(rng, fields)
    config = transformers.Glm4MoeConfig(
        **fields, rms_norm_eps=eps(rng), attention_bias=coin(rng), use_qk_norm=coin(rng), num_mtp_layers=0
    )
    return correct(hub_case(rng, cls, config))


def solar_open(rng: random.Random, cls: str = "SolarOpenForCausalLM") -> Case:
    fields = common_fields(rng) | groups(rng)
    for name in ("intermediate_size", "first_k_dense_replace"):
        fields.pop(name, None)
    config = transformers.SolarOpenConfig(**fields, rms_norm_eps=eps(rng), attention_bias=coin(rng))
    return correct(hub_case(rng, cls, config, first_k_dense_replace=0))


def dots1(rng: random.Random, cls: str = "Dots1ForCausalLM") -> Case:
    fields = common_fields(rng) | groups(rng)
    types = [rng.choice([FULL, SLIDING]) for _ in range(fields["num_hidden_layers"] - 1)]
    config = transformers.Dots1Config(
        **fields, rms_norm_eps=eps(rng), attention_bias=coin(rng), sliding_window=7, layer_types=[*types, SLIDING]
    )
    return correct(hub_case(rng, cls, config))


def minimax_m2(rng: random.Random, cls: str = "MiniMaxM2ForCausalLM") -> Case:
    fields = common_fields(rng)
    fields["rope_parameters"]["partial_rotary_factor"] = partial_rotary_factor(rng, fields)
    config = transformers.MiniMaxM2Config(
        **fields, rms_norm_eps=eps(rng), num_local_experts=rng.choice([4, 6]), num_experts_per_tok=rng.choice([1, 2, 3])
    )
    pinned = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "shared_intermediate_size": 0}
    return correct(hub_case(rng, cls, config, drop=("router_jitter_noise",), **pinned))


def minimax_m2_of_old(rng: random.Random) -> Case:
    """As published: how many features are rotated in place of their share."""

    def older(fields: dict[str, Any]) -> dict[str, Any]:
        rotary = fields.pop("rope_parameters")
        return fields | {"rope_theta": rotary["rope_theta"], "rotary_dim": 6}

    case = minimax_m2(rng)
    case.config.rope_parameters = {"rope_type": "default", "rope_theta": 500.0}
    case.config.rope_parameters["partial_rotary_factor"] = 6 / case.config.head_dim
    case.older, case.may_differ = older, ("rotary_dim",)
    return case


def ernie4_5(rng: random.Random, cls: str = "Ernie4_5ForCausalLM") -> Case:
    config = transformers.Ernie4_5Config(**common_fields(rng), rms_norm_eps=eps(rng), use_bias=coin(rng))
    return hub_case(rng, cls, config)


def ernie4_5_moe(rng: random.Random, cls: str = "Ernie4_5_MoeForCausalLM") -> Case:
    config = transformers.Ernie4_5_MoeConfig(
        **common_fields(rng),
        rms_norm_eps=eps(rng),
        moe_num_experts=rng.choice([4, 6]),
        moe_k=rng.choice([1, 2, 3]),
        moe_intermediate_size=rng.choice([16, 24]),
        moe_num_shared_experts=rng.choice([0, 1, 2]),
        moe_layer_start_index=rng.choice([0, 1]),
        moe_layer_interval=rng.choice([1, 2]),
    )
    layers = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")  # which may be said in other ways
    return correct(hub_case(rng, cls, config, may_differ=layers))


def olmoe(rng: random.Random, cls: str = "OlmoeForCausalLM") -> Case:
    fields = {name: value for name, value in common_fields(rng).items() if name != "head_dim"}
    config = transformers.OlmoeConfig(
        **fields,
        rms_norm_eps=eps(rng),
        attention_bias=coin(rng),
        num_experts=rng.choice([4, 6]),
        num_experts_per_tok=rng.choice([1, 2, 3]),
        norm_topk_prob=coin(rng),
    )
    return hub_case(rng, cls, config, clip_qkv=None)


def granitemoe(rng: random.Random, cls: str = "GraniteMoeForCausalLM") -> Case:
    config = transformers.GraniteMoeConfig(
        **common_fields(rng),
        rms_norm_eps=eps(rng),
        attention_bias=coin(rng),
        attention_multiplier=rng.choice([0.2, 1.0]),
        residual_multiplier=rng.choice([0.3, 1.0]),
        embedding_multiplier=rng.choice([2.0, 12.0]),
        logits_scaling=rng.choice([0.7, 6.0]),
        num_local_experts=rng.choice([4, 6]),
        num_experts_per_tok=rng.choice([1, 2, 3]),
    )
    return hub_case(rng, cls, config)


WITH_HEAD = {
    "glm4_moe": glm4_moe,
    "dots1": dots1,
    "solar_open": solar_open,
    "minimax_m2": minimax_m2,
    "ernie4_5": ernie4_5,
    "ernie4_5_moe": ernie4_5_moe,
    "olmoe": olmoe,
    "granitemoe": granitemoe,
}
WITHOUT_HEAD = {
    "glm4_moe": "Glm4MoeModel",
    "dots1": "Dots1Model",
    "solar_open": "SolarOpenModel",
    "minimax_m2": "MiniMaxM2Model",
    "ernie4_5": "Ernie4_5Model",
    "ernie4_5_moe": "Ernie4_5_MoeModel",
    "olmoe": "OlmoeModel",
    "granitemoe": "GraniteMoeModel",
}

CASES: Cases = {
    **WITH_HEAD,
    **{f"{name}/without head": lambda rng, n=name: WITH_HEAD[n](rng, WITHOUT_HEAD[n]) for name in WITHOUT_HEAD},
    "minimax_m2/of old": minimax_m2_of_old,
}
