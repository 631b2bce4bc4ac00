"""StarCoder2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import AttentionConfig, FeedForwardConfig, LayerNormConfig, ModelConfig
from phasor.models.families._llama import EVERY_BIAS, LlamaLike
from phasor.models.family import ACTIVATIONS, activation_name, require_kind
from phasor.models.fields import Fields
from phasor.models.layout import Rule, linear
from phasor.models.rope import read_rotary, write_rotary
from phasor.nn.positions import RotaryConfig


class Starcoder2(LlamaLike):
    """LayerNorm, rotary, a plain feed-forward network, biases everywhere, and a window in every layer."""

    model_type = "starcoder2"
    title = "StarCoder2"
    architectures = {"lm": "Starcoder2ForCausalLM", "none": "Starcoder2Model"}
    defaults = {"num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": True}
    has_head_dim = False
    harmless = frozenset({"rms_norm_eps"})  # stands in files beside the epsilon of its LayerNorms

    def read(self, f: Fields) -> ModelConfig:
        plain, bias = ModelConfig(**self.sizes(f)), f.get("use_bias", True)
        f.expect("mlp_type", "default")
        f.expect("norm_type", "layer_norm")
        return plain.replace(
            position=read_rotary(f, plain.head_dim, plain.max_length),
            attention=AttentionConfig(bias=EVERY_BIAS if bias else (), window=f.get("sliding_window", None)),
            feedforward=FeedForwardConfig(
                activation=f.choose("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh"), bias=bias
            ),
            norm=LayerNormConfig(eps=f.get("norm_epsilon", 1e-5)),
            dropout=plain.dropout.replace(
                residual=f.get("residual_dropout", 0.0), embedding=f.get("embedding_dropout", 0.0)
            ),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        position, norm = require_kind(config.position, RotaryConfig), require_kind(config.norm, LayerNormConfig)
        return self.write_sizes(config) | {
            "hidden_act": activation_name(config.feedforward.activation),
            "use_bias": config.feedforward.bias,
            "sliding_window": config.layer(0).attention.window,
            "norm_epsilon": norm.eps,
            "residual_dropout": config.dropout.residual,
            "embedding_dropout": config.dropout.embedding,
            "rope_parameters": write_rotary(position, config),
        }

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from linear(f"{ours}.up", f"{theirs}.c_fc")
        yield from linear(f"{ours}.down", f"{theirs}.c_proj")


FAMILY = Starcoder2()
