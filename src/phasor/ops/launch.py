"""Launches of Triton kernels: found again once compiled, on the device of their tensors. Nothing imports Triton."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from phasor.ops.compile_ahead import PendingKernel

NULL_CONTEXT = nullcontext()
MAX_COMPILED = 1024  # launches that are kept of each kernel
ALIGNMENT = 16  # bytes: Triton compiles other code for other addresses


class CompiledLaunch:
    """A kernel as Triton compiled it, its grid, and its arguments but for the tensors, which are given by address.

    It is launched without Triton's own Python, which would ask every tensor for its address, and the driver whether
    that is one of the device.
    """

    def __init__(self, compiled: Any, grid: tuple[int, ...], scalars: Sequence[Any]) -> None:
        self.run, self.function, self.metadata = compiled.run, compiled.function, compiled.packed_metadata
        self.grid, self.scalars = (*grid, 1, 1)[:3], scalars

    def __call__(self, device: torch.device, addresses: Sequence[Any]) -> None:
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        # No metadata of the launch, and no hooks before and after it.
        self.run(*self.grid, stream, self.function, self.metadata, None, None, None, *addresses, *self.scalars)


def given_grid(grid: tuple[int, ...], **scalars: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
    """A grid that the launch itself gives, with all scalars and options."""
    return grid, {}


class KernelLauncher:
    """Launches a Triton kernel, and keeps it as compiled together with its grid and scalars.

    Triton would inspect every argument of every launch, which takes the host longer than the launch itself.

    A launch gives the kernel's tensors, or descriptors of them, by name, which are its first arguments, and scalars and
    options such as `num_warps` by name too. `prepare(*key, **scalars)` gives the grid, and the scalars and options that
    are missing. It is called once for equal keys, scalars and dtypes, so these are all that its answer may depend on.
    Only launches whose tensors begin at multiples of 16 bytes are kept, as Triton compiles other code for the rest;
    `unaligned` names tensors for which it does not.
    """

    def __init__(
        self,
        kernel: Any,
        prepare: Callable[..., tuple[tuple[int, ...], dict[str, Any]]] = given_grid,
        unaligned: Collection[str] = (),
    ) -> None:
        self.kernel, self.prepare, self.unaligned = kernel, prepare, unaligned
        self.compiled: dict[tuple[Any, ...], CompiledLaunch] = {}

    def __call__(self, like: Tensor, tensors: Mapping[str, Any], *key: Any, **scalars: Any) -> None:
        """Launch on the device of `like`, with tensors in the order of the kernel's signature."""
        device, bits = like.device, 0
        addresses: list[Any] = []
        parts: list[Any] = [device, key]
        if scalars:
            parts += scalars
            parts += scalars.values()
        for x in tensors.values():
            if x is None:
                addresses.append(None)
                parts.append(None)
            elif not isinstance(x, Tensor):  # of which it is known that the tensor is aligned
                addresses.append(x)
                parts.append(x.base.dtype)
            else:
                address = x.data_ptr()
                addresses.append(address)
                parts.append(x.dtype)
                bits |= address
        full_key, aligned = tuple(parts), bits % ALIGNMENT == 0 or self.is_aligned(tensors)
        launch = self.compiled.get(full_key) if aligned else None
        if launch is not None and not (like.is_cuda and device.index != torch._C._cuda_getDevice()):
            launch(device, addresses)
            return
        with on_device(like):
            if launch is not None:
                launch(device, addresses)
                return
            launch = self.launch_by_triton(tensors, key, scalars)
        if launch is not None and aligned:
            if len(self.compiled) >= MAX_COMPILED:
                self.compiled.clear()
            self.compiled[full_key] = launch

    def is_aligned(self, tensors: Mapping[str, Any]) -> bool:
        """Whether all tensors begin at multiples of 16 bytes for which that makes a difference."""
        return not any(
            x.data_ptr() % ALIGNMENT
            for name, x in tensors.items()
            if isinstance(x, Tensor) and name not in self.unaligned
        )

    def launch_by_triton(
        self, tensors: Mapping[str, Any], key: tuple[Any, ...], scalars: dict[str, Any]
    ) -> CompiledLaunch | None:
        """Launch by Triton, and return what it compiled; None if it interprets kernels, or has not compiled it yet."""
        names = tuple(self.kernel.arg_names)
        if tuple(tensors) != names[: len(tensors)]:
            raise ValueError(f"the kernel's first arguments are {names[: len(tensors)]}, not {tuple(tensors)}")
        grid, rest = self.prepare(*key, **scalars)
        args = scalars | rest
        compiled = self.kernel[grid](**tensors, **args)
        if compiled is None or isinstance(compiled, PendingKernel):
            return None
        return CompiledLaunch(compiled, grid, [args[name] for name in names[len(tensors) :]])


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """A context that launches kernels on the device of `x`; nearly free where that is the current one already.

    >>> with on_device(torch.zeros(1)):
    ...     pass
    """
    # Where there is a tensor on a GPU, torch has initialized it.
    return torch.cuda.device(x.device) if x.is_cuda and x.device.index != torch._C._cuda_getDevice() else NULL_CONTEXT


def empty_dense(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor like `x`, contiguous for any strides: in half the time that `torch.empty` takes.

    >>> empty_dense(torch.zeros(3, 2).t()).stride()
    (3, 1)
    """
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def contiguous(x: Tensor | None) -> Tensor | None:
    """`x.contiguous()` of a tensor that may be absent."""
    return None if x is None else x.contiguous()


def stride_or_0(x: Tensor, dim: int) -> int:
    """The stride of a dimension, 0 where its only entry serves all rows or heads.

    >>> stride_or_0(torch.zeros(3, 2), 0), stride_or_0(torch.zeros(1, 2), 0)
    (2, 0)
    """
    return x.stride(dim) if x.shape[dim] > 1 else 0


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


def supports_ptx(device: torch.device) -> bool:
    """Whether kernels may have instructions of NVIDIA's: torch calls AMD's GPUs `cuda` too.

    >>> supports_ptx(torch.device("cpu"))
    False
    """
    return device.type == "cuda" and torch.version.hip is None


def supports_pdl(device: torch.device) -> bool:
    """Whether a kernel on this device may start before the previous one has ended (Hopper and later).

    >>> supports_pdl(torch.device("cpu"))
    False
    """
    return supports_ptx(device) and torch.cuda.get_device_capability(device) >= (9, 0)
