"""The device a user names ("auto", "cpu", "cuda:1"), its free memory, and whether it repeats its results bit by bit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.utils.deterministic

from phasor.config.schema import quote, shorten

MEMORY = Path("/proc/meminfo")


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


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device, swap space included; None where the system does not say."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type != "cpu" or not MEMORY.exists():
        return None
    return sum(1024 * int(size) for size in re.findall(r"^(?:MemAvailable|SwapFree): +(\d+)", MEMORY.read_text(), re.M))


def check_memory(size: int, device: torch.device, model_size: int) -> None:
    """Refuse to allocate bytes that a device does not have, for a model whose weights take `model_size` in all.

    >>> check_memory(1 << 10, torch.device("cpu"), 1 << 20)
    >>> check_memory(1 << 60, torch.device("meta"), 1 << 60)
    """
    free = free_memory(device)
    if free is not None and size > free:
        raise ValueError(
            f"the weights of this model need {model_size / 2**30:,.1f} GiB, and {device} has {free / 2**30:,.1f} GiB "
            'of memory free: under torch.device("meta") a model has no weights, and `phasor plan` tells how many '
            "devices it takes"
        )


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
