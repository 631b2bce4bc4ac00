"""Attention of one query per row over long keys, as a torch operation: programs take splits of the keys.

What is computed of the query before, a row of mask and a row of bias, is small beside the keys. So decoding steps with
any scheme read their keys and values once, and no more of a cache than is in use.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phasor.ops import dispatch
from phasor.ops.attention.mask import Mask
from phasor.ops.attention.score_mod import ScoreMod
from phasor.ops.attention.sdpa import PIECES, RELATIVE_VALUES, one_call_why_not
from phasor.ops.attention.split_keys_args import SplitKeysArgs
from phasor.ops.custom_op import custom_op
from phasor.ops.dispatch import compute_dtype, needs_grad

MAX_SDPA_HEAD_DIM = 256  # for which SDPA has a kernel that splits keys
MAX_KEY_DIM = 1024


def split_keys_why_not(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> str | None:
    """Why the kernel over split keys is not launched; None where it is."""
    if q.shape[1] != 1:
        return "there are several queries"
    reason = dispatch.triton_why_not(q, k, v)
    if reason is not None:
        return reason
    if needs_grad(q, k, v, *getattr(score_mod.bias, "learned", ()), score_mod.sink_logits):
        return "the kernel of one query has no gradients"
    if score_mod.dropout > 0:
        return "attention weights are dropped out"
    if score_mod.pieces:
        return PIECES
    if score_mod.relative_values is not None:
        return RELATIVE_VALUES
    if score_mod.sink_queries is not None:
        return "the distance to sink tokens is capped, so that they have other queries"
    dtype = compute_dtype(q)
    if dtype not in dispatch.KERNEL_DTYPES or not dtype == compute_dtype(k) == compute_dtype(v):
        return "queries, keys and values are not all of one dtype of at most 32 bits"
    if q.shape[-1] > MAX_KEY_DIM:
        return f"a head has more than {MAX_KEY_DIM:,} features"
    if q.shape[-1] <= MAX_SDPA_HEAD_DIM and one_call_why_not(q, k, v, mask, score_mod) is None:
        return "SDPA splits the keys of one query by itself"
    return None


def split_keys_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> Tensor:
    """One query per row `[B, 1, H, D]` over keys `[B, S, K, D]` and values `[B, S, K, E]`, as `[B, 1, H, E]`."""
    q, k, v = (x.to(compute_dtype(x)) for x in (q, k, v))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    only_last = hides_only_later_keys(mask)
    visible = None if only_last or mask.sees_all(k.shape[1]) else mask.row(k)
    bias = None
    if score_mod.bias is not None:
        index = torch.arange(k.shape[1], device=q.device)
        bias = score_mod.block_bias(index[:1], index, mask, q)
    args = SplitKeysArgs(
        q=q[:, 0],
        k=k,
        v=v,
        visible=None if visible is None else visible[:, 0, 0].contiguous(),
        bias=None if bias is None else bias[:, :, 0],
        last=mask.query_index[:, 0] if only_last and mask.query_index is not None else None,
        sink_logits=score_mod.sink_logits,
        scale=score_mod.scale,
        softcap=score_mod.softcap or 0.0,
    )
    y: Tensor = split_keys_op(args)
    return y[:, None]


def hides_only_later_keys(mask: Mask) -> bool:
    """Whether a mask of one query per row hides no key but those behind it, whose index is that of their slot.

    >>> hides_only_later_keys(Mask(causal=True, query_index=torch.tensor([[3]])))
    True
    >>> hides_only_later_keys(Mask(causal=True, window=2, query_index=torch.tensor([[3]])))
    False
    """
    return (
        mask.causal
        and mask.aligned
        and mask.query_index is not None
        and mask.key_index is None
        and mask.window is None
        and mask.pattern is None
        and mask.prefix_length is None
        and mask.key_mask is None
        and mask.key_document_ids is None
    )


@custom_op("phasor::split_keys_attention")
def split_keys_op(args: SplitKeysArgs) -> Tensor:
    """Averages of values by head, `[B, H, E]`."""
    from phasor.ops.attention import split_keys_kernel

    return split_keys_kernel.forward(args)


@split_keys_op.register_fake
def _(args: SplitKeysArgs) -> Tensor:
    return args.q.new_empty((*args.q.shape[:2], args.v.shape[-1]))
