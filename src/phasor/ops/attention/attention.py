"""Exact attention under any mask, without ever holding a mask or bias of all queries by all keys.

`ATTENTION` is the table of paths, fastest first. The model calls it, and `phasor.backends()` asks it.
"""

from __future__ import annotations

from torch import Tensor

from phasor.ops.attention import blocks, counted, cudnn, flash, sdpa, single_query, split_keys
from phasor.ops.attention.mask import Mask
from phasor.ops.attention.score_mod import ScoreMod
from phasor.ops.dispatch import Dispatch, Path


def cudnn_why_not(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> str | None:
    """Why cuDNN is not called directly; None where it is."""
    if not q.is_cuda:
        return "the tensors are not on a GPU"
    if q.shape[1] == 1:
        return "one query is too short to plan for"
    return sdpa.one_call_why_not(q, k, v, mask, score_mod) or cudnn.cudnn_unsupported_reason(q, k, v, mask, score_mod)


def flash_why_not(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> str | None:
    """Why the Triton kernel is not launched; None where it is."""
    return (
        flash.flash_unsupported_reason(q, k, v, mask, score_mod)
        if q.shape[1] > 1
        else "one query needs no tiles of queries"
    )


ATTENTION = Dispatch(
    Path("cuDNN", cudnn.cudnn_attention, cudnn_why_not),
    Path("Triton kernel over split keys", split_keys.split_keys_attention, split_keys.split_keys_why_not),
    Path("SDPA in one call", sdpa.sdpa_one_call, sdpa.one_call_why_not),
    Path("Triton kernels over counted keys", counted.counted_attention, counted.counted_why_not),
    Path("Triton kernel over key intervals", flash.flash_attention, flash_why_not),
    Path("sums that the compiler fuses", single_query.attend_in_sums, single_query.sums_unsupported_reason),
    Path("SDPA with one mask row", sdpa.sdpa_row_mask, sdpa.row_mask_why_not),
    Path("SDPA over a cache", blocks.sdpa_cached_chunk, blocks.cached_chunk_why_not),
    Path("SDPA in blocks of queries", blocks.sdpa_in_blocks, blocks.sdpa_blocks_why_not),
    Path("reference in blocks of queries", blocks.reference_in_blocks),
)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> Tensor:
    """Queries `[B, Tq, H, D]` over keys and values `[B, Tk, K, D]`, as `[B, Tq, H, D]`.

    >>> import torch
    >>> from phasor.ops.attention import attention_ref
    >>> q, k, v = torch.randn(3, 1, 6, 2, 4)
    >>> how = Mask(causal=True, window=3), ScoreMod(scale=0.5)
    >>> torch.allclose(attention(q, k, v, *how), attention_ref(q, k, v, *how)[0], atol=1e-6)
    True
    """
    y: Tensor = ATTENTION(q, k, v, mask, score_mod)
    return y
