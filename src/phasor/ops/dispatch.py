"""Which path an operation takes: one table per operation, and whether a Triton kernel can run at all.

A `Dispatch` lists the paths of one operation, fastest first, each with a function that says why it is not taken. The
operation calls it, and `phasor.backends()` asks it, so the order and the reasons are written once.

Kernels run on a GPU where Triton is installed. Under `only("triton")` they run wherever the tensors are, which on
the CPU takes Triton's interpreter (`TRITON_INTERPRET=1` before Triton is imported); under `only("reference")` never.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

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
    ...     why_not(torch.zeros(1))
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


def why_not(*tensors: Tensor) -> str | None:
    """Why no Triton kernel can run on these tensors; None where one can.

    >>> import torch
    >>> with only("triton"):
    ...     why_not(torch.zeros(1)) is None or not INSTALLED
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


def always(*args: Any) -> None:
    """No reason against a path: it supports every input."""


class Path(NamedTuple):
    """One way to compute an operation.

    `run` and `why_not` take the operation's arguments. `why_not` gives one sentence, or None where the path applies.
    """

    name: str
    run: Callable[..., Any]
    why_not: Callable[..., str | None] = always


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
        for path in self.paths:
            if path.why_not(*args) is None:
                return path.run(*args)
        raise AssertionError("the last path of an operation supports every input")

    def explain(self, *args: Any) -> tuple[str, dict[str, str]]:
        """The name of the path taken, and for each faster path the reason why it is not taken."""
        reasons: dict[str, str] = {}
        for path in self.paths:
            reason = path.why_not(*args)
            if reason is None:
                return path.name, reasons
            reasons[path.name] = reason
        raise AssertionError("the last path of an operation supports every input")
