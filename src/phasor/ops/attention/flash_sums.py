"""Sums in fixed point as the kernels of attention read them: pairs of floats, counted from a row's first key."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.launch import KernelLauncher, cdiv

BLOCK = 1024


@triton.jit
def split_kernel(sums_ptr, first_ptr, out_ptr, tokens, stride_first, BLOCK: tl.constexpr):
    """Each sum as a float and the rest that it rounds away."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.load(sums_ptr + row * tokens + offs, mask=offs < tokens, other=0)
    sums -= tl.load(first_ptr + row * stride_first)
    high = sums.to(tl.float32)
    tl.store(out_ptr + row * 2 * tokens + offs, high, mask=offs < tokens)
    tl.store(out_ptr + (row * 2 + 1) * tokens + offs, (sums - high.to(tl.int64)).to(tl.float32), mask=offs < tokens)


launch_split = KernelLauncher(split_kernel)


def split_sums(sums: Tensor, keys: Tensor) -> Tensor:
    """Sums `[B, H, T]` as pairs of floats `[B, H, 2, T]`, counted from the first key: from nothing that comes later."""
    rows, heads, tokens = sums.shape
    pairs = torch.empty(rows, heads, 2, tokens, dtype=torch.float32, device=sums.device)
    launch_split(
        sums, {"sums_ptr": sums, "first_ptr": keys, "out_ptr": pairs}, (rows * heads, cdiv(tokens, BLOCK)),
        tokens=tokens, stride_first=keys.shape[2], BLOCK=BLOCK,
    )  # fmt: skip
    return pairs
