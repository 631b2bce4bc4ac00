"""FIRE's bias: a small network of the distance as a share of the query's position, and the lines that it is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FIREBias:
    """The bias of any positions, from the weights of the network; `rate` and `threshold` are `[1]`.

    >>> up, down = torch.tensor([1.0, -1.0]), torch.tensor([[2.0], [4.0]])
    >>> bias = FIREBias(up, torch.tensor([-0.5, 0.25]), down, torch.zeros(1), torch.ones(1), torch.tensor([3.0]))
    >>> bias(torch.tensor([[3]]), torch.tensor([[0, 2, 3]])).tolist()
    [[[[1.0, 0.0, 1.0]]]]
    >>> knots, lines = bias.lines()
    >>> knots.tolist(), lines[..., 0].tolist()
    ([0.25, 0.5], [[-4.0, 1.0], [0.0, 0.0], [2.0, -1.0]])
    """

    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor
    rate: Tensor
    threshold: Tensor

    @property
    def learned(self) -> tuple[Tensor, ...]:
        """What may get a gradient."""
        return self.up, self.up_bias, self.down, self.down_bias, self.rate, self.threshold

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        distance = (queries[:, :, None] - keys[:, None, :]).abs()
        share = torch.log1p(self.rate * distance) / self.log_span(queries)[:, :, None]
        hidden = torch.relu(share[..., None] * self.up + self.up_bias)
        return (hidden @ self.down + self.down_bias).permute(0, 3, 1, 2)

    def log_span(self, queries: Tensor) -> Tensor:
        """The logarithm of the distances that a query divides by: its position, or at least the threshold."""
        return torch.log1p(self.rate * torch.maximum(queries.to(self.rate.dtype), self.threshold))

    def inverse_spans(self, queries: Tensor) -> Tensor:
        """One over `log_span` to base 2: a share is it times `log2(1 + rate distance)`."""
        return math.log(2.0) / self.log_span(queries)

    def lines(self) -> tuple[Tensor, Tensor]:
        """The knots `[hidden]` of the network in rising order, and slope and offset of its lines `[hidden + 1, 2, H]`.

        A unit is on to one side of its knot. Between two knots the network is a line, the sum of the units that are on.
        The knots have no gradient: on either side of one the lines meet.
        """
        with torch.no_grad():
            knots = torch.where(self.up == 0, torch.inf, -self.up_bias / self.up)
            order = knots.argsort()
            rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
            passed = rank < torch.arange(len(order) + 1, device=order.device)[:, None]  # [lines, units]
            is_on = torch.where(self.up == 0, self.up_bias > 0, passed == (self.up > 0))[..., None]
        # Sums and not matrix products, which autocast would round.
        slopes, offsets = ((is_on * (of_unit[:, None] * self.down)).sum(1) for of_unit in (self.up, self.up_bias))
        return knots[order], torch.stack((slopes, offsets + self.down_bias), dim=1)
