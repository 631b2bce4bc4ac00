"""What a reader needs to get a report's numbers again."""

from __future__ import annotations

import platform
from typing import Any

import torch

from phasor.distribution import __version__


def provenance(command: str | None, device: torch.device | str, **values: Any) -> dict[str, Any]:
    """The command, the device, versions, and further values such as seeds.

    >>> found = provenance("phasor evaluate run --lengths 4k", "cpu", seed=7)
    >>> found["command"], found["device"], found["seed"], found["torch"] == torch.__version__
    ('phasor evaluate run --lengths 4k', 'cpu', 7, True)
    """
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    versions = {"phasor": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {"command": command, "device": name, **versions, **values}
