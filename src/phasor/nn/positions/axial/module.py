"""Axial rotary positions: half of the pairs are rotated by the row, half by the column."""

from __future__ import annotations

from phasor.nn.positions.axial.config import AxialConfig
from phasor.nn.positions.rotary.axes import MultiAxisRotary


class AxialRotary(MultiAxisRotary, config=AxialConfig):
    """Two position rows, the row and the column in a grid, each with its own frequency table."""

    config: AxialConfig
