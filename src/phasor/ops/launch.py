"""Launches of Triton kernels: found again once compiled, on the device of their tensors. Nothing imports Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

NULL_CONTEXT = nullcontext()
MAX_COMPILED = 1024  # launches that are kept of each kernel


class DirectLaunch:
    """A kernel as Triton compiled it, launched without Triton's own Python: tensors are given by their addresses.

    Triton would ask every tensor for its address, and the driver whether that is one of the device.
    """

    def __init__(self, compiled: Any) -> None:
        self.run, self.function, self.metadata = compiled.run, compiled.function, compiled.packed_metadata

    def __call__(self, grid: tuple[int, ...], device: torch.device, args: Sequence[Any]) -> None:
        stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
        self.run(
            *grid, stream, self.function, self.metadata, None, None, None, *args
        )  # no metadata for hooks, and none


class PreparedLaunch(NamedTuple):
    """A kernel as compiled for certain dtypes and scalars, its grid, and the arguments after the tensors."""

    launch: DirectLaunch
    grid: tuple[int, ...]
    scalars: tuple[Any, ...]


class KernelLauncher:
    """Launches a Triton kernel with arguments by name, and keeps it as compiled for dtypes and numbers like these.

    Triton would inspect every argument of every launch, which takes the host longer than the launch itself.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[tuple[Any, ...], DirectLaunch] = {}
        self.prepared: dict[tuple[Any, ...], PreparedLaunch] = {}  # by device, scalars, choices and dtypes
        self.names: tuple[str, ...] = ()  # of the arguments, in the order in which they were given
        self.in_kernel_order: Callable[[Sequence[Any]], tuple[Any, ...]] = tuple
        self.tensor_places: dict[tuple[type, ...], list[int]] = {}  # by the types of all arguments

    def __call__(self, grid: tuple[int, ...], like: Tensor, args: dict[str, Any]) -> None:
        """Launch on the device of `like`; options such as `num_warps` come after the kernel's own arguments."""
        names, values = tuple(args), list(args.values())
        if names != self.names:
            self.arrange(names)
        types = tuple(map(type, values))  # 1, 1.0 and True are equal, and compiled differently
        places = self.tensor_places.get(types)
        if places is None:
            places = self.tensor_places[types] = [i for i, x in enumerate(values) if isinstance(x, Tensor)]
        addresses, constants, device = 0, values.copy(), like.device
        for place in places:
            tensor = values[place]
            values[place] = address = tensor.data_ptr()
            addresses |= address
            constants[place] = tensor.dtype
        aligned = addresses % 16 == 0  # Triton compiles other code for other addresses
        key = (device, types, *constants)
        with on_device(like):
            launch = self.compiled.get(key) if aligned else None
            if launch is not None:
                launch((*grid, 1, 1)[:3], device, self.in_kernel_order(values))
            else:
                compiled = self.kernel[grid](**args)
                if compiled is not None and aligned:  # the interpreter returns none
                    if len(self.compiled) >= MAX_COMPILED:
                        self.compiled.clear()
                    launch = self.compiled[key] = DirectLaunch(compiled)

    def launch(
        self,
        like: Tensor,
        tensors: Sequence[Tensor | None],
        scalars: tuple[Any, ...],
        prepare: Callable[..., tuple[tuple[int, ...], dict[str, Any]]],
        *choices: Any,
    ) -> None:
        """Launch on tensors and scalars, in the order of the kernel's arguments, on the device of `like`.

        The grid, the arguments after these, and options are what `prepare(scalars, *choices)` gives. It is asked once
        for equal scalars, choices and dtypes.
        """
        device, alignment = like.device, 0
        addresses: list[int | None] = []
        key: list[Any] = [device, scalars, choices]
        for x in tensors:
            if x is None:
                addresses.append(None)
                key.append(None)
            else:
                address = x.data_ptr()
                addresses.append(address)
                alignment |= address
                key.append(x.dtype)
        kept, aligned = tuple(key), alignment % 16 == 0
        with on_device(like):
            prepared = self.prepared.get(kept) if aligned else None
            if prepared is not None:
                prepared.launch(prepared.grid, device, (*addresses, *prepared.scalars))
            else:
                grid, rest = prepare(scalars, *choices)
                compiled = self.kernel[grid](*tensors, *scalars, **rest)
                if compiled is not None and aligned:  # the interpreter returns none
                    if len(self.prepared) >= MAX_COMPILED:
                        self.prepared.clear()
                    named = self.kernel.arg_names[len(tensors) + len(scalars) :]
                    values = (*scalars, *(rest[name] for name in named))
                    prepared = PreparedLaunch(DirectLaunch(compiled), (*grid, 1, 1)[:3], values)
                    self.prepared[kept] = prepared

    def arrange(self, names: tuple[str, ...]) -> None:
        """Begin anew with arguments in another order than before."""
        self.compiled.clear()
        self.tensor_places.clear()
        self.names, self.in_kernel_order = names, itemgetter(*map(names.index, self.kernel.arg_names))


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """A context that launches kernels on the device of `x`; nearly free where that is the current one already.

    >>> with on_device(torch.zeros(1)):
    ...     pass
    """
    # Where there is a tensor on a GPU, torch has initialized it.
    return torch.cuda.device(x.device) if x.is_cuda and x.device.index != torch._C._cuda_getDevice() else NULL_CONTEXT


def empty_dense(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor like `x`, contiguous whatever its strides: in half the time that `torch.empty` takes.

    >>> empty_dense(torch.zeros(3, 2).t()).stride()
    (3, 1)
    """
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


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
