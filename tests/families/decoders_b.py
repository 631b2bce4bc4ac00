"""Random configurations of Gemma, Phi, OLMo 2, Cohere, GLM-4 and gpt-oss."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import transformers

from .cases import TRAINED, Case, Cases, llama_sizes, rope

EPS = [1e-2, 1e-5]
GATES = ["silu", "gelu_pytorch_tanh", "gelu", "relu"]
WINDOW = 6


def coin(rng: random.Random) -> bool:
    return rng.random() < 0.5


def share_sizes(rng: random.Random, **fixed: Any) -> dict[str, Any]:
    """Sizes for families that have no field for the width of a head: named only where it is not the heads' share."""
    sizes = llama_sizes(rng, **fixed)
    if coin(rng):
        del sizes["head_dim"]
    return sizes


def partial(rng: random.Random, sizes: dict[str, Any]) -> float:
    """A share of the head that turns in pairs."""
    width = sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    turned = [w for w in range(4, width + 1, 2) if int(width * (w / width)) == w]
    return rng.choice(turned) / width


def mixed(rng: random.Random, layers: int) -> list[str]:
    """Layer types in no order, of both kinds."""
    kinds = [
        "sliding_attention",
        "full_attention",
        *(rng.choice(["sliding_attention", "full_attention"]) for _ in "__"),
    ]
    kinds = kinds[:layers]
    rng.shuffle(kinds)
    return kinds


def gemma_config(rng: random.Random, **more: Any) -> transformers.GemmaConfig:
    return transformers.GemmaConfig(
        **llama_sizes(rng),
        attention_bias=coin(rng),
        hidden_act=rng.choice(["gelu_pytorch_tanh", "silu", "relu"]),
        rms_norm_eps=rng.choice(EPS),
        tie_word_embeddings=coin(rng),
        rope_parameters=rope(rng),
        **more,
    )


def gemma(rng: random.Random) -> Case:
    return Case(transformers.GemmaForCausalLM, gemma_config(rng))


def gemma_of_old(rng: random.Random) -> Case:
    """The first release: "gelu" where the tanh approximation is meant, and rotary fields at the top."""

    def older(fields: dict[str, Any]) -> dict[str, Any]:
        base = fields.pop("rope_parameters")["rope_theta"]
        again = {"hidden_act": "gelu", "hidden_activation": None, "rope_theta": base, "rope_scaling": None}
        return fields | again

    sizes = llama_sizes(rng)
    config = transformers.GemmaConfig(**sizes, rms_norm_eps=1e-2, rope_parameters=rope(rng, ("default",)))
    return Case(transformers.GemmaForCausalLM, config, older=older)


def gemma_without_head(rng: random.Random) -> Case:
    return Case(transformers.GemmaModel, gemma_config(rng))


def gemma2_config(rng: random.Random, **more: Any) -> transformers.Gemma2Config:
    sizes = llama_sizes(rng)
    return transformers.Gemma2Config(
        **sizes,
        attention_bias=coin(rng),
        hidden_activation=rng.choice(GATES),
        rms_norm_eps=rng.choice(EPS),
        tie_word_embeddings=coin(rng),
        rope_parameters=rope(rng),
        query_pre_attn_scalar=rng.choice([16, 24, 40]),  # sharper scores blow up what float32 costs their angles
        attn_logit_softcapping=rng.choice([None, 1.5]),
        final_logit_softcapping=rng.choice([None, 2.0]),
        sliding_window=WINDOW,
        layer_types=rng.choice([None, mixed(rng, sizes["num_hidden_layers"])]),
        **more,
    )


def gemma2(rng: random.Random) -> Case:
    return Case(transformers.Gemma2ForCausalLM, gemma2_config(rng), attention="eager")


def gemma2_of_old(rng: random.Random) -> Case:
    """No layer types, fields twice under other names, rotary fields at the top."""

    def older(fields: dict[str, Any]) -> dict[str, Any]:
        del fields["layer_types"], fields["use_bidirectional_attention"]
        base = fields.pop("rope_parameters")["rope_theta"]
        twice = {"hidden_act": fields["hidden_activation"], "sliding_window_size": fields["sliding_window"]}
        return fields | twice | {"rope_theta": base, "cache_implementation": "hybrid"}

    config = transformers.Gemma2Config(
        **llama_sizes(rng), sliding_window=WINDOW, attn_logit_softcapping=1.5, rope_parameters=rope(rng, ("default",))
    )
    return Case(transformers.Gemma2ForCausalLM, config, attention="eager", older=older)


def gemma2_without_head(rng: random.Random) -> Case:
    return Case(transformers.Gemma2Model, gemma2_config(rng), attention="eager")


def gemma3_config(rng: random.Random, **more: Any) -> transformers.Gemma3TextConfig:
    """Either type of layer with rotary parameters of its own."""
    sizes = llama_sizes(rng)
    return transformers.Gemma3TextConfig(
        **sizes,
        attention_bias=coin(rng),
        hidden_activation=rng.choice(GATES),
        rms_norm_eps=rng.choice(EPS),
        tie_word_embeddings=coin(rng),
        rope_parameters={"full_attention": rope(rng), "sliding_attention": rope(rng, ("default", "linear"))},
        query_pre_attn_scalar=rng.choice([16, 24, 40]),  # sharper scores blow up what float32 costs their angles
        final_logit_softcapping=rng.choice([None, 2.0]),
        sliding_window=WINDOW,
        layer_types=mixed(rng, sizes["num_hidden_layers"]),
        **more,
    )


