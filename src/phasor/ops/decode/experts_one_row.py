"""A mixture of experts for one row and a small router, in two kernels.

Each program of the first kernel computes the router's logits and chooses the experts by itself: the router's weights
are few, and loaded while the kernel before ends. Then it reads its tile of its expert. The second kernel adds up the
experts' results by their weights, in a fixed order: a program has a part of the inputs of one expert, and the last
program to finish combines the parts.

With PDL the second kernel starts when the first has made its choice. It loads its first weights of the expert that it
finds written by then. No rule of the device says that the choice is visible so early: so it looks again when the first
kernel has ended, and if that was another expert, it loads again.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.decode.arguments import ExpertsArgs, NormArgs
from phasor.ops.decode.experts import activate_expert, load_tile
from phasor.ops.decode.small_gemm import load_features, load_norm_weight
from phasor.ops.decode.tiles import Tiles
from phasor.ops.pdl import pdl_launch, pdl_start_next, pdl_wait, pdl_wait_alone
from phasor.ops.quantized import Matrix

MAX_ROUTER_BYTES = 32 * 1024  # all programs read the router: a larger one is read once, in a separate kernel
ROUTER_TILE = 8192  # weights of the router that a program holds at a time
MAX_PARTS = 64  # of an output, which one program combines
DOWN_PROGRAMS = 264  # how many keep a large GPU busy
UP_TILES, DOWN_TILES = Tiles(32, 256, 8), Tiles(32, 512, 4)


@triton.jit
def load_router(
    router_ptr, start: tl.constexpr, E, K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
):  # fmt: skip
    """A tile of the router's weights: all experts, and the inputs from `start` on, of which a thread loads CONTIGUOUS.

    They are so few that every thread has inputs of all experts: then each gets all logits, and none waits for another
    to choose.
    """
    expert, offs_k = tl.arange(0, BLOCK_E)[:, None], tl.max_contiguous(tl.arange(0, BLOCK_K), CONTIGUOUS)
    offs_k = start + offs_k[None, :]
    return tl.load(router_ptr + expert * K + offs_k, mask=(expert < E) & (offs_k < K), other=0.0)


@triton.jit
def route_row(
    x_ptr, norm_ptr, norm_offset, eps, router_ptr, router_bias_ptr, slot, E,
    K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, CONTIGUOUS: tl.constexpr, TOP_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """The expert of rank `slot` for the row, all logits, which experts are chosen, and the norm's inverse divisor."""
    partial = tl.zeros([BLOCK_E, BLOCK_K], tl.float32)
    sum_squares = tl.zeros([BLOCK_K], tl.float32)
    w = load_router(router_ptr, 0, E, K, BLOCK_E, BLOCK_K, CONTIGUOUS)
    norm_weight = load_norm_weight(norm_ptr, 0, K, BLOCK_K)
    pdl_wait_alone(USE_PDL)
    for start in tl.static_range(0, K, BLOCK_K):
        x = load_features(x_ptr, start + tl.arange(0, BLOCK_K), K)
        if start + BLOCK_K < K:
            prefetched = load_router(router_ptr, start + BLOCK_K, E, K, BLOCK_E, BLOCK_K, CONTIGUOUS)
            norm_prefetched = load_norm_weight(norm_ptr, start + BLOCK_K, K, BLOCK_K)
        if norm_ptr is not None:
            sum_squares += x * x
            x *= norm_offset + norm_weight.to(tl.float32)
        partial += w.to(tl.float32) * x[None, :]
        if start + BLOCK_K < K:
            w = prefetched
            norm_weight = norm_prefetched
    logits, rstd = tl.sum(partial, axis=1), 1.0
    if norm_ptr is not None:
        rstd = tl.rsqrt(tl.sum(sum_squares, axis=0) / K + eps)
        logits *= rstd
    expert = tl.arange(0, BLOCK_E)
    real = expert < E
    if router_bias_ptr is not None:
        logits += tl.load(router_bias_ptr + expert, mask=real, other=0.0).to(tl.float32)
    # Whatever the logits are, an expert that exists comes before one that does not; of equal ones the first.
    finite = tl.where(logits == logits, tl.minimum(tl.maximum(logits, -3e38), 3e38), -3e38)
    rest = tl.where(real, finite, float("-inf"))
    chosen = 0
    for rank in tl.static_range(TOP_K):
        best = tl.argmax(rest, axis=0)
        chosen = tl.where(rank == slot, best, chosen)
        rest = tl.where(expert == best, float("-inf"), rest)
    return chosen, logits, real & (rest == float("-inf")), rstd


