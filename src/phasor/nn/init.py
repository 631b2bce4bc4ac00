"""Weight initialization: a scheme gives a standard deviation for each role of a matrix."""

from __future__ import annotations

from collections.abc import Iterator

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
from phasor.nn.attention.base import Attention
from phasor.nn.block import Block
from phasor.nn.embedding import Embedding
from phasor.nn.feed_forward import XIELU, FeedForward
from phasor.nn.heads import LogitsHead
from phasor.nn.layer_input import LayerEmbedding
from phasor.nn.moe import Experts
from phasor.nn.norm import LayerNorm, RMSNorm
from phasor.nn.positions.base import Position
from phasor.nn.residual import deepnorm_constants


def init_std(model: ModelConfig, side: Side, role: str, fan_in: int, fan_out: int) -> float:
    """The standard deviation of the initial weights of a matrix.

    >>> from phasor.models.presets import preset
    >>> init_std(preset("gpt-2"), "decoder", "q", 768, 768)
    0.02
    """
    deep = isinstance(model.placement, DeepNormConfig) and role in ("v", "out", "up", "down")
    return base_init_std(model, side, role, fan_in, fan_out) * (deepnorm_constants(model, side)[1] if deep else 1.0)


def base_init_std(model: ModelConfig, side: Side, role: str, fan_in: int, fan_out: int) -> float:
    """The standard deviation before DeepNorm's beta."""
    init = model.init
    if isinstance(init, NormalInitConfig):
        by_depth = init.by_depth and role in ("out", "down")
        return init.std / (2 * model.depth(side)) ** 0.5 if by_depth else init.std
    if isinstance(init, XavierInitConfig):
        return model.dim**-0.5 if role == "token" else (2 / (fan_in + fan_out)) ** 0.5
    if isinstance(init, FanInInitConfig | T5InitConfig):
        if role == "token":
            return 1.0
        small = isinstance(init, T5InitConfig) and role == "q"
        return fan_in**-0.5 * (model.head_dim**-0.5 if small else 1.0)
    raise ValueError(f"no code implements the initialization {init.kind!r}")


@torch.no_grad()
def initialize(module: nn.Module, model: ModelConfig, side: Side) -> None:
    """Initialize the weights of a module and of all modules inside it, by the model's configuration."""

    model = model.for_side(side)

    def draw(weight: Tensor, role: str, fan_in: int, fan_out: int) -> None:
        nn.init.normal_(weight, std=init_std(model, side, role, fan_in, fan_out))

    rows = {id(linear): rows for linear, rows in rows_by_role(module)}
    for part in module.modules():
        if isinstance(part, LayerNorm | RMSNorm | Attention | Block | XIELU):
            part.reset_parameters()
        elif isinstance(part, Position):
            part.reset_parameters(model)
        elif isinstance(part, Embedding | LayerEmbedding):
            draw(part.weight, "token", *part.weight.shape)
        elif isinstance(part, nn.Embedding):
            draw(part.weight, "token", part.num_embeddings, part.embedding_dim)
        elif isinstance(part, LogitsHead):
            if part.weight is not None:
                draw(part.weight, "head", part.weight.shape[1], part.weight.shape[0])
            zero(part.bias)
        elif isinstance(part, Experts):
            draw(part.up, "up", part.up.shape[1], part.down.shape[1])
            draw(part.down, "down", part.down.shape[1], part.down.shape[2])
            zero(part.up_bias, part.down_bias, part.correction)
            if part.expert_scale is not None:
                nn.init.ones_(part.expert_scale)
        elif isinstance(part, nn.Linear):
            for weight, role, fan_out in rows.get(id(part), [(part.weight, "other", part.out_features)]):
                draw(weight, role, part.in_features, fan_out)
            zero(part.bias)
        elif isinstance(part, nn.Conv1d):
            draw(part.weight, "other", part.weight[0].numel(), part.out_channels)
            zero(part.bias)
        elif isinstance(part, nn.GroupNorm):
            part.reset_parameters()


def rows_by_role(module: nn.Module) -> Iterator[tuple[nn.Linear, list[tuple[Tensor, str, int]]]]:
    """The projections that are initialized by role, each split into (rows, role, number of rows)."""
    for part in module.modules():
        if isinstance(part, Attention):
            yield from part.rows_by_role()
        elif isinstance(part, FeedForward):
            pieces = part.up.weight.chunk(2 if part.config.gated else 1)
            yield part.up, [(piece, "up", len(piece)) for piece in pieces]
            yield part.down, [(part.down.weight, "down", part.down.out_features)]


def zero(*biases: Tensor | None) -> None:
    for bias in biases:
        if bias is not None:
            nn.init.zeros_(bias)
