"""Tables by distance that queries and keys are multiplied with, and that attention weights average beside values.

All of it is computed for one block of queries by keys at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import embedding

from phasor.ops.attention.bias import TokenBias
from phasor.ops.attention.mask import Mask

Rearrange = Callable[[Tensor], Tensor]


@dataclass
class DistanceRows:
    """Which row of a table the distance between a query and a key has, query position minus key position.

    `queries` and `keys` are positions, `[B, Tq]` and `[B, Tk]` or `[1, ...]`. The rows count the distances, clipped to
    `reach` on either side, or to `least` on the side of keys ahead; or `bounds`, `[rows - 1]`, lists the smallest
    distance of every row but the first, and from `least` to `reach` are all that differ in their row.

    >>> rows = DistanceRows(torch.tensor([[2, 3]]), torch.tensor([[0, 2, 3, 9]]), reach=1)
    >>> rows.block(torch.tensor([0, 1]), torch.arange(4)).tolist()
    [[[2, 1, 0, 0], [2, 2, 1, 0]]]
    """

    queries: Tensor
    keys: Tensor
    reach: int = 0
    bounds: Tensor | None = None
    least: int | None = None

    @property
    def first(self) -> int:
        """The greatest distance of the first row."""
        return -self.reach if self.least is None else self.least

    def map(self, batch: int, of_queries: Rearrange, of_keys: Rearrange) -> DistanceRows:
        """The same of queries and keys that are rearranged."""
        queries, keys = of_queries(self.queries.expand(batch, -1)), of_keys(self.keys.expand(batch, -1))
        return replace(self, queries=queries, keys=keys)

    def block(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The rows of queries and keys given by index, `[B or 1, queries, keys]`."""
        distance = self.queries[:, queries][:, :, None] - self.keys[:, keys][:, None, :]
        if self.bounds is not None:
            return torch.bucketize(distance, self.bounds, right=True)
        return distance.clamp_(self.first, self.reach).sub_(self.first)


@dataclass
class ProductBias(TokenBias):
    """Products of queries `[B, Tq, H, D]` and keys `[B, Tk, K, D]` with the vectors of their distance, times `scale`.

    Either table, `[rows, heads, D]`, may be left out; its heads are one, those of keys, or those of queries.

    >>> q, k = torch.ones(1, 1, 1, 2), torch.ones(1, 3, 1, 2)
    >>> rows = DistanceRows(torch.tensor([[2]]), torch.tensor([[0, 1, 2]]), reach=1)
    >>> bias = ProductBias(q, k, rows, 0.5, query_table=torch.tensor([[[9.0, 9.0]], [[1.0, 2.0]], [[3.0, 4.0]]]))
    >>> bias.block(torch.arange(1), torch.arange(3)).tolist()
    [[[[3.5, 3.5, 1.5]]]]
    """

    q: Tensor
    k: Tensor
    rows: DistanceRows
    scale: float
    query_table: Tensor | None = None
    key_table: Tensor | None = None

    @property
    def learned(self) -> tuple[Tensor | None, ...]:
        return self.q, self.k, self.query_table, self.key_table

    def map(self, of_queries: Rearrange, of_keys: Rearrange) -> ProductBias:
        rows = self.rows.map(len(self.q), of_queries, of_keys)
        return replace(self, q=of_queries(self.q), k=of_keys(self.k), rows=rows)

    def tables(self, first: int, last: int) -> tuple[Tensor | None, Tensor | None]:
        """Both tables with a row for each distance from `first` to `last`, which are none beyond the ends of rows."""

        def of_distances(table: Tensor | None) -> Tensor | None:
            if table is None or self.rows.bounds is None:
                return None if table is None else table[first - self.rows.first : last - self.rows.first + 1]
            distances = torch.arange(first, last + 1, device=table.device)
            index = torch.bucketize(distances, self.rows.bounds, right=True)
            return embedding(index, table.flatten(1)).unflatten(-1, table.shape[1:])

        return of_distances(self.query_table), of_distances(self.key_table)

    @property
    def by_distance(self) -> bool:
        return True

    def as_products(self, k: Tensor) -> ProductBias:
        return self

    def block(
        self, queries: Tensor, keys: Tensor, dtype: torch.dtype = torch.float32, mask: Mask | None = None
    ) -> Tensor:
        rows = self.rows.block(queries, keys)
        terms = []
        if self.query_table is not None:
            terms.append(pick(products_by_row(self.q[:, queries].to(dtype), self.query_table.to(dtype)), rows))
        if self.key_table is not None:
            k = self.k[:, keys].repeat_interleave(self.q.shape[2] // self.k.shape[2], dim=2)  # [B, Tk, H, D]
            terms.append(key_products(k.to(dtype), self.key_table.to(dtype), rows))
        return sum(terms[1:], terms[0]) * self.scale


def products_by_row(x: Tensor, table: Tensor) -> Tensor:
    """Products of `[B, T, H, D]` with every row of a table `[rows, heads, D]`, as `[B, H, T, rows]`."""
    return torch.einsum("btngd,rnd->bngtr", x.unflatten(2, (table.shape[1], -1)), table).flatten(1, 2)


def pick(by_row: Tensor, rows: Tensor) -> Tensor:
    """Of `[B, H, T, rows]` those rows that `[B or 1, T, S]` lists, as `[B, H, T, S]`."""
    return by_row.gather(-1, rows[:, None].expand(*by_row.shape[:2], -1, -1))


def key_products(k: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    """Products of keys `[B, Tk, H, D]` with the rows `[B or 1, Tq, Tk]` of a table, as `[B, H, Tq, Tk]`."""
    if rows.shape[1] > 1:
        return pick(products_by_row(k, table), rows.mT).mT
    # A single query needs one product per key, and not one with every row of the table.
    own = embedding(rows[:, 0], table.flatten(1)).unflatten(-1, table.shape[1:])  # [B or 1, Tk, heads, D]
    products = (k.unflatten(2, (table.shape[1], -1)) * own[:, :, :, None]).sum(-1)
    return products.flatten(2).mT[:, :, None]


@dataclass
class RelativeValues:
    """Vectors of the distance, a table `[rows, heads, D]`, averaged with attention weights beside the values."""

    rows: DistanceRows
    table: Tensor

    def map(self, batch: int, of_queries: Rearrange, of_keys: Rearrange) -> RelativeValues:
        """The same of queries and keys that are rearranged."""
        return RelativeValues(self.rows.map(batch, of_queries, of_keys), self.table)

    def block(self, weights: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """The average with weights `[B, H, Tq, Tk]` of queries and keys given by index, `[B, Tq, H, D]`.

        >>> rows = DistanceRows(torch.tensor([[2]]), torch.tensor([[0, 1, 2]]), reach=1)
        >>> values = RelativeValues(rows, torch.tensor([[[9.0]], [[1.0]], [[3.0]]]))
        >>> values.block(torch.tensor([[[[0.25, 0.25, 0.5]]]]), torch.arange(1), torch.arange(3)).tolist()
        [[[[2.0]]]]
        """
        rows = self.rows.block(queries, keys)[:, None].expand_as(weights)
        return self.average(weights.new_zeros(*weights.shape[:-1], len(self.table)).scatter_add(-1, rows, weights))

    def average(self, by_row: Tensor) -> Tensor:
        """The average with weights that are summed by row of the table, `[B, H, Tq, rows]`, as `[B, Tq, H, D]`."""
        grouped = by_row.unflatten(1, (self.table.shape[1], -1)).to(self.table.dtype)
        return torch.einsum("bngqr,rnd->bqngd", grouped, self.table).flatten(2, 3)