@triton.jit
def expert_weight(chosen, logits, is_chosen, E, BLOCK_E: tl.constexpr, NORMALIZE: tl.constexpr):
    """An expert's share of the softmax of all logits, or with NORMALIZE of those of the chosen experts."""
    expert = tl.arange(0, BLOCK_E)
    real = expert < E
    share = tl.exp(logits - tl.max(tl.where(real, logits, float("-inf")), axis=0))
    counted = is_chosen if NORMALIZE else real
    return tl.sum(tl.where(expert == chosen, share, 0.0), axis=0) / tl.sum(tl.where(counted, share, 0.0), axis=0)


@triton.jit
def load_tiles(weight_ptrs, second_ptrs, offs_k, K: tl.constexpr, stride, mask_n, GLU: tl.constexpr):
    """A tile of each of two matrices; without GLU there is one matrix, and its tile comes twice."""
    w = load_tile(weight_ptrs, offs_k, K, stride, mask_n)
    second = w
    if GLU:
        second = load_tile(second_ptrs, offs_k, K, stride, mask_n)
    return w, second


@triton.jit
def add_products(
    x_ptr, norm_ptr, norm_offset, w, second, partial, second_partial, offs_k, K: tl.constexpr, GLU: tl.constexpr
):  # fmt: skip
    """The running products of a row's features, times the norm's weights, with tiles of weights."""
    x = load_features(x_ptr, offs_k, K)
    if norm_ptr is not None:
        x *= norm_offset + load_features(norm_ptr, offs_k, K)
    partial += w.to(tl.float32) * x[:, None]
    if GLU:
        second_partial += second.to(tl.float32) * x[:, None]
    return partial, second_partial


