"""A Gaussian around every query: a penalty of the squared distance, on the scores."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.nn.positions.base import Position, bias_dtype
from phasor.nn.positions.gaussian.config import GaussianConfig
from phasor.nn.sequence import SequenceInfo
from phasor.ops.attention import DistanceBias
from phasor.ops.constants import constant


class Gaussian(Position, config=GaussianConfig):
    """`-(i - j)^2 / (2 sigma_h^2)`, `sigma_h = width 2^h`: the logarithm of a Gaussian around the query."""

    config: GaussianConfig

    def __init__(self, config: GaussianConfig, *, num_heads: int) -> None:
        super().__init__()
        self.config = config
        self.slopes = tuple(0.5 / (config.width * 2**h) ** 2 for h in range(num_heads))

    @classmethod
    def build(cls, config: GaussianConfig, model: ModelConfig, side: Side) -> Self:
        return cls(config, num_heads=model.num_heads)

    def prepare(self, seq: SequenceInfo, like: Tensor) -> DistanceBias:
        slopes = constant(self.own_heads(self.slopes), like.device, bias_dtype(like))
        return DistanceBias(slopes=slopes, powers=torch.full_like(slopes, 2.0))

    def on_scores(self, prepared: DistanceBias) -> DistanceBias:
        return prepared
