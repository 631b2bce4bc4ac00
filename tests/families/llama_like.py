"""Random configurations of Mistral, Mixtral, Qwen, SmolLM3, Granite, StarCoder2 and StableLM."""

from __future__ import annotations

import random
from typing import Any

import transformers
from transformers import PreTrainedConfig

from .cases import Case, Cases, coin, llama_sizes, rope

FULL, SLIDING = "full_attention", "sliding_attention"


def common_fields(rng: random.Random) -> dict[str, Any]:
    """Fields that every family here varies."""
    return llama_sizes(rng) | {
        "hidden_act": rng.choice(["silu", "gelu", "gelu_pytorch_tanh", "relu"]),
        "tie_word_embeddings": coin(rng),
        "rope_parameters": rope(rng),
    }


def share_of_width(rng: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    """Half of the time without `head_dim`, which these configurations take but have no field for."""
    return sizes if coin(rng) else {name: value for name, value in sizes.items() if name != "head_dim"}


def eps(rng: random.Random) -> float:
    return rng.choice([1e-2, 1e-5])


def hub_case(
    rng: random.Random,
    cls: str,
    config: PreTrainedConfig,
    may_differ: tuple[str, ...] = (),
    drop: tuple[str, ...] = (),
    listed: tuple[str, ...] = (),
    **pinned: Any,
) -> Case:
    """A case that in half of all draws has its config.json as files on the hub do.

    Those have the rotary parameters apart, lack fields that newer versions list (`drop`), have rules about layers
    that come back as such lists (`listed`), and fields that may say one thing alone (`pinned`).
    """
    config._experts_implementation = "eager"  # the only one that float64 has

    def older(data: dict[str, Any]) -> dict[str, Any]:
        rotary = data.pop("rope_parameters")
        data["rope_theta"] = rotary.pop("rope_theta")
        if "partial_rotary_factor" in rotary:
            data["partial_rotary_factor"] = rotary.pop("partial_rotary_factor")
        rotary[kind] = rotary.pop("rope_type")
        data["rope_scaling"] = None if rotary == {kind: "default"} else rotary
        data["torch_dtype"] = data.pop("dtype")
        return {name: value for name, value in data.items() if name not in drop} | pinned

    case = Case(getattr(transformers, cls), config, may_differ=may_differ)
    kind = rng.choice(["type", "rope_type"])
    if coin(rng):
        case.older, case.may_differ = older, (*may_differ, *listed, *pinned)
        case.may_differ += ("rope_parameters",) if kind == "type" else ()  # theirs keeps the older word too
    return case


def mistral(rng: random.Random, cls: str = "MistralForCausalLM") -> Case:
    config = transformers.MistralConfig(
        **common_fields(rng), rms_norm_eps=eps(rng), sliding_window=rng.choice([None, 7, 7, 19]), attention_dropout=0.1
    )
    return hub_case(rng, cls, config)


def mixtral(rng: random.Random, cls: str = "MixtralForCausalLM") -> Case:
    config = transformers.MixtralConfig(
        **common_fields(rng),
        rms_norm_eps=eps(rng),
        sliding_window=rng.choice([None, 7, 7, 19]),
        num_local_experts=rng.choice([3, 4, 6]),
        num_experts_per_tok=rng.choice([1, 2, 3]),
    )
    return hub_case(rng, cls, config, drop=("router_jitter_noise",))


def llama4(rng: random.Random, cls: str = "Llama4ForCausalLM") -> Case:
    """Temperatures that step up behind the padded rows, whose tokens theirs counts from the padding on."""
    sizes = common_fields(rng) | {"rope_parameters": rope(rng, ("default", "llama3", "yarn"))}
    layers = sizes["num_hidden_layers"]
    config = transformers.Llama4TextConfig(
        **sizes,
        intermediate_size_mlp=rng.choice([40, 64]),
        rms_norm_eps=eps(rng),
        attention_bias=coin(rng),
        num_local_experts=rng.choice([3, 4, 6]),
        num_experts_per_tok=rng.choice([1, 1, 2]),
        moe_layers=rng.choice([None, [0], list(range(layers))]),
        interleave_moe_layer_step=rng.choice([1, 2]),
        use_qk_norm=coin(rng),
        no_rope_layers=rng.choice([None, [1, 0, *(rng.choice([0, 1]) for _ in range(layers - 2))]]),
        no_rope_layer_interval=2,
        attention_chunk_size=rng.choice([7, 16]),
        attn_temperature_tuning=coin(rng),
        floor_scale=rng.choice([24, 30]),
        attn_scale=rng.choice([0.1, 0.5]),
    )
    rules = ("interleave_moe_layer_step", "no_rope_layer_interval")  # of what the file lists
    unused = () if config.attn_temperature_tuning else ("attn_scale", "floor_scale")
    return hub_case(rng, cls, config, may_differ=(*rules, *unused), for_llm_compressor=False)


def phimoe(rng: random.Random, cls: str = "PhimoeForCausalLM") -> Case:
    """Noise of the router so large that several experts are near the best."""
    sizes = share_of_width(rng, common_fields(rng)) | {"rope_parameters": rope(rng, ("default",))}
    config = transformers.PhimoeConfig(
        **sizes,
        rms_norm_eps=eps(rng),
        sliding_window=rng.choice([None, 7, 19]),
        attention_bias=coin(rng),
        lm_head_bias=coin(rng),
        num_local_experts=rng.choice([3, 4, 6]),
        router_jitter_noise=rng.choice([0.01, 0.2, 0.4]),
    )
    return hub_case(rng, cls, config)


def phimoe_longrope(rng: random.Random) -> Case:
    """Texts within the original length: beyond it transformers keeps the factors of short ones."""
    case = phimoe(rng)
    config = case.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    factors = {
        name: [round(rng.uniform(1, 4), 3) for _ in range(width // 2)] for name in ("short_factor", "long_factor")
    }
    config.max_position_embeddings = 200
    config.rope_parameters = factors | {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "original_max_position_embeddings": 100,
        "short_mscale": 1.3,
        "long_mscale": 1.3,
    }
    return Case(case.cls, config)


def windows(rng: random.Random, depth: int) -> dict[str, Any]:
    """Windows by Qwen's rule, by a list of layers, or none in use."""
    kind = rng.choice(["rule", "rule", "list", "list", "none"])
    fields: dict[str, Any] = {"use_sliding_window": kind != "none", "sliding_window": rng.choice([7, 19])}
    fields["max_window_layers"] = rng.randint(1, depth - 1)
    if kind == "list":
        fields["layer_types"] = [SLIDING, *(rng.choice([FULL, SLIDING]) for _ in range(depth - 1))]
        rng.shuffle(fields["layer_types"])
    return fields


def layer_rules(fields: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    """How an older file says which layers have windows: where a rule does, it has no list."""
    return {} if "layer_types" in fields else {"drop": ("layer_types",), "listed": ("max_window_layers",)}


def qwen2(rng: random.Random, cls: str = "Qwen2ForCausalLM") -> Case:
    sizes = share_of_width(rng, common_fields(rng))
    fields = windows(rng, sizes["num_hidden_layers"])
    config = transformers.Qwen2Config(**sizes, **fields, rms_norm_eps=eps(rng))
    return hub_case(rng, cls, config, **layer_rules(fields), use_mrope=False)


def qwen3(rng: random.Random, cls: str = "Qwen3ForCausalLM") -> Case:
    sizes = common_fields(rng)
    fields = windows(rng, sizes["num_hidden_layers"])
    config = transformers.Qwen3Config(**sizes, **fields, rms_norm_eps=eps(rng), attention_bias=coin(rng))
    return hub_case(rng, cls, config, **layer_rules(fields))


def qwen3_by_length(rng: random.Random) -> Case:
    """Dynamic NTK, whose frequencies depend on the sequence's length."""
    case = qwen3(rng)
    case.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": rng.choice([2.0, 5.0])}
    case.crossing = True
    return case


# A step of sparse layers comes back as the list of the others.
STEP = ("decoder_sparse_step", "mlp_only_layers")


def mixture(rng: random.Random, depth: int) -> dict[str, Any]:
    """Experts in at least one layer."""
    step = rng.choice([1, 1, 2])
    sparse = rng.choice([i for i in range(depth) if (i + 1) % step == 0])
    return {
        "num_experts": rng.choice([3, 4, 6]),
        "num_experts_per_tok": rng.choice([1, 2, 3]),
        "moe_intermediate_size": rng.choice([20, 24, 36]),
        "norm_topk_prob": coin(rng),
        "decoder_sparse_step": step,
        "mlp_only_layers": [i for i in range(depth) if i != sparse and rng.random() < 0.3],
    }


def qwen3_moe(rng: random.Random, cls: str = "Qwen3MoeForCausalLM") -> Case:
    sizes = share_of_width(rng, common_fields(rng))
    config = transformers.Qwen3MoeConfig(
        **sizes,
        **mixture(rng, sizes["num_hidden_layers"]),
        rms_norm_eps=eps(rng),
        attention_bias=coin(rng),
        use_sliding_window=coin(rng),
        sliding_window=rng.choice([7, 19]),
    )
    pinned = {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}
    return hub_case(rng, cls, config, STEP if config.decoder_sparse_step > 1 else (), **pinned)


def qwen2_moe(rng: random.Random, cls: str = "Qwen2MoeForCausalLM") -> Case:
    sizes = share_of_width(rng, common_fields(rng))
    fields = windows(rng, sizes["num_hidden_layers"])
    config = transformers.Qwen2MoeConfig(
        **sizes,
        **fields,
        **mixture(rng, sizes["num_hidden_layers"]),
        rms_norm_eps=eps(rng),
        qkv_bias=coin(rng),
        shared_expert_intermediate_size=rng.choice([12, 28]),
    )
    return hub_case(rng, cls, config, STEP if config.decoder_sparse_step > 1 else (), **layer_rules(fields))


def smollm3(rng: random.Random, cls: str = "SmolLM3ForCausalLM") -> Case:
    sizes = share_of_width(rng, common_fields(rng))
    depth = sizes["num_hidden_layers"]
    fields: dict[str, Any] = {"no_rope_layer_interval": rng.choice([2, 3])}
    if coin(rng):
        fields["no_rope_layers"] = [0, *(int(coin(rng)) for _ in range(depth - 1))]
        rng.shuffle(fields["no_rope_layers"])
    if coin(rng):
        fields |= {"use_sliding_window": True, "sliding_window": rng.choice([7, 19])}
        if depth < fields["no_rope_layer_interval"] or coin(rng):
            fields["layer_types"] = [SLIDING, *(rng.choice([FULL, SLIDING]) for _ in range(depth - 1))]
            rng.shuffle(fields["layer_types"])
    config = transformers.SmolLM3Config(
        **sizes, **fields, rms_norm_eps=eps(rng), attention_bias=coin(rng), mlp_bias=coin(rng)
    )
    drop = tuple(name for name in ("layer_types", "no_rope_layers") if name not in fields)
    return hub_case(
        rng, cls, config, drop=drop, listed=("no_rope_layer_interval",), pretraining_tp=2, max_window_layers=28
    )


def granite(rng: random.Random, cls: str = "GraniteForCausalLM") -> Case:
    config = transformers.GraniteConfig(
        **share_of_width(rng, common_fields(rng)),
        rms_norm_eps=eps(rng),
        attention_bias=coin(rng),
        mlp_bias=coin(rng),
        embedding_multiplier=rng.choice([1.0, 3.5, 12]),
        logits_scaling=rng.choice([1.0, 0.3, 7.0]),
        residual_multiplier=rng.choice([0.22, 1.4]),
        attention_multiplier=rng.choice([0.09, 0.4]),
    )
    return hub_case(rng, cls, config)


def hyperclovax(rng: random.Random, cls: str = "HyperCLOVAXForCausalLM") -> Case:
    config = transformers.HyperCLOVAXConfig(
        **common_fields(rng),
        rms_norm_eps=eps(rng),
        attention_bias=coin(rng),
        mlp_bias=coin(rng),
        embedding_multiplier=rng.choice([1.0, 3.5, 12]),
        logits_scaling=rng.choice([1.0, 0.3, 7.0]),
        residual_multiplier=rng.choice([0.22, 1.4]),
        attention_multiplier=rng.choice([None, 0.09, 0.4]),
        use_post_norm=coin(rng),
    )
    return hub_case(rng, cls, config)


def starcoder2(rng: random.Random, cls: str = "Starcoder2ForCausalLM") -> Case:
    config = transformers.Starcoder2Config(
        **share_of_width(rng, common_fields(rng)),
        norm_epsilon=eps(rng),
        use_bias=coin(rng),
        sliding_window=rng.choice([None, 7, 7, 19]),
        attention_dropout=0.1,
        residual_dropout=0.2,
        embedding_dropout=0.3,
    )
    return hub_case(rng, cls, config, mlp_type="default", norm_type="layer_norm", rms_norm_eps=1.0)


def stablelm(rng: random.Random, cls: str = "StableLmForCausalLM") -> Case:
    """`head_dim` is hidden_size / num_heads, and an even number of its features is rotated."""
    sizes = {name: value for name, value in common_fields(rng).items() if name != "head_dim"}
    width = sizes["hidden_size"] // sizes["num_attention_heads"]
    sizes["rope_parameters"]["partial_rotary_factor"] = rng.choice([s for s in (0.25, 0.5, 1.0) if width * s % 2 == 0])
    config = transformers.StableLmConfig(
        **sizes,
        layer_norm_eps=eps(rng),
        use_qkv_bias=coin(rng),
        qk_layernorm=coin(rng),
        use_parallel_residual=coin(rng),
    )
    return hub_case(rng, cls, config)


WITH_HEAD = {
    "mistral": mistral,
    "mixtral": mixtral,
    "phimoe": phimoe,
    "llama4_text": llama4,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "qwen2_moe": qwen2_moe,
    "smollm3": smollm3,
    "granite": granite,
    "hyperclovax": hyperclovax,
    "starcoder2": starcoder2,
    "stablelm": stablelm,
}
WITHOUT_HEAD = {
    "mistral": "MistralModel",
    "mixtral": "MixtralModel",
    "phimoe": "PhimoeModel",
    "llama4_text": "Llama4TextModel",
    "qwen2": "Qwen2Model",
    "qwen3": "Qwen3Model",
    "qwen3_moe": "Qwen3MoeModel",
    "qwen2_moe": "Qwen2MoeModel",
    "smollm3": "SmolLM3Model",
    "granite": "GraniteModel",
    "hyperclovax": "HyperCLOVAXModel",
    "starcoder2": "Starcoder2Model",
    "stablelm": "StableLmModel",
}

CASES: Cases = {
    **WITH_HEAD,
    **{f"{name}/without head": lambda rng, n=name: WITH_HEAD[n](rng, WITHOUT_HEAD[n]) for name in WITHOUT_HEAD},
    "qwen3/by length": qwen3_by_length,
    "phimoe/longrope": phimoe_longrope,
}
