"""The configuration of xPos."""

from __future__ import annotations

from phasor.config.positions import PositionConfig
from phasor.config.schema import positive
from phasor.nn.positions.rotary.config import RotaryConfig

SPAN = 32768  # beyond it keys that decay over 512 positions leave float32's range; over fewer, sooner


class XPosConfig(RotaryConfig, kind="xpos"):
    """Rotary with an exponential decay: queries shrink and keys grow with the position, pair by pair."""

    decay: float = 512.0

    def check(self) -> None:
        super().check()
        positive(self, "decay")

    @property
    def max_positions(self) -> int:
        return min(SPAN, int(SPAN / 512 * self.decay))

    @property
    def takes_latent_keys(self) -> bool:
        return False

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        return {"xpos": cls()}
