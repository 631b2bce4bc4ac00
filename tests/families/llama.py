"""Random configurations of Llama."""

from __future__ import annotations

import random

import transformers

from .cases import Case, Cases, llama_sizes, rope


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


CASES: Cases = {"llama": llama, "llama/by length": llama_by_length, "llama/without head": llama_without_head}
