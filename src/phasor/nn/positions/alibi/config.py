"""The configuration of ALiBi."""

from __future__ import annotations

from typing import ClassVar

from phasor.config.positions import PositionConfig
from phasor.config.schema import positive


class ALiBiConfig(PositionConfig, kind="alibi"):
    """A penalty of slope times distance on the scores, slopes geometric over the heads.

    `multiplier` scales all slopes: Falcon divides the penalty by sqrt(head_dim) together with the scores.
    """

    max_bias: float = 8.0
    multiplier: float = 1.0
    acts_on: ClassVar[tuple[str, ...]] = ("scores",)
    shift_invariant: ClassVar[bool] = True

    def check(self) -> None:
        positive(self, "max_bias", "multiplier")
