"""Attention temperature by length: queries scaled by a function of their position."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.nn.positions.base import Position, bias_dtype
from phasor.nn.positions.temperature.config import TemperatureConfig
from phasor.nn.sequence import SequenceInfo


class Temperature(Position, config=TemperatureConfig):
    """`max(s log n, minimum)`, or `1 + s log(1 + floor(n / N))`, times the query at position `n - first`.

    Counts are integers and their logarithms float64, so that factors are exact at any position.
    """

    config: TemperatureConfig

    def __init__(self, config: TemperatureConfig, *, num_heads: int) -> None:
        super().__init__()
        self.config = config
        self.scale = nn.Parameter(torch.empty(num_heads)) if config.learned else None

    @classmethod
    def build(cls, config: TemperatureConfig, model: ModelConfig, side: Side) -> Self:
        return cls(config, num_heads=model.num_heads)

    def reset_parameters(self, config: ModelConfig) -> None:
        if self.scale is not None:
            nn.init.constant_(self.scale, self.config.chosen_scale)

    def prepare(self, seq: SequenceInfo, like: Tensor) -> Tensor:
        """The factors `[B or 1, T, H or 1, 1]`."""
        count = (seq.rows + self.config.first).clamp(min=self.config.first)
        if self.config.form == "floor":
            steps = (count // self.config.floor_length).to(torch.float64)
            factor = 1 + self.config.chosen_scale * torch.log1p(steps)
            return factor.to(bias_dtype(like))[:, :, None, None]
        log = torch.log(count.to(torch.float64)).to(bias_dtype(like))[:, :, None, None]
        scale = self.config.chosen_scale if self.scale is None else self.own_heads(self.scale).to(log.dtype)[:, None]
        return (log * scale).clamp(min=self.config.minimum)

    def on_query(self, q: Tensor, prepared: Tensor) -> Tensor:
        return (q * prepared).to(q.dtype)
