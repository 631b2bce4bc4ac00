"""Multi-section rotary positions (mRoPE): one frequency table, handed out in sections."""

from __future__ import annotations

from phasor.nn.positions.mrope.config import MultiSectionConfig
from phasor.nn.positions.rotary.axes import MultiAxisRotary


class MultiSectionRotary(MultiAxisRotary, config=MultiSectionConfig):
    """Three position rows by default: time, height and width."""

    config: MultiSectionConfig
