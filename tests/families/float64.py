"""The reference in float64: what transformers computes in float32 in a model of any dtype, such as angles and norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


class WithoutFloat32(TorchFunctionMode):
    """Whatever asks for float32 gets float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {name: widen(value) for name, value in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*map(widen, args), **given)


def widen(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def in_float64() -> Iterator[None]:
    """Build and run models of transformers in float64 throughout."""
    torch.set_default_dtype(torch.float64)
    try:
        with WithoutFloat32(), mock.patch.object(torch, "FloatTensor", torch.DoubleTensor):
            yield
    finally:
        torch.set_default_dtype(torch.float32)
