"""One token of linear attention: the state is read and written once, by programs of some value features each."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.launch import KernelLauncher, cdiv, contiguous, next_power_of_2
from phasor.ops.linear_attention.arguments import LinearAttentionArgs

BLOCK_V = 16  # with heads of 128 this is eight programs per head, and a row of a tile is two sectors of memory


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
    state = tl.load(state_ptr + offsets, mask=mask, other=0.0) * decay
    if IS_DELTA:
        v = (v - tl.sum(state * k[:, None], 0)) * tl.load(beta_ptr + row).to(tl.float32)
    state += k[:, None] * v[None, :]
    tl.store(state_ptr + offsets, state, mask=mask)
    out = tl.sum(state * q[:, None], 0)
    tl.store(out_ptr + row * VALUE_DIM + offs_v, out.to(out_ptr.dtype.element_ty), mask=offs_v < VALUE_DIM)


launch_step = KernelLauncher(step_kernel)


def step(args: LinearAttentionArgs) -> Tensor:
    """The output `[B, H, 1, value_dim]`; the state is updated in place."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (args.q, args.k, args.v))
    (batch, key_heads, _, key_dim), (heads, value_dim) = k.shape, v.shape[1::2]
    out = v.new_empty(v.shape)
    launch_step(
        v, {"q_ptr": q, "k_ptr": k, "v_ptr": v, "g_ptr": args.log_decay.contiguous(),
            "beta_ptr": contiguous(args.strength), "starts_ptr": args.starts, "state_ptr": args.state, "out_ptr": out},
        (cdiv(value_dim, BLOCK_V), batch * heads), num_heads=heads, group_size=heads // key_heads,
        stride_qb=q.stride(0), stride_qh=q.stride(1), stride_kb=k.stride(0), stride_kh=k.stride(1),
        stride_vb=v.stride(0), stride_vh=v.stride(1), KEY_DIM=key_dim, VALUE_DIM=value_dim,
        BLOCK_K=next_power_of_2(key_dim), BLOCK_V=BLOCK_V, HAS_STARTS=args.starts is not None,
        IS_DELTA=args.strength is not None, num_warps=4,
    )  # fmt: skip
    return out
