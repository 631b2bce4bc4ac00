"""Dilated, chunked and strided attention as plain attention: tokens that see each other become separate rows.

Tokens whose indices have the same remainder by the dilation, in the same segment, attend to each other and to nothing
else; so do blocks whose numbers have the same remainder by the stride, where no others are shown. Gathered, they are a
row under an ordinary mask, which any path of `attention` takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.ops.attention import ATTENTION, Mask, ScoreMod, TokenBias, prepare_mask
from phasor.ops.attention.mask import PreparedMask
from phasor.ops.sparse_attention.patterns import Dilated, KeyBlocks

MAX_PADDING = 8  # segments and blocks become rows where that pads by at most one in this many tokens


def fold_unsupported_reason(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> str | None:
    """Why tokens are not gathered into rows; None where they are.

    >>> x = torch.zeros(1, 8, 2, 4)
    >>> fold_unsupported_reason(x, x, x, Mask(causal=True, pattern=Dilated(dilation=2)), ScoreMod(scale=1.0)) is None
    True
    """
    queries, keys = q.shape[1], k.shape[1]
    return "one query takes one row of mask" if queries == 1 else mask_unsupported_reason(mask, queries, keys)


def mask_unsupported_reason(mask: Mask, queries: int, keys: int) -> str | None:
    """Why the tokens of a mask are not gathered into rows; None where they are."""
    if mask.query_index is not None or mask.key_index is not None:
        return "the rows of the cache differ in length, or its slots do not hold the keys in order"
    if isinstance(mask.pattern, Dilated):
        return "the dilation is longer than the sequence" if mask.pattern.dilation > keys else None
    pattern = mask.pattern
    if not isinstance(pattern, KeyBlocks) or pattern.stride is None or pattern.local > 1 or pattern.global_blocks:
        return "the pattern shows blocks of keys, and not tokens that see each other alone"
    if mask.order is not None or mask.key_document_ids is not None or mask.key_mask is not None:
        return "the blocks of packed documents and of padded rows begin at any token"
    if mask.window is not None or mask.first_key:
        return "a window hides keys of some blocks, or the first keys are not there"
    fold = block_fold(mask, pattern, queries, keys)
    if any((padded - given) * MAX_PADDING > given for padded, given in ((fold.queries, queries), (fold.keys, keys))):
        return f"rows of whole blocks would be padded by more than one in {MAX_PADDING} tokens"
    return None


@dataclass(frozen=True)
class Fold:
    """How `[B, T, ...]` becomes `[B * segments * dilation, length, ...]`, and the mask among the new rows.

    Blocks of `block` tokens stay together. Queries are padded at their front and end, keys at their end.
    """

    mask: Mask
    segments: int
    dilation: int
    front: int
    queries: int
    keys: int
    block: int = 1

    def fold(self, x: Tensor, front: int, tokens: int) -> Tensor:
        """Tokens gathered into rows, after padding with `front` zeros before them, to `tokens` in all."""
        end = tokens - front - x.shape[1]
        if front or end:
            x = F.pad(x, (0, 0) * (x.dim() - 2) + (front, end))
        x = x.unflatten(1, (self.segments, -1, self.dilation, self.block)).transpose(2, 3)
        return x.flatten(3, 4).flatten(0, 2)

    def fold_queries(self, x: Tensor) -> Tensor:
        return self.fold(x, self.front, self.queries)

    def fold_keys(self, x: Tensor) -> Tensor:
        return self.fold(x, 0, self.keys)

    def unfold(self, x: Tensor, tokens: int) -> Tensor:
        """The inverse for queries."""
        x = x.unflatten(0, (-1, self.segments, self.dilation)).unflatten(3, (-1, self.block))
        x = x.transpose(2, 3).flatten(1, 4)
        return x[:, self.front : self.front + tokens]


def new_fold(mask: Mask, rows: int, queries: int, keys: int, like: Tensor) -> Fold:
    """The fold of a mask whose pattern is `Dilated`, or `KeyBlocks` of a stride alone."""
    if isinstance(mask.pattern, KeyBlocks):
        fold = block_fold(mask, mask.pattern, queries, keys)
        padded = not mask.causal and fold.keys > keys
        real = fold.fold_keys(like.new_ones((rows, keys), dtype=torch.bool)) if padded else None
        return replace(fold, mask=replace(fold.mask, key_mask=real))
    assert isinstance(mask.pattern, Dilated)
    dilation, segment = mask.pattern.dilation, mask.pattern.segment
    padded_keys = -(-keys // dilation) * dilation
    length = min(segment or padded_keys, padded_keys)
    segments = -(-keys // length)
    whole = mask.order is None and mask.offset == 0 and mask.first_key == 0
    if whole and (segments * length - padded_keys) * MAX_PADDING <= keys:
        fold = Fold(mask, segments, dilation, 0, segments * length, segments * length)
        padded = not mask.causal and fold.keys > keys
        real = fold.fold_keys(like.new_ones((rows, keys), dtype=torch.bool)) if padded else None
        window = None if mask.window is None else -(-mask.window // dilation)
        return replace(fold, mask=Mask(causal=mask.causal, window=window, key_mask=real))
    window = mask.window if segment is None else min(segment, mask.window or segment)
    front = mask.offset % dilation
    padded_queries = -(-(front + queries) // dilation) * dilation
    fold = Fold(mask, 1, dilation, front, padded_queries, padded_keys)
    q_ids, k_ids = segment_ids(mask, segment, front, queries, keys, like)
    real = mask.key_mask
    if real is None and not mask.causal and fold.keys > keys:
        real = like.new_ones((rows, keys), dtype=torch.bool)
    folded = Mask(
        causal=mask.causal,
        window=None if window is None else -(-window // dilation),
        offset=mask.offset // dilation,
        key_mask=None if real is None else fold.fold_keys(real),
        query_document_ids=None if q_ids is None else fold.fold(q_ids.expand(rows, -1), 0, fold.queries),
        key_document_ids=None if k_ids is None else fold.fold_keys(k_ids.expand(rows, -1)),
    )
    return replace(fold, mask=folded)


def block_fold(mask: Mask, pattern: KeyBlocks, queries: int, keys: int) -> Fold:
    """The fold of blocks of keys that are a stride apart, whose padding is not masked."""
    block, stride = pattern.block, pattern.stride or 1
    period = block * stride
    front = mask.offset % period
    padded_queries, padded_keys = (-(-tokens // period) * period for tokens in (front + queries, keys))
    folded = Mask(causal=mask.causal, offset=mask.offset // period * block)
    return Fold(folded, 1, stride, front, padded_queries, padded_keys, block)


def segment_ids(
    mask: Mask, segment: int | None, front: int, queries: int, keys: int, like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Ids of the documents, or of their segments, that queries and keys belong to, from 1 on; `[B or 1, ...]`.

    The queries are `front` more than there are, before the first.
    """
    if mask.order is None:
        if segment is None:
            return None, None
        # Of ones, since stand-ins for tensors of a device that is not there can be summed, but not made by counting.
        index = like.new_ones((1, max(queries + front, keys)), dtype=torch.int64).cumsum(1) - 1 + mask.first_key
        of_queries = index.narrow(1, 0, queries + front) + mask.offset - front
        return of_queries // segment + 1, index.narrow(1, 0, keys) // segment + 1
    starts = torch.zeros_like(mask.order, dtype=torch.bool)
    if mask.key_document_ids is not None:
        starts[:, 1:] = mask.key_document_ids[:, 1:] != mask.key_document_ids[:, :-1]
    if segment is not None:
        starts = starts | (mask.order % segment == 0)
    ids = starts.cumsum(1) + 1
    return ids, ids


