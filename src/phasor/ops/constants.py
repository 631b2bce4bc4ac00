"""Constant tensors, copied to a device once and not at every step."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_CACHED = 256
CACHE: dict[tuple[tuple[int, ...] | tuple[float, ...], torch.device, torch.dtype], Tensor] = {}


def constant(values: tuple[int, ...] | tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The values as a tensor, the same one at each call: do not write to it.

    Where nothing can be copied to the device, as during the capture of a CUDA graph, the cached one is used.

    >>> constant((1, 2), torch.device("cpu"), torch.int64) is constant((1, 2), torch.device("cpu"), torch.int64)
    True
    """
    if torch.compiler.is_compiling():  # it caches constants itself
        return torch.tensor(values, device=device, dtype=dtype)
    key = values, device, dtype
    cached = CACHE.get(key)
    if cached is None:
        with torch.inference_mode(False):
            cached = torch.tensor(values, device=device, dtype=dtype)
        if type(cached) is Tensor:  # and not a fake tensor of a tracing mode
            CACHE[key] = cached
            for oldest in list(CACHE)[:-MAX_CACHED]:
                CACHE.pop(oldest, None)
    return cached


def cached_constants() -> list[Tensor]:
    """All constants in the cache. A CUDA graph reads them by address, so whoever captures one keeps this list."""
    return list(CACHE.values())
