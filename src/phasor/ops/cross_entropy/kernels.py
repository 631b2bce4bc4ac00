"""A row of logits judged and turned into its gradient, in one launch that passes over the row twice."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.launch import on_device


@triton.jit
def _shaped(x, multiplier, softcap, CAPPED: tl.constexpr):
    z = x.to(tl.float32) * multiplier
    if CAPPED:
        z = softcap - 2.0 * softcap / (tl.exp(2.0 * z / softcap) + 1.0)  # softcap * tanh(z / softcap)
    return z


@triton.jit
def _judge(
    logits,
    targets,
    weights,
    each,
    lses,
    V,
    row_stride,
    smoothing,
    z_loss,
    multiplier,
    softcap,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    weight = tl.load(weights + row).to(tl.float32)
    if weight == 0.0:
        tl.store(each + row, 0.0)
        tl.store(lses + row, 0.0)
        if GRADIENT:
            for start in range(0, V, BLOCK):
                at = start + tl.arange(0, BLOCK)
                tl.store(logits + at, tl.zeros([BLOCK], logits.dtype.element_ty), mask=at < V)
    else:
        target = tl.load(targets + row)
        aim = _shaped(tl.load(logits + target), multiplier, softcap, CAPPED)
        largest, total, plain_sum = float("-inf"), 0.0, 0.0
        for start in range(0, V, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(logits + at, mask=at < V, other=0.0, eviction_policy="evict_last")
            z = _shaped(x, multiplier, softcap, CAPPED)
            if SMOOTHED:
                plain_sum += tl.sum(tl.where(at < V, z, 0.0))
            z = tl.where(at < V, z, float("-inf"))
            before = largest
            largest = tl.maximum(before, tl.max(z))
            total = total * tl.exp(before - largest) + tl.sum(tl.exp(z - largest))
        lse = largest + tl.log(total)
        loss = lse - (1.0 - smoothing) * aim
        if SMOOTHED:
            loss -= smoothing * plain_sum / V
        tl.store(each + row, loss)
        tl.store(lses + row, lse)
        if GRADIENT:
            tl.debug_barrier()  # no warp writes before all have read: those of a short row read the same numbers
            share, spread = 1.0 + 2.0 * z_loss * lse, smoothing / V
            for start in range(0, V, BLOCK):
                at = start + tl.arange(0, BLOCK)
                x = tl.load(logits + at, mask=at < V, other=0.0, eviction_policy="evict_first")
                z = _shaped(x, multiplier, softcap, CAPPED)
                slope = share * tl.exp(z - lse) - spread - tl.where(at == target, 1.0 - smoothing, 0.0)
                slope *= weight * multiplier
                if CAPPED:
                    slope *= 1.0 - (z / softcap) * (z / softcap)
                tl.store(logits + at, slope.to(logits.dtype.element_ty), mask=at < V)


def judge(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor,
    smoothing: float,
    z_loss: float,
    multiplier: float,
    softcap: float | None,
    gradient: bool,
    block: int = 4096,
    warps: int = 8,
) -> tuple[Tensor, Tensor]:
    """`cross_entropy_ref` as one kernel, a program a row; targets must lie within the vocabulary."""
    rows, vocabulary = logits.shape
    each = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lses = torch.empty_like(each)
    with on_device(logits):
        _judge[(rows,)](
            logits,
            targets.contiguous(),
            weights.contiguous(),
            each,
            lses,
            vocabulary,
            logits.stride(0),
            float(smoothing),
            float(z_loss),
            float(multiplier),
            float(softcap or 1.0),
            CAPPED=softcap is not None,
            SMOOTHED=smoothing > 0,
            GRADIENT=gradient,
            BLOCK=min(block, triton.next_power_of_2(vocabulary)),
            num_warps=warps,
        )
    return each, lses
