"""Low-rank updates of frozen matrices: `W x + s B A x` (LoRA), or magnitude times direction (DoRA)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.nn.grouped_matmul import grouped_matmul

GROUPED_BYTES = 16  # what the sizes of torch's grouped matrix product are multiples of


class LowRank(nn.Module):
    """`s B A`, the update of a matrix or of some `rows` of it; in DoRA with the magnitude of each row.

    >>> update = LowRank(out_features=3, in_features=5, rank=2, scale=4.0)
    >>> update.A.shape, update.B.shape, bool(update.matrix().count_nonzero())
    (torch.Size([2, 5]), torch.Size([3, 2]), False)
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        rank: int,
        scale: float,
        *,
        has_magnitude: bool = False,
        rows: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.rank, self.scale = rank, scale
        self.A = nn.Parameter(torch.empty(rank, in_features))
        self.B = nn.Parameter(torch.zeros(out_features, rank))
        self.magnitude = nn.Parameter(torch.ones(out_features)) if has_magnitude else None
        self.rows: Tensor | None
        self.register_buffer("rows", None if rows is None else rows.int())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As in PEFT: A as in a linear layer, B zero."""
        if not self.A.is_meta:
            nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
            nn.init.zeros_(self.B)

    def matrix(self) -> Tensor:
        """The update `[out, in]`."""
        return self.scale * (self.B @ self.A)


class EmbeddingLowRank(LowRank):
    """The update of a token table, of which a token's vector is a column: `[dim, vocab]`."""

    def reset_parameters(self) -> None:
        """As in PEFT: A zero, B normal."""
        if not self.A.is_meta:
            nn.init.zeros_(self.A)
            nn.init.normal_(self.B)


