"""Routing as Triton kernels: a counting sort of choices by expert, and rows copied and summed in that order.

Choices are counted by chunks of tokens; then every chunk finds where its choices go from the counts of those before it.
The order is that of a stable sort, and no sum depends on the order in which programs run.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.launch import KernelLauncher, cdiv, contiguous, empty_dense, next_power_of_2
from phasor.ops.routing.arguments import CombineArgs

TILE = 4096  # elements of a tile of tokens by experts
MAX_BLOCK_M, MAX_BLOCK_D = 128, 2048
MAX_CHUNKS = 256  # every program adds up the counts of all


@triton.jit
def load_logits(logits_ptr, token, N, E, BLOCK_E: tl.constexpr):
    """The logits of some tokens `[BLOCK_M, 1]`, in float32 and -inf past the last expert; and in the order of choice.

    For any logits an expert that exists comes before one that does not.
    """
    expert = tl.arange(0, BLOCK_E)[None, :]
    mask = (token < N) & (expert < E)
    logits = tl.load(logits_ptr + token.to(tl.int64) * E + expert, mask=mask, other=0.0).to(tl.float32)
    finite = tl.where(logits == logits, tl.minimum(tl.maximum(logits, -3e38), 3e38), -3e38)
    rest = tl.where(expert < E, finite, float("-inf"))
    return tl.where(expert < E, logits, float("-inf")), rest


@triton.jit
def _loads_kernel(
    logits_ptr, counted_ptr, chose_ptr, probabilities_ptr, N, E, chunk_size,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """How many tokens of a chunk of a layer chose each expert, and the sums of its probabilities."""
    chunk, layer, expert = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_E)
    logits_ptr += layer * N * E
    chose, probabilities = tl.zeros([BLOCK_E], tl.float32), tl.zeros([BLOCK_E], tl.float32)
    for start in tl.range(chunk * chunk_size, tl.minimum((chunk + 1) * chunk_size, N), BLOCK_M):
        token = (start + tl.arange(0, BLOCK_M))[:, None]
        logits, rest = load_logits(logits_ptr, token, N, E, BLOCK_E)
        counted = (token < N).to(tl.float32)
        if counted_ptr is not None:
            counted = tl.load(counted_ptr + token, mask=token < N, other=0.0)
        share = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        probabilities += tl.sum(share * (counted / tl.sum(share, axis=1)[:, None]), axis=0)
        for _ in tl.static_range(TOP_K):
            best = tl.argmax(rest, axis=1)[:, None]
            rest = tl.where(expert[None, :] == best, float("-inf"), rest)
        chose += tl.sum(tl.where((rest == float("-inf")) & (expert < E)[None, :], counted, 0.0), axis=0)
    offsets = (layer * tl.num_programs(0) + chunk) * E + expert
    tl.store(chose_ptr + offsets, chose, mask=expert < E)
    tl.store(probabilities_ptr + offsets, probabilities, mask=expert < E)


@triton.jit
def _loads_backward_kernel(
    grad_ptr, logits_ptr, counted_ptr, dlogits_ptr, N, E, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    """The gradients of logits by the sums of the probabilities of experts."""
    layer, expert = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_E)[None, :]
    token = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    logits, _ = load_logits(logits_ptr + layer * N * E, token, N, E, BLOCK_E)
    share = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    share /= tl.sum(share, axis=1)[:, None]
    grad = tl.load(grad_ptr + layer * E + expert, mask=expert < E, other=0.0)
    dlogits = share * (grad - tl.sum(share * grad, axis=1)[:, None])
    if counted_ptr is not None:
        dlogits *= tl.load(counted_ptr + token, mask=token < N, other=0.0)
    offsets = (layer * N + token) * E + expert
    tl.store(dlogits_ptr + offsets, dlogits.to(dlogits_ptr.dtype.element_ty), mask=(token < N) & (expert < E))


@triton.jit
def _choose_kernel(
    logits_ptr, weights_ptr, chosen_ptr, counts_ptr, N, E, chunk_size,
    TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Weights and indices `[N, TOP_K]` of the chosen experts, and how often each chunk of tokens chose them."""
    pid = tl.program_id(0)
    expert, slot = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    counts = tl.zeros([BLOCK_E], tl.int32)
    for start in tl.range(pid * chunk_size, tl.minimum((pid + 1) * chunk_size, N), BLOCK_M):
        token = (start + tl.arange(0, BLOCK_M))[:, None]
        logits, rest = load_logits(logits_ptr, token, N, E, BLOCK_E)
        share = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        chosen, weights = tl.zeros([BLOCK_M, BLOCK_K], tl.int32), tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
        for j in tl.static_range(TOP_K):
            best = tl.argmax(rest, axis=1)[:, None]
            weight = tl.sum(tl.where(expert == best, share, 0.0), axis=1)[:, None]
            chosen, weights = tl.where(slot == j, best, chosen), tl.where(slot == j, weight, weights)
            rest = tl.where(expert == best, float("-inf"), rest)
        total = tl.sum(weights, axis=1) if NORMALIZE else tl.sum(share, axis=1)
        offsets, mask = token.to(tl.int64) * TOP_K + slot, (token < N) & (slot < TOP_K)
        tl.store(weights_ptr + offsets, weights / total[:, None], mask=mask)
        tl.store(chosen_ptr + offsets, chosen, mask=mask)
        counts += tl.sum(((token < N) & (expert < E) & (rest == float("-inf"))).to(tl.int32), axis=0)
    expert = tl.arange(0, BLOCK_E)
    tl.store(counts_ptr + pid * E + expert, counts, mask=expert < E)


