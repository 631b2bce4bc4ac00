"""A learned vector for every position, on the input."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.nn.checks import can_check_values
from phasor.nn.positions.base import Position
from phasor.nn.positions.learned.config import LearnedConfig
from phasor.nn.sequence import SequenceInfo


class Learned(Position, config=LearnedConfig):
    """A table of `max_length + offset` vectors; position `t` takes row `t + offset`."""

    config: LearnedConfig

    def __init__(self, config: LearnedConfig, *, dim: int) -> None:
        super().__init__()
        if config.max_length is None:
            raise ValueError("a learned table needs its max_length")
        self.config = config
        self.max_length = config.max_length
        self.weight = nn.Parameter(torch.empty(self.max_length + config.offset, dim))

    @classmethod
    def build(cls, config: LearnedConfig, model: ModelConfig, side: Side) -> Self:
        return cls(config.resolve(model), dim=model.input_width)

    def reset_parameters(self, config: ModelConfig) -> None:
        nn.init.normal_(self.weight, std=getattr(config.init, "std", config.dim**-0.5))

    def on_input(self, x: Tensor, seq: SequenceInfo) -> Tensor:
        positions, count = seq.positions, x.shape[-2]
        highest = int(positions.max()) if can_check_values(positions) and positions.numel() else None
        counted = seq.order is None and positions.dim() == 1 and (highest is None or highest >= self.max_length)
        if counted and count > self.max_length:
            raise ValueError(f"{count} tokens are more than the learned table of {self.max_length} positions holds")
        if highest is not None and highest >= self.max_length:
            raise ValueError(f"position {highest} lies beyond the learned table of {self.max_length} positions")
        return x + nn.functional.embedding(positions + self.config.offset, self.weight).to(x.dtype)
