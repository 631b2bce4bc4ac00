"""The configuration of multi-section rotary positions."""

from __future__ import annotations

from typing import Self

from phasor.config.positions import PositionConfig
from phasor.nn.positions.rotary.config import RotaryConfig


class MultiSectionConfig(RotaryConfig, kind="mrope"):
    """Multi-section rotary (mRoPE): time, height and width each rotate a section of the pairs (1/4, 3/8, 3/8).

    `sections` are the numbers of pairs, one per position row, where they are others. `interleaved` pairs take turns,
    time, height, width and time again, until the later rows have theirs; the first row has the rest (by default 3/8,
    5/16 and 5/16 of the pairs, as in Qwen3-VL).
    """

    sections: tuple[int, ...] | None = None
    interleaved: bool = False

    def check(self) -> None:
        super().check()
        if self.sections is not None and (not self.sections or min(self.sections) < 1):
            raise ValueError("MultiSectionConfig.sections must be numbers of pairs of at least 1 each")

    @property
    def axes(self) -> int:
        return len(self.sections) if self.sections else 3

    def with_defaults(self, head_dim: int) -> Self:
        return super().with_defaults(head_dim).replace(sections=self.section_sizes(self.rotary_dim_of(head_dim)))

    def check_pairs(self, rotary_dim: int) -> None:
        sections = self.section_sizes(rotary_dim)
        if sum(sections) != rotary_dim // 2 or min(sections) < 1:
            raise ValueError(
                f"MultiSectionConfig.sections {list(sections)} must add up to the {rotary_dim // 2} pairs of a "
                f"rotary dimension of {rotary_dim}, each at least 1"
            )
        if self.interleaved and self.pair_axes(rotary_dim).count(0) != sections[0]:
            raise ValueError(
                f"MultiSectionConfig.sections {list(sections)} cannot be interleaved in {rotary_dim // 2} pairs: those "
                f"of a later row are every {len(sections)}th pair"
            )
        super().check_pairs(rotary_dim)

    def section_sizes(self, rotary_dim: int) -> tuple[int, ...]:
        """How many of the pairs are rotated by each position row."""
        pairs = rotary_dim // 2
        if self.sections is None and self.interleaved:
            width = max(1, pairs * 5 // 16)
            return pairs - 2 * width, width, width
        time, height = pairs // 4, (pairs - pairs // 4) // 2
        return self.sections or (time, height, pairs - time - height)

    def pair_axes(self, rotary_dim: int) -> tuple[int, ...]:
        """The position row of each pair.

        >>> MultiSectionConfig(sections=(2, 1, 1)).pair_axes(8)
        (0, 0, 1, 2)
        >>> MultiSectionConfig(sections=(3, 2, 1), interleaved=True).pair_axes(12)
        (0, 1, 2, 0, 1, 0)
        """
        sections = self.section_sizes(rotary_dim)
        if not self.interleaved:
            return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
        turns = (divmod(pair, len(sections)) for pair in range(rotary_dim // 2))
        return tuple(axis if count < sections[axis] else 0 for count, axis in turns)

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        return {"mrope": cls(sections=(1, 1, 2)), "mrope-interleaved": cls(sections=(2, 1, 1), interleaved=True)}
