"""Gated activations in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

GLU_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "glu": torch.sigmoid,
    "reglu": F.relu,
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu-tanh": partial(F.gelu, approximate="tanh"),
}


def glu_ref(x: Tensor, activation: str) -> Tensor:
    """`act(gate) * up` of gate and up side by side.

    >>> glu_ref(torch.tensor([0.0, 2.0, 3.0, 4.0]), "reglu").tolist()
    [0.0, 8.0]
    """
    gate, up = x.chunk(2, dim=-1)
    return GLU_ACTIVATIONS[activation](gate) * up


def glu_linear_ref(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """`glu(x) W^T`.

    >>> glu_linear_ref(torch.tensor([2.0, 3.0]), torch.tensor([[10.0]]), "reglu").tolist()
    [60.0]
    """
    return F.linear(glu_ref(x, activation), weight)
