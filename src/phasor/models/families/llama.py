"""Llama 1, 2, 3 and 3.1, and the many models that took over its shape."""

from __future__ import annotations

from typing import Any

from phasor.config import AttentionConfig, FeedForwardConfig, ModelConfig, RMSNormConfig
from phasor.models.families._llama import LlamaLike
from phasor.models.family import GATES, activation_name, require_kind
from phasor.models.fields import Fields
from phasor.models.rope import read_rotary, write_rotary
from phasor.nn.positions import RotaryConfig


class Llama(LlamaLike):
    """Pre-norm with RMSNorm, rotary, grouped heads, SwiGLU."""

    model_type = "llama"
    title = "Llama 1, 2, 3, 3.1"
    architectures = {"lm": "LlamaForCausalLM", "none": "LlamaModel"}
    aliases = {"LLaMAForCausalLM": "lm"}  # as the first files have it
    first_choice = True
    harmless = frozenset({"pretraining_tp"})  # the tensor-parallel slices of pretraining: the same result

    def read(self, f: Fields) -> ModelConfig:
        plain = ModelConfig(**self.sizes(f))
        gate, bias = f.choose("hidden_act", GATES, "silu"), f.get("attention_bias", False)
        return plain.replace(
            position=read_rotary(f, plain.head_dim, plain.max_length),
            attention=AttentionConfig(bias=("q", "k", "v", "out") if bias else ()),
            feedforward=FeedForwardConfig(activation=gate, bias=f.get("mlp_bias", False)),
            norm=RMSNormConfig(eps=f.get("rms_norm_eps", 1e-6)),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        position, norm = require_kind(config.position, RotaryConfig), require_kind(config.norm, RMSNormConfig)
        return self.write_sizes(config) | {
            "hidden_act": activation_name(config.feedforward.activation),
            "attention_bias": bool(config.attention.bias),
            "mlp_bias": config.feedforward.bias,
            "rms_norm_eps": norm.eps,
            "rope_parameters": write_rotary(position, config),
        }


FAMILY = Llama()
