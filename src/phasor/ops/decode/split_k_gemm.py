"""Split-K matrix products of 2 to 16 rows, bound by reading their weights: bias, activation and residual are fused.

A GPU has more processors than such a product has tiles of outputs, so the inputs of a tile are split among programs.
The last one of a tile to finish adds up their sums, in the same order in every run. The weights are the first operand
of `tl.dot`, of which the instruction takes 64 rows at a time; of the second, the few rows, it takes as few as 8.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.decode.gemv import activate_tile
from phasor.ops.pdl import pdl_launch, pdl_start_next, pdl_wait_alone

MAX_ROWS = 16  # for more a matrix multiplication of torch is faster
BLOCK_N, BLOCK_K = 64, 128
TARGET_PROGRAMS = 256  # how many keep a large GPU busy
MAX_SPLITS = 16
NUM_STAGES = {False: 3, True: 5}  # tiles in flight, of a program that has all inputs and of one that has some


@triton.jit
def split_k_gemm_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, multiplier, out_ptr, partial_ptr, arrived_ptr, M, N,
    ACTIVATION: tl.constexpr, GLU: tl.constexpr, K: tl.constexpr, NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """`out = residual + multiplier * act(x W^T + bias)`, without the terms whose pointers are None.

    With GLU it is `act(gate) * up`, each gate beside its up in a tile.
    """
    pdl_start_next(USE_PDL)
    tile, split = tl.program_id(0), tl.program_id(1)
    SPLIT_SIZE: tl.constexpr = K // NUM_SPLITS
    offs_m, offs_k, in_tile = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_N)
    outputs = tl.minimum(tile * BLOCK_N + in_tile, N - 1)
    if GLU:
        outputs = tl.minimum(tile * (BLOCK_N // 2) + in_tile // 2, N - 1) + in_tile % 2 * N
    weight_ptrs = weight_ptr + outputs.to(tl.int64)[:, None] * K + split * SPLIT_SIZE + offs_k
    x_ptrs = x_ptr + offs_m * K + split * SPLIT_SIZE + offs_k
    pdl_wait_alone(USE_PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, SPLIT_SIZE, BLOCK_K, num_stages=NUM_STAGES):
        w = tl.load(weight_ptrs + start, eviction_policy="evict_first")
        x = tl.load(x_ptrs + start, mask=offs_m < M, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    y = tl.trans(acc)
    if NUM_SPLITS > 1:
        sums = partial_ptr + tile * (NUM_SPLITS * BLOCK_M * BLOCK_N) + offs_m * BLOCK_N + in_tile[None, :]
        tl.store(sums + split * (BLOCK_M * BLOCK_N), y)
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") != NUM_SPLITS - 1:
            return
        tl.store(arrived_ptr + tile, 0)
        y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for part in tl.static_range(NUM_SPLITS):
            y += tl.load(sums + part * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
    if bias_ptr is not None:
        y += tl.load(bias_ptr + outputs).to(tl.float32)[None, :]
    offs_n = tile * BLOCK_N + in_tile
    if GLU:
        gate, up = tl.split(tl.reshape(y, [BLOCK_M, BLOCK_N // 2, 2]))
        y = activate_tile(gate, ACTIVATION) * up
        offs_n = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    elif ACTIVATION is not None:
        y = activate_tile(y, ACTIVATION)
    offsets, mask = offs_m * N + offs_n[None, :], (offs_m < M) & (offs_n < N)[None, :]
    if residual_ptr is not None:
        y = tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32) + multiplier * y
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)


def split_k_gemm_why_not(x: Tensor, weight: Tensor) -> str | None:
    """Why the kernel is not for these rows and weights.

    >>> split_k_gemm_why_not(torch.zeros(2, 96).bfloat16(), torch.zeros(64, 96).bfloat16())
    '96 inputs are not tiles of 128'
    """
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return f"the weights are {str(weight.dtype)[6:]}, not bfloat16 or float16"
    if not 1 < len(x) <= MAX_ROWS:
        return f"there are {len(x)} rows, not 2 to {MAX_ROWS}"
    return f"{x.shape[1]} inputs are not tiles of {BLOCK_K}" if x.shape[1] % BLOCK_K else None


def choose_splits(tiles: int, inputs: int) -> int:
    """Among how many programs the inputs of each tile of outputs are split: a power of two, so that all are busy.

    >>> choose_splits(32, 2048), choose_splits(96, 2048), choose_splits(192, 2048), choose_splits(4, 384)
    (8, 2, 1, 1)
    """
    splits = 1
    while 2 * splits * tiles <= TARGET_PROGRAMS and splits < MAX_SPLITS and inputs % (2 * splits * BLOCK_K) == 0:
        splits *= 2
    return splits


class SplitKSums:
    """Memory for the sums of split inputs, until they are added up; all products of a step share one."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.partial = torch.empty(TARGET_PROGRAMS * BLOCK_N * block_m(rows), device=device)
        self.arrived = torch.zeros(TARGET_PROGRAMS, dtype=torch.int32, device=device)


def block_m(rows: int) -> int:
    """The rows of a tile: a power of two that `tl.dot` takes."""
    return max(16, triton.next_power_of_2(rows))


def split_k_gemm(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    sums: SplitKSums,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    multiplier: float = 1.0,
    activation: str | None = None,
    glu: bool = False,
    pdl: bool = False,
) -> Tensor:
    """`out = residual + multiplier * act(x W^T + bias)` of rows `[rows, inputs]`; `out` may be the residual.

    With `glu` it is `act(gate) * up` of the first and the second half of the outputs.
    """
    (rows, inputs), outputs = x.shape, out.shape[1]
    tiles = triton.cdiv(outputs, BLOCK_N // 2 if glu else BLOCK_N)
    splits = choose_splits(tiles, inputs)
    split_k_gemm_kernel[tiles, splits](
        x, weight, bias, residual, multiplier, out, sums.partial, sums.arrived, rows, outputs,
        ACTIVATION=activation, GLU=glu, K=inputs, NUM_SPLITS=splits,
        BLOCK_M=block_m(rows), BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, NUM_STAGES=NUM_STAGES[splits > 1],
        USE_PDL=pdl, **pdl_launch(pdl),
    )  # fmt: skip
    return out
