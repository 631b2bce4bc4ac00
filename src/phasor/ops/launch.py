"""Launches of Triton kernels: found again once compiled, on the device of their tensors. Nothing imports Triton."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

NULL_CONTEXT = nullcontext()
MAX_COMPILED = 1024  # launches that are kept of each kernel


class KernelLauncher:
    """Launches a Triton kernel with arguments by name, and keeps it as compiled for dtypes and numbers like these.

    Triton would inspect every argument of every launch, which takes the host longer than the launch itself.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, grid: tuple[int, ...], like: Tensor, args: dict[str, Any]) -> None:
        """Launch on the device of `like`; options such as `num_warps` come after the kernel's own arguments."""
        addresses = 0
        key: list[Any] = [like.device]
        for value in args.values():
            if isinstance(value, Tensor):
                addresses |= value.data_ptr()
                key.append(value.dtype)
            else:
                key += (type(value), value)  # 1, 1.0 and True are equal, and compiled differently
        aligned = addresses % 16 == 0  # Triton compiles other code for other addresses
        with on_device(like):
            compiled = self.compiled.get(tuple(key)) if aligned else None
            if compiled is not None:
                compiled[(*grid, 1, 1)[:3]](*[args[name] for name in self.kernel.arg_names])
                return
            compiled = self.kernel[grid](**args)
        if compiled is not None and aligned:  # the interpreter returns none
            if len(self.compiled) >= MAX_COMPILED:
                self.compiled.clear()
            self.compiled[tuple(key)] = compiled


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """A context that launches kernels on the device of `x`; nearly free where that is the current one already.

    >>> with on_device(torch.zeros(1)):
    ...     pass
    """
    return torch.cuda.device(x.device) if x.is_cuda and x.device.index != torch.cuda.current_device() else NULL_CONTEXT


def cdiv(a: int, b: int) -> int:
    """`a / b`, rounded up: `triton.cdiv` on the host takes some microseconds.

    >>> cdiv(7, 4)
    2
    """
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The power of two that is at least `n`, as `triton.next_power_of_2`.

    >>> next_power_of_2(48), next_power_of_2(64)
    (64, 64)
    """
    return 1 << (n - 1).bit_length()


def supports_pdl(device: torch.device) -> bool:
    """Whether a kernel on this device may start before the previous one has ended (Hopper and later).

    >>> supports_pdl(torch.device("cpu"))
    False
    """
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