def fold_args(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod
) -> tuple[Fold, tuple[Tensor, Tensor, Tensor, Mask, ScoreMod]]:
    """The fold, and the arguments of `attention` among its rows."""
    rows, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    fold: Fold = mask.prepared.fold or new_fold(mask, rows, queries, keys, q)
    folded = replace(score_mod)
    if score_mod.relative_values is not None:
        folded.relative_values = score_mod.relative_values.map(rows, fold.fold_queries, fold.fold_keys)
    if isinstance(score_mod.bias, TokenBias):
        folded.bias = score_mod.bias.map(fold.fold_queries, fold.fold_keys)
    elif score_mod.query_positions is not None and score_mod.key_positions is not None and score_mod.bias is not None:
        folded.query_positions = fold.fold_queries(score_mod.query_positions.expand(rows, -1))
        folded.key_positions = fold.fold_keys(score_mod.key_positions.expand(rows, -1))
    return fold, (fold.fold_queries(q), fold.fold_keys(k), fold.fold_keys(v), fold.mask, folded)


def prepare_sparse_mask(
    mask: Mask,
    like: Tensor,
    shape: tuple[int, int, int],
    *,
    plain_scores: bool = True,
    positions: tuple[Tensor, Tensor] | None = None,
) -> Mask:
    """As `prepare_mask`, of a mask with a pattern or without."""
    queries, keys, head_dim = shape
    if mask.pattern is None or queries == 1:
        return prepare_mask(mask, like, shape, plain_scores=plain_scores, positions=positions)
    if mask_unsupported_reason(mask, queries, keys) is not None:
        return mask
    fold = new_fold(mask, len(like), queries, keys, like)
    rows = fold.segments * fold.dilation
    inner = prepare_mask(
        fold.mask, like, (fold.queries // rows, fold.keys // rows, head_dim), plain_scores=plain_scores
    )
    return mask.attach(PreparedMask(fold=replace(fold, mask=inner)))


def folded_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> Tensor:
    """Dilated, chunked or strided attention, by plain attention among the rows of a fold."""
    fold, args = fold_args(q, k, v, mask, score_mod)
    y: Tensor = ATTENTION(*args)
    return fold.unfold(y, q.shape[1])


def explain(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> tuple[str, dict[str, str]]:
    """The path that attention among the rows of the fold takes."""
    with torch.no_grad():  # the gradient of a view asks for its device, and that of a stand-in need not be there
        (rows, keys, values, *given) = fold_args(q, k, v, mask, score_mod)[1]
    for folded, x in ((rows, q), (keys, k), (values, v)):
        folded.requires_grad_(x.requires_grad)
    name, reasons = ATTENTION.explain(rows, keys, values, *given)
    return f"{name}, on rows of tokens that see each other", reasons
