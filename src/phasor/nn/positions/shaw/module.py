"""Shaw's relative positions: vectors of the clipped distance, which keys and values have in the eyes of a query."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.nn.layer_step import LayerStep
from phasor.nn.positions.base import Position, layers_with, relative_init_std
from phasor.nn.positions.shaw.config import ShawConfig
from phasor.ops.attention import DistanceRows, Mask, ProductBias, RelativeValues, ScoreMod


class Shaw(Position, config=ShawConfig):
    """`q_m (k_n + a_d)` and the average of `v_n + b_d`, with `d = m - n` clipped to `max_distance` on either side.

    Row `max_distance + d` of a table is for the distance `d`. `vectors` lists those of keys and of values, by layer.
    """

    config: ShawConfig

    def __init__(self, config: ShawConfig, *, layers: int, shapes: tuple[tuple[int, ...], ...], head_dim: int) -> None:
        super().__init__()
        self.config, self.head_dim = config, head_dim
        self.vectors = nn.ParameterList(torch.empty(shape) for _ in range(layers) for shape in shapes)

    @classmethod
    def build(cls, config: ShawConfig, model: ModelConfig, side: Side) -> Self:
        layers = 1 if config.share_layers else layers_with(config, model, side)
        return cls(config, layers=layers, shapes=config.table_shapes(model), head_dim=model.head_dim)

    def reset_parameters(self, config: ModelConfig) -> None:
        for weight in self.parameters():
            nn.init.normal_(weight, std=relative_init_std(config))

    def layer_weights(self, layer: int) -> tuple[Tensor, ...]:
        tables = 2 if self.config.values else 1
        first = 0 if self.config.share_layers else layer * tables
        return tuple(self.vectors[i] for i in range(first, first + tables))

    def for_layer(self, x: Tensor, prepared: None, weights: tuple[Tensor, ...], step: LayerStep) -> tuple[Tensor, ...]:
        tables = weights if self.config.share_heads else map(self.own_heads, weights)
        return tuple(table.unflatten(-1, (-1, self.head_dim)) for table in tables)

    def on_attention(
        self, q: Tensor, k: Tensor, mask: Mask, score_mod: ScoreMod, prepared: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, ScoreMod]:
        key_table, *value_tables = (table.to(q.dtype) for table in prepared)
        queries, keys = score_mod.query_positions, score_mod.key_positions
        assert queries is not None
        assert keys is not None
        rows = DistanceRows(queries, keys, self.config.max_distance)
        both = key_table if self.config.key_products else None
        bias = ProductBias(q, k, rows, score_mod.scale, query_table=key_table, key_table=both)
        values = RelativeValues(rows, *value_tables) if value_tables else None
        return q, k, replace(score_mod, bias=bias, relative_values=values)
