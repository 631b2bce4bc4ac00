"""Matrix products in float8: a layer's output, the gradient of its input and the gradient of its weight.

Every row is divided by a power of two before it is rounded to 8 bits. In the gradient of a weight, a sum over tokens,
the powers of a token's input and gradient go into the 8 bits of the gradient, which loses nothing but what becomes too
small beside the largest.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.ops import dispatch
from phasor.ops.custom_op import custom_op
from phasor.ops.glu import glu

EIGHT = torch.float8_e4m3fn
LARGEST = torch.finfo(EIGHT).max
LEAST = 2.0**-100  # what a row is divided by
SIDE = 16  # sides of matrices in float8 are multiples of this
FAST = 2**15  # longer sums are added up in full: the fast way is off by 0.35 % over 2^14 numbers, by 3 % over 2^20
WIDEST = 2**14  # a row of the activation has to fit into the registers of one program


def eight_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix in float8, and what its rows are to be multiplied by: powers of two, `[rows, 1]` in float32.

    >>> bits, scale = eight_bits(torch.tensor([[1.0, -4.0], [0.0, 0.0]]))
    >>> (bits.float() * scale).tolist()
    [[1.0, -4.0], [0.0, 0.0]]
    """
    scale = power_above((x.abs().amax(-1, keepdim=True).float() / LARGEST).clamp(min=LEAST))
    return (x.float() * (1.0 / scale)).to(EIGHT).contiguous(), scale


