"""The configuration of Self-Extend and ReRoPE."""

from __future__ import annotations

from typing import Self

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
    def for_lengths(cls, trained: int, largest: int) -> Self:
        """Half of the trained distances are true, and groups so large that the rest reach the largest length."""
        window = max(1, trained // 2)
        return cls(window=window, group=max(1, -(-(largest - window) // max(1, trained - 1 - window))))

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        return {"selfextend": cls(window=5, group=3), "selfextend-rerope": cls(window=5, group=None)}