class ExpertsLowRank(nn.Module):
    """The updates of stacked matrices `[experts, in, out]`, `s A B` of each."""

    magnitude = rows = None

    def __init__(self, shape: Sequence[int], rank: int, scale: float) -> None:
        super().__init__()
        experts, in_features, out_features = shape
        self.rank, self.scale = rank, scale
        self.A = nn.Parameter(torch.empty(experts, in_features, rank))
        self.B = nn.Parameter(torch.zeros(experts, rank, out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if not self.A.is_meta:
            bound = self.A.shape[1] ** -0.5
            nn.init.uniform_(self.A, -bound, bound)
            nn.init.zeros_(self.B)

    def matrix(self) -> Tensor:
        """The updates `[experts, in, out]`."""
        return self.scale * (self.A @ self.B)

    def add(self, x: Tensor, y: Tensor, ends: Tensor, strength: float) -> Tensor:
        """`y + s (x A) B` for rows sorted by expert."""
        pad = -self.rank % (GROUPED_BYTES // x.element_size())
        low = grouped_matmul(x, F.pad(self.A, (0, pad)).to(x.dtype), ends)  # [N, rank]
        return y + strength * self.scale * grouped_matmul(low, F.pad(self.B, (0, 0, 0, pad)).to(x.dtype), ends)


class LoRA(nn.ModuleDict):
    """An adapter of one layer: the updates of its parts by name, and by how much they count.

    A layer that was fused of several has an update for each of them, `W x + s B A x` with its own A: what they
    multiply is one product, and their B are blocks of one matrix. Of a layer that is cut into parts of its rows or
    columns (`keep_rows`, `keep_columns`) it has the parts of B or of A.

    >>> gate, up = torch.arange(4).chunk(2)
    >>> parts = {"gate": LowRank(2, 4, 1, 1.0, rows=gate), "up": LowRank(2, 4, 1, 1.0, rows=up)}
    >>> LoRA(parts, out_features=4).factors()[1].shape
    torch.Size([4, 2])
    """

    def __init__(self, parts: Mapping[str, nn.Module], out_features: int = 0, dropout: float = 0.0) -> None:
        super().__init__(dict(parts))
        self.out_features, self.dropout, self.strength = out_features, dropout, 1.0
        self.part: tuple[int, int, int] | None = None
        self.sum_parts: Callable[[Tensor], Tensor] | None = None

    def keep_rows(self, index: int, count: int, pieces: int = 1) -> None:
        """Have the layer be one of `count` parts of its rows, each of whose `pieces` is cut apart."""
        self.part, self.out_features = (index, count, pieces), self.out_features // count

    def keep_columns(self, sum_parts: Callable[[Tensor], Tensor]) -> None:
        """Have the layer be a part of its columns; `sum_parts` adds up what is computed of all parts."""
        self.sum_parts = sum_parts

    @property
    def updates(self) -> list[LowRank]:
        return [cast(LowRank, part) for part in self.values()]

    @property
    def has_magnitude(self) -> bool:
        return any(part.magnitude is not None for part in self.updates)

    def factors(self) -> tuple[Tensor, Tensor]:
        """A `[ranks, in]` of all parts, and their `s B` `[out, ranks]`, each in its own rows and columns."""
        updates = self.updates
        A = updates[0].A if len(updates) == 1 else torch.cat([part.A for part in updates])
        B = torch.block_diag(*(part.scale * part.B for part in updates))
        rows = self.rows()
        if rows is None:
            return A, B
        # Not `index_copy`, which would keep B for the backward pass.
        return A, B.new_zeros(self.out_features, len(A)).scatter(0, rows[:, None].expand_as(B), B)

    def rows(self) -> Tensor | None:
        """The rows of the layer's weight that the parts update, one part after another; None for all in order."""
        given = [rows for rows in map(self.rows_of, self.updates) if rows is not None]
        return torch.cat(given).long() if given else None

    def rows_of(self, update: LowRank) -> Tensor | None:
        """The rows of the layer's weight that one of the updates has, by their numbers in the part that is kept."""
        if update.rows is None or self.part is None:
            return update.rows
        index, count, pieces = self.part
        rows, width = update.rows.chunk(count)[index], self.out_features // pieces
        return rows // (width * count) * width + rows % (width * count) - index * width

    def gain(self, weight: Tensor) -> Tensor:
        """DoRA's magnitude over the norm of each row of `W + s B A`, `[out]`; its gradient leaves the norm out."""
        with torch.no_grad():
            norm = torch.cat([
                torch.linalg.vector_norm((weight if rows is None else weight[rows]) + part.matrix(), dim=1)
                for part, rows in ((part, self.rows_of(part)) for part in self.updates)
            ])  # fmt: skip
            if self.sum_parts is not None:
                norm = self.sum_parts(norm.square()).sqrt()
        gain = torch.cat([cast(Tensor, part.magnitude) for part in self.updates]) / norm
        rows = self.rows()
        return gain if rows is None else gain.new_ones(self.out_features).index_copy(0, rows, gain)

    def reset_magnitude(self, weight: Tensor) -> None:
        """Set DoRA's magnitudes to the norms of the rows as they are, so that nothing is changed yet."""
        for part in self.updates:
            if part.magnitude is not None:
                rows = weight if part.rows is None else weight[part.rows]
                norm = torch.linalg.vector_norm(rows.to(part.B.dtype) + part.matrix(), dim=1)
                part.magnitude.data = norm.detach().to(part.magnitude.dtype)

    def delta(self, weight: Tensor) -> Tensor:
        """What the adapter changes of a weight `[out, in]`."""
        A, B = self.factors()
        update = (B @ A).to(weight.dtype)
        if self.has_magnitude:
            update = self.gain(weight).to(weight.dtype)[:, None] * (weight + update) - weight
        return self.strength * update

    def add(
        self,
        y: Tensor,
        multiply: Callable[[Tensor], Tensor],
        base: Callable[[], Tensor],
        weight: Callable[[], Tensor],
    ) -> Tensor:
        """What a layer gives with the update: `y + s B A x`, where `multiply` gives `A x`.

        In DoRA the gain acts on that and on the `base`, which gives W x without the bias; `weight` gives W.
        """
        A, B = self.factors()
        low = multiply(A)  # [..., ranks]
        B = B.t().to(low.dtype)
        if not self.has_magnitude:
            return torch.addmm(y.flatten(0, -2), low.flatten(0, -2), B, alpha=self.strength).view(y.shape)
        gain = self.gain(weight()).to(y.dtype)
        return y + self.strength * ((gain - 1) * base() + gain * (low @ B))

    def project(self, x: Tensor, factor: Tensor) -> Tensor:
        """`A x` for the factor A, with dropout of x in training."""
        return F.linear(F.dropout(x, self.dropout) if self.dropout and self.training else x, factor.to(x.dtype))
