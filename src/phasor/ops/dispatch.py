"""Which path an operation takes: one table per operation, and the reasons why a Triton kernel cannot run.

A `Dispatch` lists the paths of one operation, fastest first, each with a function that says why it is not taken. The
operation calls it, and `phasor.backends()` asks it, so the order and the reasons are written once.

Kernels run on a GPU where Triton is installed. Under `force_path("triton")` they run on any device, which on the CPU
takes Triton's interpreter (`TRITON_INTERPRET=1` before Triton is imported); under `force_path("reference")` never.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

ForcedPath = Literal["reference", "triton"]
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Fewer elements than these are done before a Triton kernel is launched, which takes longer than a kernel of torch's.
# A norm with an offset, as Gemma's, is several of torch's.
MIN_ELEMENTS = {"norm": 2**23, "norm with offset": 2**20, "glu": 2**22}
_forced: ForcedPath | None = None


@contextmanager
def force_path(path: ForcedPath | None) -> Iterator[None]:
    """Make every operation take its reference, or its Triton kernel where it has one; with None, let each choose.

    >>> import torch
    >>> with force_path("reference"):
    ...     triton_why_not(torch.zeros(1))
    'the reference path is forced'
    """
    global _forced
    before, _forced = _forced, path
    try:
        yield
    finally:
        _forced = before


def forced_path() -> ForcedPath | None:
    """The path set by `force_path`; None where each operation chooses.

    >>> with force_path("triton"):
    ...     forced_path()
    'triton'
    """
    return _forced


def triton_why_not(*tensors: Tensor) -> str | None:
    """Why no Triton kernel can run on these tensors; None where one can.

    >>> import torch
    >>> with force_path("triton"):
    ...     triton_why_not(torch.zeros(1)) is None or not TRITON_INSTALLED
    True
    """
    if _forced == "reference":
        return "the reference path is forced"
    if not TRITON_INSTALLED:
        return "Triton is not installed"
    if _forced != "triton":
        for x in tensors:
            if not x.is_cuda:
                return "the tensors are not on a GPU"
    return functional_transform_why_not()


def functional_transform_why_not() -> str | None:
    """Why a kernel cannot run inside `torch.func.grad`, `vmap` and forward-mode AD; None outside of them."""
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms only what is written in torch"
    if forward_ad._current_level >= 0:
        return "forward derivatives are those of what is written in torch"
    return None


def eager_kernel_why_not(operation: str, *tensors: Tensor) -> str | None:
    """Why an element-wise operation on tensors of one shape takes its reference; None where it takes its Triton kernel.

    Compiled code always takes the reference, which the compiler fuses with the operations around it.

    >>> eager_kernel_why_not("norm", torch.zeros(3))
    'the tensors are not on a GPU'
    """
    reason = triton_why_not(*tensors)
    if reason is not None:
        return reason
    if torch.compiler.is_compiling():
        return "the compiler fuses the reference with the operations around it"
    elements = tensors[0].numel()
    if elements < MIN_ELEMENTS[operation] and _forced != "triton":
        return f"{elements} elements are done before a kernel is launched"
    for x in tensors:
        if x.dtype not in KERNEL_DTYPES:
            return f"{str(x.dtype)[6:]} has no kernel"
        if hasattr(x, "__tensor_flatten__"):
            return f"a {type(x).__name__} is made of other tensors"
    return None


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd will differentiate what is computed from these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def must_be_deterministic() -> bool:
    """Whether operations that give other bits each time are refused (`torch.use_deterministic_algorithms`)."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


# A constant to the compiler, which cannot trace the second call, and compiles anew where either changes.
must_be_deterministic._dynamo_marked_constant = True  # type: ignore[attr-defined]


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype a tensor is computed in: that of autocast where it is on.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     compute_dtype(torch.zeros(1))
    torch.bfloat16
    """
    return torch.get_autocast_dtype(x.device.type) if x.dtype != torch.float64 and is_autocast(x) else x.dtype


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on where a tensor is."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def no_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context without autocast on the device of a tensor; the meta device has none."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def supports_all(*args: Any) -> None:
    """No reason against a path: it supports every input."""


class Path(NamedTuple):
    """One way to compute an operation.

    `run` and `why_not` take the operation's arguments. `why_not` gives one sentence, or None where the path applies.
    A path whose `run` asks another table has that table's `explain` as `inner`.
    """

    name: str
    run: Callable[..., Any]
    why_not: Callable[..., str | None] = supports_all
    inner: Callable[..., tuple[str, dict[str, str]]] | None = None


class Dispatch:
    """The paths of one operation, fastest first; the last supports every input.

    >>> def not_an_integer(x):
    ...     return None if isinstance(x, int) else "x is not an integer"
    >>> halve = Dispatch(Path("shift", lambda x: x >> 1, not_an_integer), Path("division", lambda x: x / 2))
    >>> halve(8), halve(8.0)
    (4, 4.0)
    >>> halve.explain(8.0)
    ('division', {'shift': 'x is not an integer'})
    """

    def __init__(self, *paths: Path) -> None:
        self.paths = paths

    def __call__(self, *args: Any) -> Any:
        for (
            _,
            run,
            why_not,
            _,
        ) in self.paths:  # unpacked, which is faster than by name: small operations are called often
            if why_not(*args) is None:
                return run(*args)
        raise AssertionError("the last path of an operation supports every input")

    def choose(self, *args: Any) -> Path:
        """The path that is taken."""
        for path in self.paths:
            if path.why_not(*args) is None:
                return path
        raise AssertionError("the last path of an operation supports every input")

    def explain(self, *args: Any) -> tuple[str, dict[str, str]]:
        """The name of the path taken, and for each faster path the reason why it is not taken.

        Where the path asks another table, the name and the reasons are those of that table.
        """
        reasons: dict[str, str] = {}
        for path in self.paths:
            reason = path.why_not(*args)
            if reason is None:
                name, inner_reasons = (path.name, {}) if path.inner is None else path.inner(*args)
                return name, reasons | inner_reasons
            reasons[path.name] = reason
        raise AssertionError("the last path of an operation supports every input")
