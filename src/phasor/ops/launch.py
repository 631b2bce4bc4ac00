"""The device a Triton kernel is launched on, and whether it supports programmatic dependent launch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

NULL_CONTEXT = nullcontext()


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """A context that launches kernels on the device of `x`; nearly free where that is the current one already.

    >>> with on_device(torch.zeros(1)):
    ...     pass
    """
    return torch.cuda.device(x.device) if x.is_cuda and x.device.index != torch.cuda.current_device() else NULL_CONTEXT


def supports_pdl(device: torch.device) -> bool:
    """Whether a kernel on this device may start before the previous one has ended (Hopper and later).

    >>> supports_pdl(torch.device("cpu"))
    False
    """
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
