"""Launches of the kernels of linear attention, forward and backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.config.recurrent import DELTA_CHUNK
from phasor.ops.launch import KernelLauncher, cdiv, contiguous, next_power_of_2, stride_or_0
from phasor.ops.linear_attention.arguments import LinearAttentionArgs
from phasor.ops.linear_attention.backward_kernels import dstate_kernel, dz_kernel, gradient_kernel
from phasor.ops.linear_attention.forward_kernels import decay_kernel, output_kernel, solve_kernel, state_kernel

# Features of a tile of float32, and of 16 bits, at least: for fewer of these in chunks of 64 tokens Triton 3.6 compiles
# code for Hopper that ends with an illegal memory access.
MIN_TILES = {True: 16, False: 64}
# Few heads carry their states through a long row on few of a GPU's processors. Segments of it are then walked at the
# same time, three times: for what they write, for what they leave of a state, and from the state each begins with.
SEGMENT_CHUNKS = 96  # chunks, at least
MIN_SEGMENTS, MAX_SEGMENTS = 4, 8
SEGMENT_BLOCK = 64  # value features of a program
OUTPUT_CHUNK = 64  # tokens of a program that computes outputs, of which a longer chunk has several parts
BUSY_PROGRAMS = 256  # about what a GPU runs at the same time

launch_decay = KernelLauncher(decay_kernel)
launch_solve = KernelLauncher(solve_kernel)
launch_state = KernelLauncher(state_kernel)
launch_output = KernelLauncher(output_kernel)
launch_dz = KernelLauncher(dz_kernel)
launch_dstate = KernelLauncher(dstate_kernel)
launch_gradient = KernelLauncher(gradient_kernel)


class ChunkLayout:
    """Sizes of one call, and the scalars that all its kernels share."""

    def __init__(self, args: LinearAttentionArgs) -> None:
        (self.batch, key_heads, self.tokens, self.key_dim), (heads, self.value_dim) = args.k.shape, args.v.shape[1::2]
        self.heads, self.group_size, self.rows = heads, heads // key_heads, self.batch * heads
        self.chunk = args.chunk
        self.chunks = cdiv(self.tokens, self.chunk)
        self.is_delta, self.is_float32 = args.strength is not None, args.v.dtype == torch.float32
        least = MIN_TILES[self.is_float32]
        self.key_tile, self.value_tile = (max(least, next_power_of_2(n)) for n in (self.key_dim, self.value_dim))
        self.scalars: dict[str, Any] = {
            "num_tokens": self.tokens, "num_heads": heads, "group_size": self.group_size, "KEY_DIM": self.key_dim,
            "VALUE_DIM": self.value_dim, "CHUNK": self.chunk, "PRECISION": "ieee" if self.is_float32 else "tf32",
        }  # fmt: skip
        self.has_starts = args.starts is not None

    def options(self, num_warps: int, num_stages: int, **blocks: int) -> dict[str, Any]:
        """The scalars, with the tiles and options of a launch; float32 takes twice the registers and shared memory."""
        if self.is_float32:
            num_warps, num_stages = 8, 1
        return {**self.scalars, **blocks, "num_warps": num_warps, "num_stages": num_stages}

    def chunk_options(self, num_warps: int, num_stages: int, **blocks: int) -> dict[str, Any]:
        """The same for a kernel that computes chunks by themselves, decays included."""
        return self.options(num_warps, num_stages, **blocks) | {"HAS_STARTS": self.has_starts}

    def num_segments(self) -> int:
        """Into how many segments of chunks the pass of the state is cut."""
        busy = BUSY_PROGRAMS if self.is_delta else BUSY_PROGRAMS // 4  # a program of retention does less
        free = busy // (self.rows * cdiv(self.value_dim, SEGMENT_BLOCK))
        count = min(MAX_SEGMENTS, free, self.chunks // SEGMENT_CHUNKS)
        return count if count >= MIN_SEGMENTS else 1

    def state_options(self, segments: int) -> dict[str, Any]:
        """The scalars of a pass of the state; with few programs each has few value features."""
        block = 32 if self.rows * self.value_dim >= 32 * BUSY_PROGRAMS else 16
        block = min(self.value_tile, SEGMENT_BLOCK if segments > 1 else block)
        options = self.options(4, 2 if segments > 1 else 3, BLOCK_K=self.key_tile, BLOCK_V=block)
        return options | {"segment_chunks": cdiv(self.chunks, segments), "IS_DELTA": self.is_delta}


def strides(**tensors: Tensor) -> dict[str, int]:
    """The strides of batch, heads and tokens of `[B, H, T, D]` by the names that kernels have for them.

    That of a single row is 0: of a million tokens it would take 64 bits, for which kernels would be compiled again.
    """
    found: dict[str, int] = {}
    for name, x in tensors.items():
        found |= {f"stride_{name}b": stride_or_0(x, 0), f"stride_{name}h": x.stride(1), f"stride_{name}t": x.stride(2)}
    return found


def for_kernels(args: LinearAttentionArgs) -> LinearAttentionArgs:
    """The arguments as kernels read them: contiguous features, gates and states, and documents' starts as bytes."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (args.q, args.k, args.v))
    return LinearAttentionArgs(
        q, k, v, args.log_decay.contiguous(), contiguous(args.strength), contiguous(args.state),
        None if args.starts is None else args.starts.contiguous().view(torch.uint8),
    )  # fmt: skip


