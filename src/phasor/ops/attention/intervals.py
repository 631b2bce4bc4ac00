"""A mask as intervals: for each query the first and the last key it sees, which is all a kernel needs of the mask.

Sink tokens and prefixes outside of a window are a second interval. Padding between real tokens stays a property of the
keys. Everything is computed on the device from whole rows, without reading a value on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phasor.ops.attention.mask import Mask
from phasor.ops.attention.score_mod import Span

NON_CONTIGUOUS = -(1 << 30)  # the shift of rows whose positions do not increase with the index


def intervals_unsupported_reason(mask: Mask) -> str | None:
    """Why a mask is not intervals of keys; None where it is.

    >>> intervals_unsupported_reason(Mask(causal=True, window=3)) is None
    True
    """
    if mask.pattern is not None:
        return "sparse attention hides keys between those it shows"
    if mask.key_index is not None:
        return "the cache's slots do not hold the keys in order"
    return None


def intervals(mask: Mask, queries: int, keys: int, device: torch.device) -> Tensor:
    """For each query its first and last key, then where there is one its second interval, int32 `[B or 1, 2 or 4, Tq]`.

    An interval whose last key is before its first is empty.

    >>> intervals(Mask(causal=True, window=2, sink_tokens=1), 4, 4, torch.device("cpu"))[0].tolist()
    [[0, 0, 1, 2], [0, 1, 2, 3], [0, 0, 0, 0], [0, 0, 0, 0]]
    """
    begin = torch.zeros(1, queries, dtype=torch.int64, device=device)
    end = begin + keys - 1
    if not mask.aligned:
        if mask.key_document_ids is not None and mask.query_document_ids is not None:
            begin, end = cross_document_bounds(mask.query_document_ids, mask.key_document_ids)
        first, last, extra = *trim_padding(mask.key_mask, begin, end), None
    else:
        row = query_indices(mask, queries, device)
        if mask.key_document_ids is not None:
            begin, end = (x.gather(1, row.expand(len(x), -1)) for x in document_bounds(mask.key_document_ids))
        first, last = begin, end
        if mask.window is not None:
            first = first.maximum(row - mask.window + 1)
            last = last if mask.causal else last.minimum(row + mask.window - 1)
        last = last.minimum(row) if mask.causal else last
        extra = extra_interval_end(mask, row, begin, end)
        if extra is not None and mask.window is None:
            last, extra = last.maximum(extra), None
        first, last = trim_padding(mask.key_mask, first, last)
    bounds = [first, last] if extra is None else [first, last, begin, extra]
    return torch.stack(torch.broadcast_tensors(*bounds), dim=1).to(torch.int32)


def restrict(bounds: Tensor, span: Span, mask: Mask, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """Intervals `[B or 1, 2 or 4, Tq]` of only those keys that are within a span, where positions count tokens.

    >>> mask, positions = Mask(causal=True), torch.arange(4)[None]
    >>> bounds = intervals(mask, 4, 4, torch.device("cpu"))
    >>> restrict(bounds, Span(2, None), mask, positions, positions)[0].tolist()
    [[0, 0, 0, 0], [-1, -1, 0, 1]]
    """
    highest = key_positions.shape[1]  # above all positions
    group = query_positions // span.size
    low, high = group.new_zeros(group.shape), group.new_full(group.shape, highest)
    if span.last is not None:  # where their groups begin and end
        low = ((group - span.last) * span.size).clamp(0, highest)
    if span.first is not None:
        high = ((group - span.first + 1) * span.size - 1).clamp(-1, highest)
    if mask.key_document_ids is not None:  # positions of later documents come after all of those before
        ids = mask.key_document_ids
        start = torch.nn.functional.pad((ids[:, 1:] != ids[:, :-1]).cumsum(1), (1, 0)) * (highest + 1)
        own = gather_rows(start, query_indices(mask, query_positions.shape[1], ids.device))
        low, high, key_positions = low + own, high + own, key_positions + start
    low, high, key_positions = expand_rows(low, high, key_positions)
    low, high = torch.searchsorted(key_positions, low), torch.searchsorted(key_positions, high, right=True) - 1
    pairs = bounds.to(torch.int64).split(2, dim=1)
    narrower = [(pair[:, 0].maximum(low), pair[:, 1].minimum(high)) for pair in pairs]
    return torch.stack([x for pair in narrower for x in pair], dim=1).to(torch.int32)


def expand_rows(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one row or as many as the others, contiguous and all with as many."""
    rows = max(len(x) for x in tensors)
    return [x.expand(rows, *x.shape[1:]).contiguous() for x in tensors]


def query_indices(mask: Mask, queries: int, device: torch.device) -> Tensor:
    """The index of each query among the keys, `[B or 1, Tq]`."""
    return torch.arange(queries, device=device)[None] + mask.offset if mask.query_index is None else mask.query_index


