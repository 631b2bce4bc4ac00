"""Floating-point operations of a training step: those that a model needs, and those that a device computes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from phasor.config import AttentionConfig, ModelConfig
from phasor.config.parameters import parameters_of, sides_of


def model_flops(model: ModelConfig, length: int) -> float:
    """Operations per token of a forward and backward pass, as papers count them for the MFU (PaLM, appendix B).

    Six for every weight that the token is multiplied with, and attention over all tokens of the row, masked or not.

    >>> from phasor.models.presets import preset
    >>> round(model_flops(preset("llama-3.1"), 8192) / 1e9, 1)
    57.9
    """
    counted = parameters_of(model)
    attention = 3 * sum(of_layer.flops_per_token(model, length) for _, of_layer in attentions(model))
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
    seen = cache(lambda attention, causal: attention.visible_keys(length, causal))
    return sum(
        attention.flops_per_token(model, length if causal is None else seen(attention, causal))
        for causal, attention in attentions(model)
    )


def attentions(model: ModelConfig) -> Iterator[tuple[bool | None, AttentionConfig]]:
    """The attention of every layer, and whether its mask is causal; None for cross-attention, which sees all keys."""
    for side in sides_of(model):
        for index in range(model.depth(side)):
            attention = model.for_side(side).layer(index).attention
            yield side == "decoder", attention
            if side == "decoder" and model.shape == "encoder-decoder":
                yield None, attention