class ChunkDecays(NamedTuple):
    """The decays of all chunks, as `decay_kernel` computes them."""

    from_state: Tensor
    to_end: Tensor
    kept: Tensor

    def kept_over(self, segments: int) -> Tensor:
        """The decay of a state over each segment of chunks, `[B, H, segments]`."""
        chunks = self.kept.shape[-1]
        size = cdiv(chunks, segments)
        return F.pad(self.kept, (0, size * segments - chunks), value=1.0).unflatten(-1, (segments, size)).prod(-1)


def chunk_decays(layout: ChunkLayout, args: LinearAttentionArgs) -> ChunkDecays:
    """The decays that the passes of the state read."""
    from_state, to_end = (args.v.new_empty(args.log_decay.shape, dtype=torch.float32) for _ in range(2))
    kept = from_state.new_empty(layout.batch, layout.heads, layout.chunks)
    launch_decay(
        args.v, {"g_ptr": args.log_decay, "starts_ptr": args.starts, "from_state_ptr": from_state,
                 "to_end_ptr": to_end, "kept_ptr": kept},
        (layout.chunks, layout.rows), num_tokens=layout.tokens, num_heads=layout.heads, CHUNK=layout.chunk,
        HAS_STARTS=layout.has_starts, num_warps=1,
    )  # fmt: skip
    return ChunkDecays(from_state, to_end, kept)


def walk_states(
    layout: ChunkLayout,
    args: LinearAttentionArgs,
    decays: ChunkDecays,
    written: Tensor,
    w: Tensor | None,
    begin: Tensor | None = None,
    states: Tensor | None = None,
) -> Tensor:
    """The state after each segment `[B, H, segments, key_dim, value_dim]`, from those in `begin` or zero on.

    Where there are `states` to be filled, what tokens write replaces `written`.
    """
    segments = layout.num_segments()
    options = layout.state_options(segments)
    if layout.chunk > DELTA_CHUNK:
        options["num_warps"] = 8
    shape = layout.batch, layout.heads, segments, layout.key_dim, layout.value_dim
    final = args.v.new_empty(shape, dtype=torch.float32)
    launch_state(
        args.v, {"k_ptr": args.k, "z_ptr": written, "w_ptr": w, "to_end_ptr": decays.to_end, "kept_ptr": decays.kept,
                 "state_ptr": begin, "states_ptr": states, "final_ptr": final},
        (cdiv(layout.value_dim, options["BLOCK_V"]), layout.rows, segments), **strides(k=args.k, z=written),
        **options, HAS_STATE=begin is not None, HAS_STATES=states is not None, IS_TRANSITION=False,
    )  # fmt: skip
    return final


