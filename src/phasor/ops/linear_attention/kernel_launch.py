"""Launches of the kernels of linear attention, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phasor.ops.launch import KernelLauncher, cdiv, contiguous, next_power_of_2
from phasor.ops.linear_attention.arguments import LinearAttentionArgs
from phasor.ops.linear_attention.backward_kernels import dstate_kernel, dz_kernel, gradient_kernel
from phasor.ops.linear_attention.chunked import CHUNK
from phasor.ops.linear_attention.forward_kernels import output_kernel, solve_kernel, state_kernel

MIN_TILE = 16  # features: the least that tensor cores multiply

launch_solve = KernelLauncher(solve_kernel)
launch_state = KernelLauncher(state_kernel)
launch_output = KernelLauncher(output_kernel)
launch_dz = KernelLauncher(dz_kernel)
launch_dstate = KernelLauncher(dstate_kernel)
launch_gradient = KernelLauncher(gradient_kernel)


class Problem:
    """Sizes of one call, and the scalars that all its kernels share."""

    def __init__(self, args: LinearAttentionArgs) -> None:
        (self.batch, key_heads, self.tokens, self.key_dim), (heads, self.value_dim) = args.k.shape, args.v.shape[1::2]
        self.heads, self.group_size, self.rows = heads, heads // key_heads, self.batch * heads
        self.chunks = cdiv(self.tokens, CHUNK)
        self.is_delta, self.is_float32 = args.strength is not None, args.v.dtype == torch.float32
        self.key_tile, self.value_tile = (max(MIN_TILE, next_power_of_2(n)) for n in (self.key_dim, self.value_dim))
        self.scalars: dict[str, Any] = {
            "num_tokens": self.tokens, "num_heads": heads, "group_size": self.group_size, "KEY_DIM": self.key_dim,
            "VALUE_DIM": self.value_dim, "CHUNK": CHUNK, "PRECISION": "tf32x3" if self.is_float32 else "tf32",
            "HAS_STARTS": args.starts is not None,
        }  # fmt: skip

    def options(self, num_warps: int, num_stages: int, **blocks: int) -> dict[str, Any]:
        """The scalars, with the tiles and options of a launch; float32 takes twice the registers and shared memory."""
        if self.is_float32:
            num_warps, num_stages = 8, 1
        return {**self.scalars, **blocks, "num_warps": num_warps, "num_stages": num_stages}

    def state_block(self) -> int:
        """How many value features one program carries through all chunks: few, where there are few heads."""
        return min(self.value_tile, 32 if self.rows * self.value_dim >= 132 * 2 * 32 else 16)


def strides(**tensors: Tensor) -> dict[str, int]:
    """The strides of batch, heads and tokens of `[B, H, T, D]` by the names that kernels have for them."""
    return {f"stride_{name}{dim}": x.stride(i) for name, x in tensors.items() for i, dim in enumerate("bht")}


def for_kernels(args: LinearAttentionArgs) -> LinearAttentionArgs:
    """The arguments as kernels read them: contiguous features, gates and states, and documents' starts as bytes."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (args.q, args.k, args.v))
    return LinearAttentionArgs(
        q, k, v, args.log_decay.contiguous(), contiguous(args.strength), contiguous(args.state),
        None if args.starts is None else args.starts.contiguous().view(torch.uint8),
    )  # fmt: skip


