"""Attention of one query per row as sums that a compiler fuses, for compiled decoding steps on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from phasor.ops.attention.mask import Mask
from phasor.ops.attention.score_mod import ScoreMod
from phasor.ops.attention.sdpa import unsupported_scores


def sums_unsupported_reason(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> str | None:
    """Why attention is not written as sums; None where it is."""
    if not torch.compiler.is_compiling():
        return "only a compiler fuses sums"
    if q.device.type != "cpu":
        return "GPUs have kernels for one query"
    if q.shape[1] > 1:
        return "there are several queries"
    if score_mod.dropout:
        return "attention weights are dropped"
    return unsupported_scores(score_mod)


def attend_in_sums(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> Tensor:
    """One query per row `[B, 1, H, D]` over keys and values `[B, Tk, K, D]`, in at least float32.

    Keys and values are read once and in the order of memory; SDPA reads a head at a time.

    >>> from phasor.ops.attention import attention_ref
    >>> q, k, v = torch.randn(1, 1, 4, 8), torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8)
    >>> how = Mask(causal=True, query_index=torch.tensor([[3]])), ScoreMod(scale=0.5)
    >>> torch.allclose(attend_in_sums(q, k, v, *how), attention_ref(q, k, v, *how)[0], atol=1e-6)
    True
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    q = q.to(wide).contiguous()
    q = q.as_strided(q.shape, q.stride())  # computed once: a compiler would fuse what it is computed from with the sums
    grouped = q.unflatten(2, (k.shape[2], -1))  # [B, 1, K, G, D]
    scores = (grouped * k[:, :, :, None].to(wide)).sum(-1) * score_mod.scale  # [B, Tk, K, G]
    visible = mask.row(k)  # [B or 1, 1, 1, Tk]
    if visible is not None:
        scores = scores.masked_fill(~visible[:, 0, 0, :, None, None], torch.finfo(wide).min)
    weights = scores.softmax(1)
    y = (weights[..., None] * v[:, :, :, None].to(wide)).sum(1, keepdim=True)  # [B, 1, K, G, D]
    return y.flatten(2, 3).to(v.dtype)
