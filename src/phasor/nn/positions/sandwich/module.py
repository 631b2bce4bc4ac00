"""Sandwich: inner products of sinusoidal codes, on the scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.nn.positions.base import Position, bias_dtype
from phasor.nn.positions.frequencies import geometric_frequencies
from phasor.nn.positions.phase import cos_sin_of, increments
from phasor.nn.positions.sandwich.config import SandwichPositionConfig
from phasor.nn.sequence import SequenceInfo
from phasor.ops.attention import Bias, DistanceBias
from phasor.ops.constants import constant


@dataclass(frozen=True)
class SandwichBias:
    """The bias of any positions, by the inner products of their codes: `[pairs]` frequencies, `[H]` ratios."""

    increments: Tensor
    ratios: Tensor

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        codes = [torch.cat(self.cos_sin(x), dim=-1) for x in (queries, keys)]
        products = (codes[0] @ codes[1].mT).to(self.ratios.dtype)
        return products[:, None] / self.ratios[:, None, None]

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions `[...]`, float64 `[..., pairs]`."""
        return cos_sin_of(positions[..., None], self.increments, torch.float64)

    def table(self, max_distance: int) -> Tensor:
        """The bias of every distance from `-max_distance` to `max_distance`, `[distances, H]`."""
        behind = self.cos_sin(torch.arange(max_distance + 1, device=self.ratios.device))[0].sum(-1)
        products = torch.cat((behind[1:].flip(0), behind))
        return products.to(self.ratios.dtype)[:, None] / self.ratios


class SandwichPosition(Position, config=SandwichPositionConfig):
    """`sum_i cos((i - j) theta_i) / ratio_h`, which is the inner product of two sinusoidal codes, by exact phases.

    Where positions count tokens it is a table by distance. Positions that are given, and those of a cache, may be any
    distance apart: there it is computed from the codes.
    """

    config: SandwichPositionConfig

    def __init__(self, config: SandwichPositionConfig, *, num_heads: int) -> None:
        super().__init__()
        self.config = config
        self.increments = increments(geometric_frequencies(config.base, config.width))
        self.ratios = tuple(config.max_ratio * head / num_heads for head in range(1, num_heads + 1))

    @classmethod
    def build(cls, config: SandwichPositionConfig, model: ModelConfig, side: Side) -> Self:
        return cls(config, num_heads=model.num_heads)

    def prepare(self, seq: SequenceInfo, like: Tensor) -> Bias:
        device = like.device
        bias = SandwichBias(
            constant(self.increments, device, torch.int64),
            constant(self.own_heads(self.ratios), device, bias_dtype(like)),
        )
        if seq.max_distance is None:
            return bias
        return DistanceBias(table=bias.table(seq.max_distance), min_distance=-seq.max_distance)

    def on_scores(self, prepared: Bias) -> Bias:
        return prepared
