"""What positions add to scores: any function of positions, a function of distance, or of what tokens hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from phasor.ops.attention.mask import Mask

# Given the positions of some queries [B or 1, Tq] and of some keys [B or 1, Tk], what to add to their scores,
# [B or 1, H, Tq, Tk].
Bias = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DistanceBias:
    """A bias by distance, query position minus key position, as data that a kernel can read.

    Either `slopes`, `[H]`: minus slope times a curve of the distance `d` to either side. The curve is `d` itself; with
    `rates`, `[H]`, it is `log(1 + rate d)`, and with `powers`, `[H]`, it is `d^power`. Or a `table`, `[distances, H]`:
    its first row is for the distance `min_distance` and all below, its last for the last one and all beyond.

    >>> bias = DistanceBias(table=torch.tensor([[5.0], [6.0], [7.0]]), min_distance=-1)
    >>> bias(torch.tensor([[2, 3]]), torch.tensor([[0, 2, 3, 9]])).tolist()
    [[[[7.0, 6.0, 5.0, 5.0], [7.0, 7.0, 6.0, 5.0]]]]
    >>> bias = DistanceBias(slopes=torch.tensor([0.5]), powers=torch.tensor([2.0]))
    >>> bias(torch.tensor([[3]]), torch.tensor([[0, 2, 3, 5]])).tolist()
    [[[[-4.5, -0.5, -0.0, -2.0]]]]
    """

    slopes: Tensor | None = None
    table: Tensor | None = None
    min_distance: int = 0
    rates: Tensor | None = None
    powers: Tensor | None = None

    @property
    def learned(self) -> tuple[Tensor | None, ...]:
        """What may get a gradient."""
        return self.slopes, self.rates, self.powers, self.table

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        distance = queries[:, :, None] - keys[:, None, :]
        if self.slopes is not None:
            return -self.slopes[:, None, None] * self.curve(distance.abs()[:, None])
        assert self.table is not None
        rows = distance.sub_(self.min_distance).clamp_(0, len(self.table) - 1)
        return embedding(rows, self.table).permute(0, 3, 1, 2)

    def curve(self, distance: Tensor) -> Tensor:
        """The curve that slopes multiply, of distances that are not negative."""
        if self.rates is not None:
            return torch.log1p(self.rates[:, None, None] * distance)
        if self.powers is not None:
            # A distance of 0 is 0 to every power; its gradient with respect to the power is that of 1, which is 0.
            return distance.clamp(min=1).to(self.powers.dtype) ** self.powers[:, None, None] * (distance > 0)
        return distance


class TokenBias:
    """A bias of what queries and keys hold beside their positions; subclasses compute it block by block."""

    @property
    def learned(self) -> tuple[Tensor | None, ...]:
        """What may get a gradient."""
        raise NotImplementedError(f"{type(self).__name__} does not implement learned")

    def map(self, of_queries: Callable[[Tensor], Tensor], of_keys: Callable[[Tensor], Tensor]) -> TokenBias:
        """The same bias with the tensors `[B, T, ...]` of queries and of keys rearranged."""
        raise NotImplementedError(f"{type(self).__name__} does not implement map")

    @property
    def by_distance(self) -> bool:
        """Whether the bias is of products with vectors of the distance, which kernels take: `as_products`."""
        return False

    def as_products(self, k: Tensor) -> TokenBias:
        """The same as a `ProductBias`, given keys `[B, Tk, K, D]`, where it is `by_distance`."""
        raise NotImplementedError(f"{type(self).__name__} does not implement as_products")

    def block(
        self, queries: Tensor, keys: Tensor, dtype: torch.dtype = torch.float32, mask: Mask | None = None
    ) -> Tensor:
        """The bias between queries and keys given by index, `[B, H, queries, keys]`.

        The keys are all that the mask shows the queries; without a mask they see every key.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement block")


@dataclass(frozen=True)
class SumBias(TokenBias):
    """Minus the difference to either side of two sums in fixed point: one of a query, one of a key.

    `queries` and `keys` are int64, `[B, Tq, H]` and `[B, Tk, H]`, in multiples of `unit`; differences are exact. The
    gradients go through `query_zeros` and `key_zeros`, zeros in floats, where they are given.

    >>> import torch
    >>> bias = SumBias(torch.tensor([[[-6]]]), torch.tensor([[[-2], [-6]]]), unit=0.5)
    >>> bias.block(torch.tensor([0]), torch.tensor([0, 1])).tolist()
    [[[[-2.0, -0.0]]]]
    """

    queries: Tensor
    keys: Tensor
    unit: float
    query_zeros: Tensor | None = None
    key_zeros: Tensor | None = None

    @property
    def learned(self) -> tuple[Tensor | None, ...]:
        return self.query_zeros, self.key_zeros

    def map(self, of_queries: Callable[[Tensor], Tensor], of_keys: Callable[[Tensor], Tensor]) -> SumBias:
        zeros = (self.query_zeros, of_queries), (self.key_zeros, of_keys)
        own = (None if x is None else change(x) for x, change in zeros)
        return SumBias(of_queries(self.queries), of_keys(self.keys), self.unit, *own)

    def block(
        self, queries: Tensor, keys: Tensor, dtype: torch.dtype = torch.float32, mask: Mask | None = None
    ) -> Tensor:
        of_queries, of_keys = (x.mT[..., index] for x, index in ((self.queries, queries), (self.keys, keys)))
        difference = (of_queries[..., :, None] - of_keys[..., None, :]).to(dtype) * self.unit
        if self.query_zeros is not None:
            difference = difference + self.query_zeros.mT[..., queries, None]
        if self.key_zeros is not None:
            difference = difference - self.key_zeros.mT[..., None, keys]
        return -difference.abs()
