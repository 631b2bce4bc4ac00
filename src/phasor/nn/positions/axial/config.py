"""The configuration of axial rotary positions."""

from __future__ import annotations

from decimal import Decimal
from typing import ClassVar

from phasor.config.positions import PositionConfig
from phasor.nn.positions.rotary.config import RotaryConfig


class AxialConfig(RotaryConfig, kind="axial"):
    """Rotary over a 2-D grid: half of the pairs are rotated by the row, half by the column.

    Each axis has the frequencies of a plain rotary scheme of half the dimension.
    """

    axes: ClassVar[int] = 2

    def check_pairs(self, rotary_dim: int) -> None:
        if rotary_dim % 4:
            raise ValueError(f"axial rotary needs a rotary dimension divisible by 4, not {rotary_dim}: half per axis")
        super().check_pairs(rotary_dim // 2)

    def pair_axes(self, rotary_dim: int) -> tuple[int, ...]:
        return (0,) * (rotary_dim // 4) + (1,) * (rotary_dim // 4)

    def frequencies(self, rotary_dim: int, length: int | None = None) -> list[Decimal]:
        return super().frequencies(rotary_dim // 2, length) * 2

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        return {"axial": cls()}
