"""OLMo 2."""

from __future__ import annotations

from typing import Any

from phasor.config import AttentionConfig, FeedForwardConfig, ModelConfig, OutputConfig, RMSNormConfig
from phasor.models.families._llama import EVERY_BIAS, LlamaLike
from phasor.models.family import GATES, activation_name, require_kind
from phasor.models.fields import Fields
from phasor.models.rope import read_rotary, write_rotary
from phasor.nn.positions import RotaryConfig


class Olmo2(LlamaLike):
    """Norms on the outputs of attention and feed-forward, and on all queries and all keys as a whole."""

    model_type = "olmo2"
    title = "OLMo 2"
    architectures = {"lm": "Olmo2ForCausalLM", "none": "Olmo2Model"}
    norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    has_head_dim = False

    def read(self, f: Fields) -> ModelConfig:
        plain = ModelConfig(**self.sizes(f))
        bias = EVERY_BIAS if f.get("attention_bias", False) else ()
        return plain.replace(
            position=read_rotary(f, plain.head_dim, plain.max_length),
            attention=AttentionConfig(bias=bias, qk_norm="whole"),
            feedforward=FeedForwardConfig(activation=f.choose("hidden_act", GATES, "silu")),
            norm=RMSNormConfig(eps=f.get("rms_norm_eps", 1e-5)),
            placement=OutputConfig(),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        position = require_kind(config.position, RotaryConfig)
        return self.write_sizes(config) | {
            "hidden_act": activation_name(config.feedforward.activation),
            "attention_bias": bool(config.attention.bias),
            "rms_norm_eps": require_kind(config.norm, RMSNormConfig).eps,
            "rope_parameters": write_rotary(position, config),
        }


FAMILY = Olmo2()
