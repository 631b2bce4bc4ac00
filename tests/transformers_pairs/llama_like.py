"""Decoders with the weight names of Llama: Llama, Mixtral, Qwen, gpt-oss, Gemma 2, OLMo 2, Cohere, Granite."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from phasor import ModelConfig, preset

from .weights import (
    EPS,
    LAYERS,
    OURS,
    PRE,
    ROWS,
    SIZES,
    TOKENS,
    Case,
    Theirs,
    both,
    llama_experts,
    llama_glu,
    llama_rules,
)


def llama(rope: dict[str, Any], extension: dict[str, Any] | None) -> Case:
    config = transformers.LlamaConfig(
        **SIZES, num_key_value_heads=2, rms_norm_eps=EPS, rope_parameters={"rope_theta": 5000.0} | rope
    )
    position = {"kind": "rotary", "base": 5000.0, "extension": extension}
    norm = {"kind": "rmsnorm", "eps": EPS}
    ours = preset("llama-3.1", **OURS, num_kv_heads=2, position=position, norm=norm)
    return Case(transformers.LlamaForCausalLM(config), ours, llama_rules(*PRE))


def llama_plain() -> Case:
    return llama({"rope_type": "default"}, None)


def llama_3() -> Case:
    theirs = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    ours = {"kind": "llama3", "factor": 8.0, "original_length": 64}
    return llama({"rope_type": "llama3", "factor": 8.0} | theirs, ours)


def llama_yarn() -> Case:
    theirs = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    return llama(theirs, {"kind": "yarn", "factor": 4.0, "original_length": 256})


def llama_left_padding() -> Case:
    case = llama_plain()
    attention_mask = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    attention_mask[1, :9] = False
    case.inputs, case.arguments = {"attention_mask": attention_mask.long()}, {"attention_mask": attention_mask}
    return case


def mixtral() -> Case:
    config = transformers.MixtralConfig(
        **SIZES, num_key_value_heads=2, rms_norm_eps=EPS, num_local_experts=5, num_experts_per_tok=2, sliding_window=7
    )
    ours = preset(
        "llama-2",
        **OURS,
        num_kv_heads=2,
        position={"kind": "rotary", "base": config.rope_parameters["rope_theta"]},
        attention={"window": 7},
        feedforward={"activation": "swiglu", "experts": {"num_experts": 5, "top_k": 2}},
        norm={"kind": "rmsnorm", "eps": EPS},
    )
    return Case(transformers.MixtralForCausalLM(config), ours, llama_rules(*PRE, feedforward=llama_experts))


def qwen3_moe() -> Case:
    config = transformers.Qwen3MoeConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=10,
        rms_norm_eps=EPS,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        norm_topk_prob=False,
    )
    experts = {"num_experts": 5, "top_k": 3, "normalize": False, "hidden_dim": 20}
    ours = preset(
        "llama-2",
        **OURS,
        num_kv_heads=2,
        head_dim=10,
        position={"kind": "rotary", "base": config.rope_parameters["rope_theta"]},
        attention={"qk_norm": "head"},
        feedforward={"activation": "swiglu", "experts": experts},
        norm={"kind": "rmsnorm", "eps": EPS},
    )
    return Case(transformers.Qwen3MoeForCausalLM(config), ours, llama_rules(*PRE, feedforward=llama_experts))


def qwen2_moe() -> Case:
    """A shared expert behind a gate, and biases on queries, keys and values alone."""
    config = transformers.Qwen2MoeConfig(
        **SIZES,
        num_key_value_heads=2,
        rms_norm_eps=EPS,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=28,
        norm_topk_prob=True,
    )

    def feedforward(theirs: Theirs, ours: str, mlp: str) -> dict[str, Tensor]:
        found = llama_experts(theirs, ours, mlp) | llama_glu(theirs, f"{ours}.shared", f"{mlp}.shared_expert")
        return found | both(theirs, f"{ours}.shared_gate", f"{mlp}.shared_expert_gate")

    experts = {"num_experts": 5, "top_k": 2, "hidden_dim": 20, "shared_dim": 28, "shared_gate": True}
    ours = preset(
        "llama-2",
        **OURS,
        num_kv_heads=2,
        position={"kind": "rotary", "base": config.rope_parameters["rope_theta"]},
        attention={"bias": ["q", "k", "v"]},
        feedforward={"activation": "swiglu", "experts": experts},
        norm={"kind": "rmsnorm", "eps": EPS},
    )
    return Case(transformers.Qwen2MoeForCausalLM(config), ours, llama_rules(*PRE, feedforward=feedforward))


def gpt_oss() -> Case:
    """Sink logits, every second layer local, clamped SwiGLU experts with biases, YaRN without truncation."""
    config = transformers.GptOssConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=12,
        rms_norm_eps=EPS,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        swiglu_limit=0.9,
    )

    def feedforward(theirs: Theirs, ours: str, mlp: str) -> dict[str, Tensor]:
        def gate_first(x: Tensor) -> Tensor:
            return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)

        return {
            f"{ours}.up": gate_first(theirs(f"{mlp}.experts.gate_up_proj")),
            f"{ours}.up_bias": gate_first(theirs(f"{mlp}.experts.gate_up_proj_bias")),
            f"{ours}.down": theirs(f"{mlp}.experts.down_proj"),
            f"{ours}.down_bias": theirs(f"{mlp}.experts.down_proj_bias"),
        } | both(theirs, f"{ours}.router", f"{mlp}.router")

    def rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
        found = llama_rules(*PRE, feedforward=feedforward)(theirs, config)
        for i in range(LAYERS):
            found[f"decoder.blocks.{i}.attention.sinks"] = theirs(f"model.layers.{i}.self_attn.sinks")
        return found

    attention = {"bias": ["q", "k", "v", "out"], "sink_logits": True}
    yarn = {"kind": "yarn", "factor": 32.0, "original_length": 4096, "truncate": False}
    ours = preset(
        "llama-2",
        **OURS,
        num_kv_heads=2,
        head_dim=12,
        position={"kind": "rotary", "base": 150000.0, "extension": yarn},
        layers=[{"attention": attention | {"window": 6}}, {"attention": attention}],
        feedforward={
            "activation": {"kind": "swiglu-clamped", "limit": 0.9},
            "bias": True,
            "experts": {"num_experts": 4, "top_k": 2, "router_bias": True},
        },
        norm={"kind": "rmsnorm", "eps": EPS},
    )
    return Case(transformers.GptOssForCausalLM(config), ours, rules)


def gemma_2() -> Case:
    """Norms on both sides with 1 + weight, both soft-caps, own scale, every second layer local."""
    config = transformers.Gemma2Config(
        **SIZES,
        num_key_value_heads=2,
        head_dim=10,
        rms_norm_eps=EPS,
        query_pre_attn_scalar=7,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.0,
        sliding_window=6,
        attn_implementation="eager",
    )
    attention = {"softcap": 1.5, "scale": 7**-0.5}
    ours = ModelConfig(
        **OURS,
        num_kv_heads=2,
        head_dim=10,
        position="rotary",
        layers=[{"attention": attention | {"window": 6}}, {"attention": attention}],
        feedforward={"activation": "geglu-tanh"},
        norm={"kind": "rmsnorm", "eps": EPS, "unit_offset": True},
        placement="sandwich",
        embedding={"scale": "sqrt"},
        head={"kind": "lm", "softcap": 2.0},
    )
    norms = (*PRE, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return Case(transformers.Gemma2ForCausalLM(config), ours, llama_rules(*norms))


def olmo_2() -> Case:
    config = transformers.Olmo2Config(**SIZES, num_key_value_heads=2, rms_norm_eps=EPS)
    ours = preset(
        "llama-2",
        **OURS,
        num_kv_heads=2,
        attention={"qk_norm": "whole"},
        norm={"kind": "rmsnorm", "eps": EPS},
        placement="output",
    )
    norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    return Case(transformers.Olmo2ForCausalLM(config), ours, llama_rules(*norms))


def cohere() -> Case:
    """Parallel after one norm without bias, a norm weight for every head of q and k, adjacent pairs."""
    config = transformers.CohereConfig(
        **SIZES, num_key_value_heads=2, layer_norm_eps=EPS, use_qk_norm=True, logit_scale=0.6
    )
    ours = preset(
        "palm",
        **OURS,
        num_kv_heads=2,
        position={"kind": "rotary", "base": config.rope_parameters["rope_theta"], "pairing": "adjacent"},
        attention={"qk_norm": "heads"},
        norm={"kind": "layernorm", "eps": EPS, "bias": False},
        head={"kind": "lm", "multiplier": 0.6},
    )
    return Case(transformers.CohereForCausalLM(config), ours, llama_rules("input_layernorm"))


def granite() -> Case:
    """Every multiplier: embedding, attention scale, residual, logits (a division)."""
    config = transformers.GraniteConfig(
        **SIZES,
        num_key_value_heads=2,
        rms_norm_eps=EPS,
        embedding_multiplier=3.0,
        attention_multiplier=0.21,
        residual_multiplier=0.4,
        logits_scaling=2.5,
        tie_word_embeddings=True,
    )
    ours = preset(
        "llama-2",
        **OURS,
        num_kv_heads=2,
        attention={"scale": 0.21},
        norm={"kind": "rmsnorm", "eps": EPS},
        placement={"kind": "pre", "multiplier": 0.4},
        embedding={"scale": 3.0},
        head={"kind": "lm", "multiplier": 1 / 2.5},
    )
    return Case(transformers.GraniteForCausalLM(config), ours, llama_rules(*PRE))
