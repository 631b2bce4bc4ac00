"""T5's relative bias: a learned scalar per head and bucket of distance, on the scores."""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from fractions import Fraction
from typing import Self, cast

import torch
from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.nn.layer_step import LayerStep
from phasor.nn.positions.base import Position, layers_with
from phasor.nn.positions.t5.config import T5PositionConfig
from phasor.ops.attention import Bias, DistanceBias
from phasor.ops.constants import constant

MAX_TABLE_DISTANCE = 4096  # beyond it the table by distance would be too long


class T5Bias(Position, config=T5PositionConfig):
    """Half of the buckets hold one distance each, the other half log-spaced ranges up to `max_distance`.

    Encoders distinguish before from after, with half of the buckets per direction; in decoders everything ahead
    shares the bucket of distance 0. One table serves every layer that uses the scheme, or each has its own.
    """

    config: T5PositionConfig

    def __init__(self, config: T5PositionConfig, *, num_heads: int, bidirectional: bool, layers: int = 1) -> None:
        super().__init__()
        self.config = config
        self.bidirectional = bidirectional
        self.buckets = config.num_buckets // 2 if bidirectional else config.num_buckets  # of one direction
        self.bounds = bucket_bounds(self.buckets, config.max_distance)
        reach = self.bounds[-1]  # from here on all distances are in one bucket
        self.lowest = -reach if bidirectional else 0
        self.by_distance = bucket_table(self.bounds, bidirectional) if reach <= MAX_TABLE_DISTANCE else None
        tables = [nn.Parameter(torch.empty(config.num_buckets, num_heads)) for _ in range(layers)]
        self.weight = tables[0] if config.shared else nn.ParameterList(tables)

    @classmethod
    def build(cls, config: T5PositionConfig, model: ModelConfig, side: Side) -> Self:
        layers = 1 if config.shared else layers_with(config, model, side)
        return cls(config, num_heads=model.num_heads, bidirectional=side == "encoder", layers=layers)

    def reset_parameters(self, config: ModelConfig) -> None:
        for table in self.parameters():
            nn.init.normal_(table, std=config.dim**-0.5)

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each signed distance, query position minus key position."""
        bounds = constant(self.bounds, distance.device, torch.int64)
        if not self.bidirectional:
            return torch.bucketize(distance.clamp(min=0), bounds, right=True)
        ahead = (distance < 0).to(torch.int64) * self.buckets
        return ahead + torch.bucketize(distance.abs(), bounds, right=True)

    def layer_weights(self, layer: int) -> tuple[Tensor, ...]:
        return (self.weight[layer],) if isinstance(self.weight, nn.ParameterList) else ()

    def for_layer(self, x: Tensor, prepared: None, weights: tuple[Tensor, ...], step: LayerStep) -> Tensor:
        return weights[0]

    def on_scores(self, prepared: Tensor | None) -> Bias:
        table = self.own_heads(cast(Tensor, self.weight) if prepared is None else prepared)
        if self.by_distance is None:
            return functools.partial(self.by_bucket, table)
        buckets = constant(self.by_distance, table.device, torch.int64)
        return DistanceBias(table=nn.functional.embedding(buckets, table), min_distance=self.lowest)

    def by_bucket(self, table: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """The bias without a table by distance."""
        buckets = self.bucket(queries[:, :, None] - keys[:, None, :])
        return nn.functional.embedding(buckets, table).permute(0, 3, 1, 2)


@functools.lru_cache(maxsize=64)
def bucket_table(bounds: tuple[int, ...], bidirectional: bool) -> tuple[int, ...]:
    """The bucket of every distance from that where the last bucket ahead begins to that where the last one behind does.

    >>> bucket_table((1, 2, 4), bidirectional=True)
    (7, 6, 6, 5, 0, 1, 2, 2, 3)
    """
    behind = [bisect_right(bounds, distance) for distance in range(bounds[-1] + 1)]
    ahead = [bisect_right(bounds, distance) + len(bounds) + 1 for distance in range(bounds[-1], 0, -1)]
    return tuple(ahead + behind if bidirectional else behind)


@functools.lru_cache(maxsize=64)
def bucket_bounds(buckets: int, max_distance: int) -> tuple[int, ...]:
    """The smallest distance of every bucket but the first, in exact arithmetic.

    A distance n at or past `exact = buckets / 2` falls into `exact + floor(log(n/exact) / log(max/exact) * exact)`,
    so bucket `exact + j` starts at the smallest n with `(n/exact)^exact >= (max/exact)^j`.

    >>> bucket_bounds(16, 128)
    (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91)
    """
    exact = buckets // 2
    bounds = list(range(1, exact + 1))
    for j in range(1, buckets - exact):
        reach = Fraction(max_distance, exact) ** j
        bounds.append(bisect_left(range(max_distance), reach, key=lambda n: Fraction(n, exact) ** (buckets - exact)))
    return tuple(bounds)
