"""CoPE: a query counts keys by its own gates, and is multiplied with the vector of the count."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.nn.layer_step import LayerStep
from phasor.nn.positions.base import Position, layers_with, relative_init_std
from phasor.nn.positions.cope.config import CoPEConfig
from phasor.ops.attention import CountBias, Mask, ScoreMod


class LayerTable(NamedTuple):
    """The vectors of one layer, and the call that sums over its keys."""

    table: Tensor
    step: LayerStep


class CoPE(Position, config=CoPEConfig):
    """`q_m (k_n + e[p_mn])`, with `p_mn` the sum of `sigmoid(q_m k_j)` over the keys `j >= n` that the query sees.

    A fractional `p` has the vector between the two next to it, and none is beyond `max_position`. All products are
    times the scale of attention, inside the sigmoid too.
    """

    config: CoPEConfig

    def __init__(self, config: CoPEConfig, *, layers: int, head_dim: int) -> None:
        super().__init__()
        self.config = config
        self.vectors = nn.ParameterList(torch.empty(config.max_position + 1, head_dim) for _ in range(layers))

    @classmethod
    def build(cls, config: CoPEConfig, model: ModelConfig, side: Side) -> Self:
        layers = 1 if config.share_layers else layers_with(config, model, side)
        return cls(config, layers=layers, head_dim=model.head_dim)

    def reset_parameters(self, config: ModelConfig) -> None:
        for weight in self.vectors:
            nn.init.normal_(weight, std=relative_init_std(config))

    def layer_weights(self, layer: int) -> tuple[Tensor]:
        return (self.vectors[0 if self.config.share_layers else layer],)

    def for_layer(self, x: Tensor, prepared: None, weights: tuple[Tensor], step: LayerStep) -> LayerTable:
        return LayerTable(*weights, step)

    def on_attention(
        self, q: Tensor, k: Tensor, mask: Mask, score_mod: ScoreMod, prepared: LayerTable
    ) -> tuple[Tensor, Tensor, ScoreMod]:
        bias = CountBias(q, k, prepared.table.to(q.dtype), score_mod.scale, prepared.step)
        return q, k, replace(score_mod, bias=bias)
