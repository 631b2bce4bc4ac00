"""DeBERTa's disentangled attention: products of queries and keys with projected vectors of the distance's bucket."""

from __future__ import annotations

import functools
from bisect import bisect_right
from dataclasses import replace
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.nn.layer_step import LayerStep
from phasor.nn.norm import LayerNorm
from phasor.nn.positions.base import Position, ProjectHeads, layers_with, relative_init_std
from phasor.nn.positions.disentangled.config import DisentangledConfig
from phasor.nn.sequence import SequenceInfo
from phasor.ops.attention import DistanceRows, Mask, ProductBias, ScoreMod
from phasor.ops.constants import constant


class Tables(NamedTuple):
    """What queries are multiplied with, and what keys are, `[rows, heads, D]`; None for nothing."""

    query: Tensor | None
    key: Tensor | None


class Disentangled(Position, config=DisentangledConfig):
    """`(q_m k_n + q_m K r + k_n Q r) / sqrt(terms)`, with `r` the vector of the bucket of `m - n`, times the scale.

    `terms` counts the products. `K` and `Q` project to keys and to queries, by separate weights or the layer's.
    """

    config: DisentangledConfig

    def __init__(self, config: DisentangledConfig, *, layers: int, width: int, head_dim: int, dim: int) -> None:
        super().__init__()
        self.config, self.head_dim = config, head_dim
        self.table = nn.Parameter(torch.empty(2 * config.span, dim))
        self.norm = None if config.norm is None else LayerNorm((dim,), config.norm)
        own = 0 if config.share_att_key else len(config.pos_att_type) * layers
        self.weight = nn.ParameterList(torch.empty(width, dim) for _ in range(own))  # by layer, then by term
        self.bias = nn.ParameterList(torch.empty(width) for _ in range(own))
        self.bounds = row_bounds(config.position_buckets, config.max_relative_positions)

    @classmethod
    def build(cls, config: DisentangledConfig, model: ModelConfig, side: Side) -> Self:
        sizes = {"width": model.num_heads * model.head_dim, "head_dim": model.head_dim, "dim": model.dim}
        return cls(config, layers=layers_with(config, model, side), **sizes)

    def reset_parameters(self, config: ModelConfig) -> None:
        if self.norm is not None:
            self.norm.reset_parameters()
        for weight in (self.table, *self.weight):
            nn.init.normal_(weight, std=relative_init_std(config))
        for bias in self.bias:
            nn.init.zeros_(bias)

    def prepare(self, seq: SequenceInfo, like: Tensor) -> Tensor:
        return (self.table if self.norm is None else self.norm(self.table)).to(like.dtype)

    def layer_weights(self, layer: int) -> tuple[Tensor, ...]:
        terms = 0 if self.config.share_att_key else len(self.config.pos_att_type)
        own = range(layer * terms, (layer + 1) * terms)
        return tuple(x for i in own for x in (self.weight[i], self.bias[i]))

    def for_layer(self, x: Tensor, prepared: Tensor, weights: tuple[Tensor, ...], step: LayerStep) -> Tensor | Tables:
        if self.config.share_att_key:
            return prepared
        pairs = zip(weights[::2], weights[1::2], strict=True)
        projected = [linear(prepared, *(x.to(prepared.dtype) for x in pair)) for pair in pairs]
        heads = (self.own_heads(x).unflatten(-1, (-1, self.head_dim)) for x in projected)
        by_term = dict(zip(self.config.pos_att_type, heads, strict=True))
        return Tables(by_term.get("c2p"), by_term.get("p2c"))

    def with_projection(self, project: ProjectHeads, prepared: Tensor | Tables) -> Tables:
        if isinstance(prepared, Tables):
            return prepared
        queries, keys = project(prepared)
        terms = self.config.pos_att_type
        return Tables(keys if "c2p" in terms else None, queries if "p2c" in terms else None)

    def on_attention(
        self, q: Tensor, k: Tensor, mask: Mask, score_mod: ScoreMod, prepared: Tables
    ) -> tuple[Tensor, Tensor, ScoreMod]:
        queries, keys = score_mod.query_positions, score_mod.key_positions
        assert queries is not None
        assert keys is not None
        scale = score_mod.scale * (1 + len(self.config.pos_att_type)) ** -0.5
        bounds = constant(self.bounds, q.device, torch.int64)
        rows = DistanceRows(queries, keys, reach=self.bounds[-1], bounds=bounds, least=self.bounds[0] - 1)
        tables = (None if table is None else table.to(q.dtype) for table in prepared)
        return q, k, replace(score_mod, scale=scale, bias=ProductBias(q, k, rows, scale, *tables))


@functools.lru_cache(maxsize=64)
def row_bounds(buckets: int | None, max_distance: int) -> tuple[int, ...]:
    """The smallest distance of every row but the first, in exact arithmetic.

    With `half = buckets / 2`, a distance `n` past `half` falls into the bucket
    `half + ceil(log(n/half) / log((max - 1)/half) * (half - 1))`, and all others into their own: bucket `half + j + 1`
    starts at the smallest `n` with `(n/half)^(half - 1) > ((max - 1)/half)^j`. The buckets of distances to either side
    lie around the row `buckets`. Without buckets every distance has its row.

    >>> row_bounds(6, 9)
    (-8, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5)
    >>> row_bounds(None, 2)
    (-1, 0, 1)
    """
    span, half = buckets or max_distance, (buckets or 2 * max_distance) // 2
    starts = list(range(1, half + 1))  # of the buckets from 1 on, and of what lies past the last
    for j in range(span - half):
        level = (max_distance - 1) ** j * half ** (half - 1 - j)
        starts.append(bisect_right(range(max_distance), level, key=lambda n: n ** (half - 1)))
    return tuple([1 - start for start in reversed(starts)] + starts[:-1])
