"""The device a user names: "auto", "cpu", "cuda", "cuda:1"."""

from __future__ import annotations

import torch


def resolve_device(name: str) -> torch.device:
    """The device of that name; "auto" is a GPU where there is one.

    >>> resolve_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.empty(0, device=name).device
        if device.type == "meta":
            raise RuntimeError("it holds no data")
        return device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"the device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
