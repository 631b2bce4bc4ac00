"""Rotary positions of several axes: each position row rotates its own section of the pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from phasor.nn.positions.rotary.module import Rotary
from phasor.nn.sequence import SequenceInfo


class MultiAxisRotary(Rotary):
    """What axial and multi-section rotary share: `section_sizes` of the configuration says which pairs are whose."""

    def why_not(self, seq: SequenceInfo, like: Tensor) -> str | None:
        return "positions have several axes" if self.axes > 1 else super().why_not(seq, like)

    def positions_by_pair(self, positions: Tensor) -> Tensor:
        sections = self.config.section_sizes(self.rotary_dim)
        rows = positions.unbind(0) if positions.dim() == 3 else [positions] * len(sections)
        by_pair = [row[..., None].expand(*row.shape, size) for row, size in zip(rows, sections, strict=True)]
        return torch.cat(by_pair, dim=-1)