@triton.jit
def _sort_kernel(
    chosen_ptr, counts_ptr, rows_ptr, ends_ptr, N, E, chunk_size, num_chunks,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Which row each choice becomes, `[N, TOP_K]`, and where the rows of each expert end, `[E]`."""
    pid, expert = tl.program_id(0), tl.arange(0, BLOCK_E)
    total, earlier = tl.zeros([BLOCK_E], tl.int32), tl.zeros([BLOCK_E], tl.int32)
    for start in tl.range(0, num_chunks, BLOCK_M):
        chunk = (start + tl.arange(0, BLOCK_M))[:, None]
        mask = (chunk < num_chunks) & (expert < E)[None, :]
        counts = tl.load(counts_ptr + chunk * E + expert[None, :], mask=mask, other=0)
        total += tl.sum(counts, axis=0)
        earlier += tl.sum(tl.where(chunk < pid, counts, 0), axis=0)
    ends = tl.cumsum(total, axis=0)
    if pid == 0:
        tl.store(ends_ptr + expert, ends, mask=expert < E)
    next_row = ends - total + earlier
    for start in tl.range(pid * chunk_size, tl.minimum((pid + 1) * chunk_size, N), BLOCK_M):
        token = start + tl.arange(0, BLOCK_M)
        offsets, mask = token.to(tl.int64) * TOP_K, token < N
        chose = tl.zeros([BLOCK_M, BLOCK_E], tl.int32)
        for j in tl.static_range(TOP_K):
            chosen = tl.load(chosen_ptr + offsets + j, mask=mask, other=-1)
            chose += (chosen[:, None] == expert[None, :]).to(tl.int32)  # 0 or 1: the choices of a token differ
        row = next_row[None, :] + tl.cumsum(chose, axis=0) - chose
        for j in tl.static_range(TOP_K):
            chosen = tl.load(chosen_ptr + offsets + j, mask=mask, other=-1)
            own = tl.sum(tl.where(chosen[:, None] == expert[None, :], row, 0), axis=1)
            tl.store(rows_ptr + offsets + j, own, mask=mask)
        next_row += tl.sum(chose, axis=0)


@triton.jit
def _gather_kernel(x_ptr, rows_ptr, y_ptr, D, TOP_K: tl.constexpr, BLOCK_D: tl.constexpr):
    """`y[rows[token, j]] = x[token]`."""
    token, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    x = tl.load(x_ptr + token * D + cols, mask=cols < D, other=0.0)
    for j in tl.static_range(TOP_K):
        row = tl.load(rows_ptr + token * TOP_K + j).to(tl.int64)
        tl.store(y_ptr + row * D + cols, x, mask=cols < D)


@triton.jit
def expert_of(row, ends_ptr, E, BLOCK_E: tl.constexpr):
    """The expert that a row belongs to: as many as end before it."""
    expert = tl.arange(0, BLOCK_E)
    ends = tl.load(ends_ptr + expert, mask=expert < E, other=2147483647)
    return tl.sum((row >= ends).to(tl.int32), axis=0).to(tl.int64)


@triton.jit
def _combine_kernel(
    x_ptr, bias_ptr, weights_ptr, rows_ptr, ends_ptr, y_ptr, D, E,
    TOP_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """`y[token] = sum_j weights[token, j] (x[row] + bias[expert])`; without the terms whose pointers are None."""
    token, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for j in tl.static_range(TOP_K):
        row = tl.load(rows_ptr + token * TOP_K + j).to(tl.int64)
        x = tl.load(x_ptr + row * D + cols, mask=cols < D, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + expert_of(row, ends_ptr, E, BLOCK_E) * D + cols
            x += tl.load(bias_ptrs, mask=cols < D, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            x *= tl.load(weights_ptr + token * TOP_K + j)
        acc += x
    tl.store(y_ptr + token * D + cols, acc.to(y_ptr.dtype.element_ty), mask=cols < D)


@triton.jit
def _combine_backward_kernel(
    dy_ptr, x_ptr, bias_ptr, logits_ptr, weights_ptr, rows_ptr, ends_ptr, dx_ptr, dlogits_ptr, D, E,
    TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The gradients of the rows that were summed, and through their weights of the token's logits."""
    token = tl.program_id(0).to(tl.int64)
    slot, expert = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_E)
    dweights = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.range(0, D, BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)
        dy = tl.load(dy_ptr + token * D + cols, mask=cols < D, other=0.0).to(tl.float32)
        for j in tl.static_range(TOP_K):
            row = tl.load(rows_ptr + token * TOP_K + j).to(tl.int64)
            x = tl.load(x_ptr + row * D + cols, mask=cols < D, other=0.0).to(tl.float32)
            if bias_ptr is not None:
                bias_ptrs = bias_ptr + expert_of(row, ends_ptr, E, BLOCK_E) * D + cols
                x += tl.load(bias_ptrs, mask=cols < D, other=0.0).to(tl.float32)
            dx = dy * tl.load(weights_ptr + token * TOP_K + j)
            tl.store(dx_ptr + row * D + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < D)
            dweights += tl.where(slot == j, tl.sum(dy * x, axis=0), 0.0)
    weights = tl.load(weights_ptr + token * TOP_K + slot, mask=slot < TOP_K, other=0.0)
    rows = tl.load(rows_ptr + token * TOP_K + slot, mask=slot < TOP_K, other=-1)[:, None]
    ends = tl.load(ends_ptr + expert, mask=expert < E, other=0)
    begins = tl.load(ends_ptr + expert - 1, mask=(expert > 0) & (expert < E), other=0)
    chose = (rows >= begins[None, :]) & (rows < ends[None, :])  # [BLOCK_K, BLOCK_E]
    mean = tl.sum(weights * dweights, axis=0)
    if NORMALIZE:  # the weights are a softmax over the chosen experts
        dlogits = tl.sum(tl.where(chose, (weights * (dweights - mean))[:, None], 0.0), axis=0)
    else:
        logits = tl.load(logits_ptr + token * E + expert, mask=expert < E, other=float("-inf")).to(tl.float32)
        share = tl.exp(logits - tl.max(logits, axis=0))
        dshare = tl.sum(tl.where(chose, dweights[:, None], 0.0), axis=0) - mean
        dlogits = dshare * share / tl.sum(share, axis=0)
    tl.store(dlogits_ptr + token * E + expert, dlogits.to(dlogits_ptr.dtype.element_ty), mask=expert < E)


