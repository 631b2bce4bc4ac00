"""KERPLE: a learned penalty on the logarithm or a power of the distance, on the scores."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.nn.positions.base import Position, bias_dtype
from phasor.nn.positions.kerple.config import KERPLEConfig
from phasor.nn.sequence import SequenceInfo
from phasor.ops.attention import DistanceBias

SMALLEST = 1e-2  # of what is drawn at first


class KERPLE(Position, config=KERPLEConfig):
    """`-r1 log(1 + r2 d)`, or `-r1 d^r2` with `r2` below 2, the distance `d` to either side taken in integers.

    `log_slope` is the logarithm of `r1`, and `curvature` that of `r2`, or for a power the logit of `r2 / 2`, so that no
    step of an optimizer leaves the range in which the kernel is conditionally positive definite.
    """

    config: KERPLEConfig

    def __init__(self, config: KERPLEConfig, *, num_heads: int) -> None:
        super().__init__()
        self.config = config
        self.log_slope = nn.Parameter(torch.empty(num_heads))
        self.curvature = nn.Parameter(torch.empty(num_heads))

    @classmethod
    def build(cls, config: KERPLEConfig, model: ModelConfig, side: Side) -> Self:
        return cls(config, num_heads=model.num_heads)

    def reset_parameters(self, config: ModelConfig) -> None:
        """`r1` from U(0, 2) and `r2` from U(0, 1); for a power `r1` from U(0, 1) and `r2` from U(0, 2)."""
        is_log = self.config.form == "log"
        nn.init.uniform_(self.log_slope, SMALLEST, 2.0 if is_log else 1.0).data.log_()
        nn.init.uniform_(self.curvature, SMALLEST, 1.0 - SMALLEST)
        self.curvature.data.copy_(self.curvature.data.log() if is_log else self.curvature.data.logit())

    def prepare(self, seq: SequenceInfo, like: Tensor) -> DistanceBias:
        dtype = bias_dtype(like)
        slopes = self.own_heads(self.log_slope).to(dtype).exp()
        curvature = self.own_heads(self.curvature).to(dtype)
        if self.config.form == "log":
            return DistanceBias(slopes=slopes, rates=curvature.exp())
        return DistanceBias(slopes=slopes, powers=2 * curvature.sigmoid())

    def on_scores(self, prepared: DistanceBias) -> DistanceBias:
        return prepared
