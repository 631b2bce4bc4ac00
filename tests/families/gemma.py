"""Random configurations of Gemma, Gemma 2, Gemma 3 and Gemma 4."""

from __future__ import annotations

import random
from typing import Any

import transformers

from .cases import EPS, GATES, WINDOW, Case, Cases, coin, llama_sizes, mixed_layer_types, rope

TYPES = ["sliding_attention", "full_attention"]
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.4}


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
        layer_types=rng.choice([None, mixed_layer_types(rng, sizes["num_hidden_layers"])]),
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
    """Either type of layer with its own rotary parameters."""
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
        layer_types=mixed_layer_types(rng, sizes["num_hidden_layers"]),
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


def gemma4_config(rng: random.Random, **more: Any) -> transformers.Gemma4TextConfig:
    """Heads and rotary parameters of their own in global layers, the last of which is one."""
    sizes = llama_sizes(rng) | {"num_hidden_layers": rng.choice([3, 4]), "hidden_size_per_layer_input": 0} | more
    sizes["vocab_size_per_layer_input"] = sizes["vocab_size"]
    types = mixed_layer_types(rng, 2) + [rng.choice(TYPES) for _ in range(sizes["num_hidden_layers"] - 3)]
    return transformers.Gemma4TextConfig(
        **sizes,
        attention_bias=coin(rng),
        attention_k_eq_v=coin(rng),
        hidden_activation=rng.choice(GATES),
        rms_norm_eps=rng.choice(EPS),
        tie_word_embeddings=coin(rng),
        global_head_dim=rng.choice([12, 18, 20]),
        num_global_key_value_heads=rng.choice([None, 1, sizes["num_attention_heads"]]),
        rope_parameters=rng.choice(
            [None, {"full_attention": PROPORTIONAL, "sliding_attention": rope(rng, ("default", "linear"))}]
        ),
        final_logit_softcapping=rng.choice([None, 2.0]),
        sliding_window=WINDOW,
        layer_types=[*types, "full_attention"],
    )


def is_scalar(name: str) -> bool:
    """The scalars of layers are buffers of theirs."""
    return name.endswith("layer_scalar")


def scale_queries(model: Any) -> None:
    """Scores are not scaled but by what the norm of queries has learned; and no scalar of a layer is near zero."""
    for name, weight in model.named_parameters():
        if name.endswith("q_norm.weight"):
            weight.mul_(len(weight) ** -0.5)
    for name, scalar in model.named_buffers():
        if is_scalar(name):
            scalar.add_(scalar.sign() * 0.5)


def gemma4_case(cls: Any, config: transformers.Gemma4TextConfig) -> Case:
    return Case(cls, config, buffers=is_scalar, touch=scale_queries)


def gemma4(rng: random.Random) -> Case:
    return gemma4_case(transformers.Gemma4ForCausalLM, gemma4_config(rng))


def gemma4_with_shared_keys(rng: random.Random) -> Case:
    """As E2B: vectors of tokens for every layer, keys and values shared by the last layers, whose networks are wide."""
    layers = rng.choice([5, 6])
    config = gemma4_config(
        rng,
        num_hidden_layers=layers,
        hidden_size_per_layer_input=rng.choice([5, 9]),  # without them theirs does not generate from shared keys
        num_kv_shared_layers=layers - 3,
        use_double_wide_mlp=coin(rng),
    )
    return gemma4_case(transformers.Gemma4ForCausalLM, config)


def gemma4_with_experts(rng: random.Random) -> Case:
    """As 26B-A4B: experts beside the network of every layer."""
    experts = {"num_experts": rng.choice([5, 8]), "top_k_experts": rng.choice([1, 2, 3])}
    config = gemma4_config(rng, enable_moe_block=True, moe_intermediate_size=rng.choice([12, 20]), **experts)
    config._experts_implementation = "eager"  # in float64 too
    return gemma4_case(transformers.Gemma4ForCausalLM, config)


def gemma4_without_head(rng: random.Random) -> Case:
    return gemma4_case(transformers.Gemma4TextModel, gemma4_config(rng))


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
    "gemma4_text": gemma4,
    "gemma4_text/shared keys": gemma4_with_shared_keys,
    "gemma4_text/experts": gemma4_with_experts,
    "gemma4_text/without head": gemma4_without_head,
}
