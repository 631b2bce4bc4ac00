"""What a reader needs to get a report's numbers again."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch


def provenance(command: str | None, device: torch.device | str, **values: Any) -> dict[str, Any]:
    """The command, the device, versions, and further values such as seeds.

    >>> found = provenance("phasor evaluate run --lengths 4k", "cpu", seed=7)
    >>> found["command"], found["device"], found["seed"], found["torch"] == torch.__version__
    ('phasor evaluate run --lengths 4k', 'cpu', 7, True)
    """
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    versions = {"phasor": installed_version(), "torch": torch.__version__, "python": platform.python_version()}
    return {"command": command, "device": name, **versions, **values}


def installed_version() -> str:
    """The version of phasor; "unknown" in a source tree that is not installed."""
    try:
        return importlib.metadata.version("phasor")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
