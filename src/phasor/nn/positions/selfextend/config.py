"""The configuration of Self-Extend and ReRoPE."""

from __future__ import annotations

from phasor.config.positions import PositionConfig
from phasor.config.schema import at_least_one
from phasor.nn.positions.rotary.config import PiecewiseRotaryConfig


class SelfExtendConfig(PiecewiseRotaryConfig, kind="selfextend"):
    """Rotary with true distances below a window, and beyond it those of groups of tokens (Self-Extend, ReRoPE).

    A group of `group` tokens counts as one position. Without a group all keys beyond the window are at its distance,
    which is ReRoPE.
    """

    window: int = 1024
    group: int | None = 8

    def check(self) -> None:
        super().check()
        at_least_one(self, "window")
        if self.group is not None:
            at_least_one(self, "group")

    @property
    def shift_invariant(self) -> bool:
        return self.group is None or self.group == 1

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        return {"selfextend": cls(window=5, group=3), "selfextend-rerope": cls(window=5, group=None)}
