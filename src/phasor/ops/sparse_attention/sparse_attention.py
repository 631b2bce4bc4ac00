"""Attention under a mask with a pattern: the table of its paths, fastest first.

The model calls `SPARSE_ATTENTION`, and `phasor.backends()` asks it.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from phasor.ops.attention import ATTENTION, Mask, ScoreMod
from phasor.ops.attention.blocks import block_indices, in_blocks, slice_block
from phasor.ops.attention.reference import attention_weights, weighted_values
from phasor.ops.attention.sdpa import sdpa
from phasor.ops.dispatch import Dispatch, Path
from phasor.ops.sparse_attention import block_lists, fold
from phasor.ops.sparse_attention.patterns import TopBlocks
from phasor.ops.sparse_attention.selection import selected_keys


def by_index_why_not(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> str | None:
    """Why the mask alone does not say which keys a query sees; None where it does."""
    return "blocks of keys are chosen by score" if isinstance(mask.pattern, TopBlocks) else None


def top_blocks_block(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod, start: int, stop: int) -> Tensor:
    """Attention of the queries `start` to `stop` to their blocks of highest score, with a mask for every head."""
    assert isinstance(mask.pattern, TopBlocks)
    selected = selected_keys(q, k, mask, mask.pattern, start, stop)
    last = mask.key_ranges(start, stop, k.shape[1])[-1][1]
    mask = replace(mask, pattern=None)
    queries, keys = block_indices(q, k, mask, start, stop)
    q, k, v, shown, bias = slice_block(q, k, v, mask, score_mod, start, stop)
    visible = selected[..., :last] if shown is None else selected[..., :last] & shown[:, None]
    if score_mod.supported_by_sdpa:
        return sdpa(q, k, v, visible, bias, score_mod=score_mod)
    weights = attention_weights(q, k, visible, bias, score_mod)
    return weighted_values(weights, v, queries, keys, score_mod)


def top_blocks_in_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> Tensor:
    """Blocks of highest score, in blocks of queries."""
    return in_blocks(top_blocks_block, q, k, v, mask, score_mod)


SPARSE_ATTENTION = Dispatch(
    Path("rows of tokens that see each other", fold.folded_attention, fold.fold_unsupported_reason, fold.explain),
    Path(
        "Triton kernel over lists of key blocks",
        block_lists.block_list_attention,
        block_lists.block_lists_unsupported_reason,
    ),
    Path("masks of queries by keys", ATTENTION, by_index_why_not, ATTENTION.explain),
    Path("selected blocks as masks, in blocks of queries", top_blocks_in_blocks),
)


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> Tensor:
    """Queries `[B, Tq, H, D]` over those keys and values `[B, Tk, K, D]` that the mask's pattern shows.

    >>> import torch
    >>> from phasor.ops.sparse_attention import Dilated, sparse_attention_ref
    >>> q, k, v = torch.randn(3, 1, 9, 2, 4)
    >>> how = Mask(causal=True, pattern=Dilated(dilation=2)), ScoreMod(scale=0.5)
    >>> torch.allclose(sparse_attention(q, k, v, *how), sparse_attention_ref(q, k, v, *how)[0], atol=1e-6)
    True
    """
    y: Tensor = SPARSE_ATTENTION(q, k, v, mask, score_mod)
    return y
