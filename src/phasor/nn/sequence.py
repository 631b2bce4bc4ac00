"""Positions, masks, documents and lengths of the tokens of one call, for position schemes and attention masks.

Letters for shapes, here and everywhere: B rows of a batch, T tokens, H query heads, K key/value heads,
D features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.config.schema import quote
from phasor.nn.checks import can_check_values
from phasor.ops.attention import Mask

Length = int | Sequence[int] | Sequence[Sequence[int]]


class SequenceArgs(TypedDict, total=False):
    """The arguments of a call that describe its tokens; see `Transformer`."""

    positions: Tensor | None
    attention_mask: Tensor | None
    document_ids: Tensor | None
    length: Length | None


@dataclass(frozen=True)
class SequenceInfo:
    """Positions, real tokens, documents and lengths of the tokens of one call.

    `positions` is `[T]`, `[B, T]` or `[axes, B, T]`. `order` counts the real tokens of each document from 0 and
    is None where it equals the index. `length` is an integer, or a CPU tensor `[B, T]` with one per token.
    """

    positions: Tensor
    length: int | Tensor | None
    attention_mask: Tensor | None = None
    document_ids: Tensor | None = None
    order: Tensor | None = None
    first: Tensor | None = None  # from an earlier call with the same cache: where each token's sequence begins
    cached_window: int | None = None  # of the layers, where a cache keeps their keys; see `Position.depends_on_window`
    max_distance: int | None = None  # between positions, where the host knows it: where they count the tokens

    @property
    def rows(self) -> Tensor:
        """Positions as `[B or 1, T]`, the first axis of several."""
        return {1: self.positions[None], 2: self.positions}.get(self.positions.dim(), self.positions[0])

    def origin(self) -> Tensor:
        """For each token the position of the first real token of its row or document, `[B or 1, T or 1]`."""
        if self.first is not None:
            return self.first
        if self.order is None:
            return self.rows[:, :1]
        index = torch.arange(self.order.shape[-1], device=self.order.device)
        first = (self.order == 0) & (True if self.attention_mask is None else self.attention_mask)
        start = torch.where(first, index, 0).cummax(-1).values
        return self.rows.expand_as(self.order).gather(-1, start)


class KeyInfo(NamedTuple):
    """What some layers attend to in one call, those of a cache included: the mask and positions `[B or 1, S]` of keys.

    `sink_query_positions`, `[B or 1, T]`, are those of queries that attend to sink tokens, where their distance is
    capped.
    """

    seq: SequenceInfo
    mask: Mask
    positions: Tensor
    sink_query_positions: Tensor | None = None


def sequence_info(
    batch: int,
    count: int,
    device: torch.device,
    *,
    positions: Tensor | None = None,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    length: Length | None = None,
    needs_length: bool = False,
) -> SequenceInfo:
    """The info of `batch` rows of `count` tokens; default positions count real tokens and restart per document.

    >>> attention_mask = torch.tensor([[False, True, True], [True, True, True]])
    >>> sequence_info(2, 3, torch.device("cpu"), attention_mask=attention_mask).positions.tolist()
    [[0, 0, 1], [0, 1, 2]]
    """
    order = token_order(attention_mask, document_ids)
    max_distance = count - 1 if positions is None else None
    if positions is None:
        positions = torch.arange(count, device=device) if order is None else order
    if length is not None:
        check_length_type(length)
    # A scheme of fixed frequencies needs no length: a given one is checked only where that costs no graph break
    # and no device synchronization.
    check = length is not None and (order is None or can_check_values(order))
    planned = lengths(batch, count, attention_mask, document_ids, length) if needs_length or check else count
    return SequenceInfo(positions, planned, attention_mask, document_ids, order, max_distance=max_distance)


def count_text(tokens: Tensor, padding_token: int) -> Tensor:
    """Positions that count the tokens other than padding, which has position -1.

    >>> count_text(torch.tensor([[5, 7, 1, 6, 1]]), padding_token=1).tolist()
    [[0, 1, -1, 2, -1]]
    """
    real = tokens != padding_token
    return real.cumsum(-1) * real - 1


def token_order(attention_mask: Tensor | None, document_ids: Tensor | None) -> Tensor | None:
    """For each token the number of real tokens of its document before it; None where that is its index."""
    if attention_mask is not None:
        before = attention_mask.cumsum(-1) - attention_mask.to(torch.int64)
    elif document_ids is not None:
        before = torch.arange(document_ids.shape[-1], device=document_ids.device).expand_as(document_ids)
    else:
        return None
    if document_ids is not None:
        starts = torch.ones_like(document_ids, dtype=torch.bool)
        starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
        before = before - torch.where(starts, before, 0).cummax(-1).values
    return before


def check_length_type(length: Length) -> None:
    if not isinstance(length, int | Sequence):
        raise ValueError(
            f"length must be an integer or a list with one per row (a list of lists, one per document, when packed), "
            f"not {type(length).__name__}"
        )


def lengths(
    batch: int,
    count: int,
    attention_mask: Tensor | None,
    document_ids: Tensor | None,
    length: Length | None,
) -> int | Tensor:
    """The length each token's sequence is planned to have: as given, or the number of its real tokens."""
    if attention_mask is None and document_ids is None and (length is None or isinstance(length, int)):
        return at_least(count, length, "the sequence")
    per_row: Sequence[int | Sequence[int] | None]
    per_row = [length] * batch if length is None or isinstance(length, int) else length
    if len(per_row) != batch:
        raise ValueError(f"length lists {len(per_row)} rows for a batch of {batch}")
    table = torch.zeros(batch, count, dtype=torch.int64, device="cpu")
    for row, planned in enumerate(per_row):
        ids = table.new_zeros(count) if document_ids is None else document_ids[row].cpu()
        real = table.new_ones(count, dtype=torch.bool) if attention_mask is None else attention_mask[row].cpu()
        documents = ids.unique_consecutive()
        per_document = list(planned) if isinstance(planned, list | tuple) else [planned] * len(documents)
        if len(per_document) != len(documents):
            raise ValueError(f"length lists {len(per_document)} documents for row {row}, which has {len(documents)}")
        for document, own in zip(documents, per_document, strict=True):
            inside = ids == document
            present = max(1, int((inside & real).sum()))  # a document of nothing but padding still needs some length
            table[row, inside] = at_least(present, own, f"row {row}")
    return table


def at_least(present: int, planned: object, where: str) -> int:
    """The planned length, or the number of tokens present where none is given; never fewer than those."""
    if planned is None:
        return present
    if type(planned) is not int or planned >= 1 << 63:
        raise ValueError(f"length must be integers of at most 63 bits, not {quote(planned)}")
    if planned < present:
        raise ValueError(f"the given length {planned} is shorter than the {present} tokens of {where}")
    return planned


def shift_right(source: Tensor | None, start: int | None, classifies: bool = True) -> Tensor:
    """The target of an encoder-decoder that classifies a source: the same behind the token that a decoder starts with.

    >>> shift_right(torch.tensor([[7, 8, 2]]), start=0).tolist()
    [[0, 7, 8]]
    """
    if source is None or not classifies:
        raise ValueError("an encoder-decoder takes a source and a target: model(source, target)")
    if start is None:
        raise ValueError("a target needs the token its decoder starts with: set the start of model.special")
    return F.pad(source[:, :-1], (1, 0), value=start)