def power_above(x: Tensor) -> Tensor:
    """The least power of two that is not below `x`, which is positive; not a number where `x` is not finite.

    >>> power_above(torch.tensor([0.25, 0.3, 1.0, 5.0])).tolist()
    [0.25, 0.5, 1.0, 8.0]
    """
    power = ((x.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(x < torch.inf, power, torch.nan)


def product(bits: Tensor, scale: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`a b^T` for `a [M, K]` in float8 and `b [N, K]`, which is rounded to it, summed in float32."""
    right, columns = eight_bits(b)
    return multiplied(bits, right, scale, columns.t(), dtype)


def multiplied(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """`a b^T` of matrices in float8, times `rows [M, 1]` and `columns [1, N]`, or two numbers."""
    fast = bool(a.shape[1] <= FAST)  # and not a symbol, where a compiler takes sizes for dynamic
    return torch._scaled_mm(a, b.t(), rows, columns, out_dtype=dtype, use_fast_accum=fast)


def weight_gradient(grad: Tensor, scale: Tensor, turned: Tensor, turned_scale: Tensor, weight: Tensor) -> Tensor:
    """The sum over tokens of gradient times input, `[N, K]`, for `grad [T, N]` and inputs turned, `[K, T]`."""
    both = scale * turned_scale
    top = both.amax().clamp(min=torch.finfo(torch.float32).tiny)
    made = multiplied(turn(grad, both / top), turned, top, torch.ones_like(top), torch.bfloat16)
    return made.to(weight.dtype)


@custom_op("phasor::turn_bits")
def _turn(bits: Tensor, factor: Tensor | None) -> Tensor:
    rows, columns = bits.shape
    long = -(-rows // SIDE) * SIDE
    if dispatch.triton_why_not(bits) is None:
        from phasor.ops.float8.kernels import turned

        return turned(bits, factor, long)
    made = torch.zeros((columns, long), dtype=EIGHT, device=bits.device)
    made[:, :rows] = (bits if factor is None else (bits.float() * factor).to(EIGHT)).t()
    return made


@_turn.register_fake
def _(bits: Tensor, factor: Tensor | None) -> Tensor:
    return bits.new_empty((bits.shape[1], -(-bits.shape[0] // SIDE) * SIDE))


def turn(bits: Tensor, factor: Tensor | None = None) -> Tensor:
    """The transpose of a matrix in float8, its rows multiplied by a factor each, with zeros up to a multiple of 16.

    >>> bits = torch.tensor([[1.0, 2.0]]).to(EIGHT)
    >>> turn(bits, torch.tensor([[0.5]])).float()[:, :2].tolist()
    [[0.5, 0.0], [1.0, 0.0]]
    """
    made: Tensor = _turn(bits, factor)
    return made


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        bits, scale = eight_bits(x)
        ctx.save_for_backward(turn(bits), scale, weight)
        return product(bits, scale, weight, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None]:
        turned, turned_scale, weight = ctx.saved_tensors
        bits, scale = eight_bits(grads[0])
        by_x = product(bits, scale, weight.t(), grads[0].dtype)
        learned = ctx.needs_input_grad[1]
        return by_x, weight_gradient(bits, scale, turned, turned_scale, weight) if learned else None


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x W^T + b`, the product in float8, in the type that automatic casting asks for.

    >>> x, weight = torch.randn(2, 3, 32, dtype=torch.bfloat16), torch.randn(16, 32, dtype=torch.bfloat16)
    >>> exact = torch.nn.functional.linear(x, weight)
    >>> bool((float8_linear(x, weight) - exact).norm() < 0.1 * exact.norm())
    True
    """
    if not x.numel():
        return F.linear(x, weight, bias)
    y = _Linear.apply(cast(x).flatten(0, -2), weight).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias.to(y.dtype)


def cast(x: Tensor) -> Tensor:
    """`x` in the type that automatic casting asks for.

    >>> cast(torch.zeros(1)).dtype
    torch.float32
    """
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def float8_why_not(weight: Tensor) -> str | None:
    """Why a layer with this weight cannot take float8 products; None where it can."""
    if weight.dim() != 2 or any(size % SIDE for size in weight.shape):
        return f"a weight {list(weight.shape)} has a side that is not a multiple of {SIDE}"
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device) < (8, 9):
        return f"{torch.cuda.get_device_name(weight.device)} has no float8 products"
    return None


@custom_op("phasor::gated_bits")
def _gated(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    from phasor.ops.float8.kernels import gated

    return gated(x, kind)


@_gated.register_fake
def _(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    rows, wide = x.shape
    return x.new_empty((rows, wide // 2), dtype=EIGHT), x.new_empty((rows, 1), dtype=torch.float32)


@custom_op("phasor::gated_bits_backward")
def _gated_backward(grad: Tensor, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    from phasor.ops.float8.kernels import gated_backward

    return gated_backward(grad, x, kind)


@_gated_backward.register_fake
def _(grad: Tensor, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=EIGHT), x.new_empty((x.shape[0], 1), dtype=torch.float32)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor, kind: str) -> Tensor:
        bits, scale = eight_bits(x)
        wide = product(bits, scale, up, x.dtype)
        inner, inner_scale = _gated(wide, kind)
        ctx.kind = kind
        ctx.save_for_backward(turn(bits), scale, wide, turn(inner), inner_scale, up, down)
        return product(inner, inner_scale, down, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        turned, turned_scale, wide, inner, inner_scale, up, down = ctx.saved_tensors
        _, learned_up, learned_down, _ = ctx.needs_input_grad
        bits, scale = eight_bits(grads[0])
        by_inner = product(bits, scale, down.t(), wide.dtype)
        by_down = weight_gradient(bits, scale, inner, inner_scale, down) if learned_down else None
        bits, scale = _gated_backward(by_inner, wide, ctx.kind)
        by_x = product(bits, scale, up.t(), wide.dtype)
        return by_x, weight_gradient(bits, scale, turned, turned_scale, up) if learned_up else None, by_down, None


FUNCTIONS = (_Linear, _FeedForward)


def float8_feedforward(x: Tensor, up: Tensor, down: Tensor, kind: str) -> Tensor:
    """`gated(x Up^T) Down^T`, all products in float8; between them nothing but the gate is kept in more bits."""
    return _FeedForward.apply(cast(x).flatten(0, -2), up, down, kind).unflatten(0, x.shape[:-1])


def feedforward_why_not(x: Tensor, hidden: int, kind: str) -> str | None:
    """Why a gated feed-forward network in float8 is made of its parts; None where it is one operation."""
    if kind not in glu.GLU_ACTIVATIONS:
        return f"{kind!r} has no kernel"
    if hidden > WIDEST:
        return f"{hidden} features are more than {WIDEST}"
    return dispatch.triton_why_not(x) if x.numel() else "there are no tokens"
