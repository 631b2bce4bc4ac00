"""When norms and activations take a kernel of their own: in eager mode, on a GPU, where there is enough to do."""

from __future__ import annotations

import torch
from torch import Tensor

from phasor.ops import dispatch

# How many numbers make a kernel of ours worth its launch, which takes longer than that of one of torch's own.
WORTH = {"norm": 2**22, "gated": 2**22}


def why_not(operation: str, x: Tensor) -> str | None:
    """Why an operation on `x` takes its plain form; None where it takes its kernel.

    Compiled code always takes the plain form, which the compiler fuses with what stands around it.

    >>> why_not("norm", torch.zeros(3))
    'the tensors are not on a GPU'
    """
    if torch.compiler.is_compiling():
        return "the compiler fuses the plain form with what stands around it"
    reason = dispatch.why_not(x)
    if reason is not None:
        return reason
    if x.dtype not in dispatch.FLOATS:
        return f"{str(x.dtype)[6:]} has no kernel"
    if hasattr(x, "__tensor_flatten__"):
        return f"a {type(x).__name__} is made of other tensors"
    if x.numel() < WORTH[operation] and dispatch.asked() != "triton":
        return f"{x.numel()} numbers are done before a kernel is launched"
    return None
