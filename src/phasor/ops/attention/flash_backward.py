"""The backward pass of attention over intervals: one kernel goes by blocks of queries, the other by blocks of keys.

Weights are made again from the scores and the sums kept of the forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from phasor.ops.attention.flash_dkdv import keys_kernel
from phasor.ops.attention.flash_dq import delta_kernel, queries_kernel
from phasor.ops.attention.flash_tiles import LOG2E, settings
from phasor.ops.attention.intervals import query_ranges
from phasor.ops.launch import on_device


def backward(
    grad: Tensor, out: Tensor, logsumexp: Tensor, sinks: Tensor | None, learned: bool, told: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, of a LEARNED table `[distances, H]`, and of sink logits `[H]`."""
    q, k, v = told["q"], told["k"], told["v"]
    rows, queries, heads, width = q.shape
    keys, groups = k.shape[1:3]
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    told = told | {"logsumexp": logsumexp, "grad": grad}
    told |= {"grad_row": grad.stride(0), "grad_token": grad.stride(1), "grad_head": grad.stride(2)}
    delta = torch.empty_like(logsumexp)
    q_grad, k_grad, v_grad = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    by_queries, by_keys = settings("queries", q), settings("keys", q)
    blocks = triton.cdiv(queries, by_queries["M"])
    parts = torch.zeros(rows, heads, blocks, told["entries"] if learned else 0, device=q.device)
    ranges = query_ranges(told["bounds"], keys, by_keys["N"])
    with on_device(q):
        per = max(1, 4096 // told["D"])
        delta_kernel[(triton.cdiv(rows * queries * heads, per),)](
            out, grad, delta, queries, heads, rows * queries * heads, *grad.stride()[:3], width, told["D"], per
        )
        told["delta"] = delta
        queries_kernel[(blocks * heads * rows,)](q_grad=q_grad, table_grad=parts, LEARNED=learned, **told, **by_queries)
        keys_kernel[(triton.cdiv(keys, by_keys["N"]) * groups * rows,)](
            k_grad=k_grad,
            v_grad=v_grad,
            ranges=ranges,
            ranges_row=0 if len(ranges) == 1 else ranges.stride(0),
            **told,
            **by_keys,
        )
    sinks_grad = torch.zeros(0, device=q.device)
    if sinks is not None:
        weight = torch.exp2(sinks.float()[:, None] * LOG2E.value - logsumexp)
        sinks_grad = -(weight * delta).sum((0, 2))
    return q_grad, k_grad, v_grad, parts.sum((0, 2)).t(), sinks_grad