def gemma3(rng: random.Random) -> Case:
    return Case(transformers.Gemma3ForCausalLM, gemma3_config(rng))


def gemma3_of_old(rng: random.Random) -> Case:
    """A pattern in place of layer types, a base for either type, and a stretch that is the full layers' alone.

    The pattern comes back as layer types.
    """

    def older(fields: dict[str, Any]) -> dict[str, Any]:
        for name in ("layer_types", "rope_parameters", "use_bidirectional_attention", "_sliding_window_pattern"):
            del fields[name]
        bases = {"rope_theta": 5000.0, "rope_local_base_freq": 200.0}
        stretch = {"rope_scaling": rng.choice([None, {"rope_type": "linear", "factor": 4.0}])}
        return fields | bases | stretch | {"sliding_window_pattern": 3, "cache_implementation": "hybrid"}

    config = transformers.Gemma3TextConfig(**llama_sizes(rng, num_hidden_layers=4), sliding_window=WINDOW)
    other = ("_sliding_window_pattern", "sliding_window_pattern")
    return Case(transformers.Gemma3ForCausalLM, config, older=older, may_differ=other)


def gemma3_both_ways(rng: random.Random) -> Case:
    """EmbeddingGemma: an encoder, whose windows reach to both sides."""
    config = gemma3_config(rng, use_bidirectional_attention=True)
    return Case(rng.choice([transformers.Gemma3TextModel, transformers.Gemma3ForCausalLM]), config)


def gemma3_without_head(rng: random.Random) -> Case:
    return Case(transformers.Gemma3TextModel, gemma3_config(rng))


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
        rope_parameters=rope(rng) | {"partial_rotary_factor": partial(rng, sizes)},
        resid_pdrop=0.1,
        embd_pdrop=0.2,
        **more,
    )


def phi(rng: random.Random) -> Case:
    return Case(transformers.PhiForCausalLM, phi_config(rng))


def phi_of_old(rng: random.Random) -> Case:
    """Rotary fields at the top, the share of the head that turns among them or left out."""
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
        rope_parameters=rope(rng, ("default",)) | {"partial_rotary_factor": partial(rng, sizes)},
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
    share = partial(rng, sizes)
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
        "rope_parameters": rope(rng) | {"partial_rotary_factor": partial(rng, sizes)},
        "eos_token_id": [3, 5],
    }


def glm_of_old(rng: random.Random) -> Case:
    """Rotary fields at the top, and half of a head turned where none is named."""

    def older(fields: dict[str, Any]) -> dict[str, Any]:
        base = fields.pop("rope_parameters")["rope_theta"]
        return fields | {"rope_theta": base}

    fields = glm_fields(rng) | {"rope_parameters": rope(rng, ("default",)), "head_dim": 12}
    return Case(transformers.GlmForCausalLM, transformers.GlmConfig(**fields), older=older)


def glm(cls: str) -> Callable[[random.Random], Case]:
    """The same fields for either family."""
    config = transformers.Glm4Config if cls.startswith("Glm4") else transformers.GlmConfig
    return lambda rng: Case(getattr(transformers, cls), config(**glm_fields(rng)))


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
        layer_types=rng.choice([None, mixed(rng, sizes["num_hidden_layers"])]),
        rope_parameters=parameters,
        **more,
    )
    return one_by_one(config)


def one_by_one(config: transformers.GptOssConfig) -> transformers.GptOssConfig:
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
    case = Case(transformers.GptOssForCausalLM, one_by_one(config), attention="eager", older=older)
    case.may_differ = ("rope_parameters",)
    return case


def gpt_oss_without_head(rng: random.Random) -> Case:
    return Case(transformers.GptOssModel, gpt_oss_config(rng), attention="eager")


CASES: Cases = {
    "gemma": gemma,
    "gemma/of old": gemma_of_old,
    "gemma/without head": gemma_without_head,
    "gemma2": gemma2,
    "gemma2/of old": gemma2_of_old,
    "gemma2/without head": gemma2_without_head,
    "gemma3_text": gemma3,
    "gemma3_text/of old": gemma3_of_old,
    "gemma3_text/both ways": gemma3_both_ways,
    "gemma3_text/without head": gemma3_without_head,
    "phi": phi,
    "phi/of old": phi_of_old,
    "phi/without head": phi_without_head,
    "phi3": phi3,
    "phi3/of old": phi3_of_old,
    "phi3/crossing": phi3_crossing,
    "phi3/short": phi3_short,
    "phi3/without head": phi3_without_head,
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
    "gpt_oss": gpt_oss,
    "gpt_oss/of old": gpt_oss_of_old,
    "gpt_oss/without head": gpt_oss_without_head,
}
