"""Initialisation: every scheme is a standard deviation for each role a matrix can have."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phasor.config import (
    DeepNormConfig,
    FanInInitConfig,
    ModelConfig,
    NormalInitConfig,
    T5InitConfig,
    XavierInitConfig,
)
from phasor.config.model import Side
from phasor.parts.attention import Attention
from phasor.parts.embedding import Embedding
from phasor.parts.experts import Experts
from phasor.parts.feedforward import FeedForward
from phasor.parts.head import LogitsHead
from phasor.parts.norm import LayerNorm, RMSNorm
from phasor.parts.positions import Position
from phasor.parts.residual import deepnorm_constants


def spread(model: ModelConfig, side: Side, role: str, fan_in: int, fan_out: int) -> float:
    """The standard deviation of a matrix's fresh weights.

    >>> from phasor.presets import preset
    >>> spread(preset("gpt-2"), "decoder", "q", 768, 768)
    0.02
    """
    init = model.init
    if isinstance(init, NormalInitConfig):
        by_depth = init.by_depth and role in ("out", "down")
        return init.std / (2 * model.depth(side)) ** 0.5 if by_depth else init.std
    if isinstance(init, XavierInitConfig):
        if role == "token":
            return model.dim**-0.5
        deep = isinstance(model.placement, DeepNormConfig) and role in ("v", "out", "up", "down")
        return (2 / (fan_in + fan_out)) ** 0.5 * (deepnorm_constants(model, side)[1] if deep else 1.0)
    if isinstance(init, FanInInitConfig | T5InitConfig):
        if role == "token":
            return 1.0
        small = isinstance(init, T5InitConfig) and role == "q"
        return fan_in**-0.5 * (model.head_width**-0.5 if small else 1.0)
    raise ValueError(f"no code draws the initialisation {init.kind!r}")


@torch.no_grad()
def initialise(module: nn.Module, model: ModelConfig, side: Side) -> None:
    """Draw fresh weights for a module and all within it, as the model's configuration says."""

    def draw(weight: Tensor, role: str, fan_in: int, fan_out: int) -> None:
        nn.init.normal_(weight, std=spread(model, side, role, fan_in, fan_out))

    roles = {id(m): role for m, role in named_roles(module)}
    for part in module.modules():
        if isinstance(part, LayerNorm | RMSNorm):
            part.reset_parameters()
        elif isinstance(part, Position):
            part.reset_parameters(model)
        elif isinstance(part, Embedding):
            draw(part.weight, "token", *part.weight.shape)
        elif isinstance(part, nn.Embedding):
            draw(part.weight, "token", part.num_embeddings, part.embedding_dim)
        elif isinstance(part, LogitsHead):
            if part.weight is not None:
                draw(part.weight, "head", part.weight.shape[1], part.weight.shape[0])
            zero(part.bias)
        elif isinstance(part, Experts):
            draw(part.up, "up", part.up.shape[1], part.up.shape[2])
            draw(part.down, "down", part.down.shape[1], part.down.shape[2])
            zero(part.up_bias, part.down_bias)
        elif isinstance(part, Attention):
            zero(part.sinks, *part.lone_bias.values())
        elif isinstance(part, nn.Linear):
            for rows, role, fan_out in roles.get(id(part), lambda w: [(w, "other", w.shape[0])])(part.weight):
                draw(rows, role, part.in_features, fan_out)
            zero(part.bias)


def named_roles(module: nn.Module):
    """For each projection whose role matters, a function from its weight to (rows, role, fan-out) of every part."""

    def whole(role: str):
        return lambda weight: [(weight, role, weight.shape[0])]

    for part in module.modules():
        if isinstance(part, Attention):
            for linear, names in part.fused():
                yield linear, lambda weight, part=part, names=names: part.rows(weight, names)
            yield part.out, whole("out")
        elif isinstance(part, FeedForward):
            yield part.up, gate_and_up if part.config.gated else whole("up")
            yield part.down, whole("down")


def gate_and_up(weight: Tensor):
    gate, up = weight.chunk(2)
    return [(gate, "up", len(gate)), (up, "up", len(up))]


def zero(*biases: Tensor | None) -> None:
    for bias in biases:
        if bias is not None:
            nn.init.zeros_(bias)
