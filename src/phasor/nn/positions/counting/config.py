"""The configuration of counting."""

from __future__ import annotations

from typing import ClassVar

from phasor.config.positions import PositionConfig


class CountingConfig(PositionConfig, kind="counting"):
    """The position itself times a learned direction, added to the input: naive, and unbounded."""

    acts_on: ClassVar[tuple[str, ...]] = ("input",)
