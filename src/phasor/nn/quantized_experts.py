"""Routed experts whose matrices are frozen in 8 bits or NF4: gradients pass through them, and adapters add to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phasor.nn.grouped_matmul import grouped_matmul
from phasor.nn.moe import Experts
from phasor.nn.quantized import Quantization, Quantized
from phasor.ops.custom_op import CustomOp, custom_op, save_record, saved_record
from phasor.ops.dispatch import compute_dtype
from phasor.ops.quantized import FrozenMatrix, Int8Matrix, NF4Matrix, dequantize


@custom_op("phasor::nf4_experts")
def nf4_experts_op(x: Tensor, matrix: NF4Matrix, ends: Tensor, experts: int, transposed: bool) -> Tensor:
    """`grouped_matmul` with an NF4 matrix of all experts, one above the other, or with their transposes."""
    return multiply_stack(x, matrix, ends, experts, transposed)


@custom_op("phasor::int8_experts")
def int8_experts_op(x: Tensor, matrix: Int8Matrix, ends: Tensor, experts: int, transposed: bool) -> Tensor:
    """The same with an int8 matrix."""
    return multiply_stack(x, matrix, ends, experts, transposed)


def multiply_stack(x: Tensor, matrix: FrozenMatrix, ends: Tensor, experts: int, transposed: bool) -> Tensor:
    """Rows sorted by expert times their expert's matrix, dequantized for that."""
    weight = dequantize(matrix, x.dtype).unflatten(0, (experts, -1))
    return grouped_matmul(x, weight.mT if transposed else weight, ends)


def register_gradient(op: CustomOp) -> None:
    """Give a product its shape and its gradient to `x`, for which the quantized matrix is kept."""

    def fake(x: Tensor, matrix: FrozenMatrix, ends: Tensor, experts: int, transposed: bool) -> Tensor:
        return x.new_empty(len(x), len(matrix.values) // experts if transposed else matrix.inputs)

    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        save_record(ctx, inputs.matrix, inputs.ends)
        ctx.options = inputs.experts, inputs.transposed

    def backward(ctx: Any, grad: Tensor) -> dict[str, Tensor | None]:
        matrix, ends = saved_record(ctx)
        experts, transposed = ctx.options
        return {"x": op(grad, matrix, ends, experts, not transposed)}

    op.register_fake(fake)
    op.register_autograd(backward, setup_context=setup_context)


register_gradient(nf4_experts_op)
register_gradient(int8_experts_op)


class QuantizedStack(Quantized):
    """The matrices of all experts, `[experts, in, out]`, quantized as one, `[experts in, out]`.

    >>> stack = QuantizedStack(torch.randn(2, 6, 64), Quantization("nf4"))
    >>> stack.full_shape, tuple(stack.weight.shape)
    (torch.Size([2, 6, 64]), (12, 32))
    """

    def __init__(self, weight: Tensor, quantization: Quantization) -> None:
        super().__init__()
        self.stack_shape = weight.shape
        self.set_weight(quantization.quantize(weight.flatten(0, 1)))

    def __len__(self) -> int:
        return self.stack_shape[0]

    @property
    def full_shape(self) -> torch.Size:
        return self.stack_shape

    @property
    def shape(self) -> torch.Size:
        """As of the tensor that it stands for."""
        return self.stack_shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        matrix, x = self.frozen_matrix, x.to(compute_dtype(x))
        op = nf4_experts_op if isinstance(matrix, NF4Matrix) else int8_experts_op
        y: Tensor = op(x, matrix, ends, len(self), False)
        return y


class QuantizedExperts(Experts):
    """Experts with a `QuantizedStack` in the place of each matrix."""

    def mix_experts(self, tokens: Tensor, logits: Tensor) -> Tensor:
        return self.by_groups(tokens, logits)

    def multiply(self, x: Tensor, name: str, ends: Tensor) -> Tensor:
        y: Tensor = getattr(self, name)(x, ends)
        return y


def quantize_stack(experts: Experts, name: str, weight: Tensor, quantization: Quantization) -> QuantizedStack:
    """Let experts hold a quantized matrix under a name."""
    stack = QuantizedStack(weight, quantization)
    experts._parameters.pop(name, None)
    setattr(experts, name, stack)
    if type(experts) is Experts:
        experts.__class__ = QuantizedExperts
    return stack
