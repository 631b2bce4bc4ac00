"""The two naive schemes, kept to show what fails: a bare count, and a count scaled to the sequence."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from phasor.config import CountingConfig, ModelConfig, NormalizedConfig
from phasor.config.model import Side
from phasor.nn.positions.base import Position
from phasor.nn.sequence import SequenceInfo


class Counting(Position):
    """`t` times a learned direction: the input grows without bound."""

    config: CountingConfig | NormalizedConfig

    def __init__(self, config: CountingConfig | NormalizedConfig, *, dim: int) -> None:
        super().__init__()
        self.config = config
        self.direction = nn.Parameter(torch.empty(dim))

    @classmethod
    def build(cls, config: CountingConfig | NormalizedConfig, model: ModelConfig, side: Side) -> Self:
        return cls(config, dim=model.input_width)

    def reset_parameters(self, config: ModelConfig) -> None:
        nn.init.normal_(self.direction, std=0.02)

    def place(self, places: SequenceInfo) -> Tensor:
        """One number a token."""
        return places.positions.to(torch.float64)

    def on_input(self, x: Tensor, places: SequenceInfo) -> Tensor:
        return x + (self.place(places)[..., None] * self.direction).to(x.dtype)


class Normalized(Counting):
    """`t / (n - 1)` times a learned direction (0 where n is 1): a step means another distance at every n."""

    def place(self, places: SequenceInfo) -> Tensor:
        length = places.length
        if length is None:
            raise ValueError("the normalized scheme depends on the sequence's length, and none is known")
        last = max(length - 1, 1) if isinstance(length, int) else (length - 1).clamp(min=1).to(places.positions.device)
        return super().place(places) / last
