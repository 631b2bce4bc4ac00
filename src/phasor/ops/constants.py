"""Tables that never change: written to a device once, and not at every step."""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 256
MADE: dict[tuple[tuple[int, ...] | tuple[float, ...], torch.device, torch.dtype], Tensor] = {}


def constant(values: tuple[int, ...] | tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Numbers as a tensor, the same one each time: do not write to it.

    Where a copy to the device cannot be made, as while a CUDA graph is captured, one that was made before serves.

    >>> constant((1, 2), torch.device("cpu"), torch.int64) is constant((1, 2), torch.device("cpu"), torch.int64)
    True
    """
    if torch.compiler.is_compiling():  # it keeps constants itself
        return torch.tensor(values, device=device, dtype=dtype)
    key = values, device, dtype
    made = MADE.get(key)
    if made is None:
        with torch.inference_mode(False):
            made = torch.tensor(values, device=device, dtype=dtype)
        if type(made) is Tensor:  # and not a stand-in, from a mode that traces
            MADE[key] = made
            for oldest in list(MADE)[:-MOST]:
                MADE.pop(oldest, None)
    return made


def constants() -> list[Tensor]:
    """All that are kept now. A CUDA graph reads them where they lie: who captures one holds on to them."""
    return list(MADE.values())
