"""Linear layers and gated MLPs in float8: outputs, gradients of inputs and gradients of weights.

Every row is divided by a power of two before it is rounded to 8 bits. The gradient of a weight is a sum over tokens:
there the scales of a token's input and gradient are multiplied into the 8 bits of the gradient, which loses only what
is too small beside the largest.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.ops import dispatch
from phasor.ops.custom_op import custom_op, needs_dispatcher
from phasor.ops.dispatch import Dispatch, Path
from phasor.ops.float8.reference import ALIGNMENT, FLOAT8, FLOAT8_MAX, MIN_SCALE, transpose_ref
from phasor.ops.glu import GLU, GLU_ACTIVATIONS, glu

# Longer sums are accumulated in float32 alone: tensor cores in their fast mode are off by 0.35 % over 2^14 elements,
# and by 3 % over 2^20.
MAX_FAST_ACCUM = 2**15
MAX_HIDDEN_DIM = 2**14  # a row of the activation has to fit into the registers of one program


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in float8, and the scales of its rows: powers of two, `[rows, 1]` in float32.

    >>> values, scale = quantize_rows(torch.tensor([[1.0, -4.0], [0.0, 0.0]]))
    >>> (values.float() * scale).tolist()
    [[1.0, -4.0], [0.0, 0.0]]
    """
    scale = round_up_to_power_of_two((x.abs().amax(-1, keepdim=True).float() / FLOAT8_MAX).clamp(min=MIN_SCALE))
    return (x.float() * (1.0 / scale)).to(FLOAT8).contiguous(), scale


