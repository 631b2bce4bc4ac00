"""Where the tokens of one call stand: what the position schemes and the masks are told.

Letters for shapes, here and everywhere: B rows of a batch, T tokens, H query heads, K key/value heads,
D features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Length = int | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Places:
    """Positions, real tokens, documents and lengths of one sequence of tokens.

    `positions` is `[T]`, `[B, T]` or `[axes, B, T]`. `order` counts the real tokens of each document from 0 and
    is None where it is simply the index. `length` is a host number, or a host tensor `[B, T]` of one a token.
    """

    positions: Tensor
    length: int | Tensor
    padding: Tensor | None = None
    documents: Tensor | None = None
    order: Tensor | None = None

    def origin(self) -> Tensor:
        """For each token the position of the first real token of its row or document, `[1]` or `[B, T]`."""
        if self.order is None:
            return self.positions[..., :1]
        index = torch.arange(self.order.shape[-1], device=self.order.device)
        first = (self.order == 0) & (True if self.padding is None else self.padding)
        start = torch.where(first, index, 0).cummax(-1).values
        return self.positions.expand_as(self.order).gather(-1, start)


def places(
    batch: int,
    count: int,
    device: torch.device,
    *,
    positions: Tensor | None = None,
    padding: Tensor | None = None,
    documents: Tensor | None = None,
    length: Length | None = None,
    needs_length: bool = False,
) -> Places:
    """The places of `batch` rows of `count` tokens; by default they count real tokens and restart per document.

    >>> padding = torch.tensor([[False, True, True], [True, True, True]])
    >>> places(2, 3, torch.device("cpu"), padding=padding).positions.tolist()
    [[0, 0, 1], [0, 1, 2]]
    """
    order = order_of(padding, documents)
    if positions is None:
        positions = torch.arange(count, device=device) if order is None else order
    counted = lengths(batch, count, padding, documents, order, length) if needs_length else count
    if length is not None and not needs_length:
        check_length_type(length)
    return Places(positions, counted, padding, documents, order)


def order_of(padding: Tensor | None, documents: Tensor | None) -> Tensor | None:
    """For each token how many real tokens of its document stand before it; None where that is its index."""
    if padding is None and documents is None:
        return None
    real = torch.ones_like(documents, dtype=torch.int64) if padding is None else padding.to(torch.int64)
    before = real.cumsum(-1) - real
    if documents is not None:
        starts = torch.ones_like(documents, dtype=torch.bool)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        before = before - torch.where(starts, before, 0).cummax(-1).values
    return before


def check_length_type(length: Length) -> None:
    if isinstance(length, Tensor) or not (isinstance(length, int) or isinstance(length, Sequence)):
        raise ValueError(
            f"length must be a whole number or a list of one a row (a list of lists, one a document, when packed), "
            f"not {type(length).__name__}"
        )


def lengths(
    batch: int,
    count: int,
    padding: Tensor | None,
    documents: Tensor | None,
    order: Tensor | None,
    length: Length | None,
) -> int | Tensor:
    """The length each token's sequence is planned to have: as stated, or the number of its real tokens."""
    if length is not None:
        check_length_type(length)
    if order is None:
        if length is None or isinstance(length, int):
            return at_least(count, count if length is None else length, "the sequence")
        return torch.tensor(
            [[at_least(count, own, f"row {row}")] * count for row, own in enumerate(one_a_row(length, batch))]
        )
    real = torch.ones_like(order, dtype=torch.bool) if padding is None else padding
    table = torch.zeros(batch, count, dtype=torch.int64)
    stated = [length] * batch if length is None or isinstance(length, int) else one_a_row(length, batch)
    for row in range(batch):
        ids = [0] * count if documents is None else documents[row].tolist()
        runs = list(dict.fromkeys(ids))
        own = [stated[row]] * len(runs) if stated[row] is None or isinstance(stated[row], int) else stated[row]
        if len(own) != len(runs):
            raise ValueError(f"length lists {len(own)} documents for row {row}, which has {len(runs)}")
        kept = real[row].tolist()
        for run, planned in zip(runs, own, strict=True):
            present = sum(k for k, i in zip(kept, ids, strict=True) if i == run)
            planned = present if planned is None else at_least(present, planned, f"row {row}")
            table[row, [i == run for i in ids]] = max(planned, 1)
    return table


def one_a_row(length: Sequence, batch: int) -> Sequence:
    if len(length) != batch:
        raise ValueError(f"length lists {len(length)} rows for a batch of {batch}")
    return length


def at_least(present: int, planned: int, where: str) -> int:
    if isinstance(planned, bool) or not isinstance(planned, int):
        raise ValueError(f"length must be whole numbers, not {planned!r}")
    if planned < present:
        raise ValueError(f"the stated length {planned} is shorter than the {present} tokens of {where}")
    return planned
