"""Attention in blocks of queries: each block takes only the keys its mask can reach, and builds only its own mask.

No mask or bias of all queries by all keys is ever held. In training a block is recomputed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from phasor.ops.attention.mask import Mask
from phasor.ops.attention.reference import attention_weights, weighted_values
from phasor.ops.attention.score_mod import ScoreMod
from phasor.ops.attention.sdpa import PIECES, RELATIVE_VALUES, sdpa
from phasor.ops.dispatch import needs_grad

BLOCK, MIN_BLOCK = 512, 128  # queries at a time; the fewest are for narrow windows and learned biases


def block_size(mask: Mask, score_mod: ScoreMod) -> int:
    """How many queries make a block: about as many as a window has keys, so that a block reaches few that it hides.

    SDPA holds scores and weights of a block several times where it computes gradients of a bias.

    >>> plain = ScoreMod(scale=1.0)
    >>> block_size(Mask(causal=True), plain), block_size(Mask(causal=True, window=200), plain)
    (512, 256)
    """
    if score_mod.learns_bias:
        return min(MIN_BLOCK, BLOCK)
    if mask.pattern is not None and mask.pattern.query_block is not None:
        return min(max(MIN_BLOCK, mask.pattern.query_block), BLOCK)
    if mask.window is None:
        return BLOCK
    return min(max(MIN_BLOCK, 1 << (mask.window - 1).bit_length()), BLOCK)


def sdpa_blocks_why_not(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> str | None:
    """Why the blocks are not computed by SDPA; None where they are."""
    if score_mod.pieces:
        return PIECES
    if score_mod.relative_values is not None:
        return RELATIVE_VALUES
    return None if score_mod.supported_by_sdpa else "SDPA has no soft-cap and no sink logits"


def cached_chunk_why_not(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> str | None:
    """Why this is not one SDPA call of a few queries over a cache and themselves; None where it is.

    >>> q, k = torch.zeros(1, 3, 2, 4), torch.zeros(1, 8, 2, 4)
    >>> cached_chunk_why_not(q, k, k, Mask(causal=True, offset=5), ScoreMod(scale=1.0)) is None
    True
    """
    if not mask.follows_cache:
        return "the queries do not follow others in a cache"
    if q.shape[1] > (size := block_size(mask, score_mod)):
        return f"more than {size} queries are computed in blocks"
    return sdpa_blocks_why_not(q, k, v, mask, score_mod)


def sdpa_cached_chunk(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> Tensor:
    """One SDPA call of queries that follow others in a cache, with a mask of queries by keys."""
    return sdpa_block(q, k, v, mask, score_mod, 0, q.shape[1])


def sdpa_in_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> Tensor:
    """SDPA in blocks of queries, each with its own mask and bias."""
    return in_blocks(sdpa_block, q, k, v, mask, score_mod)


def reference_in_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> Tensor:
    """The reference in blocks of queries."""
    return in_blocks(reference_block, q, k, v, mask, score_mod)


def in_blocks(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod
) -> Tensor:
    """`attend(q, k, v, mask, score_mod, start, stop)` for all blocks of queries, one after the other."""
    queries, size = q.shape[1], block_size(mask, score_mod)
    if queries <= size:
        return attend(q, k, v, mask, score_mod, 0, queries)
    recompute, random = needs_grad(q, k, v), score_mod.dropout > 0
    blocks = []
    for start in range(0, queries, size):
        # All but tensors is bound: the compiler of some versions of torch loses fields of what a checkpoint is given.
        block = partial(attend, mask=mask, score_mod=score_mod, start=start, stop=min(start + size, queries))
        if recompute:
            blocks.append(checkpoint(block, q, k, v, use_reentrant=False, preserve_rng_state=random))
        else:
            blocks.append(block(q, k, v))
    return torch.cat(blocks, dim=1)


def sdpa_block(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod, start: int, stop: int) -> Tensor:
    """SDPA of the queries `start` to `stop` over the keys they can reach."""
    q, k, v, visible, bias = slice_block(q, k, v, mask, score_mod, start, stop)
    return sdpa(q, k, v, None if visible is None else visible[:, None], bias, score_mod=score_mod)


def reference_block(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod, start: int, stop: int) -> Tensor:
    """The reference for the queries `start` to `stop` over the keys they can reach."""
    queries, keys = block_indices(q, k, mask, start, stop)
    pieces = score_mod.block_pieces(queries, keys)
    q, k, v, visible, bias = slice_block(q, k, v, mask, score_mod, start, stop)
    weights = attention_weights(q, k, visible, bias, score_mod, pieces)
    return weighted_values(weights, v, queries, keys, score_mod)


def block_indices(q: Tensor, k: Tensor, mask: Mask, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """The indices of the queries `start` to `stop` and of the keys they can reach."""
    ranges = mask.key_ranges(start, stop, k.shape[1])
    keys = torch.cat([torch.arange(a, b, device=q.device) for a, b in ranges])
    return torch.arange(start, stop, device=q.device), keys


def slice_block(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod, start: int, stop: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The queries `start` to `stop`, the keys and values they can reach, and their mask and bias."""
    ranges = mask.key_ranges(start, stop, k.shape[1])
    queries, keys = block_indices(q, k, mask, start, stop)
    k, v = (
        torch.cat([x[:, a:b] for a, b in ranges], dim=1) if len(ranges) > 1 else x[:, slice(*ranges[0])] for x in (k, v)
    )
    visible, bias = mask.block(queries, keys), score_mod.block_bias(queries, keys, mask, q)
    q, k = score_mod.concat_sink_queries(q[:, start:stop], k, slice(start, stop), keys, mask)
    return q, k, v, visible, bias
