"""Random configurations of Phi and Phi-3."""

from __future__ import annotations

import random
from typing import Any

import transformers

from .cases import EPS, GATES, TRAINED, WINDOW, Case, Cases, coin, llama_sizes, partial_rotary_factor, rope, share_sizes


def phi_config(rng: random.Random, **more: Any) -> transformers.PhiConfig:
    """A norm on queries and keys, whose width is always the heads' share, or heads of another width."""
    normed = coin(rng)
    sizes = share_sizes(rng)
    if normed:
        sizes.pop("head_dim", None)
    return transformers.PhiConfig(
        **sizes,
        hidden_act=rng.choice(["gelu_new", "gelu", "relu", "silu"]),
        qk_layernorm=normed,
        layer_norm_eps=rng.choice(EPS),
        tie_word_embeddings=coin(rng),
        rope_parameters=rope(rng) | {"partial_rotary_factor": partial_rotary_factor(rng, sizes)},
        resid_pdrop=0.1,
        embd_pdrop=0.2,
        **more,
    )


def phi(rng: random.Random) -> Case:
    return Case(transformers.PhiForCausalLM, phi_config(rng))


def phi_of_old(rng: random.Random) -> Case:
    """Rotary fields at the top, with the rotated share of a head among them or left out."""
    share = rng.choice([{}, {"partial_rotary_factor": 1.0}])

    def older(fields: dict[str, Any]) -> dict[str, Any]:
        base = fields.pop("rope_parameters")["rope_theta"]
        return fields | share | {"rope_theta": base, "rope_scaling": None}

    sizes = llama_sizes(rng)
    del sizes["head_dim"]
    config = transformers.PhiConfig(**sizes, rope_parameters=rope(rng, ("default",)))
    return Case(transformers.PhiForCausalLM, config, older=older)


def phi_without_head(rng: random.Random) -> Case:
    return Case(transformers.PhiModel, phi_config(rng))


def phi3_config(rng: random.Random, **more: Any) -> transformers.Phi3Config:
    sizes = share_sizes(rng)
    return transformers.Phi3Config(
        **sizes,
        hidden_act=rng.choice(GATES),
        rms_norm_eps=rng.choice(EPS),
        tie_word_embeddings=coin(rng),
        rope_parameters=rope(rng, ("default",)) | {"partial_rotary_factor": partial_rotary_factor(rng, sizes)},
        original_max_position_embeddings=TRAINED,
        sliding_window=rng.choice([None, WINDOW]),
        resid_pdrop=0.1,
        embd_pdrop=0.2,
        **more,
    )


def phi3(rng: random.Random) -> Case:
    return Case(transformers.Phi3ForCausalLM, phi3_config(rng))


def phi3_without_head(rng: random.Random) -> Case:
    return Case(transformers.Phi3Model, phi3_config(rng))


def longrope(rng: random.Random, original: int) -> transformers.Phi3Config:
    """Divisors for every pair, its factor and attention factor said or left to the lengths."""
    sizes = llama_sizes(rng, max_position_embeddings=2 * original)
    del sizes["head_dim"]
    share = partial_rotary_factor(rng, sizes)
    pairs = int(sizes["hidden_size"] // sizes["num_attention_heads"] * share) // 2
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "partial_rotary_factor": share,
        "short_factor": [round(rng.uniform(1, 2), 3) for _ in range(pairs)],
        "long_factor": [round(rng.uniform(2, 8), 3) for _ in range(pairs)],
    }
    parameters |= rng.choice([{}, {"factor": 5.0}, {"attention_factor": 1.3}])
    return transformers.Phi3Config(
        **sizes,
        rms_norm_eps=1e-2,
        tie_word_embeddings=coin(rng),
        rope_parameters=parameters,
        original_max_position_embeddings=original,
    )


def phi3_crossing(rng: random.Random) -> Case:
    """Sequences on both sides of the length LongRoPE starts from."""
    return Case(transformers.Phi3ForCausalLM, longrope(rng, 30), crossing=True)


def phi3_short(rng: random.Random) -> Case:
    """All that is decoded fits into the original length."""
    return Case(transformers.Phi3ForCausalLM, longrope(rng, 100))


def phi3_of_old(rng: random.Random) -> Case:
    """As Phi-4-mini has it: rotary fields at the top, and fields of its own code.

    Those come back as nothing, which means the same, and the rotary kind under one name in place of two.
    """
    own = {"attention_bias": False, "mlp_bias": False, "lm_head_bias": False}
    own |= {"full_attn_mod": 1, "interpolate_factor": 1}

    def older(fields: dict[str, Any]) -> dict[str, Any]:
        scaling = fields.pop("rope_parameters")
        top = {name: scaling.pop(name) for name in ("rope_theta", "partial_rotary_factor")}
        scaling["type"] = scaling.pop("rope_type")
        del scaling["original_max_position_embeddings"]
        code = {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}
        return fields | top | own | code | {"rope_scaling": scaling}

    other = (*own, "partial_rotary_factor", "rope_parameters")
    return Case(transformers.Phi3ForCausalLM, longrope(rng, 30), crossing=True, older=older, may_differ=other)


CASES: Cases = {
    "phi": phi,
    "phi/of old": phi_of_old,
    "phi/without head": phi_without_head,
    "phi3": phi3,
    "phi3/of old": phi3_of_old,
    "phi3/crossing": phi3_crossing,
    "phi3/short": phi3_short,
    "phi3/without head": phi3_without_head,
}
