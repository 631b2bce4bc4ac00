"""FIRE: a small network of the distance as a share of the query's position, on the scores."""

from __future__ import annotations

import math
from typing import Self

import torch
from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.nn.positions.base import Position, bias_dtype
from phasor.nn.positions.fire.config import FIREConfig
from phasor.nn.sequence import SequenceInfo
from phasor.ops.attention import FIREBias


class FIRE(Position, config=FIREConfig):
    """`f(psi(d) / psi(max(i, L)))` with `psi(x) = log(c x + 1)`, `d` the distance and `i` the query's position.

    `f` is a network of one hidden layer with ReLU. `c` and `L` are learned as logarithms, so that they stay positive.
    The share depends on the query's position as well, so this is no table by distance. A kernel takes the lines that
    the network consists of.
    """

    config: FIREConfig

    def __init__(self, config: FIREConfig, *, num_heads: int) -> None:
        super().__init__()
        self.config = config
        self.up = nn.Parameter(torch.empty(config.hidden_dim))
        self.up_bias = nn.Parameter(torch.empty(config.hidden_dim))
        self.down = nn.Parameter(torch.empty(config.hidden_dim, num_heads))
        self.down_bias = nn.Parameter(torch.empty(num_heads))
        self.log_rate = nn.Parameter(torch.empty(1))
        self.log_threshold = nn.Parameter(torch.empty(1))

    @classmethod
    def build(cls, config: FIREConfig, model: ModelConfig, side: Side) -> Self:
        return cls(config, num_heads=model.num_heads)

    def reset_parameters(self, config: ModelConfig) -> None:
        """Weights and biases uniform within one over the square root of their inputs."""
        most = self.config.hidden_dim**-0.5
        for weight, bound in ((self.up, 1.0), (self.up_bias, 1.0), (self.down, most), (self.down_bias, most)):
            nn.init.uniform_(weight, -bound, bound)
        nn.init.constant_(self.log_rate, math.log(self.config.rate))
        nn.init.constant_(self.log_threshold, math.log(self.config.threshold))

    def prepare(self, seq: SequenceInfo, like: Tensor) -> FIREBias:
        network = (self.up, self.up_bias, self.own_heads(self.down), self.own_heads(self.down_bias))
        numbers = (self.log_rate, self.log_threshold)
        dtype = bias_dtype(like)
        return FIREBias(*(weight.to(dtype) for weight in network), *(x.to(dtype).exp() for x in numbers))

    def on_scores(self, prepared: FIREBias) -> FIREBias:
        return prepared
