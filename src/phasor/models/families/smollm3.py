"""SmolLM3."""

from __future__ import annotations

from typing import Any

from phasor.config import AttentionConfig, FeedForwardConfig, ModelConfig, RMSNormConfig
from phasor.models.families._layers import read_windows, vary_layers, write_windows
from phasor.models.families._llama import EVERY_BIAS, LlamaLike
from phasor.models.family import GATES, activation_name, require_kind
from phasor.models.fields import Fields, json_repr
from phasor.models.rope import read_rotary, write_rotary
from phasor.nn.positions import NoPositionConfig, RotaryConfig


class SmolLM3(LlamaLike):
    """Llama without positions in some layers, which may have a window."""

    model_type = "smollm3"
    title = "SmolLM3"
    architectures = {"lm": "SmolLM3ForCausalLM", "none": "SmolLM3Model"}
    defaults = {"num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True}
    has_head_dim = False
    # Where layers are listed or none asks for a window; a field of other families; how products were once cut.
    harmless = frozenset({"no_rope_layer_interval", "sliding_window", "max_window_layers", "pretraining_tp"})

    def read(self, f: Fields) -> ModelConfig:
        plain, bias = ModelConfig(**self.sizes(f)), f.get("attention_bias", False)
        attention = AttentionConfig(bias=EVERY_BIAS if bias else ())
        position = read_rotary(f, plain.head_dim, plain.max_length, base=2e6)
        rotary = self.rope_layers(f, plain.num_layers)
        windows = read_windows(f, plain.num_layers, lambda i: not rotary[i])
        config = plain.replace(
            position=position,
            attention=attention,
            feedforward=FeedForwardConfig(
                activation=f.choose("hidden_act", GATES, "silu"), bias=f.get("mlp_bias", False)
            ),
            norm=RMSNormConfig(eps=f.get("rms_norm_eps", 1e-6)),
        )
        return vary_layers(
            config,
            position=[position if has_rope else NoPositionConfig() for has_rope in rotary],
            attention=[attention.replace(window=w) for w in windows],
        )

    def rope_layers(self, f: Fields, count: int) -> list[bool]:
        """Which layers have rotary positions: contrary to its name, `no_rope_layers` has a 1 for those."""
        listed = f.get("no_rope_layers", None)
        if listed is None:
            interval = f.positive("no_rope_layer_interval", 4)
            return [(i + 1) % interval != 0 for i in range(count)]
        if not isinstance(listed, list) or len(listed) < count or not all(one in (0, 1) for one in listed):
            raise ValueError(f"{f.file}: no_rope_layers must be {count} times 0 or 1, not {json_repr(listed)}")
        return [one == 1 for one in listed[:count]]

    def write(self, config: ModelConfig) -> dict[str, Any]:
        position, norm = require_kind(config.position, RotaryConfig), require_kind(config.norm, RMSNormConfig)
        layers = [config.layer(i) for i in range(config.num_layers)]
        return self.write_sizes(config) | {
            "hidden_act": activation_name(config.feedforward.activation),
            "attention_bias": bool(layers[0].attention.bias),
            "mlp_bias": config.feedforward.bias,
            "rms_norm_eps": norm.eps,
            "rope_parameters": write_rotary(position, config),
            "no_rope_layers": [int(isinstance(layer.position, RotaryConfig)) for layer in layers],
            **write_windows(config),
        }


FAMILY = SmolLM3()
