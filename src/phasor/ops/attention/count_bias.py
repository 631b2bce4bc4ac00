"""Products with vectors of how many keys a query counts, each key by its gate (CoPE)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from phasor.ops.attention.bias import TokenBias
from phasor.ops.attention.mask import SEES_ALL, Mask
from phasor.ops.attention.reference import products
from phasor.ops.attention.relative import products_by_row
from phasor.ops.dispatch import no_autocast


class KeySums(Protocol):
    """What knows the order of keys."""

    def sum_from_keys(self, x: Tensor, queries: Tensor, keys: Tensor, mask: Mask) -> Tensor:
        """The sum of `x` `[B, H, queries, keys]` over the keys from each of them to the last, both given by index."""
        ...


@dataclass
class CountBias(TokenBias):
    """Queries `[B, Tq, H, D]` times the vectors, `table` `[rows, D]`, of how many keys `[B, Tk, K, D]` they count.

    All products are times `scale`. Sums over keys are those of the `step`.
    """

    q: Tensor
    k: Tensor
    table: Tensor
    scale: float
    step: KeySums

    @property
    def learned(self) -> tuple[Tensor | None, ...]:
        return self.q, self.k, self.table

    def map(self, of_queries: Callable[[Tensor], Tensor], of_keys: Callable[[Tensor], Tensor]) -> CountBias:
        return replace(self, q=of_queries(self.q), k=of_keys(self.k))

    def block(
        self, queries: Tensor, keys: Tensor, dtype: torch.dtype = torch.float32, mask: Mask | None = None
    ) -> Tensor:
        with no_autocast(self.q):
            q, k = self.q[:, queries].to(dtype), self.k[:, keys].to(dtype)
            gates = torch.sigmoid(products(q, k) * self.scale)  # [B, H, Tq, Tk]
            by_row = products_by_row(q, self.table[:, None].to(dtype)) * self.scale  # [B, H, Tq, rows]
        mask = SEES_ALL if mask is None else mask
        visible = mask.block(queries, keys)
        if visible is not None:
            gates = gates.masked_fill(~visible[:, None], 0.0)
        counts = self.step.sum_from_keys(gates, queries, keys, mask).clamp(max=len(self.table) - 1)
        below, above = (by_row.gather(-1, row.to(torch.int64)) for row in (counts.floor(), counts.ceil()))
        return below + (above - below) * (counts - counts.floor())
