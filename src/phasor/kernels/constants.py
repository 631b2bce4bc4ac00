"""Tables that never change: written to a device once, and not at every step."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def constant(values: tuple[int, ...] | tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Numbers as a tensor, the same one each time: do not write to it.

    Where a copy to the device cannot be made, as while a CUDA graph is captured, one that was made before serves.

    >>> constant((1, 2), torch.device("cpu"), torch.int64) is constant((1, 2), torch.device("cpu"), torch.int64)
    True
    """
    if torch.compiler.is_compiling():  # it keeps constants itself
        return torch.tensor(values, device=device, dtype=dtype)
    made = kept(values, device, dtype)
    if type(made) is not Tensor:  # a stand-in, from a mode that traces
        kept.cache_clear()
    return made


@functools.lru_cache(maxsize=256)
def kept(values: tuple[int, ...] | tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, device=device, dtype=dtype)
