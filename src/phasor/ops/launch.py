"""Where a Triton kernel is launched, and when it may begin."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

NOTHING = nullcontext()


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """A context in which a launch goes to the device of `x`; on the present one, as nearly always, it costs nothing.

    >>> with on_device(torch.zeros(1)):
    ...     pass
    """
    return torch.cuda.device(x.device) if x.is_cuda and x.device.index != torch.cuda.current_device() else NOTHING


def supports_pdl(device: torch.device) -> bool:
    """Whether a kernel on this device may begin before the one before it has ended.

    >>> supports_pdl(torch.device("cpu"))
    False
    """
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
