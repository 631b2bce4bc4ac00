"""Which form of an operation runs: its reference in plain torch, or its Triton kernel.

Kernels run on a GPU where Triton is installed. Under `only("triton")` they run wherever the tensors are, which on
the CPU takes Triton's interpreter (`TRITON_INTERPRET=1` before Triton is imported); under `only("reference")` never.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

Form = Literal["reference", "triton"]
INSTALLED = importlib.util.find_spec("triton") is not None
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what kernels compute with
_asked: Form | None = None


@contextmanager
def only(form: Form) -> Iterator[None]:
    """Have every operation take this form, where it has it.

    >>> import torch
    >>> with only("reference"):
    ...     obstacle(torch.zeros(1))
    'the reference was asked for'
    """
    global _asked
    before, _asked = _asked, form
    try:
        yield
    finally:
        _asked = before


def asked() -> Form | None:
    """The form that was asked for; None where each operation chooses.

    >>> with only("triton"):
    ...     asked()
    'triton'
    """
    return _asked


def obstacle(*tensors: Tensor) -> str | None:
    """Why no Triton kernel can run on these tensors; None where one can.

    >>> import torch
    >>> with only("triton"):
    ...     obstacle(torch.zeros(1)) is None or not INSTALLED
    True
    """
    if _asked == "reference":
        return "the reference was asked for"
    if not INSTALLED:
        return "Triton is not installed"
    if _asked != "triton" and not all(x.is_cuda for x in tensors):
        return "the tensors are not on a GPU"
    return transformed()


def transformed() -> str | None:
    """Why an operation takes its plain form inside of `torch.func.grad`, `vmap` and the like; None outside of them."""
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms only what is written in torch"
    if forward_ad._current_level >= 0:
        return "forward derivatives are those of what is written in torch"
    return None
