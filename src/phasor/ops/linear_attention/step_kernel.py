"""One token of linear attention: the state is read and written once, by programs of some value features each."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.launch import KernelLauncher, cdiv, contiguous, next_power_of_2
from phasor.ops.linear_attention.arguments import LinearAttentionArgs

MIN_PROGRAMS = 256  # about two for each processor of a GPU; with fewer, heads are split
MIN_BLOCK_V = 32  # value features of a part of a head: a row of it is one line of memory
MAX_TILE = 128 * 128  # elements of a program
ELEMENTS_PER_WARP = 2048  # 64 registers of a thread


@triton.jit
def step_kernel(q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, starts_ptr, state_ptr, out_ptr,
                num_heads, group_size, stride_qb, stride_qh, stride_kb, stride_kh, stride_vb, stride_vh,
                KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
                HAS_STARTS: tl.constexpr, IS_DELTA: tl.constexpr):  # fmt: skip
    """The state after the token, and the output."""
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // num_heads, row % num_heads
    offs_k, offs_v = tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    offsets = row * KEY_DIM * VALUE_DIM + offs_k[:, None] * VALUE_DIM + offs_v[None, :]
    mask = (offs_k < KEY_DIM)[:, None] & (offs_v < VALUE_DIM)[None, :]
    key_head = head // group_size
    q = tl.load(q_ptr + batch * stride_qb + key_head * stride_qh + offs_k, mask=offs_k < KEY_DIM, other=0.0)
    k = tl.load(k_ptr + batch * stride_kb + key_head * stride_kh + offs_k, mask=offs_k < KEY_DIM, other=0.0)
    v = tl.load(v_ptr + batch * stride_vb + head * stride_vh + offs_v, mask=offs_v < VALUE_DIM, other=0.0)
    q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
    decay = tl.exp(tl.load(g_ptr + row).to(tl.float32))
    if HAS_STARTS:
        decay = tl.where(tl.load(starts_ptr + batch) != 0, 0.0, decay)
    state = tl.load(state_ptr + offsets, mask=mask, other=0.0)
    # What the query reads in the next state: in the old one, decayed, and in what is written.
    out = tl.sum(state * q[:, None], 0) * decay
    if IS_DELTA:
        v = (v - tl.sum(state * k[:, None], 0) * decay) * tl.load(beta_ptr + row).to(tl.float32)
    out += tl.sum(q * k, 0) * v
    tl.store(state_ptr + offsets, state * decay + k[:, None] * v[None, :], mask=mask)
    tl.store(out_ptr + row * VALUE_DIM + offs_v, out.to(out_ptr.dtype.element_ty), mask=offs_v < VALUE_DIM)


launch_step = KernelLauncher(step_kernel)


def choose_block(rows: int, key_tile: int, value_dim: int) -> int:
    """The value features of a program for that many heads of all rows.

    >>> [choose_block(heads, 128, 128) for heads in (16, 64, 128, 256)]
    [32, 32, 64, 128]
    """
    block = min(next_power_of_2(value_dim), max(MIN_BLOCK_V, MAX_TILE // key_tile))
    while block > MIN_BLOCK_V and rows * cdiv(value_dim, block) < MIN_PROGRAMS:
        block //= 2
    return block


def step(args: LinearAttentionArgs) -> Tensor:
    """The output `[B, H, 1, value_dim]`; the state is updated in place."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (args.q, args.k, args.v))
    (batch, key_heads, _, key_dim), (heads, value_dim) = k.shape, v.shape[1::2]
    out, key_tile = v.new_empty(v.shape), next_power_of_2(key_dim)
    block = choose_block(batch * heads, key_tile, value_dim)
    launch_step(
        v, {"q_ptr": q, "k_ptr": k, "v_ptr": v, "g_ptr": args.log_decay.contiguous(),
            "beta_ptr": contiguous(args.strength), "starts_ptr": args.starts, "state_ptr": args.state, "out_ptr": out},
        (cdiv(value_dim, block), batch * heads), num_heads=heads, group_size=heads // key_heads,
        stride_qb=q.stride(0), stride_qh=q.stride(1), stride_kb=k.stride(0), stride_kh=k.stride(1),
        stride_vb=v.stride(0), stride_vh=v.stride(1), KEY_DIM=key_dim, VALUE_DIM=value_dim,
        BLOCK_K=key_tile, BLOCK_V=block, HAS_STARTS=args.starts is not None,
        IS_DELTA=args.strength is not None, num_warps=max(1, key_tile * block // ELEMENTS_PER_WARP),
    )  # fmt: skip
    return out
