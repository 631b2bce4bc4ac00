"""The device a user names ("auto", "cpu", "cuda", "cuda:1"), and whether it repeats its results bit by bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.utils.deterministic

from phasor.config.schema import quote, shorten


def resolve_device(name: torch.device | str) -> torch.device:
    """The device of that name; "auto" is a GPU where there is one.

    >>> resolve_device("cpu")
    device(type='cpu')
    """
    if isinstance(name, str) and name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.empty(0, device=name).device
        if device.type == "meta":
            raise RuntimeError("it holds no data")
        return device
    except (RuntimeError, AssertionError, UnicodeEncodeError) as error:
        reason = shorten(str(error).splitlines()[0], 300)
        raise ValueError(f"the device {quote(str(name))} cannot be used: {reason}") from None
    except TypeError:
        raise ValueError(f"a device is named as 'cpu' or 'cuda:1', not as {quote(name)}") from None


@contextmanager
def deterministic_algorithms(enabled: bool = True) -> Iterator[None]:
    """Have operations give the same bits every time, also those that a GPU is faster at in any order.

    torch is told by `torch.use_deterministic_algorithms`, and cuBLAS by its own variable, unless that is set.

    >>> with deterministic_algorithms():
    ...     torch.are_deterministic_algorithms_enabled()
    True
    """
    if not enabled:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a pass over each
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
