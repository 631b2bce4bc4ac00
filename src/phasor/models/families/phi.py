"""Phi 1, 1.5 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import (
    AttentionConfig,
    FeedForwardConfig,
    GELUTanhConfig,
    LayerNormConfig,
    LogitsConfig,
    ModelConfig,
    ParallelConfig,
)
from phasor.models.families._llama import EVERY_BIAS, LlamaLike
from phasor.models.family import ACTIVATIONS, activation_name, require_kind
from phasor.models.fields import Fields
from phasor.models.layout import Rule, linear, projections
from phasor.models.rope import read_rotary, write_rotary
from phasor.nn.positions import RotaryConfig


class Phi(LlamaLike):
    """Attention and feed-forward in parallel after one LayerNorm, part of a head rotated, biases everywhere."""

    model_type = "phi"
    title = "Phi 1, 1.5, 2"
    architectures = {"lm": "PhiForCausalLM", "none": "PhiModel"}
    norms = ("input_layernorm",)
    last_norm = "final_layernorm"
    has_head_dim = False

    def read(self, f: Fields) -> ModelConfig:
        plain = ModelConfig(**self.sizes(f))
        activation = f.choose("hidden_act", ACTIVATIONS, "gelu_new")
        return plain.replace(
            position=read_rotary(f, plain.head_dim, plain.max_length, partial=0.5),
            attention=AttentionConfig(bias=EVERY_BIAS, qk_norm="head" if f.get("qk_layernorm", False) else "none"),
            feedforward=FeedForwardConfig(activation=activation, bias=True),
            norm=LayerNormConfig(eps=f.get("layer_norm_eps", 1e-5)),
            placement=ParallelConfig(),
            head=plain.head.replace(bias=True) if isinstance(plain.head, LogitsConfig) else plain.head,
            dropout=plain.dropout.replace(embedding=f.get("embd_pdrop", 0.0), residual=f.get("resid_pdrop", 0.0)),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        position, activation = require_kind(config.position, RotaryConfig), config.feedforward.activation
        return self.write_sizes(config) | {
            "hidden_act": "gelu_new" if isinstance(activation, GELUTanhConfig) else activation_name(activation),
            "qk_layernorm": config.attention.qk_norm == "head",
            "layer_norm_eps": require_kind(config.norm, LayerNormConfig).eps,
            "embd_pdrop": config.dropout.embedding,
            "resid_pdrop": config.dropout.residual,
            "rope_parameters": {"partial_rotary_factor": 1.0} | write_rotary(position, config),
        }

    def attention(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from projections(ours, theirs)
        yield from linear(f"{ours}.out", f"{theirs}.dense")
        yield from linear(f"{ours}.q_norm", f"{theirs}.q_layernorm")
        yield from linear(f"{ours}.k_norm", f"{theirs}.k_layernorm")

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from linear(f"{ours}.up", f"{theirs}.fc1")
        yield from linear(f"{ours}.down", f"{theirs}.fc2")


FAMILY = Phi()
