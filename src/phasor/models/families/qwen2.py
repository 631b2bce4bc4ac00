"""Qwen 1.5, 2 and 2.5."""

from __future__ import annotations

from typing import Any

from phasor.config import AttentionConfig, FeedForwardConfig, ModelConfig, RMSNormConfig
from phasor.models.families._layers import read_windows, vary_layers, write_windows
from phasor.models.families._llama import LlamaLike
from phasor.models.family import GATES, activation_name, require_kind
from phasor.models.fields import Fields
from phasor.models.rope import read_rotary, write_rotary
from phasor.nn.positions import RotaryConfig


class Qwen2(LlamaLike):
    """Llama with biases on queries, keys and values, and windows in the later layers."""

    model_type = "qwen2"
    title = "Qwen 2, 2.5"
    architectures = {"lm": "Qwen2ForCausalLM", "none": "Qwen2Model"}
    defaults = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096}
    has_head_dim = False
    harmless = frozenset({"max_window_layers", "sliding_window"})  # where no layer asks for them

    def read(self, f: Fields) -> ModelConfig:
        plain, attention = ModelConfig(**self.sizes(f)), AttentionConfig(bias=("q", "k", "v"))
        f.expect("use_mrope", False)
        windows = read_windows(f, plain.num_layers, lambda i: i >= f.get("max_window_layers", 28))
        config = plain.replace(
            position=read_rotary(f, plain.head_dim, plain.max_length),
            attention=attention,
            feedforward=FeedForwardConfig(activation=f.choose("hidden_act", GATES, "silu")),
            norm=RMSNormConfig(eps=f.get("rms_norm_eps", 1e-6)),
        )
        return vary_layers(config, attention=[attention.replace(window=w) for w in windows])

    def write(self, config: ModelConfig) -> dict[str, Any]:
        position, norm = require_kind(config.position, RotaryConfig), require_kind(config.norm, RMSNormConfig)
        return self.write_sizes(config) | {
            "hidden_act": activation_name(config.feedforward.activation),
            "rms_norm_eps": norm.eps,
            "rope_parameters": write_rotary(position, config),
            **write_windows(config),
        }


FAMILY = Qwen2()
