"""Random configurations of gpt-oss."""

from __future__ import annotations

import random
from typing import Any

import transformers

from .cases import EPS, WINDOW, Case, Cases, coin, llama_sizes, mixed_layer_types, rope


def gpt_oss_config(rng: random.Random, **more: Any) -> transformers.GptOssConfig:
    """Sizes of experts that fit products of groups, and such that do not."""
    sizes = llama_sizes(rng)
    parameters = rope(rng, ("default", "yarn"))
    if parameters["rope_type"] == "yarn":
        parameters |= {"truncate": False, "beta_fast": 8.0, "beta_slow": 0.5}
    config = transformers.GptOssConfig(
        **sizes,
        attention_bias=coin(rng),
        rms_norm_eps=rng.choice(EPS),
        tie_word_embeddings=coin(rng),
        num_local_experts=rng.choice([4, 5]),
        num_experts_per_tok=rng.choice([1, 2, 3]),
        swiglu_limit=rng.choice([0.5, 0.9]),
        swiglu_alpha=rng.choice([1.702, 0.8]),
        sliding_window=WINDOW,
        layer_types=rng.choice([None, mixed_layer_types(rng, sizes["num_hidden_layers"])]),
        rope_parameters=parameters,
        **more,
    )
    return eager_experts(config)


def eager_experts(config: transformers.GptOssConfig) -> transformers.GptOssConfig:
    """Their experts one after the other, which is also what float64 can do."""
    config._experts_implementation = "eager"
    return config


def gpt_oss(rng: random.Random) -> Case:
    return Case(transformers.GptOssForCausalLM, gpt_oss_config(rng), attention="eager")


def gpt_oss_of_old(rng: random.Random) -> Case:
    """As published, but for its weights: fields twice, and YaRN spelled out or left to the family.

    Its `beta_fast` and `beta_slow` are the usual ones, which are not written.
    """
    spelled = rng.choice([True, False])

    def older(fields: dict[str, Any]) -> dict[str, Any]:
        parameters = fields.pop("rope_parameters")
        del fields["swiglu_alpha"]
        if spelled:
            fields |= {"rope_theta": parameters.pop("rope_theta"), "rope_scaling": parameters}
        return fields | {"experts_per_token": fields["num_experts_per_tok"], "initial_context_length": 4096}

    sizes = llama_sizes(rng, head_dim=16)
    config = transformers.GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW)
    case = Case(transformers.GptOssForCausalLM, eager_experts(config), attention="eager", older=older)
    case.may_differ = ("rope_parameters",)
    return case


def gpt_oss_without_head(rng: random.Random) -> Case:
    return Case(transformers.GptOssModel, gpt_oss_config(rng), attention="eager")


CASES: Cases = {
    "gpt_oss": gpt_oss,
    "gpt_oss/of old": gpt_oss_of_old,
    "gpt_oss/without head": gpt_oss_without_head,
}
