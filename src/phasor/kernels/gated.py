"""Gated activations: gate and up side by side, `[..., 2 h]`, become `act(gate) * up`, `[..., h]`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.kernels import eager

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "glu": torch.sigmoid,
    "reglu": F.relu,
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu-tanh": partial(F.gelu, approximate="tanh"),
}
WITH_KERNEL = frozenset({"glu", "reglu", "swiglu", "geglu", "geglu-tanh"})


def gated(x: Tensor, kind: str) -> Tensor:
    """`act(gate) * up`; the kernel computes in float32 and rounds once, and its gradient keeps nothing but `x`.

    >>> gated(torch.tensor([0.0, 2.0, 3.0, 4.0]), "reglu").tolist()
    [0.0, 8.0]
    """
    return gated_ref(x, kind) if obstacle(x, kind) is not None else _gated(x, kind)


def obstacle(x: Tensor, kind: str) -> str | None:
    """Why a gated activation takes its plain form; None where it takes its kernel."""
    reason = eager.obstacle("gated", x)
    if reason is None and kind not in WITH_KERNEL:
        return f"{kind!r} has no kernel"
    return reason


def gated_ref(x: Tensor, kind: str) -> Tensor:
    """The same in plain form."""
    gate, up = x.chunk(2, dim=-1)
    return GATES[kind](gate) * up


@torch.library.custom_op("phasor::gated", mutates_args=())
def _gated(x: Tensor, kind: str) -> Tensor:
    from phasor.kernels.gated_triton import forward

    return forward(x, kind)


@_gated.register_fake
def _(x: Tensor, kind: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@torch.library.custom_op("phasor::gated_backward", mutates_args=())
def _gated_backward(grad: Tensor, x: Tensor, kind: str) -> Tensor:
    from phasor.kernels.gated_triton import backward

    return backward(grad, x, kind)


@_gated_backward.register_fake
def _(grad: Tensor, x: Tensor, kind: str) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    x, ctx.kind = inputs
    ctx.save_for_backward(x)


def _back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _gated_backward(grad, *ctx.saved_tensors, ctx.kind), None


_gated.register_autograd(_back, setup_context=_keep)