def document_bounds(document_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last index of each token's document, whose tokens are contiguous; `[B, T]` both."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    ends = torch.ones_like(starts)
    ends[:, :-1] = starts[:, 1:]
    first = torch.where(starts, index, 0).cummax(1).values
    last = torch.where(ends, index, document_ids.shape[1] - 1).flip(1).cummin(1).values.flip(1)
    return first, last


def cross_document_bounds(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last key of each query's document in another sequence; an empty interval where it has none."""
    ids, indices = keys.to(torch.int64).sort(dim=1, stable=True)
    queries = queries.to(torch.int64)
    left, right = torch.searchsorted(ids, queries), torch.searchsorted(ids, queries, right=True)
    first = indices.gather(1, left.clamp(max=keys.shape[1] - 1))
    last = indices.gather(1, (right - 1).clamp(min=0))
    return torch.where(right > left, first, keys.shape[1]), torch.where(right > left, last, -1)


def trim_padding(attention_mask: Tensor | None, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Intervals without the padding at the ends of a row."""
    if attention_mask is None:
        return first, last
    index = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    lowest = torch.where(attention_mask, index, attention_mask.shape[1]).amin(1, keepdim=True)
    highest = torch.where(attention_mask, index, -1).amax(1, keepdim=True)
    return first.maximum(lowest), last.minimum(highest)


def extra_interval_end(mask: Mask, row: Tensor, begin: Tensor, end: Tensor) -> Tensor | None:
    """The last key that is visible as a sink token or part of the prefix; such keys begin where the document does."""
    last = None
    if mask.window is not None and mask.sink_tokens:
        last = last_of_first_tokens(mask.order, mask.sink_tokens, begin, end)
        last = last.minimum(row) if mask.causal else last
    if mask.prefix_length is not None and (mask.causal or mask.window is not None):
        prefix_length = last_of_first_tokens(mask.order, mask.prefix_length[:, None], begin, end)
        last = prefix_length if last is None else last.maximum(prefix_length)
    return last


def last_of_first_tokens(order: Tensor | None, count: int | Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """The index of the last token that has fewer than `count` real ones before it, in documents from begin to end."""
    if order is None:
        return begin + count - 1
    early = order < count
    before = torch.nn.functional.pad(early.cumsum(1), (1, 0))
    begin, end = begin.expand(len(order), -1), end.expand(len(order), -1)
    return begin + before.gather(1, end + 1) - before.gather(1, begin) - 1


def shifts(mask: Mask, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """One integer per row, int32 `[B or 1]`: a query and a key it sees are `query + shift - key` apart, by index.

    It is `NON_CONTIGUOUS` for rows where that does not hold: positions with gaps, padding between real tokens.

    >>> positions = torch.tensor([[7, 8, 9], [0, 1, 3]])
    >>> (shifts(Mask(causal=True), positions, positions) == NON_CONTIGUOUS).tolist()
    [False, True]
    """
    device = key_positions.device
    if not mask.aligned:
        return torch.full((1,), NON_CONTIGUOUS, dtype=torch.int32, device=device)
    row = query_indices(mask, query_positions.shape[1], device)
    index = torch.arange(key_positions.shape[1], device=device)[None]
    lead, before = key_positions - index, (index - 1).clamp(min=0)
    separate = torch.zeros_like(index, dtype=torch.bool)  # from the token before: no query sees both
    if mask.key_mask is not None:
        before = gather_rows(torch.where(mask.key_mask, index, 0).cummax(1).values, before)  # the last real one
        separate = ~(mask.key_mask & gather_rows(mask.key_mask, before))
    if mask.window is not None and mask.query_index is None and mask.offset >= mask.sink_tokens + mask.window - 1:
        separate = separate | (index <= mask.sink_tokens)  # all windows are past the sinks
    if mask.key_document_ids is not None:
        separate = separate | (mask.key_document_ids != gather_rows(mask.key_document_ids, before))
    steady = ((lead == gather_rows(lead, before)) | separate).all(1)
    even = (row - row[:, :1] == torch.arange(row.shape[1], device=device)).all(1)
    own = (query_positions == gather_rows(key_positions, row)).all(1)
    return torch.where(steady & even & own, row[:, 0], NON_CONTIGUOUS).to(torch.int32)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """The entries of each row at some indices; either may have one row for all."""
    rows = max(len(x), len(index))
    return x.expand(rows, -1).gather(1, index.expand(rows, -1))


def query_ranges(bounds: Tensor, keys: int, block: int) -> Tensor:
    """For every block of keys which queries to visit, int32 `[B or 1, blocks, 4]`: from, to, and within that the
    from and to of queries that see the whole block.

    >>> query_ranges(intervals(Mask(causal=True, window=3), 6, 6, torch.device("cpu")), 6, 2)[0].tolist()
    [[0, 4, 1, 3], [2, 6, 3, 5], [4, 6, 5, 6]]
    """
    low = torch.arange(0, keys, block, dtype=torch.int32, device=bounds.device)
    high = (low + block - 1).clamp(max=keys - 1)
    first, last = bounds[:, 0], bounds[:, 1]
    start, stop = reaching_queries(first, last, low, high)
    if bounds.shape[1] == 4:
        begin, end = reaching_queries(bounds[:, 2], bounds[:, 3], low, high)
        touched = begin < end
        start, stop = torch.where(touched, start.minimum(begin), start), torch.where(touched, stop.maximum(end), stop)
    whole_from = search_rows(last.flip(1).cummin(1).values.flip(1), high)
    whole_to = search_rows(first.cummax(1).values, low, right=True)
    return torch.stack((start, stop, whole_from, whole_to), dim=-1).to(torch.int32)


def reaching_queries(first: Tensor, last: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """From which query to which intervals may reach a block of keys from `low` to `high`."""
    return search_rows(last.cummax(1).values, low), search_rows(
        first.flip(1).cummin(1).values.flip(1), high, right=True
    )


def search_rows(rising: Tensor, values: Tensor, right: bool = False) -> Tensor:
    """`torch.searchsorted` of the same values in every row."""
    return torch.searchsorted(rising.contiguous(), values.expand(len(rising), -1).contiguous(), right=right)