def transitions(layout: ChunkLayout, args: LinearAttentionArgs, decays: ChunkDecays, w: Tensor | None) -> Tensor:
    """The matrix that each segment multiplies the state before it by, `[B, H, segments, key_dim, key_dim]`; for
    retention a number, `[B, H, segments, 1, 1]`.
    """
    segments = layout.num_segments()
    if w is None:
        return decays.kept_over(segments)[..., None, None]
    block = min(layout.key_tile, SEGMENT_BLOCK)
    shape = layout.batch, layout.heads, segments, layout.key_dim, layout.key_dim
    final = args.v.new_empty(shape, dtype=torch.float32)
    options = layout.state_options(segments) | {"VALUE_DIM": layout.key_dim, "BLOCK_V": block}
    launch_state(
        args.v, {"k_ptr": args.k, "z_ptr": None, "w_ptr": w, "to_end_ptr": decays.to_end, "kept_ptr": decays.kept,
                 "state_ptr": None, "states_ptr": None, "final_ptr": final},
        (cdiv(layout.key_dim, block), layout.rows, segments), **strides(k=args.k, z=args.k), **options,
        HAS_STATE=False, HAS_STATES=False, IS_TRANSITION=True,
    )  # fmt: skip
    return final


def walk_dstates(
    layout: ChunkLayout,
    args: LinearAttentionArgs,
    decays: ChunkDecays,
    do: Tensor,
    w: Tensor | None,
    dz: Tensor,
    end: Tensor | None = None,
    dstates: Tensor | None = None,
) -> Tensor:
    """The gradient of the state before each segment, from those of the states after it in `end`, or zero, on.

    Where there are `dstates` to be filled, `dz` gets its share of them.
    """
    segments = layout.num_segments()
    options = layout.state_options(segments)
    shape = layout.batch, layout.heads, segments, layout.key_dim, layout.value_dim
    begin = args.v.new_empty(shape, dtype=torch.float32)
    launch_dstate(
        args.v, {"q_ptr": args.q, "k_ptr": args.k, "do_ptr": do, "w_ptr": w, "from_state_ptr": decays.from_state,
                 "to_end_ptr": decays.to_end, "kept_ptr": decays.kept,
                 "dfinal_ptr": contiguous(end), "dz_ptr": dz, "dstates_ptr": dstates, "dstate_ptr": begin},
        (cdiv(layout.value_dim, options["BLOCK_V"]), layout.rows, segments), **strides(q=args.q, k=args.k, do=do),
        **options, HAS_DFINAL=end is not None, HAS_STATES=dstates is not None,
    )  # fmt: skip
    return begin


