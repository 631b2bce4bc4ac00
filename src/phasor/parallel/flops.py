"""Floating-point operations of a training step: those that a model needs, and those that a device computes."""

from __future__ import annotations

import functools

from phasor.config import AttentionConfig, ModelConfig
from phasor.config.model import Side
from phasor.parallel.parameters import parameters_of


def sides_of(model: ModelConfig) -> list[Side]:
    """The stacks of a model."""
    return ["encoder", "decoder"] if model.shape == "encoder-decoder" else [model.shape]


def model_flops(model: ModelConfig, length: int) -> float:
    """Operations per token of a forward and backward pass, as papers count them for the MFU (PaLM, appendix B).

    Six for every weight that the token is multiplied with, and attention over all tokens of the row, masked or not.

    >>> from phasor.models.presets import preset
    >>> round(model_flops(preset("llama-3.1"), 8192) / 1e9, 1)
    57.9
    """
    counted = parameters_of(model)
    layers = sum(model.depth(side) for side in sides_of(model))
    layers += model.num_layers if model.shape == "encoder-decoder" else 0  # cross-attention
    attention = 12 * layers * model.num_heads * model.head_dim * length
    return 6 * (counted.in_blocks + counted.in_head) + attention


def mfu(model: ModelConfig, tokens_per_second: float, length: int, peak: float) -> float:
    """Model FLOPS utilization: the share of a device's peak that a model needs at some tokens per second of a device.

    >>> from phasor.models.presets import preset
    >>> round(100 * mfu(preset("llama-3.1"), 6667, 8192, 989e12), 1)
    39.0
    """
    return tokens_per_second * model_flops(model, length) / peak


def attention_flops(model: ModelConfig, length: int) -> float:
    """Operations per token of a forward pass between queries, keys and values, without what masks hide."""
    heads = 4 * model.num_heads * model.head_dim
    total = 0.0
    for side in sides_of(model):
        for index in range(model.depth(side)):
            total += heads * visible_keys(model.layer(index).attention, side, length)
            total += heads * length if side == "decoder" and model.shape == "encoder-decoder" else 0
    return total


@functools.cache
def visible_keys(attention: AttentionConfig, side: Side, length: int) -> float:
    """How many keys a query sees, on average over a row.

    >>> visible_keys(AttentionConfig(), "decoder", 9), visible_keys(AttentionConfig(window=2), "decoder", 4)
    (5.0, 1.75)
    """
    if attention.sparse is not None:
        return attention.sparse.visible_keys(length, side == "decoder", attention.window)
    window = min(attention.window or length, length)
    if side == "encoder":
        return float(window)
    seen = window * length - window * (window - 1) / 2
    return min(seen / length + (attention.sink_tokens if window < length else 0), (length + 1) / 2)