def forward(args: LinearAttentionArgs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, the last state, and what the backward pass needs: the inverses of the chunks' systems `[B, H, T, CHUNK]`
    and what tokens wrote `[B, H, T, value_dim]`, both empty for retention, and the state before each chunk.
    """
    args = for_kernels(args)
    problem, k, v = Problem(args), args.k, args.v
    tokens = (problem.batch, problem.heads, problem.tokens)
    per_state = (problem.key_dim, problem.value_dim)
    gates = {"g_ptr": args.log_decay, "starts_ptr": args.starts}
    inverse, z, w = v.new_empty(0), v.new_empty(0), None
    if problem.is_delta:
        inverse, z = v.new_empty(*tokens, CHUNK), v.new_empty(*tokens, problem.value_dim)
        w = v.new_empty(*tokens, problem.key_dim)
        launch_solve(
            v, {"k_ptr": k, "v_ptr": v, "g_ptr": args.log_decay, "beta_ptr": args.strength, "starts_ptr": args.starts,
                "inverse_ptr": inverse, "w_ptr": w, "u_ptr": z},
            (problem.chunks, problem.rows), **strides(k=k, v=v),
            **problem.options(
                4, 2, BLOCK_K=problem.key_tile, BLOCK_V=min(64, problem.value_tile), LOG2_CHUNK=CHUNK.bit_length() - 1
            ),
        )  # fmt: skip
    written = z if problem.is_delta else v
    states = v.new_empty(*tokens[:2], problem.chunks, *per_state)
    final = v.new_empty(*tokens[:2], *per_state, dtype=torch.float32)
    block = problem.state_block()
    launch_state(
        v, {"k_ptr": k, "z_ptr": written, "w_ptr": w, **gates, "state_ptr": args.state, "states_ptr": states,
            "final_ptr": final},
        (cdiv(problem.value_dim, block), problem.rows), **strides(k=k, z=written),
        **problem.options(4, 3, BLOCK_K=problem.key_tile, BLOCK_V=block), HAS_STATE=args.state is not None,
        IS_DELTA=problem.is_delta,
    )  # fmt: skip
    out = v.new_empty(v.shape)
    block = min(128, problem.value_tile)
    launch_output(
        v, {"q_ptr": args.q, "k_ptr": k, "z_ptr": written, **gates, "states_ptr": states, "out_ptr": out},
        (cdiv(problem.value_dim, block), problem.chunks, problem.rows), **strides(q=args.q, k=k, z=written),
        **problem.options(4, 2, BLOCK_K=problem.key_tile, BLOCK_V=block),
    )  # fmt: skip
    return out, final, inverse, z, states


def backward(
    do: Tensor, dfinal: Tensor | None, args: LinearAttentionArgs, inverse: Tensor, z: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values, log decays, strengths (empty for retention) and of the first state."""
    args = for_kernels(args)
    problem, q, k, v = Problem(args), args.q, args.k, args.v
    do = do if do.stride(-1) == 1 else do.contiguous()
    tokens = (problem.batch, problem.heads, problem.tokens)
    gates = {"g_ptr": args.log_decay, "beta_ptr": args.strength, "starts_ptr": args.starts}
    w = v.new_empty(*tokens, problem.key_dim) if problem.is_delta else None
    dz = v.new_empty(v.shape)
    launch_dz(
        v, {"q_ptr": q, "k_ptr": k, "do_ptr": do, **gates, "inverse_ptr": inverse, "dz_ptr": dz, "w_ptr": w},
        (problem.chunks, problem.rows), **strides(q=q, k=k, do=do), IS_DELTA=problem.is_delta,
        **problem.options(4, 2, BLOCK_K=problem.key_tile, BLOCK_V=min(64, problem.value_tile)),
    )  # fmt: skip
    dstates, dstate = torch.empty_like(states), states.new_empty(*tokens[:2], *states.shape[3:], dtype=torch.float32)
    block = problem.state_block()
    launch_dstate(
        v, {"q_ptr": q, "k_ptr": k, "do_ptr": do, "w_ptr": w, "g_ptr": args.log_decay, "starts_ptr": args.starts,
            "dfinal_ptr": contiguous(dfinal), "dz_ptr": dz, "dstates_ptr": dstates, "dstate_ptr": dstate},
        (cdiv(problem.value_dim, block), problem.rows), **strides(q=q, k=k, do=do), IS_DELTA=problem.is_delta,
        **problem.options(4, 3, BLOCK_K=problem.key_tile, BLOCK_V=block), HAS_DFINAL=dfinal is not None,
    )  # fmt: skip
    written, block = z if problem.is_delta else v, min(64, problem.key_tile)
    parts = cdiv(problem.key_dim, block)
    # Several heads add to the gradient of one key head.
    dq, dk = v.new_empty(2, *tokens, problem.key_dim, dtype=v.dtype if problem.group_size == 1 else torch.float32)
    dv = v.new_empty(v.shape) if problem.is_delta else dz
    dg = v.new_empty(parts, *tokens, dtype=torch.float32)
    dbeta = torch.empty_like(dg) if problem.is_delta else dg.new_empty(0)
    launch_gradient(
        v, {"q_ptr": q, "k_ptr": k, "v_ptr": v, "z_ptr": written, "do_ptr": do, "dz_ptr": dz, **gates,
            "inverse_ptr": inverse, "states_ptr": states, "dstates_ptr": dstates, "dq_ptr": dq, "dk_ptr": dk,
            "dv_ptr": dv, "dg_ptr": dg, "dbeta_ptr": dbeta},
        (parts, problem.chunks, problem.rows), **strides(q=q, k=k, v=v, z=written, do=do),
        stride_part=dg.stride(0), IS_DELTA=problem.is_delta,
        **problem.options(8, 2, BLOCK_K=block, BLOCK_V=min(64, problem.value_tile)),
    )  # fmt: skip
    if problem.group_size > 1:
        dq, dk = (x.unflatten(1, (-1, problem.group_size)).sum(2).to(v.dtype) for x in (dq, dk))
    return dq, dk, dv, dg.sum(0), dbeta.sum(0), dstate