def forward(args: LinearAttentionArgs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, the last state, and what the backward pass needs: the inverses of the chunks' systems `[B, H, T, chunk]`
    and what tokens wrote `[B, H, T, value_dim]`, both empty for retention, and the state before each chunk.
    """
    args = for_kernels(args)
    layout, k, v = ChunkLayout(args), args.k, args.v
    tokens = (layout.batch, layout.heads, layout.tokens)
    per_state = (layout.key_dim, layout.value_dim)
    gates = {"g_ptr": args.log_decay, "starts_ptr": args.starts}
    inverse, z, w = v.new_empty(0), v.new_empty(0), None
    if layout.is_delta:
        inverse, z = v.new_empty(*tokens, layout.chunk), v.new_empty(*tokens, layout.value_dim)
        w = v.new_empty(*tokens, layout.key_dim)
        launch_solve(
            v, {"k_ptr": k, "v_ptr": v, "g_ptr": args.log_decay, "beta_ptr": args.strength, "starts_ptr": args.starts,
                "inverse_ptr": inverse, "w_ptr": w, "u_ptr": z},
            (layout.chunks, layout.rows), **strides(k=k, v=v),
            **layout.chunk_options(4, 2, BLOCK_K=layout.key_tile, BLOCK_V=min(64, layout.value_tile)),
            LOG2_CHUNK=layout.chunk.bit_length() - 1,
        )  # fmt: skip
    written = z if layout.is_delta else v
    states = v.new_empty(*tokens[:2], layout.chunks, *per_state)
    segments, begin, decays = layout.num_segments(), args.state, chunk_decays(layout, args)
    if segments > 1:
        local, transition = walk_states(layout, args, decays, written, w), transitions(layout, args, decays, w)
        begin, carry = torch.empty_like(local), torch.matmul if layout.is_delta else torch.mul
        begin[:, :, 0] = 0.0 if args.state is None else args.state
        for i in range(segments - 1):
            begin[:, :, i + 1] = local[:, :, i] + carry(transition[:, :, i], begin[:, :, i])
    final = walk_states(layout, args, decays, written, w, begin, states)[:, :, -1].contiguous()
    out = v.new_empty(v.shape)
    block, chunk = min(128, layout.value_tile), min(layout.chunk, OUTPUT_CHUNK)
    launch_output(
        v, {"q_ptr": args.q, "k_ptr": k, "z_ptr": written, **gates, "states_ptr": states, "out_ptr": out},
        (cdiv(layout.value_dim, block), cdiv(layout.tokens, chunk), layout.rows), **strides(q=args.q, k=k, z=written),
        **layout.chunk_options(4, 2, BLOCK_K=layout.key_tile, BLOCK_V=block, CHUNK=chunk),
        PARTS=layout.chunk // chunk,
    )  # fmt: skip
    return out, final, inverse, z, states


def backward(
    do: Tensor, dfinal: Tensor | None, args: LinearAttentionArgs, inverse: Tensor, z: Tensor, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values, log decays, strengths (empty for retention) and of the first state."""
    args = for_kernels(args)
    layout, q, k, v = ChunkLayout(args), args.q, args.k, args.v
    do = do if do.stride(-1) == 1 else do.contiguous()
    tokens = (layout.batch, layout.heads, layout.tokens)
    gates = {"g_ptr": args.log_decay, "beta_ptr": args.strength, "starts_ptr": args.starts}
    w = v.new_empty(*tokens, layout.key_dim) if layout.is_delta else None
    dz = v.new_empty(v.shape)
    launch_dz(
        v, {"q_ptr": q, "k_ptr": k, "do_ptr": do, **gates, "inverse_ptr": inverse, "dz_ptr": dz, "w_ptr": w},
        (layout.chunks, layout.rows), **strides(q=q, k=k, do=do), IS_DELTA=layout.is_delta,
        **layout.chunk_options(4, 2, BLOCK_K=layout.key_tile, BLOCK_V=min(64, layout.value_tile)),
    )  # fmt: skip
    dstates, segments, end = torch.empty_like(states), layout.num_segments(), dfinal
    decays = chunk_decays(layout, args)
    if segments > 1:
        local, transition = walk_dstates(layout, args, decays, do, w, dz), transitions(layout, args, decays, w)
        end, carry = torch.empty_like(local), torch.matmul if layout.is_delta else torch.mul
        end[:, :, -1] = 0.0 if dfinal is None else dfinal
        for i in reversed(range(1, segments)):
            end[:, :, i - 1] = local[:, :, i] + carry(transition[:, :, i].mT, end[:, :, i])
    dstate = walk_dstates(layout, args, decays, do, w, dz, end, dstates)[:, :, 0].contiguous()
    written, block = z if layout.is_delta else v, min(64, layout.key_tile)
    parts = cdiv(layout.key_dim, block)
    # Several heads add to the gradient of one key head.
    dq, dk = v.new_empty(2, *tokens, layout.key_dim, dtype=v.dtype if layout.group_size == 1 else torch.float32)
    dv = v.new_empty(v.shape) if layout.is_delta else dz
    dg = v.new_empty(parts, *tokens, dtype=torch.float32)
    dbeta = torch.empty_like(dg) if layout.is_delta else dg.new_empty(0)
    launch_gradient(
        v, {"q_ptr": q, "k_ptr": k, "v_ptr": v, "z_ptr": written, "do_ptr": do, "dz_ptr": dz, **gates,
            "inverse_ptr": inverse, "states_ptr": states, "dstates_ptr": dstates, "dq_ptr": dq, "dk_ptr": dk,
            "dv_ptr": dv, "dg_ptr": dg, "dbeta_ptr": dbeta},
        (parts, layout.chunks, layout.rows), **strides(q=q, k=k, v=v, z=written, do=do),
        stride_part=dg.stride(0), IS_DELTA=layout.is_delta,
        **layout.chunk_options(8, 2, BLOCK_K=block, BLOCK_V=min(64, layout.value_tile)),
    )  # fmt: skip
    if layout.group_size > 1:
        dq, dk = (x.unflatten(1, (-1, layout.group_size)).sum(2).to(v.dtype) for x in (dq, dk))
    return dq, dk, dv, dg.sum(0), dbeta.sum(0), dstate
