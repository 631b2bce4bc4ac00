"""The configuration of Gaussian biases."""

from __future__ import annotations

from typing import ClassVar

from phasor.config.positions import PositionConfig
from phasor.config.schema import positive


class GaussianConfig(PositionConfig, kind="gaussian"):
    """A penalty of the squared distance over 2 sigma^2, sigma doubling from head to head, from `width` on."""

    width: float = 4.0
    acts_on: ClassVar[tuple[str, ...]] = ("scores",)
    shift_invariant: ClassVar[bool] = True

    def check(self) -> None:
        positive(self, "width")
