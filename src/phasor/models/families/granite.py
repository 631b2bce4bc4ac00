"""Granite 3."""

from __future__ import annotations

import math
from typing import Any

from phasor.config import AttentionConfig, FeedForwardConfig, LanguageHeadConfig, ModelConfig, PreConfig, RMSNormConfig
from phasor.models.families._llama import EVERY_BIAS, LlamaLike
from phasor.models.family import GATES, activation_name, require_kind
from phasor.models.fields import Fields
from phasor.models.rope import read_rotary, write_rotary
from phasor.nn.positions import RotaryConfig


class Granite(LlamaLike):
    """Llama with multipliers: on embeddings, scores, what joins the residual stream, and logits."""

    model_type = "granite"
    title = "Granite 3"
    architectures = {"lm": "GraniteForCausalLM", "none": "GraniteModel"}
    has_head_dim = False
    harmless = frozenset({"logits_scaling"})  # where there are no logits

    def read(self, f: Fields) -> ModelConfig:
        plain, bias = ModelConfig(**self.sizes(f)), f.get("attention_bias", False)
        head = LanguageHeadConfig(multiplier=1 / f.positive("logits_scaling", 1.0)) if plain.has_logits else plain.head
        return plain.replace(
            position=read_rotary(f, plain.head_dim, plain.max_length),
            attention=AttentionConfig(bias=EVERY_BIAS if bias else (), scale=f.get("attention_multiplier", 1.0)),
            feedforward=FeedForwardConfig(
                activation=f.choose("hidden_act", GATES, "silu"), bias=f.get("mlp_bias", False)
            ),
            norm=RMSNormConfig(eps=f.get("rms_norm_eps", 1e-6)),
            placement=PreConfig(multiplier=f.get("residual_multiplier", 1.0)),
            embedding=plain.embedding.replace(scale=f.get("embedding_multiplier", 1.0)),
            head=head,
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        position, norm = require_kind(config.position, RotaryConfig), require_kind(config.norm, RMSNormConfig)
        scale, embedding = config.attention.scale, config.embedding.scale
        fields = self.write_sizes(config) | {
            "hidden_act": activation_name(config.feedforward.activation),
            "attention_bias": bool(config.attention.bias),
            "mlp_bias": config.feedforward.bias,
            "rms_norm_eps": norm.eps,
            "rope_parameters": write_rotary(position, config),
            "attention_multiplier": config.head_dim**-0.5 if scale is None else scale,
            "residual_multiplier": config.placement.multiplier,
            "embedding_multiplier": config.dim**0.5 if embedding == "sqrt" else embedding,
        }
        if config.has_logits:
            multiplier = require_kind(config.head, LanguageHeadConfig).multiplier
            fields["logits_scaling"] = config.dim**0.5 if multiplier == "rsqrt" else divisor(multiplier)
        return fields


def divisor(multiplier: float) -> float:
    """The number to divide by in place of a multiplication, as it was most likely written.

    >>> [n for n in range(1, 1000) if divisor(1 / n) != n or divisor(1 / (n / 10)) != n / 10]
    []
    """
    near = 1 / multiplier
    written = (float(f"{near:.15g}"), near, math.nextafter(near, 0), math.nextafter(near, math.inf))
    return next((number for number in written if 1 / number == multiplier), near)


FAMILY = Granite()