def round_up_to_power_of_two(x: Tensor) -> Tensor:
    """The least power of two that is not below `x`, which is positive; NaN where `x` is not finite.

    >>> round_up_to_power_of_two(torch.tensor([0.25, 0.3, 1.0, 5.0])).tolist()
    [0.25, 0.5, 1.0, 8.0]
    """
    power = ((x.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(x < torch.inf, power, torch.nan)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` with the precision of `dtype`.

    Compilers compute bfloat16 in float32 and leave out the rounding in between. So compiled code rounds the bits.

    >>> round_to(torch.tensor([1.001, 1.01]), torch.bfloat16).tolist()
    [1.0, 1.0078125]
    """
    if not needs_dispatcher() or (x.dtype, dtype) != (torch.float32, torch.bfloat16):
        return x.to(dtype)
    bits = x.view(torch.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000  # to the nearest, ties to even
    return torch.where(x == x, rounded.view(torch.float32), x)


def quantized_matmul(values: Tensor, scale: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`a b^T` for a quantized `a [M, K]` and `b [N, K]`, summed in float32.

    `b` is rounded to `dtype` first, then quantized: a weight in float32 and its copy in `dtype`, as sharded training
    gathers it, give the same bits.
    """
    b_values, b_scale = quantize_rows(round_to(b, dtype))
    return scaled_matmul(values, b_values, scale, b_scale.t(), dtype)


def scaled_matmul(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`a b^T` of float8 matrices, times `a_scale [M, 1]` and `b_scale [1, N]`, or two scalars."""
    fast = bool(a.shape[1] <= MAX_FAST_ACCUM)  # a bool, and not a symbol of a compiler with dynamic sizes
    return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast)


def weight_gradient(grad: Tensor, grad_scale: Tensor, x_t: Tensor, x_scale: Tensor, weight: Tensor) -> Tensor:
    """The sum over tokens of gradient times input, `[N, K]`, for `grad [T, N]` and transposed inputs `x_t [K, T]`."""
    scale = grad_scale * x_scale
    largest = scale.amax().clamp(min=torch.finfo(torch.float32).tiny)
    product = scaled_matmul(transpose(grad, scale / largest), x_t, largest, torch.ones_like(largest), torch.bfloat16)
    return product.to(weight.dtype)


def _triton_transpose(values: Tensor, factor: Tensor | None) -> Tensor:
    from phasor.ops.float8.kernels import transpose

    return transpose(values, factor)


def _transpose_why_not(values: Tensor, factor: Tensor | None) -> str | None:
    return dispatch.triton_why_not(values)


FLOAT8_TRANSPOSE = Dispatch(
    Path("Triton kernel", _triton_transpose, _transpose_why_not),
    Path("torch", transpose_ref),
)


@custom_op("phasor::float8_transpose")
def _transpose(values: Tensor, factor: Tensor | None) -> Tensor:
    y: Tensor = FLOAT8_TRANSPOSE(values, factor)
    return y


@_transpose.register_fake
def _(values: Tensor, factor: Tensor | None) -> Tensor:
    return values.new_empty((values.shape[1], -(-values.shape[0] // ALIGNMENT) * ALIGNMENT))


def transpose(values: Tensor, factor: Tensor | None = None) -> Tensor:
    """The transpose of a float8 matrix, each row multiplied by its factor, with zeros up to a multiple of 16.

    >>> values = torch.tensor([[1.0, 2.0]]).to(FLOAT8)
    >>> transpose(values, torch.tensor([[0.5]])).float()[:, :2].tolist()
    [[0.5, 0.0], [1.0, 0.0]]
    """
    y: Tensor = _transpose(values, factor)
    return y


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        values, scale = quantize_rows(x)
        ctx.save_for_backward(transpose(values), scale, weight)
        return quantized_matmul(values, scale, weight, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        x_t, x_scale, weight = ctx.saved_tensors
        values, scale = quantize_rows(grads[0])
        dx = quantized_matmul(values, scale, weight.t(), grads[0].dtype)
        trains = ctx.needs_input_grad[1]
        return dx, weight_gradient(values, scale, x_t, x_scale, weight) if trains else None


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x W^T + b` with the matrix product in float8, in the dtype of `x` or of autocast.

    >>> x, weight = torch.randn(2, 3, 32, dtype=torch.bfloat16), torch.randn(16, 32, dtype=torch.bfloat16)
    >>> exact = torch.nn.functional.linear(x, weight)
    >>> bool((float8_linear(x, weight) - exact).norm() < 0.1 * exact.norm())
    True
    """
    y: Tensor = FLOAT8_LINEAR(x, weight, bias)
    return y


def _float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = _LinearFunction.apply(autocast(x).flatten(0, -2), weight).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias.to(y.dtype)


def _float8_linear_why_not(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    return None if x.numel() else "there are no tokens"


FLOAT8_LINEAR = Dispatch(
    Path("matrix product in float8", _float8_linear, _float8_linear_why_not),
    Path("torch, in the dtype of the input", F.linear),
)


def autocast(x: Tensor) -> Tensor:
    """`x` in the dtype of autocast where it is enabled.

    >>> autocast(torch.zeros(1)).dtype
    torch.float32
    """
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def float8_unsupported_reason(weight: Tensor) -> str | None:
    """Why a layer with this weight cannot compute in float8; None where it can."""
    if weight.dim() != 2 or any(size % ALIGNMENT for size in weight.shape):
        return f"a weight {list(weight.shape)} has a side that is not a multiple of {ALIGNMENT}"
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < (8, 9):
        return f"{torch.cuda.get_device_name(weight.device)} has no float8 matrix products"
    return None


@custom_op("phasor::glu_float8")
def _glu_float8(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    from phasor.ops.float8.kernels import glu_float8

    return glu_float8(x, kind)


@_glu_float8.register_fake
def _(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    return x.new_empty((rows, columns // 2), dtype=FLOAT8), x.new_empty((rows, 1), dtype=torch.float32)


@custom_op("phasor::glu_float8_backward")
def _glu_float8_backward(grad: Tensor, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    from phasor.ops.float8.kernels import glu_float8_backward

    return glu_float8_backward(grad, x, kind)


@_glu_float8_backward.register_fake
def _(grad: Tensor, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=FLOAT8), x.new_empty((x.shape[0], 1), dtype=torch.float32)


class _MLPFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor, kind: str) -> Tensor:
        values, scale = quantize_rows(x)
        projected = quantized_matmul(values, scale, up, x.dtype)
        hidden, hidden_scale = _glu_float8(projected, kind)
        ctx.kind = kind
        ctx.save_for_backward(transpose(values), scale, projected, transpose(hidden), hidden_scale, up, down)
        return quantized_matmul(hidden, hidden_scale, down, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x_t, x_scale, projected, hidden_t, hidden_scale, up, down = ctx.saved_tensors
        _, trains_up, trains_down, _ = ctx.needs_input_grad
        values, scale = quantize_rows(grads[0])
        dhidden = quantized_matmul(values, scale, down.t(), projected.dtype)
        ddown = weight_gradient(values, scale, hidden_t, hidden_scale, down) if trains_down else None
        values, scale = _glu_float8_backward(dhidden, projected, ctx.kind)
        dx = quantized_matmul(values, scale, up.t(), projected.dtype)
        return dx, weight_gradient(values, scale, x_t, x_scale, up) if trains_up else None, ddown, None


AUTOGRAD_FUNCTIONS = (_LinearFunction, _MLPFunction)


def float8_mlp(x: Tensor, up: Tensor, down: Tensor, kind: str) -> Tensor:
    """`glu(x Up^T) Down^T` with all matrix products in float8.

    Fused, the activation is written in float8 only, and no more than the output of the up projection is kept in the
    dtype of `x`.

    >>> x, up, down = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((3, 16), (64, 16), (16, 32)))
    >>> float8_mlp(x, up, down, "swiglu").shape
    torch.Size([3, 16])
    """
    y: Tensor = FLOAT8_MLP(x, up, down, kind)
    return y


def float8_mlp_why_not(x: Tensor, up: Tensor, down: Tensor, kind: str) -> str | None:
    """Why a gated MLP in float8 is computed part by part; None where it is fused."""
    if kind not in GLU_ACTIVATIONS:
        return f"{kind!r} has no kernel"
    if down.shape[1] > MAX_HIDDEN_DIM:
        return f"a hidden dim of {down.shape[1]} is more than {MAX_HIDDEN_DIM}"
    return dispatch.triton_why_not(x) if x.numel() else "there are no tokens"


def _fused_mlp(x: Tensor, up: Tensor, down: Tensor, kind: str) -> Tensor:
    return _MLPFunction.apply(autocast(x).flatten(0, -2), up, down, kind).unflatten(0, x.shape[:-1])


def _separate_mlp(x: Tensor, up: Tensor, down: Tensor, kind: str) -> Tensor:
    return float8_linear(glu(float8_linear(x, up), kind), down)


def _explain_separate_mlp(x: Tensor, up: Tensor, down: Tensor, kind: str) -> tuple[str, dict[str, str]]:
    return GLU.explain(x.new_empty((*x.shape[:-1], up.shape[0])), kind)


FUSED_FLOAT8_MLP = Path(
    "Triton kernels that write float8, one operation with both projections", _fused_mlp, float8_mlp_why_not
)
FLOAT8_MLP = Dispatch(
    FUSED_FLOAT8_MLP,
    Path("float8 linear layers around the activation", _separate_mlp, inner=_explain_separate_mlp),
)
