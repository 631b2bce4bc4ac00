"""Kernels that put attention to two sets of keys together, forward and backward."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.launch import KernelLauncher, cdiv, next_power_of_2

ELEMENTS = 4096  # of a program
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(out_ptr, lse_ptr, num_tokens, num_heads, rows, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    """Rows of `[B, T, H, D]` in float32 with their logsumexp, -inf where there are no keys, and where both lie."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    batch, token, head = offs // (num_tokens * num_heads), offs // num_heads % num_tokens, offs % num_heads
    at = (batch * num_heads + head) * num_tokens + token
    offs_d = tl.arange(0, BLOCK_D)
    offsets = offs[:, None] * HEAD_DIM + offs_d[None, :]
    mask = (offs < rows)[:, None] & (offs_d < HEAD_DIM)[None, :]
    out = tl.load(out_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + at, mask=offs < rows, other=float("inf"))
    return out, tl.where(lse == float("inf"), float("-inf"), lse), offsets, mask, at, offs < rows


@triton.jit
def combine_kernel(out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, out_ptr, lse_ptr, num_tokens, num_heads, rows,
                   HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Outputs and their logsumexp."""
    a, lse_a, _, _, _, _ = load_rows(out_a_ptr, lse_a_ptr, num_tokens, num_heads, rows, HEAD_DIM, BLOCK_D, BLOCK)
    b, lse_b, offsets, mask, at, valid = load_rows(
        out_b_ptr, lse_b_ptr, num_tokens, num_heads, rows, HEAD_DIM, BLOCK_D, BLOCK
    )
    most = tl.maximum(lse_a, lse_b)
    most = tl.where(most == float("-inf"), 0.0, most)
    weight_a, weight_b = tl.exp2(lse_a - most), tl.exp2(lse_b - most)
    total = weight_a + weight_b
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    out = a * (weight_a * share)[:, None] + b * (weight_b * share)[:, None]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)
    lse = tl.where(total == 0.0, float("inf"), most + tl.log2(tl.where(total == 0.0, 1.0, total)))
    tl.store(lse_ptr + at, lse, mask=valid)


@triton.jit
def combine_backward_kernel(grad_ptr, grad_lse_ptr, out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, lse_ptr, da_ptr,
                            dlse_a_ptr, db_ptr, dlse_b_ptr, num_tokens, num_heads, rows, HEAD_DIM: tl.constexpr,
                            BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Gradients of both outputs, and of the logsumexp of both."""
    a, lse_a, _, _, _, _ = load_rows(out_a_ptr, lse_a_ptr, num_tokens, num_heads, rows, HEAD_DIM, BLOCK_D, BLOCK)
    b, lse_b, _, _, _, _ = load_rows(out_b_ptr, lse_b_ptr, num_tokens, num_heads, rows, HEAD_DIM, BLOCK_D, BLOCK)
    grad, lse, offsets, mask, at, valid = load_rows(
        grad_ptr, lse_ptr, num_tokens, num_heads, rows, HEAD_DIM, BLOCK_D, BLOCK
    )
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    weight_a, weight_b = tl.exp2(lse_a - lse), tl.exp2(lse_b - lse)
    difference = weight_a * weight_b * tl.sum(grad * (a - b), 1) * LN2
    dlse_a, dlse_b = difference, -difference
    if grad_lse_ptr is not None:
        grad_lse = tl.load(grad_lse_ptr + at, mask=valid, other=0.0)
        dlse_a += weight_a * grad_lse
        dlse_b += weight_b * grad_lse
    tl.store(da_ptr + offsets, (grad * weight_a[:, None]).to(da_ptr.dtype.element_ty), mask=mask)
    tl.store(db_ptr + offsets, (grad * weight_b[:, None]).to(db_ptr.dtype.element_ty), mask=mask)
    tl.store(dlse_a_ptr + at, dlse_a, mask=valid)
    tl.store(dlse_b_ptr + at, dlse_b, mask=valid)


def prepare(shape: tuple[int, ...]) -> tuple[tuple[int, ...], dict[str, int]]:
    rows, head_dim = shape[0] * shape[1] * shape[2], shape[3]
    block_d = next_power_of_2(head_dim)
    block = max(1, ELEMENTS // block_d)
    sizes = {"num_tokens": shape[1], "num_heads": shape[2], "rows": rows, "HEAD_DIM": head_dim}
    return (cdiv(rows, block),), {**sizes, "BLOCK_D": block_d, "BLOCK": block}


launch_forward = KernelLauncher(combine_kernel, prepare)
launch_backward = KernelLauncher(combine_backward_kernel, prepare)


def launch_combine(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    tensors = {"out_a_ptr": out_a, "lse_a_ptr": lse_a, "out_b_ptr": out_b, "lse_b_ptr": lse_b}
    launch_forward(out, {**tensors, "out_ptr": out, "lse_ptr": lse}, out.shape)


def launch_combine_backward(
    grad: Tensor, grad_lse: Tensor | None, inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> None:
    """From outputs and logsumexp of both sets, and the logsumexp of all, the gradients of the former four."""
    read = zip(("out_a_ptr", "lse_a_ptr", "out_b_ptr", "lse_b_ptr", "lse_ptr"), inputs, strict=True)
    written = zip(("da_ptr", "dlse_a_ptr", "db_ptr", "dlse_b_ptr"), grads, strict=True)
    launch_backward(grad, {"grad_ptr": grad, "grad_lse_ptr": grad_lse, **dict(read), **dict(written)}, grad.shape)
