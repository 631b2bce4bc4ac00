"""Attention by one call of `torch.nn.functional.scaled_dot_product_attention` (SDPA), with at most one row of mask."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from phasor.ops.attention import cudnn, split_large
from phasor.ops.attention.mask import Mask
from phasor.ops.attention.score_mod import ScoreMod
from phasor.ops.dispatch import compute_dtype, is_autocast, needs_grad

PIECES = "distances have several pieces, each with its own queries and keys"
RELATIVE_VALUES = "values have vectors of the distance added, which differ by query"


def one_call_why_not(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> str | None:
    """Why this is not one SDPA call without a mask tensor; None where it is.

    >>> x = torch.zeros(1, 8, 2, 4)
    >>> one_call_why_not(x, x, x, Mask(causal=True), ScoreMod(scale=1.0)) is None
    True
    >>> one_call_why_not(x, x, x, Mask(causal=True, window=3), ScoreMod(scale=1.0))
    'a window hides keys, and SDPA has no window'
    """
    reason = unsupported_scores(score_mod)
    if reason is not None:
        return reason
    keys = k.shape[1]
    if mask.window is not None and mask.window < keys:
        return "a window hides keys, and SDPA has no window"
    if mask.pattern is not None:
        return "sparse attention hides keys, which takes a mask of queries by keys"
    if not mask.sees_all(keys):
        return "a prefix, padding, documents or a cache's slots hide keys, which takes a mask of queries by keys"
    if mask.offset != 0 and q.shape[1] > 1:
        return "the queries follow those in a cache, which takes a mask of queries by keys"
    return None


def unsupported_scores(score_mod: ScoreMod) -> str | None:
    """Why SDPA cannot compute the scores without a tensor of queries by keys; None where it can."""
    if score_mod.softcap is not None:
        return "the scores are soft-capped, and SDPA has no soft-cap"
    if score_mod.sink_logits is not None:
        return "sink logits take part in the softmax, and SDPA has none"
    if score_mod.bias is not None:
        return "the positions add a bias to the scores, which would be a tensor of queries by keys"
    if score_mod.pieces:
        return PIECES
    if score_mod.relative_values is not None:
        return RELATIVE_VALUES
    if score_mod.sink_queries is not None:
        return "the distance to sink tokens is capped, so that they have other queries"
    return None


def takes_narrow_values(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> bool:
    """Whether one SDPA call is by a kernel for values with fewer features than keys, so that they need no zeros.

    That is cuDNN's; torch's other kernels are slow there.

    >>> x = torch.zeros(1, 8, 2, 24)
    >>> takes_narrow_values(x, x, x[..., :16], Mask(causal=True), ScoreMod(scale=1.0))
    False
    """
    if one_call_why_not(q, k, v, mask, score_mod) is not None or score_mod.dropout > 0 or not q.is_cuda:
        return False
    suits = compute_dtype(q) in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == v.shape[-1] % 8 == 0
    overflows = needs_grad(q, k, v) and cudnn.gradients_may_overflow(q.shape[1], k.shape[1], mask.is_causal)
    return suits and q.shape[-1] <= cudnn.MAX_WIDE_KEYS and not overflows and cudnn.available() == (True, True)


def sdpa_one_call(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> Tensor:
    """One SDPA call without a mask tensor: causal, or over all keys."""
    return sdpa(q, k, v, score_mod=score_mod, causal=mask.is_causal)


def row_mask_why_not(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> str | None:
    """Why one row of mask does not serve all queries; None where it does, as for padding or for a single query."""
    reason = unsupported_scores(score_mod)
    if reason is None and q.shape[1] > 1 and not mask.hides_only_padding(k.shape[1]):
        return "queries differ in the keys they see, which takes a mask of queries by keys"
    return reason


def sdpa_row_mask(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> Tensor:
    """One SDPA call with a mask that is the same for all queries."""
    if mask.hides_only_padding(k.shape[1]):
        assert mask.key_mask is not None
        return sdpa(q, k, v, mask.key_mask[:, None, None, :], score_mod=score_mod)
    return sdpa(q, k, v, mask.row(k), score_mod=score_mod)


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    score_mod: ScoreMod,
    causal: bool = False,
) -> Tensor:
    """SDPA in phasor's layout, `[B, Tq, H, D]`; `visible` and `bias` are broadcast to `[B, H, Tq, Tk]`.

    A bias stays in at least float32: far keys have biases of hundreds, where bfloat16 has steps of 2.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    if bias is not None and is_autocast(q):  # which would round the bias
        q, k, v = (x.to(compute_dtype(x)) for x in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):
            return sdpa(q, k, v, visible, bias, score_mod=score_mod, causal=causal)
    if bias is not None and q.is_cuda and q.dtype != wide:  # whose kernels take one dtype
        y = sdpa(q.to(wide), k.to(wide), v.to(wide), visible, bias, score_mod=score_mod, causal=causal)
        return y.to(v.dtype)
    if split_large.has_int32_kernels(q) and needs_grad(q, k, v, bias):
        if split_large.exceeds_int32(q, k, v):
            return split_large.attend_in_halves(
                partial(sdpa, score_mod=score_mod, causal=causal), q, k, v, visible, bias
            )
        q, k, v = split_large.make_dense(q), split_large.make_dense(k), split_large.make_dense(v)
    if visible is None and bias is None and q.is_cuda:
        q, k, v = (x.to(compute_dtype(x)) for x in (q, k, v))
        group_size = q.shape[2] // k.shape[2]
        if group_size > 1 and q.shape[1] > 1 and q.dtype == torch.float32:
            # No fused kernel shares heads in float32, and torch would hold the scores of all tokens at once.
            k, v = (x.repeat_interleave(group_size, dim=2) for x in (k, v))
    if bias is not None and q.is_cuda and needs_grad(bias) and not q.requires_grad:
        q = q.detach().requires_grad_()  # torch's backward for a bias alone accesses memory that is not its own
    attn_mask = visible
    if bias is not None:
        attn_mask = (bias if visible is None else bias.masked_fill(~visible, float("-inf"))).to(wide)
    if q.shape[1] == 1 and q.shape[2] != k.shape[2]:
        return _sdpa_single_query(q, k, v, score_mod, attn_mask)
    y = _call_sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask, score_mod, causal)
    return y.transpose(1, 2)


