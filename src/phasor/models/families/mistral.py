"""Mistral 7B and its successors of the same shape."""

from __future__ import annotations

from typing import Any

from phasor.config import AttentionConfig, FeedForwardConfig, ModelConfig, RMSNormConfig
from phasor.models.families._llama import LlamaLike
from phasor.models.family import GATES, activation_name, require_kind
from phasor.models.fields import Fields
from phasor.models.rope import read_rotary, write_rotary
from phasor.nn.positions import RotaryConfig


class Mistral(LlamaLike):
    """Llama without biases and with a window, the same in every layer."""

    model_type = "mistral"
    title = "Mistral"
    architectures = {"lm": "MistralForCausalLM", "none": "MistralModel"}
    defaults = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    }

    def read(self, f: Fields) -> ModelConfig:
        plain = ModelConfig(**self.sizes(f))
        return plain.replace(
            position=read_rotary(f, plain.head_dim, plain.max_length),
            attention=AttentionConfig(window=f.get("sliding_window", None)),
            feedforward=FeedForwardConfig(activation=f.choose("hidden_act", GATES, "silu")),
            norm=RMSNormConfig(eps=f.get("rms_norm_eps", 1e-6)),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        position, norm = require_kind(config.position, RotaryConfig), require_kind(config.norm, RMSNormConfig)
        return self.write_sizes(config) | {
            "hidden_act": activation_name(config.feedforward.activation),
            "sliding_window": config.layer(0).attention.window,
            "rms_norm_eps": norm.eps,
            "rope_parameters": write_rotary(position, config),
        }


FAMILY = Mistral()
