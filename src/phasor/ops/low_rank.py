"""Products of low rank beside a large matrix: such a product added to it, and both gradients of one in a single pass.

Multiplying takes less time than reading the large matrix, so what counts is how often, and how fast, that is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phasor.ops.dispatch import Dispatch, Path, forced_path, triton_why_not

DTYPES = (torch.bfloat16, torch.float16)
MAX_RANK = 64
MIN_ADDED = 2**22  # elements: fewer are added to before a kernel is launched
MIN_GRADIENT = 2**26  # elements: fewer are read twice sooner than parts of both results are written and summed
SHARED_MEMORY = 227 * 1024  # bytes that the tiles of a gradient take


def add_by_kernel(y: Tensor, low: Tensor, factor: Tensor) -> Tensor:
    """`y += low factor` by a Triton kernel."""
    from phasor.ops import low_rank_kernels

    return low_rank_kernels.add_product(y, low, factor)


def gradients_by_kernel(dy: Tensor, low: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """`dy B` and `dy^T low` by a Triton kernel."""
    from phasor.ops import low_rank_kernels

    return low_rank_kernels.gradients(dy, low, B)


def gradients_in_torch(dy: Tensor, low: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """`dy B` and `dy^T low` by two products."""
    return dy @ B, dy.t() @ low


def kernel_why_not(large: Tensor, low: Tensor, factor: Tensor, min_elements: int) -> str | None:
    """Why neither kernel is taken."""
    reason = triton_why_not(large, low, factor)
    if reason is not None:
        return reason
    if large.dtype not in DTYPES:
        return f"{str(large.dtype)[6:]} has no kernel"
    if low.shape[1] > MAX_RANK:
        return f"the rank is {low.shape[1]}, more than {MAX_RANK}"
    if large.stride(1) != 1:
        return "elements of a row are not one after another"
    if large.numel() < min_elements and forced_path() != "triton":
        return f"{large.numel()} elements are too few"
    return None


def add_why_not(y: Tensor, low: Tensor, factor: Tensor) -> str | None:
    """Why the kernel does not add a product."""
    return kernel_why_not(y, low, factor, MIN_ADDED)


def gradients_why_not(dy: Tensor, low: Tensor, B: Tensor) -> str | None:
    """Why the kernel does not compute both gradients."""
    reason = kernel_why_not(dy, low, B, MIN_GRADIENT)
    if reason is None and dy.numel() == 0:
        return "there is nothing to sum"
    return reason or shared_memory_why_not(dy, SHARED_MEMORY)


def shared_memory_why_not(x: Tensor, needed: int) -> str | None:
    """Why the tiles of a kernel do not fit on the GPU of a tensor."""
    if not x.is_cuda:
        return None
    shared = getattr(torch.cuda.get_device_properties(x.device), "shared_memory_per_block_optin", 0)
    return None if shared >= needed else f"{shared} bytes of shared memory are too few"


ADD_PRODUCT = Dispatch(Path("Triton kernel", add_by_kernel, add_why_not), Path("addmm_", Tensor.addmm_))
GRADIENTS = Dispatch(
    Path("Triton kernel, one pass", gradients_by_kernel, gradients_why_not), Path("two products", gradients_in_torch)
)


def add_product(y: Tensor, low: Tensor, factor: Tensor) -> Tensor:
    """`y += low factor` of `y [M, N]`, `low [M, rank]` and `factor [rank, N]`: in place, and rounded once.

    >>> add_product(torch.ones(1, 2), torch.tensor([[2.0]]), torch.tensor([[3.0, 4.0]])).tolist()
    [[7.0, 9.0]]
    """
    total: Tensor = ADD_PRODUCT(y, low, factor)
    return total


def low_rank_gradients(dy: Tensor, low: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Of `low B^T`, whose gradient is `dy [M, N]`, the gradients `dy B` of `low [M, rank]` and `dy^T low` of B.

    >>> dlow, dB = low_rank_gradients(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]]), torch.tensor([[4.0], [5.0]]))
    >>> dlow.tolist(), dB.tolist()
    ([[14.0]], [[3.0], [6.0]])
    """
    both: tuple[Tensor, Tensor] = GRADIENTS(dy, low, B)
    return both
