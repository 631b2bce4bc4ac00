"""Random configurations of further decoders with Llama's names: OLMo, EXAONE, Cohere 2, Seed-OSS and others."""

from __future__ import annotations

import random
from typing import Any

import transformers

from .cases import Case, Cases, coin, mixed_layer_types, rope
from .llama_like import FULL, SLIDING, common_fields, eps, hub_case, share_of_width


def listed_or_ruled(rng: random.Random, depth: int, **rule: Any) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Windows by a list of layers or by the family's rule, whose fields an older file has in place of the list."""
    fields: dict[str, Any] = {"sliding_window": rng.choice([7, 19])}
    if coin(rng):
        return fields | rule, {"drop": ("layer_types",)}
    return fields | {"layer_types": mixed_layer_types(rng, depth)}, {}


def olmo3(rng: random.Random, cls: str = "Olmo3ForCausalLM") -> Case:
    sizes = share_of_width(rng, common_fields(rng))
    sizes["rope_parameters"] = {FULL: rope(rng), SLIDING: rope(rng, ("default", "linear"))}
    fields, _ = listed_or_ruled(rng, sizes["num_hidden_layers"])
    config = transformers.Olmo3Config(**sizes, **fields, rms_norm_eps=eps(rng), attention_bias=coin(rng))
    return Case(getattr(transformers, cls), config)


def olmo3_of_old(rng: random.Random) -> Case:
    """The rotary base and an extension apart; the extension is that of global layers."""
    case = olmo3(rng)
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 20}
    scaling |= {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}

    def older(data: dict[str, Any]) -> dict[str, Any]:
        del data["rope_parameters"]
        return data | {"rope_theta": 500000, "rope_scaling": scaling}

    case.older = older
    return case


def exaone4(rng: random.Random, cls: str = "Exaone4ForCausalLM") -> Case:
    sizes = share_of_width(rng, common_fields(rng))
    fields, spelled = listed_or_ruled(rng, sizes["num_hidden_layers"], sliding_window_pattern=rng.choice([2, 3]))
    config = transformers.Exaone4Config(**sizes, **fields, rms_norm_eps=eps(rng))
    return hub_case(rng, cls, config, **spelled)


def exaone4_without_windows(rng: random.Random) -> Case:
    """A null window: every layer is global, and rotary."""
    sizes = common_fields(rng)
    layers = [FULL] * sizes["num_hidden_layers"]
    config = transformers.Exaone4Config(**sizes, rms_norm_eps=eps(rng), sliding_window=None, layer_types=layers)
    return hub_case(rng, "Exaone4ForCausalLM", config, may_differ=("sliding_window_pattern",))


def cohere2(rng: random.Random, cls: str = "Cohere2ForCausalLM") -> Case:
    sizes = share_of_width(rng, common_fields(rng))
    rule = {"sliding_window_pattern": rng.choice([2, 3])}
    fields, spelled = listed_or_ruled(rng, sizes["num_hidden_layers"], **rule)
    config = transformers.Cohere2Config(
        **sizes,
        **fields,
        layer_norm_eps=eps(rng),
        attention_bias=coin(rng),
        logit_scale=rng.choice([0.5, 2.0]),
    )
    return hub_case(rng, cls, config, **spelled, **(rule if spelled else {}))


def seed_oss(rng: random.Random, cls: str = "SeedOssForCausalLM") -> Case:
    config = transformers.SeedOssConfig(
        **common_fields(rng),
        rms_norm_eps=eps(rng),
        attention_bias=coin(rng),
        attention_out_bias=coin(rng),
        mlp_bias=coin(rng),
        attention_dropout=0.2,
        residual_dropout=0.3,
    )
    return hub_case(rng, cls, config)


WITH_HEAD = {
    "olmo3": olmo3,
    "exaone4": exaone4,
    "cohere2": cohere2,
    "seed_oss": seed_oss,
}
WITHOUT_HEAD = {
    "olmo3": "Olmo3Model",
    "exaone4": "Exaone4Model",
    "cohere2": "Cohere2Model",
    "seed_oss": "SeedOssModel",
}

CASES: Cases = {
    **WITH_HEAD,
    **{f"{name}/without head": lambda rng, n=name: WITH_HEAD[n](rng, WITHOUT_HEAD[n]) for name in WITHOUT_HEAD},
    "olmo3/of old": olmo3_of_old,
    "exaone4/without windows": exaone4_without_windows,
}
