"""The configuration of multi-section rotary positions."""

from __future__ import annotations

from phasor.config.positions import PositionConfig
from phasor.nn.positions.rotary.config import RotaryConfig


class MultiSectionConfig(RotaryConfig, kind="mrope"):
    """Multi-section rotary (mRoPE): time, height and width each rotate a section of the pairs (1/4, 3/8, 3/8).

    `sections` are the numbers of pairs, one per position row, where they are others.
    """

    sections: tuple[int, ...] | None = None

    def check(self) -> None:
        super().check()
        if self.sections is not None and (not self.sections or min(self.sections) < 1):
            raise ValueError("MultiSectionConfig.sections must be numbers of pairs of at least 1 each")

    @property
    def axes(self) -> int:
        return len(self.sections) if self.sections else 3

    def check_pairs(self, rotary_dim: int) -> None:
        sections = self.section_sizes(rotary_dim)
        if sum(sections) != rotary_dim // 2 or min(sections) < 1:
            raise ValueError(
                f"MultiSectionConfig.sections {list(sections)} must add up to the {rotary_dim // 2} pairs of a "
                f"rotary dimension of {rotary_dim}, each at least 1"
            )
        super().check_pairs(rotary_dim)

    def section_sizes(self, rotary_dim: int) -> tuple[int, ...]:
        pairs = rotary_dim // 2
        time, height = pairs // 4, (pairs - pairs // 4) // 2
        return self.sections or (time, height, pairs - time - height)

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        return {"mrope": cls(sections=(1, 1, 2))}
