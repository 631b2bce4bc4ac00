"""GLM-4 as `glm`: glm-4-9b and its relatives of 2024."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from phasor.config import AttentionConfig, FeedForwardConfig, ModelConfig, PlacementConfig, PreConfig, RMSNormConfig
from phasor.models.families._llama import LlamaLike, fused_gate
from phasor.models.family import GATES, activation_name, require_kind
from phasor.models.fields import Fields
from phasor.models.layout import Rule
from phasor.models.rope import read_rotary, write_rotary
from phasor.nn.positions import RotaryConfig


class Glm(LlamaLike):
    """Llama with half of a head rotated in adjacent pairs, biases on queries, keys and values, a fused gate."""

    model_type = "glm"
    title = "GLM-4 (2024)"
    architectures = {"lm": "GlmForCausalLM", "none": "GlmModel"}
    defaults = {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072}
    placement: ClassVar[PlacementConfig] = PreConfig()

    def read(self, f: Fields) -> ModelConfig:
        plain = ModelConfig(**self.sizes(f))
        return plain.replace(
            position=read_rotary(f, plain.head_dim, plain.max_length, partial=0.5, pairing="adjacent"),
            attention=AttentionConfig(bias=("q", "k", "v") if f.get("attention_bias", True) else ()),
            feedforward=FeedForwardConfig(activation=f.choose("hidden_act", GATES, "silu")),
            norm=RMSNormConfig(eps=f.get("rms_norm_eps", 1.5625e-07)),
            placement=self.placement,
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        position = require_kind(config.position, RotaryConfig)
        return self.write_sizes(config) | {
            "hidden_act": activation_name(config.feedforward.activation),
            "attention_bias": bool(config.attention.bias),
            "rms_norm_eps": require_kind(config.norm, RMSNormConfig).eps,
            "rope_parameters": {"partial_rotary_factor": 1.0} | write_rotary(position, config),
        }

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from fused_gate(ours, theirs)


FAMILY = Glm()
