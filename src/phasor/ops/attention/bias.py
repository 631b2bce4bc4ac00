"""What positions add to scores: any function of positions, or a function of distance given as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import embedding

# Given the positions of some queries [B or 1, Tq] and of some keys [B or 1, Tk], what to add to their scores,
# [B or 1, H, Tq, Tk].
Bias = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DistanceBias:
    """A bias by distance, query position minus key position, as data that a kernel can read.

    Either `slopes`, `[H]`: minus slope times the distance to either side. Or a `table`, `[distances, H]`: its first
    row is for the distance `min_distance` and all below, its last for the last one and all beyond.

    >>> import torch
    >>> bias = DistanceBias(table=torch.tensor([[5.0], [6.0], [7.0]]), min_distance=-1)
    >>> bias(torch.tensor([[2, 3]]), torch.tensor([[0, 2, 3, 9]])).tolist()
    [[[[7.0, 6.0, 5.0, 5.0], [7.0, 7.0, 6.0, 5.0]]]]
    """

    slopes: Tensor | None = None
    table: Tensor | None = None
    min_distance: int = 0

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        distance = queries[:, :, None] - keys[:, None, :]
        if self.slopes is not None:
            return -self.slopes[:, None, None] * distance.abs()[:, None]
        assert self.table is not None
        rows = distance.sub_(self.min_distance).clamp_(0, len(self.table) - 1)
        return embedding(rows, self.table).permute(0, 3, 1, 2)