@triton.jit
def _add_bias_kernel(x_ptr, bias_ptr, ends_ptr, y_ptr, D, E, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):
    """`y[row] = x[row] + bias[expert]`."""
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    bias_ptrs = bias_ptr + expert_of(row, ends_ptr, E, BLOCK_E) * D + cols
    x = tl.load(x_ptr + row * D + cols, mask=cols < D, other=0.0).to(tl.float32)
    x += tl.load(bias_ptrs, mask=cols < D, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * D + cols, x.to(y_ptr.dtype.element_ty), mask=cols < D)


@triton.jit
def load_gate_up(x_ptr, bias_ptr, ends_ptr, row, cols, D, E, limit, BLOCK_E: tl.constexpr):
    """Gate and up of a row with their biases, in float32, clamped, and whether each was inside of its limits."""
    mask = cols < D
    gate = tl.load(x_ptr + row * D * 2 + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * D * 2 + D + cols, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert_of(row, ends_ptr, E, BLOCK_E) * D * 2 + cols
        gate += tl.load(bias_ptrs, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(bias_ptrs + D, mask=mask, other=0.0).to(tl.float32)
    gate_inside, up_inside = gate <= limit, (up >= -limit) & (up <= limit)
    return tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit), gate_inside, up_inside


@triton.jit
def _clamped_swiglu_kernel(
    x_ptr, bias_ptr, ends_ptr, y_ptr, D, E, limit, gain, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    """`gate sigmoid(gain gate) (up + 1)` of clamped gate and up."""
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    gate, up, _, _ = load_gate_up(x_ptr, bias_ptr, ends_ptr, row, cols, D, E, limit, BLOCK_E)
    y = gate * tl.sigmoid(gain * gate) * (up + 1.0)
    tl.store(y_ptr + row * D + cols, y.to(y_ptr.dtype.element_ty), mask=cols < D)


@triton.jit
def _clamped_swiglu_backward_kernel(
    dy_ptr, x_ptr, bias_ptr, ends_ptr, dx_ptr, y_ptr, D, E, limit, gain, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    row, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    dy = tl.load(dy_ptr + row * D + cols, mask=cols < D, other=0.0).to(tl.float32)
    gate, up, gate_inside, up_inside = load_gate_up(x_ptr, bias_ptr, ends_ptr, row, cols, D, E, limit, BLOCK_E)
    sigmoid = tl.sigmoid(gain * gate)
    dgate = tl.where(gate_inside, dy * (up + 1.0) * sigmoid * (1.0 + gain * gate * (1.0 - sigmoid)), 0.0)
    dup = tl.where(up_inside, dy * gate * sigmoid, 0.0)
    dx_ptr += row * D * 2
    tl.store(dx_ptr + cols, dgate.to(dx_ptr.dtype.element_ty), mask=cols < D)
    tl.store(dx_ptr + D + cols, dup.to(dx_ptr.dtype.element_ty), mask=cols < D)
    if y_ptr is not None:
        y = gate * sigmoid * (up + 1.0)
        tl.store(y_ptr + row * D + cols, y.to(y_ptr.dtype.element_ty), mask=cols < D)


@triton.jit
def _expert_sums_kernel(x_ptr, ends_ptr, y_ptr, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """`y[expert]`, the sum of the rows of each expert."""
    expert, cols = tl.program_id(0), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    begin, end = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0), tl.load(ends_ptr + expert)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in tl.range(begin, end, BLOCK_M):
        row = (start + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        acc += tl.load(x_ptr + row * D + cols[None, :], mask=(row < end) & (cols < D)[None, :], other=0.0)
    total = tl.sum(acc, axis=0).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + expert.to(tl.int64) * D + cols, total, mask=cols < D)


launch_loads = KernelLauncher(_loads_kernel)
launch_loads_backward = KernelLauncher(_loads_backward_kernel)
launch_choose = KernelLauncher(_choose_kernel)
launch_sort = KernelLauncher(_sort_kernel)
launch_gather = KernelLauncher(_gather_kernel)
launch_combine = KernelLauncher(_combine_kernel)
launch_combine_backward = KernelLauncher(_combine_backward_kernel)
launch_add_bias = KernelLauncher(_add_bias_kernel)
launch_clamped_swiglu = KernelLauncher(_clamped_swiglu_kernel)
launch_clamped_swiglu_backward = KernelLauncher(_clamped_swiglu_backward_kernel)
launch_expert_sums = KernelLauncher(_expert_sums_kernel)


def sort_choices(
    logits: Tensor, top_k: int, normalize: bool, max_block_m: int = MAX_BLOCK_M, max_chunks: int = MAX_CHUNKS
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights `[N, top_k]` of the chosen experts, the row each choice becomes, and where each expert's rows end."""
    count, num_experts = logits.shape
    block_e = next_power_of_2(num_experts)
    block_m = min(max_block_m, max(TILE // block_e, 1))
    chunk_size = block_m * cdiv(count, block_m * max_chunks)
    num_chunks = cdiv(count, chunk_size)
    weights = torch.empty((count, top_k), dtype=torch.float32, device=logits.device)
    chosen, rows = torch.empty_like(weights, dtype=torch.int32), torch.empty_like(weights, dtype=torch.int32)
    counts = torch.empty((num_chunks, num_experts), dtype=torch.int32, device=logits.device)
    ends = torch.empty(num_experts, dtype=torch.int32, device=logits.device)
    tensors: dict[str, Tensor | None] = {"logits_ptr": logits.contiguous(), "weights_ptr": weights}
    tensors |= {"chosen_ptr": chosen, "counts_ptr": counts}
    sizes = {"N": count, "E": num_experts, "chunk_size": chunk_size, "TOP_K": top_k}
    sizes |= {"BLOCK_M": block_m, "BLOCK_E": block_e}
    launch_choose(logits, tensors, (num_chunks,), **sizes, NORMALIZE=normalize, BLOCK_K=next_power_of_2(top_k))
    tensors = {"chosen_ptr": chosen, "counts_ptr": counts, "rows_ptr": rows, "ends_ptr": ends}
    launch_sort(logits, tensors, (num_chunks,), **sizes, num_chunks=num_chunks)
    return weights, rows, ends


def expert_loads(
    logits: Tensor, counted: Tensor | None, top_k: int, max_chunks: int = MAX_CHUNKS
) -> tuple[Tensor, Tensor]:
    """How many tokens of `[L, N, E]` chose each expert, and the sum of its probabilities: `[L, E]` each."""
    layers, count, num_experts = logits.shape
    block_e = next_power_of_2(num_experts)
    block_m = min(MAX_BLOCK_M, max(TILE // block_e, 1))
    chunk_size = block_m * cdiv(count, block_m * max_chunks)
    chunks = cdiv(count, chunk_size)
    loads = torch.empty((2, layers, chunks, num_experts), dtype=torch.float32, device=logits.device)
    tensors = {"logits_ptr": logits.contiguous(), "counted_ptr": counted, "chose_ptr": loads[0]}
    tensors |= {"probabilities_ptr": loads[1]}
    sizes = {"N": count, "E": num_experts, "chunk_size": chunk_size, "TOP_K": top_k}
    launch_loads(logits, tensors, (chunks, layers), **sizes, BLOCK_M=block_m, BLOCK_E=block_e)
    return loads[0].sum(1), loads[1].sum(1)


def expert_loads_backward(grad: Tensor, logits: Tensor, counted: Tensor | None) -> Tensor:
    """The gradients of logits `[L, N, E]` by the sums of probabilities."""
    (layers, count, num_experts), dlogits = logits.shape, empty_dense(logits)
    block_e = next_power_of_2(num_experts)
    block_m = min(MAX_BLOCK_M, max(TILE // block_e, 1))
    tensors = {"grad_ptr": grad.contiguous(), "logits_ptr": logits.contiguous(), "counted_ptr": counted}
    tensors |= {"dlogits_ptr": dlogits}
    grid = cdiv(count, block_m), layers
    launch_loads_backward(logits, tensors, grid, N=count, E=num_experts, BLOCK_M=block_m, BLOCK_E=block_e)
    return dlogits


def column_blocks(rows: int, width: int) -> tuple[tuple[int, int], int]:
    """The grid of rows by blocks of columns, and the columns of a block."""
    block_d = min(MAX_BLOCK_D, next_power_of_2(width))
    return (rows, cdiv(width, block_d)), block_d


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """`y[rows[token, j]] = x[token]`."""
    (count, top_k), width = rows.shape, x.shape[1]
    y = torch.empty((count * top_k, width), dtype=x.dtype, device=x.device)
    grid, block_d = column_blocks(count, width)
    tensors = {"x_ptr": x.contiguous(), "rows_ptr": rows, "y_ptr": y}
    launch_gather(x, tensors, grid, D=width, TOP_K=top_k, BLOCK_D=block_d)
    return y


def combine(x: Tensor, bias: Tensor | None, weights: Tensor | None, rows: Tensor, ends: Tensor | None) -> Tensor:
    """`y[token] = sum_j weights[token, j] (x[rows[token, j]] + bias[expert])`; the weights are 1 where none are given.

    The experts of biases are found by `ends`.
    """
    (count, top_k), width, num_experts = rows.shape, x.shape[1], 0 if bias is None else len(bias)
    y = torch.empty((count, width), dtype=x.dtype, device=x.device)
    tensors = {
        "x_ptr": x.contiguous(), "bias_ptr": contiguous(bias), "weights_ptr": weights, "rows_ptr": rows,
        "ends_ptr": ends, "y_ptr": y,
    }  # fmt: skip
    grid, block_d = column_blocks(count, width)
    block_e = next_power_of_2(max(num_experts, 1))
    launch_combine(x, tensors, grid, D=width, E=num_experts, TOP_K=top_k, BLOCK_D=block_d, BLOCK_E=block_e)
    return y


def combine_backward(dy: Tensor, args: CombineArgs) -> tuple[Tensor, Tensor]:
    """The gradients of the rows and of the logits that the weights come from."""
    x, bias, logits, weights, rows, ends, normalize = args
    (count, top_k), width, num_experts = rows.shape, x.shape[1], logits.shape[1]
    dx, dlogits = empty_dense(x), empty_dense(logits)
    tensors = {
        "dy_ptr": dy.contiguous(), "x_ptr": x.contiguous(), "bias_ptr": contiguous(bias),
        "logits_ptr": logits.contiguous(), "weights_ptr": weights, "rows_ptr": rows, "ends_ptr": ends,
        "dx_ptr": dx, "dlogits_ptr": dlogits,
    }  # fmt: skip
    launch_combine_backward(
        x, tensors, (count,), D=width, E=num_experts, TOP_K=top_k, NORMALIZE=normalize,
        BLOCK_D=min(MAX_BLOCK_D, next_power_of_2(width)), BLOCK_E=next_power_of_2(num_experts),
        BLOCK_K=next_power_of_2(top_k),
    )  # fmt: skip
    return dx, dlogits


def add_bias(x: Tensor, bias: Tensor, ends: Tensor) -> Tensor:
    """`y[row] = x[row] + bias[expert]`, for rows sorted by expert."""
    (num_experts, width), y = bias.shape, empty_dense(x)
    tensors = {"x_ptr": x.contiguous(), "bias_ptr": bias.contiguous(), "ends_ptr": ends, "y_ptr": y}
    grid, block_d = column_blocks(len(x), width)
    launch_add_bias(x, tensors, grid, D=width, E=num_experts, BLOCK_D=block_d, BLOCK_E=next_power_of_2(num_experts))
    return y


def clamped_swiglu(x: Tensor, bias: Tensor | None, ends: Tensor, limit: float, gain: float) -> Tensor:
    """`gate sigmoid(gain gate) (up + 1)` of gate and up side by side, clamped after adding their expert's bias."""
    y = torch.empty((len(x), x.shape[1] // 2), dtype=x.dtype, device=x.device)
    tensors = {"x_ptr": x.contiguous(), "bias_ptr": contiguous(bias), "ends_ptr": ends, "y_ptr": y}
    grid, scalars = clamped_args(x, ends, limit, gain)
    launch_clamped_swiglu(x, tensors, grid, **scalars)
    return y


def clamped_swiglu_backward(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    ends: Tensor,
    limit: float,
    gain: float,
    output: Tensor | None = None,
) -> Tensor:
    """The gradients of gate and up with their biases; `output`, which may be `dy`, receives the activation again."""
    dx = empty_dense(x)
    tensors = {
        "dy_ptr": dy.contiguous(), "x_ptr": x.contiguous(), "bias_ptr": contiguous(bias), "ends_ptr": ends,
        "dx_ptr": dx, "y_ptr": output,
    }  # fmt: skip
    grid, scalars = clamped_args(x, ends, limit, gain)
    launch_clamped_swiglu_backward(x, tensors, grid, **scalars)
    return dx


def clamped_args(x: Tensor, ends: Tensor, limit: float, gain: float) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid and the scalars of either direction."""
    width, experts = x.shape[1] // 2, len(ends)
    grid, block_d = column_blocks(len(x), width)
    sizes = {"D": width, "E": experts, "BLOCK_D": block_d, "BLOCK_E": next_power_of_2(experts)}
    return grid, {"limit": limit, "gain": gain, **sizes}


def expert_sums(x: Tensor, ends: Tensor, dtype: torch.dtype, block_m: int = 128, block_d: int = 64) -> Tensor:
    """The sums of the rows of each expert, `[num_experts, dim]`."""
    y = torch.empty((len(ends), x.shape[1]), dtype=dtype, device=x.device)
    tensors = {"x_ptr": x.contiguous(), "ends_ptr": ends, "y_ptr": y}
    grid = len(ends), cdiv(x.shape[1], block_d)
    launch_expert_sums(x, tensors, grid, D=x.shape[1], BLOCK_M=block_m, BLOCK_D=block_d, num_warps=8)
    return y
