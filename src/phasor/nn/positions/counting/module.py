"""A bare count on the input: a naive scheme, kept to show what fails."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.nn.positions.base import Position
from phasor.nn.positions.counting.config import CountingConfig
from phasor.nn.sequence import SequenceInfo


class Counting(Position, config=CountingConfig):
    """`t` times a learned direction: the input grows without bound."""

    config: CountingConfig

    def __init__(self, config: CountingConfig, *, dim: int) -> None:
        super().__init__()
        self.config = config
        self.direction = nn.Parameter(torch.empty(dim))

    @classmethod
    def build(cls, config: CountingConfig, model: ModelConfig, side: Side) -> Self:
        return cls(config, dim=model.input_width)

    def reset_parameters(self, config: ModelConfig) -> None:
        nn.init.normal_(self.direction, std=0.02)

    def factor(self, seq: SequenceInfo) -> Tensor:
        """What the direction is multiplied by, one value per token."""
        return seq.positions.to(torch.float64)

    def on_input(self, x: Tensor, seq: SequenceInfo) -> Tensor:
        return x + (self.factor(seq)[..., None] * self.direction).to(x.dtype)
