"""How attention scores are modified between the product of queries and keys and the softmax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from phasor.ops.attention.bias import Bias, TokenBias
from phasor.ops.attention.mask import Mask
from phasor.ops.attention.relative import RelativeValues
from phasor.ops.dispatch import needs_grad


@dataclass(frozen=True)
class SinkQueries:
    """The queries `[B, Tq, H, D]` and their positions `[B or 1, Tq]` that are used with sink tokens."""

    queries: Tensor
    positions: Tensor


class Span(NamedTuple):
    """Pairs of positions whose groups of `size` are `first` to `last` apart, query minus key; None for any distance.

    >>> Span(3, None).applies(torch.tensor([7]), torch.tensor([2, 4, 5])).tolist()
    [True, True, False]
    """

    first: int | None
    last: int | None
    size: int = 1

    def mirror(self) -> Span:
        """The same span with keys ahead in place of keys behind."""
        first, last = (None if x is None else -x for x in (self.last, self.first))
        return Span(first, last, self.size)

    def applies(self, queries: Tensor, keys: Tensor) -> Tensor:
        """For which pairs of positions, which are broadcast against each other."""
        apart = queries // self.size - keys // self.size
        inside = torch.ones_like(apart, dtype=torch.bool) if self.first is None else apart >= self.first
        return inside if self.last is None else inside & (apart <= self.last)


@dataclass(frozen=True)
class ScorePiece:
    """Queries `[B, Tq, H, D]` and keys `[B, Tk, K, D]` that are used for the pairs of a span."""

    queries: Tensor
    keys: Tensor
    span: Span


@dataclass(slots=True)
class ScoreMod:
    """What happens to scores, apart from masking.

    `bias` gives what to add for query and key positions, `softcap` bounds the scaled scores smoothly, and
    `sink_logits` (one per head) take part in the softmax without having a value. `sink_queries` replace the queries
    and their positions for sink tokens, whose distance they cap. `pieces` replace queries and keys for some pairs of
    positions, where distances have several pieces; all others are those of `near`. Positions are `counted` where they
    are known to count the tokens of each document. `relative_values` are averaged with the weights beside the values.

    >>> ScoreMod(scale=0.125, softcap=50.0).supported_by_sdpa
    False
    """

    scale: float
    softcap: float | None = None
    sink_logits: Tensor | None = None
    bias: Bias | TokenBias | None = None
    query_positions: Tensor | None = None
    key_positions: Tensor | None = None
    sink_queries: SinkQueries | None = None
    dropout: float = 0.0
    pieces: tuple[ScorePiece, ...] = ()
    near: Span | None = None
    counted: bool = False
    relative_values: RelativeValues | None = None

    @property
    def supported_by_sdpa(self) -> bool:
        """Whether `scaled_dot_product_attention` can compute this, the bias being part of its mask."""
        plain = self.softcap is None and self.sink_logits is None
        return plain and not self.pieces and self.relative_values is None

    @property
    def learns_bias(self) -> bool:
        """Whether the bias says what of it is learned, and that gets a gradient."""
        return needs_grad(*getattr(self.bias, "learned", ()))

    def block_bias(self, queries: Tensor, keys: Tensor, mask: Mask, like: Tensor) -> Tensor | None:
        """The bias between queries and keys given by index, `[B or 1, H, queries, keys]`, for queries like some."""
        if isinstance(self.bias, TokenBias):
            return self.bias.block(queries, keys, torch.promote_types(like.dtype, torch.float32), mask)
        if self.bias is None or self.query_positions is None or self.key_positions is None:
            return None
        bias = self.bias(self.query_positions[:, queries], self.key_positions[:, keys])
        if self.sink_queries is None:
            return bias
        sink_bias = self.bias(self.sink_queries.positions[:, queries], self.key_positions[:, keys])
        return torch.where(mask.is_sink(keys)[:, None, None, :], sink_bias, bias)

    def block_pieces(self, queries: Tensor, keys: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of every piece its queries and keys, given by index, and the pairs it is for, `[B or 1, 1, Tq, Tk]`."""
        if not self.pieces:
            return []
        assert self.query_positions is not None
        assert self.key_positions is not None
        m, n = self.query_positions[:, queries][:, :, None], self.key_positions[:, keys][:, None, :]
        return [(p.queries[:, queries], p.keys[:, keys], p.span.applies(m, n)[:, None]) for p in self.pieces]

    def concat_sink_queries(
        self, q: Tensor, k: Tensor, queries: slice, keys: Tensor, mask: Mask
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys whose matrix product is the scores: twice as wide where sink tokens have other queries."""
        if self.sink_queries is None:
            return q, k
        sink = mask.is_sink(keys)[:, :, None, None]
        wide = torch.cat((k.masked_fill(sink, 0), k.masked_fill(~sink, 0)), dim=-1)
        return torch.cat((q, self.sink_queries.queries[:, queries]), dim=-1), wide
