"""The cross-entropy of rows of logits and its gradient, in one launch that passes over each row twice."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.launch import KernelLauncher


@triton.jit
def _scale_and_softcap(x, multiplier, softcap, HAS_SOFTCAP: tl.constexpr):
    z = x.to(tl.float32) * multiplier
    if HAS_SOFTCAP:
        z = softcap - 2.0 * softcap / (tl.exp(2.0 * z / softcap) + 1.0)  # softcap * tanh(z / softcap)
    return z


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,
    target_ptr,
    weight_ptr,
    loss_ptr,
    lse_ptr,
    V,
    stride_m,
    label_smoothing,
    z_loss,
    multiplier,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_GRAD: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One row of V logits: its loss and log-sum-exp, and with HAS_GRAD its gradient, written over the logits."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_m
    weight = tl.load(weight_ptr + row).to(tl.float32)
    if weight == 0.0:
        tl.store(loss_ptr + row, 0.0)
        tl.store(lse_ptr + row, 0.0)
        if HAS_GRAD:
            for start in range(0, V, BLOCK_V):
                cols = start + tl.arange(0, BLOCK_V)
                tl.store(logits_ptr + cols, tl.zeros([BLOCK_V], logits_ptr.dtype.element_ty), mask=cols < V)
    else:
        target = tl.load(target_ptr + row)
        z_target = _scale_and_softcap(tl.load(logits_ptr + target), multiplier, softcap, HAS_SOFTCAP)
        m_i, l_i, z_sum = float("-inf"), 0.0, 0.0
        for start in range(0, V, BLOCK_V):
            cols = start + tl.arange(0, BLOCK_V)
            x = tl.load(logits_ptr + cols, mask=cols < V, other=0.0, eviction_policy="evict_last")
            z = _scale_and_softcap(x, multiplier, softcap, HAS_SOFTCAP)
            if HAS_SMOOTHING:
                z_sum += tl.sum(tl.where(cols < V, z, 0.0))
            z = tl.where(cols < V, z, float("-inf"))
            m_before = m_i
            m_i = tl.maximum(m_before, tl.max(z))
            l_i = l_i * tl.exp(m_before - m_i) + tl.sum(tl.exp(z - m_i))
        lse = m_i + tl.log(l_i)
        loss = lse - (1.0 - label_smoothing) * z_target
        if HAS_SMOOTHING:
            loss -= label_smoothing * z_sum / V
        tl.store(loss_ptr + row, loss)
        tl.store(lse_ptr + row, lse)
        if HAS_GRAD:
            tl.debug_barrier()  # no warp writes before all have read: the warps of a short row read the same elements
            p_scale, smooth = 1.0 + 2.0 * z_loss * lse, label_smoothing / V
            for start in range(0, V, BLOCK_V):
                cols = start + tl.arange(0, BLOCK_V)
                x = tl.load(logits_ptr + cols, mask=cols < V, other=0.0, eviction_policy="evict_first")
                z = _scale_and_softcap(x, multiplier, softcap, HAS_SOFTCAP)
                dz = p_scale * tl.exp(z - lse) - smooth - tl.where(cols == target, 1.0 - label_smoothing, 0.0)
                dz *= weight * multiplier
                if HAS_SOFTCAP:
                    dz *= 1.0 - (z / softcap) * (z / softcap)
                tl.store(logits_ptr + cols, dz.to(logits_ptr.dtype.element_ty), mask=cols < V)


launch_cross_entropy = KernelLauncher(_cross_entropy_kernel)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor,
    label_smoothing: float,
    z_loss: float,
    multiplier: float,
    softcap: float | None,
    gradient: bool,
    block_v: int = 4096,
    num_warps: int = 8,
) -> tuple[Tensor, Tensor]:
    """`cross_entropy_ref` as one kernel with one program per row; targets must lie within the vocabulary."""
    rows, vocab_size = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(losses)
    tensors = {"logits_ptr": logits, "target_ptr": targets.contiguous(), "weight_ptr": weights.contiguous()}
    launch_cross_entropy(
        logits,
        {**tensors, "loss_ptr": losses, "lse_ptr": lse},
        (rows,),
        V=vocab_size,
        stride_m=logits.stride(0),
        label_smoothing=float(label_smoothing),
        z_loss=float(z_loss),
        multiplier=float(multiplier),
        softcap=float(softcap or 1.0),
        HAS_SOFTCAP=softcap is not None,
        HAS_SMOOTHING=label_smoothing > 0,
        HAS_GRAD=gradient,
        BLOCK_V=min(block_v, triton.next_power_of_2(vocab_size)),
        num_warps=num_warps,
    )
    return losses, lse
