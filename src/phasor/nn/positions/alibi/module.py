"""ALiBi: a linear penalty on distance, on the scores."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.nn.positions.alibi.config import ALiBiConfig
from phasor.nn.positions.base import Position, bias_dtype
from phasor.nn.sequence import SequenceInfo
from phasor.ops.attention import DistanceBias
from phasor.ops.constants import constant


class ALiBi(Position, config=ALiBiConfig):
    """`-slope_h |i - j|`, the distance taken in integers, so that it is exact at any position.

    Slopes that are learned start as the fixed ones. Their logarithms are the weights, so that they stay positive.
    """

    config: ALiBiConfig

    def __init__(self, config: ALiBiConfig, *, num_heads: int) -> None:
        super().__init__()
        self.config = config
        self.slopes = tuple(config.multiplier * slope for slope in alibi_slopes(num_heads, config.max_bias))
        self.log_slope = nn.Parameter(torch.empty(num_heads)) if config.learned else None

    @classmethod
    def build(cls, config: ALiBiConfig, model: ModelConfig, side: Side) -> Self:
        return cls(config, num_heads=model.num_heads)

    def reset_parameters(self, config: ModelConfig) -> None:
        if self.log_slope is not None:
            with torch.no_grad():
                self.log_slope.copy_(torch.tensor(self.slopes).log())

    def prepare(self, seq: SequenceInfo, like: Tensor) -> Tensor:
        if self.log_slope is not None:
            return self.own_heads(self.log_slope).to(bias_dtype(like)).exp()
        return constant(self.own_heads(self.slopes), like.device, bias_dtype(like))

    def on_scores(self, prepared: Tensor) -> DistanceBias:
        return DistanceBias(slopes=prepared)


def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> tuple[float, ...]:
    """Slopes `2^(-max_bias h / n)`, h from 1; head counts between powers of two fill up from the next power.

    >>> alibi_slopes(4)
    (0.25, 0.0625, 0.015625, 0.00390625)
    >>> alibi_slopes(3)
    (0.0625, 0.00390625, 0.25)
    """
    power = 1 << (num_heads.bit_length() - 1)

    def geometric(count: int) -> list[float]:
        return [2.0 ** (-max_bias * h / count) for h in range(1, count + 1)]

    extra = geometric(2 * power)[0::2][: num_heads - power]
    return (*geometric(power), *extra)
