"""The configuration of Sandwich."""

from __future__ import annotations

from typing import ClassVar

from phasor.config.positions import PositionConfig
from phasor.config.schema import MOST_FEATURES, greater_than_one, positive


class SandwichPositionConfig(PositionConfig, kind="sandwich"):
    """Inner products of sinusoidal codes on the scores, divided by a ratio per head; nothing learned.

    `width` is the number of features of the codes. The ratios go from `max_ratio / num_heads` to `max_ratio`.
    """

    width: int = 128
    base: float = 10000.0
    max_ratio: float = 8.0
    acts_on: ClassVar[tuple[str, ...]] = ("scores",)
    shift_invariant: ClassVar[bool] = True

    def check(self) -> None:
        greater_than_one(self, "base")
        positive(self, "max_ratio")
        positive(self, "width", most=MOST_FEATURES)
        if self.width < 2 or self.width % 2:
            raise ValueError(f"SandwichPositionConfig.width must be even and at least 2, not {self.width}")

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        return {"sandwich": cls(width=16)}