def _sdpa_single_query(q: Tensor, k: Tensor, v: Tensor, score_mod: ScoreMod, attn_mask: Tensor | None) -> Tensor:
    """SDPA of one query per row: the heads that share a key take the place of queries, so that no key is copied."""
    kv_heads = k.shape[2]
    if attn_mask is not None and attn_mask.shape[1] > 1:
        attn_mask = attn_mask.squeeze(2).unflatten(1, (kv_heads, -1))
    heads = q.view(q.shape[0], kv_heads, -1, q.shape[-1])
    y = _call_sdpa(heads, k.transpose(1, 2), v.transpose(1, 2), attn_mask, score_mod)
    return y.reshape(*q.shape[:-1], v.shape[-1])


def _call_sdpa(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, score_mod: ScoreMod, causal: bool = False
) -> Tensor:
    """Queries `[B, H, Tq, D]` over keys and values `[B, K, Tk, D]` by the kernel that torch chooses."""
    # A flag that holds is the constant True and not a symbol, as it would be where a compiler takes sizes for dynamic.
    flags = {"is_causal": causal, "enable_gqa": q.shape[1] != k.shape[1]}
    options: dict[str, Any] = {name: True for name, value in flags.items() if value}
    options |= {"attn_mask": attn_mask, "dropout_p": score_mod.dropout, "scale": score_mod.scale}
    if cudnn.sdpa_may_overflow(q, k, causal) and needs_grad(q, k, v, attn_mask):
        with sdpa_kernel(cudnn.other_backends()):
            return F.scaled_dot_product_attention(q, k, v, **options)
    return F.scaled_dot_product_attention(q, k, v, **options)
