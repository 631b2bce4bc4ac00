"""gpt-oss, with experts in MXFP4 as it is published, or unquantized."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import (
    AttentionConfig,
    ExpertsConfig,
    FeedForwardConfig,
    ModelConfig,
    RMSNormConfig,
    SwiGLUClampedConfig,
)
from phasor.models.families._layers import FULL, SLIDING, read_types, vary_layers, windows_of, write_types
from phasor.models.families._llama import EVERY_BIAS, LlamaLike
from phasor.models.family import require_kind
from phasor.models.fields import Fields, json_repr
from phasor.models.layout import Interleaved, Rule, linear
from phasor.models.rope import read_rotary, write_rotary
from phasor.nn.positions import RotaryConfig

STRETCHED = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOss(LlamaLike):
    """Sink logits, every second layer local, clamped SwiGLU experts with biases, gates and ups alternating."""

    model_type = "gpt_oss"
    title = "gpt-oss"
    architectures = {"lm": "GptOssForCausalLM", "none": "GptOssModel"}
    defaults = {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
    }
    # losses, which outputs are returned, and what other fields say again
    harmless = frozenset(
        {"experts_per_token", "initial_context_length", "output_router_logits", "router_aux_loss_coef"}
    )

    def read(self, f: Fields) -> ModelConfig:
        plain = ModelConfig(**self.sizes(f))
        f.expect("hidden_act", "silu")
        method = f.get("quantization_config", {}).get("quant_method", "mxfp4")
        if method != "mxfp4":
            raise ValueError(f"{f.file}: phasor does not honor quantization_config with {json_repr(method)}")
        mixture = ExpertsConfig(
            num_experts=f.get("num_local_experts", f.get("num_experts", 128)),
            top_k=f.get("num_experts_per_tok", 4),
            router_bias=True,
        )
        own = AttentionConfig(bias=EVERY_BIAS if f.get("attention_bias", True) else (), sink_logits=True)
        kinds = read_types(f, [FULL if i % 2 else SLIDING for i in range(plain.num_layers)])
        windows = windows_of(f, kinds, f.get("sliding_window", None))
        config = plain.replace(
            position=read_rotary(f, plain.head_dim, plain.max_length, base=150000.0, usual=STRETCHED),
            attention=own,
            feedforward=FeedForwardConfig(
                activation=SwiGLUClampedConfig(limit=f.get("swiglu_limit", 7.0), gain=f.get("swiglu_alpha", 1.702)),
                bias=True,
                experts=mixture,
            ),
            norm=RMSNormConfig(eps=f.get("rms_norm_eps", 1e-5)),
        )
        return vary_layers(config, attention=[own.replace(window=window) for window in windows])

    def write(self, config: ModelConfig) -> dict[str, Any]:
        position, mixture = require_kind(config.position, RotaryConfig), config.feedforward.experts
        if mixture is None:
            raise ValueError("it has experts in every layer")
        activation = require_kind(config.feedforward.activation, SwiGLUClampedConfig)
        fields = {
            "num_local_experts": mixture.num_experts,
            "num_experts_per_tok": mixture.top_k,
            "attention_bias": bool(config.layer(0).attention.bias),
            "swiglu_limit": activation.limit,
            "swiglu_alpha": activation.gain,
            "rms_norm_eps": require_kind(config.norm, RMSNormConfig).eps,
            "rope_parameters": write_rotary(position, config),
        }
        return self.write_sizes(config) | write_types(config) | fields

    def attention(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from super().attention(ours, theirs)
        yield Rule(f"{ours}.sinks", f"{theirs}.sinks")

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from linear(f"{ours}.router", f"{theirs}.router")
        yield Rule(f"{ours}.up", f"{theirs}.experts.gate_up_proj", Interleaved())
        yield Rule(f"{ours}.up_bias", f"{theirs}.experts.gate_up_proj_bias", Interleaved())
        yield Rule(f"{ours}.down", f"{theirs}.experts.down_proj")
        yield Rule(f"{ours}.down_bias", f"{theirs}.experts.down_proj_bias")


FAMILY = GptOss()