@triton.jit
def expert_gemv(
    x_ptr, norm_ptr, norm_offset, weight_ptrs, second_ptrs, mask_n, stride,
    K: tl.constexpr, GLU: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """`x W` of one row, times the norm's weights; float32 `[BLOCK_N]`.

    With GLU there are two matrices, and a result of each. With one stage the next tile is on its way to registers, with
    more of them the next tiles to shared memory.
    """
    partial = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
    second_partial = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
    offs_k = tl.arange(0, BLOCK_K)
    if NUM_STAGES == 1:
        last: tl.constexpr = (K - 1) // BLOCK_K * BLOCK_K
        w, second = load_tiles(weight_ptrs, second_ptrs, offs_k, K, stride, mask_n, GLU)
        for start in tl.range(0, last, BLOCK_K):
            ahead = load_tiles(weight_ptrs, second_ptrs, start + BLOCK_K + offs_k, K, stride, mask_n, GLU)
            partial, second_partial = add_products(
                x_ptr, norm_ptr, norm_offset, w, second, partial, second_partial, start + offs_k, K, GLU
            )
            w, second = ahead
        partial, second_partial = add_products(
            x_ptr, norm_ptr, norm_offset, w, second, partial, second_partial, last + offs_k, K, GLU
        )
    else:
        for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
            w, second = load_tiles(weight_ptrs, second_ptrs, start + offs_k, K, stride, mask_n, GLU)
            partial, second_partial = add_products(
                x_ptr, norm_ptr, norm_offset, w, second, partial, second_partial, start + offs_k, K, GLU
            )
    return tl.sum(partial, axis=0), tl.sum(second_partial, axis=0)


@triton.jit
def one_row_up_kernel(
    x_ptr, norm_ptr, norm_offset, eps, router_ptr, router_bias_ptr, weight_ptr, bias_ptr, limit, gain,
    chosen_ptr, weights_ptr, out_ptr, N, E,
    K: tl.constexpr, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, ACTIVATION: tl.constexpr, GLU: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_ROUTER: tl.constexpr, CONTIGUOUS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """`out[i] = act(norm(x) W + bias)` of the expert of rank `i`, `[TOP_K, N]`; with GLU gates come first.

    `chosen [TOP_K]` are these experts, and `weights [TOP_K]` their weights, which the last program of an expert writes;
    it does nothing else.
    """
    slot, tile = tl.program_id(1), tl.program_id(0)
    chosen, logits, is_chosen, rstd = route_row(
        x_ptr, norm_ptr, norm_offset, eps, router_ptr, router_bias_ptr, slot, E,
        K, BLOCK_E, BLOCK_ROUTER, CONTIGUOUS, TOP_K, USE_PDL,
    )  # fmt: skip
    if tile == tl.num_programs(0) - 1:
        tl.store(chosen_ptr + slot, chosen)
        pdl_start_next(USE_PDL)
        tl.store(weights_ptr + slot, expert_weight(chosen, logits, is_chosen, E, BLOCK_E, NORMALIZE))
        return
    pdl_start_next(USE_PDL)
    expert, stride = chosen.to(tl.int64), N * 2 if GLU else N
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    weight_ptrs = weight_ptr + expert * K * stride + offs_n[None, :]
    acc, up = expert_gemv(
        x_ptr, norm_ptr, norm_offset, weight_ptrs, weight_ptrs + N, mask_n, stride,
        K, GLU, BLOCK_N, BLOCK_K, NUM_STAGES,
    )  # fmt: skip
    acc, up = acc * rstd, up * rstd
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert * stride + offs_n
        acc += tl.load(bias_ptrs, mask=mask_n, other=0.0).to(tl.float32)
        if GLU:
            up += tl.load(bias_ptrs + N, mask=mask_n, other=0.0).to(tl.float32)
    y = activate_expert(acc, up, limit, gain, ACTIVATION, GLU)
    tl.store(out_ptr + slot * N + offs_n, y.to(out_ptr.dtype.element_ty), mask=mask_n)


@triton.jit
def one_row_down_kernel(
    x_ptr, guessed_ptr, chosen_ptr, weights_ptr, weight_ptr, bias_ptr, residual_ptr, multiplier,
    partial_ptr, arrived_ptr, out_ptr, N, E, K: tl.constexpr, SPLIT_SIZE: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """`out = residual + multiplier * sum_i weight_i (x_i W_i + bias_i)` over the chosen experts.

    Terms whose pointers are None are left out. A program has SPLIT_SIZE of the inputs of one expert, and begins to read
    the one in `guessed` before the choice is known.
    """
    tile, slot, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parts = tl.num_programs(1) * tl.num_programs(2)
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    begin = split * SPLIT_SIZE
    stop = tl.minimum(begin + SPLIT_SIZE, K)
    first = begin + tl.arange(0, BLOCK_K)
    guessed = tl.load(guessed_ptr + slot, cache_modifier=".cg")
    guessed = tl.minimum(tl.maximum(guessed, 0), E - 1).to(tl.int64)
    w = load_tile(weight_ptr + guessed * K * N + offs_n[None, :], first, stop, N, mask_n)
    pdl_wait(USE_PDL)
    expert = tl.load(chosen_ptr + slot, cache_modifier=".cg").to(tl.int64)
    weight = tl.load(weights_ptr + slot)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + offs_n, mask=mask_n, other=0.0)
    x = load_features(x_ptr + slot * K, first, stop)
    weight_ptrs = weight_ptr + expert * K * N + offs_n[None, :]
    if expert != guessed:
        w = load_tile(weight_ptrs, first, stop, N, mask_n)
    partial = tl.zeros([BLOCK_K, BLOCK_N], tl.float32)
    for start in tl.static_range(0, SPLIT_SIZE, BLOCK_K):
        if start + BLOCK_K < SPLIT_SIZE:
            offs_k = first + start + BLOCK_K
            prefetched = load_tile(weight_ptrs, offs_k, stop, N, mask_n)
            x_prefetched = load_features(x_ptr + slot * K, offs_k, stop)
        partial += w.to(tl.float32) * x[:, None]
        if start + BLOCK_K < SPLIT_SIZE:
            w = prefetched
            x = x_prefetched
    acc = tl.sum(partial, axis=0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * N + offs_n, mask=offs_n < tl.where(split == 0, N, 0), other=0.0)
        acc += bias.to(tl.float32)
    part = tl.where(weight != 0.0, weight * acc, 0.0)  # what is not finite counts only with a weight
    tl.store(partial_ptr + (slot * tl.num_programs(2) + split) * N + offs_n, part, mask=mask_n)
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == parts - 1:
        tl.store(arrived_ptr + tile, 0)
        offs_p = tl.arange(0, BLOCK_SPLITS)[:, None]
        part_ptrs, mask = partial_ptr + offs_p * N + offs_n[None, :], (offs_p < parts) & mask_n[None, :]
        y = tl.sum(tl.load(part_ptrs, mask=mask, other=0.0, cache_modifier=".cg"), axis=0)
        if residual_ptr is not None:
            y = residual.to(tl.float32) + multiplier * y
        tl.store(out_ptr + offs_n, y.to(out_ptr.dtype.element_ty), mask=mask_n)


def router_is_small(router: Matrix) -> bool:
    """Whether every program can read a router `[experts, dim]`; if not, one kernel has to do it for all.

    >>> router_is_small(torch.zeros(8, 1024).bfloat16()), router_is_small(torch.zeros(128, 2048).bfloat16())
    (True, False)
    """
    return isinstance(router, Tensor) and router.nbytes <= MAX_ROUTER_BYTES


class OneRowWorkspace:
    """Memory of one step: the chosen experts and their weights, hidden features, and sums until they are combined.

    All layers of a step with experts of these sizes can share one.
    """

    def __init__(self, experts: ExpertsArgs, dtype: torch.dtype, device: torch.device) -> None:
        _, hidden, dim = experts.down.shape
        slots, tiles = experts.top_k, triton.cdiv(dim, DOWN_TILES.block_n)
        self.chosen = torch.zeros(slots, dtype=torch.int32, device=device)
        self.guessed = self.chosen
        self.weights = torch.empty(slots, device=device)
        self.hidden = torch.empty(slots, hidden, dtype=dtype, device=device)
        splits = max(1, min(DOWN_PROGRAMS // (tiles * slots), MAX_PARTS // slots, hidden // 128))
        self.share = triton.cdiv(triton.cdiv(hidden, splits), 16) * 16
        self.splits = triton.cdiv(hidden, self.share)
        self.partial = torch.empty(slots * self.splits, dim, device=device)
        self.arrived = torch.zeros(tiles, dtype=torch.int32, device=device)


def experts_one_row(
    x: Tensor,
    router: Tensor,
    experts: ExpertsArgs,
    out: Tensor,
    workspace: OneRowWorkspace,
    *,
    router_bias: Tensor | None = None,
    norm: NormArgs | None = None,
    residual: Tensor | None = None,
    multiplier: float = 1.0,
    pdl: bool = False,
) -> Tensor:
    """`out = residual + multiplier * sum_e weight_e expert_e(norm(x))` of a row `[1, dim]`; `out` may be the residual.

    The weights are those that a router `[experts, dim]` gives the normalized row, in float32.
    """
    dim, space = x.shape[1], workspace
    count, hidden, _ = experts.down.shape
    block_e = triton.next_power_of_2(count)
    block_router = max(16, min(triton.next_power_of_2(dim), ROUTER_TILE // block_e))
    contiguous = max(1, min(16 // x.element_size(), block_router // (32 * UP_TILES.num_warps)))
    one_row_up_kernel[(triton.cdiv(hidden, UP_TILES.block_n) + 1, experts.top_k)](
        x, *(norm or (None, 0.0, 0.0)), router, router_bias, experts.up, experts.up_bias, experts.limit, experts.gain,
        space.chosen, space.weights, space.hidden, hidden, count,
        K=dim, TOP_K=experts.top_k, NORMALIZE=experts.normalize, ACTIVATION=experts.activation, GLU=experts.glu,
        BLOCK_E=block_e, BLOCK_ROUTER=block_router, CONTIGUOUS=contiguous,
        BLOCK_N=UP_TILES.block_n, BLOCK_K=UP_TILES.block_k, NUM_STAGES=UP_TILES.num_stages, USE_PDL=pdl,
        num_warps=UP_TILES.num_warps, **pdl_launch(pdl),
    )  # fmt: skip
    one_row_down_kernel[(len(space.arrived), experts.top_k, space.splits)](
        space.hidden, space.guessed, space.chosen, space.weights, experts.down, experts.down_bias, residual, multiplier,
        space.partial, space.arrived, out, dim, count, K=hidden, SPLIT_SIZE=space.share,
        BLOCK_SPLITS=triton.next_power_of_2(len(space.partial)), BLOCK_N=DOWN_TILES.block_n,
        BLOCK_K=min(DOWN_TILES.block_k, triton.next_power_of_2(space.share)), USE_PDL=pdl,
        num_warps=DOWN_TILES.num_warps, **pdl_launch(pdl),
    )  # fmt: skip
    return out
