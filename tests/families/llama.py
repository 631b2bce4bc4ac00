"""Random configurations of Llama, OLMo 2, Cohere and GLM-4."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import transformers

from .cases import EPS, GATES, Case, Cases, coin, llama_sizes, partial_rotary_factor, rope, share_sizes


def llama(rng: random.Random) -> Case:
    config = transformers.LlamaConfig(
        **llama_sizes(rng),
        attention_bias=rng.random() < 0.5,
        mlp_bias=rng.random() < 0.5,
        rms_norm_eps=rng.choice([1e-2, 1e-5]),
        tie_word_embeddings=rng.random() < 0.5,
        rope_parameters=rope(rng),
    )
    return Case(transformers.LlamaForCausalLM, config)


def llama_by_length(rng: random.Random) -> Case:
    """Dynamic NTK, whose frequencies depend on the sequence's length."""
    parameters = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": rng.choice([2.0, 5.0])}
    config = transformers.LlamaConfig(**llama_sizes(rng), rope_parameters=parameters)
    return Case(transformers.LlamaForCausalLM, config, crossing=True)


def llama_without_head(rng: random.Random) -> Case:
    return Case(transformers.LlamaModel, transformers.LlamaConfig(**llama_sizes(rng), rope_parameters=rope(rng)))


def olmo2_config(rng: random.Random, **more: Any) -> transformers.Olmo2Config:
    return transformers.Olmo2Config(
        **share_sizes(rng),
        attention_bias=coin(rng),
        hidden_act=rng.choice(GATES),
        rms_norm_eps=rng.choice(EPS),
        tie_word_embeddings=coin(rng),
        rope_parameters=rope(rng),
        **more,
    )


def olmo2(rng: random.Random) -> Case:
    return Case(transformers.Olmo2ForCausalLM, olmo2_config(rng))


def olmo2_without_head(rng: random.Random) -> Case:
    return Case(transformers.Olmo2Model, olmo2_config(rng))


def cohere_config(rng: random.Random, **more: Any) -> transformers.CohereConfig:
    return transformers.CohereConfig(
        **share_sizes(rng),
        attention_bias=coin(rng),
        use_qk_norm=coin(rng),
        hidden_act=rng.choice(GATES),
        layer_norm_eps=rng.choice(EPS),
        logit_scale=rng.choice([0.6, 1.0, 2.5]),
        tie_word_embeddings=coin(rng),
        rope_parameters=rope(rng),
        **more,
    )


def cohere(rng: random.Random) -> Case:
    return Case(transformers.CohereForCausalLM, cohere_config(rng))


def cohere_of_old(rng: random.Random) -> Case:
    """Rotary fields at the top, and the length a tokenizer allows."""

    def older(fields: dict[str, Any]) -> dict[str, Any]:
        base = fields.pop("rope_parameters")["rope_theta"]
        del fields["use_qk_norm"], fields["tie_word_embeddings"]
        return fields | {"rope_theta": base, "model_max_length": 131072, "pretraining_tp": 1}

    sizes = share_sizes(rng)
    config = transformers.CohereConfig(**sizes, logit_scale=0.6, rope_parameters=rope(rng, ("default",)))
    return Case(transformers.CohereForCausalLM, config, older=older)


def cohere_without_head(rng: random.Random) -> Case:
    return Case(transformers.CohereModel, cohere_config(rng))


def glm_fields(rng: random.Random) -> dict[str, Any]:
    sizes = llama_sizes(rng)
    return sizes | {
        "attention_bias": coin(rng),
        "hidden_act": rng.choice(GATES),
        "rms_norm_eps": rng.choice(EPS),
        "tie_word_embeddings": coin(rng),
        "rope_parameters": rope(rng) | {"partial_rotary_factor": partial_rotary_factor(rng, sizes)},
        "eos_token_id": [3, 5],
    }


def glm_of_old(rng: random.Random) -> Case:
    """Rotary fields at the top, and half of a head rotated where no share is given."""

    def older(fields: dict[str, Any]) -> dict[str, Any]:
        base = fields.pop("rope_parameters")["rope_theta"]
        return fields | {"rope_theta": base}

    fields = glm_fields(rng) | {"rope_parameters": rope(rng, ("default",)), "head_dim": 12}
    return Case(transformers.GlmForCausalLM, transformers.GlmConfig(**fields), older=older)


def glm(cls: str) -> Callable[[random.Random], Case]:
    """The same fields for either family."""
    config = transformers.Glm4Config if cls.startswith("Glm4") else transformers.GlmConfig
    return lambda rng: Case(getattr(transformers, cls), config(**glm_fields(rng)))


CASES: Cases = {
    "llama": llama,
    "llama/by length": llama_by_length,
    "llama/without head": llama_without_head,
    "olmo2": olmo2,
    "olmo2/without head": olmo2_without_head,
    "cohere": cohere,
    "cohere/of old": cohere_of_old,
    "cohere/without head": cohere_without_head,
    "glm": glm("GlmForCausalLM"),
    "glm/of old": glm_of_old,
    "glm/without head": glm("GlmModel"),
    "glm4": glm("Glm4ForCausalLM"),
    "glm4/without head": glm("Glm4Model"),
}
