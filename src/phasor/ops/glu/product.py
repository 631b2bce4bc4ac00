"""Gated activations h and their products with a factor of low rank, `h A^T`, and the gradients of both."""

from __future__ import annotations

from torch import Tensor

from phasor.ops.dispatch import Dispatch, Path, triton_why_not
from phasor.ops.glu.glu import glu_op
from phasor.ops.low_rank import DTYPES, MAX_RANK, shared_memory_why_not

SHARED_MEMORY = 80 * 1024  # bytes that the tiles of a kernel take


def product_by_kernel(x: Tensor, A: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The activation and its product, by a Triton kernel that reads x once."""
    from phasor.ops.glu import product_kernels

    return product_kernels.glu_product(x, A, activation)


def activation_then_product(x: Tensor, A: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The activation by its kernel, then the product."""
    h: Tensor = glu_op(x, activation)
    return h, h @ A.t()


def backward_by_kernel(dh: Tensor, x: Tensor, dlow: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Both gradients by a Triton kernel, which does not write the activation."""
    from phasor.ops.glu import product_kernels

    return product_kernels.glu_product_backward(dh, x, dlow, activation)


def backward_then_product(dh: Tensor, x: Tensor, dlow: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The gradient of the activation by its kernel, which writes the activation again in place of `dh`; a product."""
    from phasor.ops.glu.kernels import glu_backward

    h = dh.contiguous()
    dx = glu_backward(h, x, activation, output=h)
    return dx, dlow.t() @ h


def product_why_not(x: Tensor, A: Tensor, activation: str) -> str | None:
    """Why the kernel does not multiply the activation."""
    return kernel_why_not(x, len(A))


def backward_why_not(dh: Tensor, x: Tensor, dlow: Tensor, activation: str) -> str | None:
    """Why the kernel does not compute both gradients."""
    return kernel_why_not(x, dlow.shape[1])


def kernel_why_not(x: Tensor, rank: int) -> str | None:
    """Why no kernel reads gate and up once."""
    reason = triton_why_not(x)
    if reason is not None:
        return reason
    if x.dtype not in DTYPES:
        return f"{str(x.dtype)[6:]} has no kernel"
    if rank > MAX_RANK:
        return f"the rank is {rank}, more than {MAX_RANK}"
    return "there is nothing to sum" if x.numel() == 0 else shared_memory_why_not(x, SHARED_MEMORY)


GLU_PRODUCT = Dispatch(
    Path("Triton kernel", product_by_kernel, product_why_not), Path("activation, then product", activation_then_product)
)
GLU_PRODUCT_BACKWARD = Dispatch(
    Path("Triton kernel", backward_by_kernel, backward_why_not), Path("gradient, then product", backward_then_product)
)


def glu_product(x: Tensor, A: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """`h = act(gate) * up [M, D]` and `h A^T [M, rank]`, of `x [M, 2 D]`, gate and up, and `A [rank, D]`."""
    both: tuple[Tensor, Tensor] = GLU_PRODUCT(x, A, activation)
    return both


def glu_product_backward(dh: Tensor, x: Tensor, dlow: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The gradient of x for that of h, `dh`, which is overwritten, and the gradient of A, `dlow^T h`, for `dlow`."""
    both: tuple[Tensor, Tensor] = GLU_PRODUCT_BACKWARD(dh, x, dlow, activation)
    return both
