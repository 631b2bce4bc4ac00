"""Granite 3."""

from __future__ import annotations

import math
from typing import Any

from phasor.config import ModelConfig
from phasor.models.entries import GATES, Activation, Bias, Draft, Field, HeadDim, Scale
from phasor.models.families._llama import LlamaLike
from phasor.models.rope import RopeParameters


class Divisor(Scale):
    """What our multiplier is one over.

    >>> from phasor.models.presets import preset
    >>> divisor, config = Divisor("head.multiplier"), preset("llama-2")
    >>> [n for n in range(1, 10000) if divisor.encode(1 / (n / 10), config) != n / 10]
    []
    """

    def decode(self, value: Any, draft: Draft) -> Any:
        return 1 / value

    def encode(self, value: Any, config: ModelConfig) -> Any:
        """The number that was most likely in the file, of those that give the multiplier."""
        multiplier = super().encode(value, config)
        near = 1 / multiplier
        candidates = (float(f"{near:.15g}"), near, math.nextafter(near, 0), math.nextafter(near, math.inf))
        return next((number for number in candidates if 1 / number == multiplier), near)


class Granite(LlamaLike):
    """Llama with multipliers: on embeddings, scores, what joins the residual stream, and logits."""

    model_type = "granite"
    title = "Granite 3"
    architectures = {"lm": "GraniteForCausalLM", "none": "GraniteModel"}
    parts = LlamaLike.parts | {"norm": "rmsnorm", "placement": "pre"}
    fields = LlamaLike.fields | {
        "head_dim": HeadDim(),
        "hidden_act": Activation("silu", GATES),
        "attention_bias": Bias(False),
        "mlp_bias": Field("feedforward.bias", default=False),
        "rms_norm_eps": Field("norm.eps", default=1e-6),
        "rope_parameters": RopeParameters(),
        "attention_multiplier": Field("attention.scale", default=None, absent=1.0),
        "residual_multiplier": Field("placement.multiplier", default=1.0),
        "embedding_multiplier": Scale("embedding.scale", default=1.0),
        "logits_scaling": Divisor("head.multiplier", default=1.0, positive=True),
    }


FAMILY = Granite()
