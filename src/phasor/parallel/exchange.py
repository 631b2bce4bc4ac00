"""Tokens gathered from the processes of an axis, and sums scattered to them, both with gradients.

Tokens stand along the second dimension, `[B, T, ...]`. The gradient of one operation is the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Axis:
    """The processes along an axis of a mesh that exchange with this one, by the name of their group."""

    index: int
    size: int
    group: str

    @classmethod
    def of(cls, mesh: DeviceMesh, name: str) -> Axis:
        """An axis of a mesh."""
        axis = mesh[name]
        return cls(axis.get_local_rank(), axis.size(), axis.get_group().group_name)


def gather(x: Tensor, axis: Axis) -> Tensor:
    """The tokens of all processes, in their order."""
    rows = len(x)
    ops = torch.ops._c10d_functional
    whole = ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), axis.size, axis.group))
    return whole.unflatten(0, (axis.size, rows)).transpose(0, 1).flatten(1, 2)


def scatter_sum(x: Tensor, axis: Axis) -> Tensor:
    """This process's tokens of the sum over all processes."""
    parts = x.unflatten(1, (axis.size, -1)).transpose(0, 1).flatten(0, 1)
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.reduce_scatter_tensor(parts.contiguous(), "sum", axis.size, axis.group))


class GatherTokens(torch.autograd.Function):
    """`gather`, with the tokens put into an order; the gradient is scattered in the inverse one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, order: Tensor | None, inverse: Tensor | None) -> Tensor:
        ctx.axis, ctx.inverse = axis, inverse
        whole = gather(x, axis)
        return whole if order is None else whole.index_select(1, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grad if ctx.inverse is None else grad.index_select(1, ctx.inverse)
        return scatter_sum(grad, ctx.axis), None, None, None


class ScatterSum(torch.autograd.Function):
    """`scatter_sum`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return scatter_sum(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gather(grad, ctx.axis), None


def gather_tokens(x: Tensor, axis: Axis, order: Tensor | None = None, inverse: Tensor | None = None) -> Tensor:
    """The tokens of all processes, or `gathered[:, order]` with the `inverse` of that order; gradients are summed."""
    whole: Tensor = GatherTokens.apply(x, axis, order, inverse)
    return whole


def scatter_sums(x: Tensor, axis: Axis) -> Tensor:
    """This process's tokens of the sum over all processes; gradients are gathered."""
    part: Tensor = ScatterSum.apply(x, axis)
    return part


def sum_values(x: Tensor, axis: Axis) -> Tensor:
    """The sum of a tensor over the processes of an axis, without a gradient."""
    ops = torch.ops._c10d_functional
    total: Tensor = ops.wait_tensor(ops.all_reduce(x, "sum", axis.group))
    return total


def sum_in_place(tensors: list[Tensor], axis: Axis) -> None:
    """Sum tensors over the processes of an axis, all of them in one exchange."""
    flat = sum_values(torch.cat([tensor.flatten() for tensor in tensors]), axis)
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))
