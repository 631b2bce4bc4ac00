"""A mixture of experts for a few rows: only the experts that a row has chosen are read, each of them once.

Routing stays on the device, and no shape depends on it. A step is three kernels. The first chooses the experts of every
row and lists those in use. The second has programs for every expert in use: it multiplies all rows by its matrix, which
costs no more than its own rows as long as reading the matrix does. The third adds up the experts' results by their
weights, in a fixed order: its programs have a share of the experts and of their inputs each, and the last program to
finish combines them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.decode.arguments import ExpertsArgs, NormArgs
from phasor.ops.decode.gemv import activate_tile
from phasor.ops.decode.tiles import Tiles
from phasor.ops.pdl import pdl_launch, pdl_wait

TARGET_PROGRAMS = 264  # how many keep a large GPU busy
MAX_GROUPS = 8  # of experts that a program of the last kernel takes one after the other
ONE_ROW_TILES, TILES = Tiles(32, 128, 4), Tiles(64, 64, 4, 4)


def choose_expert_tiles(rows: int) -> Tiles:
    """The tiles of an expert's matrices."""
    return ONE_ROW_TILES if rows == 1 else TILES


@triton.jit
def route_kernel(
    logits_ptr, weights_ptr, active_ptr, M, E, slots, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Weights `[M, E]` of the experts, 0 for those not chosen, and in `active [slots]` those that any row chose."""
    pdl_wait(USE_PDL)
    row, expert = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_E)
    real, mask = expert < E, (row < M) & (expert < E)[None, :]
    logits = tl.load(logits_ptr + row * E + expert[None, :], mask=mask, other=0.0).to(tl.float32)
    # Whatever the logits are, an expert that exists comes before one that does not.
    finite = tl.where(logits == logits, tl.minimum(tl.maximum(logits, -3e38), 3e38), -3e38)
    rest = tl.where(real[None, :], finite, float("-inf"))
    for _ in tl.range(TOP_K):
        rest = tl.where(expert[None, :] == tl.argmax(rest, axis=1)[:, None], float("-inf"), rest)
    chosen = real[None, :] & (rest == float("-inf"))
    share = tl.exp(logits - tl.max(tl.where(real[None, :], logits, float("-inf")), axis=1)[:, None])
    share = tl.where(real[None, :], share, 0.0)
    total = tl.sum(tl.where(chosen, share, 0.0) if NORMALIZE else share, axis=1)
    weights = tl.where(chosen, share / total[:, None], 0.0)
    tl.store(weights_ptr + row * E + expert[None, :], weights, mask=mask)
    used = tl.max(tl.where(chosen & (row < M), 1, 0), axis=0)
    slot = tl.cumsum(used, axis=0) - 1
    tl.store(active_ptr + slot, expert, mask=used > 0)
    tl.store(active_ptr + expert, tl.full([BLOCK_E], -1, tl.int32), mask=(expert >= tl.sum(used)) & (expert < slots))


@triton.jit
def load_tile(weight_ptrs, offs_k, stop, stride, mask_n):
    """A tile of weights: some inputs of some outputs, which lie side by side."""
    mask = (offs_k < stop)[:, None] & mask_n[None, :]
    return tl.load(weight_ptrs + offs_k[:, None] * stride, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def expert_gemm(
    x_ptr, norm_ptr, norm_offset, eps, weight_ptrs, second_ptrs, mask_n, begin, stop, stride, M, K,
    GLU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """`norm(x) W` over the inputs `begin` to `stop` of rows `[M, K]`; float32 `[BLOCK_M, BLOCK_N]`.

    With GLU there are two matrices, and a result of each. A norm needs all of the inputs.
    """
    if BLOCK_M == 1:
        partial = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
        second_partial = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
        sum_squares = tl.zeros([BLOCK_K], tl.float32)
        offs_k = begin + tl.arange(0, BLOCK_K)
        w = load_tile(weight_ptrs, offs_k, stop, stride, mask_n)
        if GLU:
            second = load_tile(second_ptrs, offs_k, stop, stride, mask_n)
        for start in tl.range(begin, stop, BLOCK_K):
            offs_k = start + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + offs_k, mask=offs_k < stop, other=0.0).to(tl.float32)
            prefetched = load_tile(weight_ptrs, offs_k + BLOCK_K, stop, stride, mask_n)
            if GLU:
                second_prefetched = load_tile(second_ptrs, offs_k + BLOCK_K, stop, stride, mask_n)
            if norm_ptr is not None:
                sum_squares += x * x
                x *= norm_offset + tl.load(norm_ptr + offs_k, mask=offs_k < stop, other=0.0).to(tl.float32)
            partial += w.to(tl.float32) * x[:, None]
            w = prefetched
            if GLU:
                second_partial += second.to(tl.float32) * x[:, None]
                second = second_prefetched
        acc, second_acc = tl.sum(partial, axis=0)[None, :], tl.sum(second_partial, axis=0)[None, :]
        if norm_ptr is not None:
            rstd = tl.rsqrt(tl.sum(sum_squares, axis=0) / K + eps)
            acc, second_acc = acc * rstd, second_acc * rstd
    else:
        offs_m = tl.arange(0, BLOCK_M)[:, None]
        acc, second_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        row_squares = tl.zeros([BLOCK_M], tl.float32)
        for start in tl.range(begin, stop, BLOCK_K, num_stages=NUM_STAGES):
            offs_k = start + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + offs_m * K + offs_k[None, :], mask=(offs_m < M) & (offs_k < stop)[None, :], other=0.0)
            if norm_ptr is not None:
                wide = x.to(tl.float32)
                row_squares += tl.sum(wide * wide, axis=1)
                norm_weight = tl.load(norm_ptr + offs_k, mask=offs_k < stop, other=0.0).to(tl.float32)
                x = (wide * (norm_offset + norm_weight)[None, :]).to(x_ptr.dtype.element_ty)
            acc = tl.dot(x, load_tile(weight_ptrs, offs_k, stop, stride, mask_n), acc, input_precision="ieee")
            if GLU:
                w = load_tile(second_ptrs, offs_k, stop, stride, mask_n)
                second_acc = tl.dot(x, w, second_acc, input_precision="ieee")
        if norm_ptr is not None:
            row_rstd = tl.rsqrt(row_squares / K + eps)[:, None]
            acc, second_acc = acc * row_rstd, second_acc * row_rstd
    return acc, second_acc


@triton.jit
def activate_expert(x, up, limit, gain, ACTIVATION: tl.constexpr, GLU: tl.constexpr):
    """`act(x)`; with GLU, `act(gate) * up` of `x`, the gates, and `up`."""
    if ACTIVATION == "swiglu-clamped":
        gate = tl.minimum(x, limit)
        y = gate * tl.sigmoid(gain * gate) * (tl.minimum(tl.maximum(up, -limit), limit) + 1.0)
    elif GLU:
        y = activate_tile(x, ACTIVATION) * up
    else:
        y = activate_tile(x, ACTIVATION)
    return y


@triton.jit
def expert_up_kernel(
    x_ptr, norm_ptr, norm_offset, eps, active_ptr, weight_ptr, bias_ptr, limit, gain, out_ptr, M, N, K,
    ACTIVATION: tl.constexpr, GLU: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """`out[slot] = act(norm(x) W + bias)` of the expert in each slot, `[slots, M, N]`; with GLU gates come first."""
    pdl_wait(USE_PDL)
    slot = tl.program_id(1)
    expert = tl.load(active_ptr + slot).to(tl.int64)
    if expert < 0:
        return
    stride = N * 2 if GLU else N
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    weight_ptrs = weight_ptr + expert * K * stride + offs_n[None, :]
    acc, up = expert_gemm(
        x_ptr, norm_ptr, norm_offset, eps, weight_ptrs, weight_ptrs + N, mask_n, 0, K, stride, M, K,
        GLU, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
    )  # fmt: skip
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert * stride + offs_n
        acc += tl.load(bias_ptrs, mask=mask_n, other=0.0).to(tl.float32)[None, :]
        if GLU:
            up += tl.load(bias_ptrs + N, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    y = activate_expert(acc, up, limit, gain, ACTIVATION, GLU)
    offs_m = tl.arange(0, BLOCK_M)[:, None]
    out_ptrs = out_ptr + (slot * M + offs_m).to(tl.int64) * N + offs_n[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=(offs_m < M) & mask_n[None, :])


@triton.jit
def expert_down_kernel(
    x_ptr, active_ptr, weights_ptr, weight_ptr, bias_ptr, residual_ptr, multiplier, partial_ptr, arrived_ptr, out_ptr,
    M, N, K, E, slots, share,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """`out = residual + multiplier * sum_e weight_e (x_e W_e + bias_e)`, without the terms whose pointers are None.

    A program has a share of the slots and `share` of the inputs of their experts.
    """
    pdl_wait(USE_PDL)
    group, groups, split = tl.program_id(1), tl.num_programs(1), tl.program_id(2)
    parts = groups * tl.num_programs(2)
    offs_m, offs_n = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < M, offs_n < N
    begin, stop = split * share, tl.minimum((split + 1) * share, K)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for slot in tl.range(group, slots, groups):
        expert = tl.load(active_ptr + slot).to(tl.int64)
        if expert >= 0:
            weight_ptrs = weight_ptr + expert * K * N + offs_n[None, :]
            acc, _ = expert_gemm(
                x_ptr + slot * M * K, None, 0.0, 0.0, weight_ptrs, weight_ptrs, mask_n, begin, stop, N,
                M, K, False, BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
            )  # fmt: skip
            if bias_ptr is not None:
                bias = tl.load(bias_ptr + expert * N + offs_n, mask=offs_n < tl.where(split == 0, N, 0), other=0.0)
                acc += bias.to(tl.float32)[None, :]
            weight = tl.load(weights_ptr + offs_m * E + expert, mask=mask_m, other=0.0)[:, None]
            total += tl.where(weight != 0.0, weight * acc, 0.0)  # rows of other experts may not be finite
    offsets, mask = offs_m[:, None] * N + offs_n[None, :], mask_m[:, None] & mask_n[None, :]
    size = M * N
    tl.store(partial_ptr + (group * tl.num_programs(2) + split) * size + offsets, total, mask=mask)
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel") == parts - 1:
        tl.store(arrived_ptr + tl.program_id(0), 0)
        y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for part in tl.range(parts, loop_unroll_factor=8):  # loads of several parts at a time
            y += tl.load(partial_ptr + part * size + offsets, mask=mask, other=0.0, cache_modifier=".cg")
        if residual_ptr is not None:
            y = tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32) + multiplier * y
        tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)


class ExpertsWorkspace:
    """Memory of one step: the routing, hidden features of the experts in use, and sums until they are combined.

    All layers of a step with experts of these sizes can share one.
    """

    def __init__(self, rows: int, experts: ExpertsArgs, dtype: torch.dtype, device: torch.device) -> None:
        count, hidden, dim = experts.down.shape
        self.slots = min(count, rows * experts.top_k)
        self.weights = torch.empty(rows, count, device=device)
        self.active = torch.empty(self.slots, dtype=torch.int32, device=device)
        self.hidden = torch.empty(self.slots, rows, hidden, dtype=dtype, device=device)
        block_n, block_k = choose_expert_tiles(rows)[:2]
        tiles = triton.cdiv(dim, block_n)
        self.groups = min(self.slots, MAX_GROUPS)
        splits = max(1, min(TARGET_PROGRAMS // (tiles * self.groups), hidden // (2 * block_k)))
        self.share = triton.cdiv(triton.cdiv(hidden, splits), block_k) * block_k
        self.splits = triton.cdiv(hidden, self.share)
        self.partial = torch.empty(self.groups * self.splits, rows, dim, device=device)
        self.arrived = torch.zeros(tiles, dtype=torch.int32, device=device)


def experts(
    x: Tensor,
    logits: Tensor,
    experts: ExpertsArgs,
    out: Tensor,
    workspace: ExpertsWorkspace,
    *,
    norm: NormArgs | None = None,
    residual: Tensor | None = None,
    multiplier: float = 1.0,
    pdl: bool = False,
) -> Tensor:
    """`out = residual + multiplier * sum_e weight_e expert_e(norm(x))` of rows `[rows, dim]`; `out` may be a residual.

    `logits [rows, experts]` are the router's, of the normalized rows.
    """
    rows, dim = x.shape
    count, hidden, _ = experts.down.shape
    space, slots = workspace, workspace.slots
    tiles = choose_expert_tiles(rows)
    block_m = 1 if rows == 1 else max(16, triton.next_power_of_2(rows))
    common = {"BLOCK_M": block_m, "BLOCK_N": tiles.block_n, "NUM_STAGES": tiles.num_stages, "USE_PDL": pdl}
    block_k = tiles.block_k * 2 // x.element_size() if rows > 1 else tiles.block_k  # tiles in flight fit into memory
    common |= {"BLOCK_K": block_k, "num_warps": tiles.num_warps, **pdl_launch(pdl)}
    route_kernel[(1,)](
        logits, space.weights, space.active, rows, count, slots, experts.top_k, experts.normalize,
        BLOCK_M=triton.next_power_of_2(rows), BLOCK_E=triton.next_power_of_2(count), USE_PDL=pdl,
        num_warps=4 if rows <= 16 else 8, **pdl_launch(pdl),
    )  # fmt: skip
    expert_up_kernel[(triton.cdiv(hidden, tiles.block_n), slots)](
        x, *(norm or (None, 0.0, 0.0)), space.active, experts.up, experts.up_bias, experts.limit, experts.gain,
        space.hidden, rows, hidden, dim, experts.activation, experts.glu, **common,
    )  # fmt: skip
    expert_down_kernel[(triton.cdiv(dim, tiles.block_n), space.groups, space.splits)](
        space.hidden, space.active, space.weights, experts.down, experts.down_bias, residual, multiplier,
        space.partial, space.arrived, out, rows, dim, hidden, count, slots, space.share, **common,
    )  # fmt: skip
    return out
