"""Rotary positions of several axes: each position row rotates its own pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from phasor.nn.positions.rotary.module import Rotary
from phasor.nn.sequence import SequenceInfo
from phasor.ops.constants import constant


class MultiAxisRotary(Rotary):
    """What axial and multi-section rotary share: `pair_axes` of the configuration says which pairs are whose."""

    def why_not(self, seq: SequenceInfo, like: Tensor) -> str | None:
        return "positions have several axes" if self.axes > 1 else super().why_not(seq, like)

    def positions_by_pair(self, positions: Tensor) -> Tensor:
        if positions.dim() < 3:
            return super().positions_by_pair(positions)
        axes = constant(self.config.pair_axes(self.rotary_dim), positions.device, torch.int64)
        return positions[axes].movedim(0, -1)  # [B, T, pairs]
