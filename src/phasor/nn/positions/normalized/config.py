"""The configuration of normalized counting."""

from __future__ import annotations

from typing import ClassVar

from phasor.nn.positions.counting.config import CountingConfig


class NormalizedConfig(CountingConfig, kind="normalized"):
    """t/(n-1) times a learned direction, added to the input: naive, one step means a different distance at each n."""

    depends_on_length: ClassVar[bool] = True
