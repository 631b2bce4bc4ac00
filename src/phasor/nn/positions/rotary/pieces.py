"""Rotary positions whose distances have several pieces: queries and keys are rotated again for the far ones."""

from __future__ import annotations

import torch
from torch import Tensor

from phasor.nn.positions.rotary.config import PiecewiseRotaryConfig
from phasor.nn.positions.rotary.module import Rotary, headwise
from phasor.ops.rope import rotate_pairs


class PiecewiseRotary(Rotary):
    """Rotations add up, so that what is rotated by one position is brought to another by their difference.

    That is how the keys of a cache, rotated once and for all, serve every piece. Subclasses override `pieces`.
    """

    config: PiecewiseRotaryConfig

    def rotate_by(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotated heads `[B, T, H, D]`, rotated further by positions `[B or 1, T]` of either sign."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        cos, sin = (headwise(part) for part in self._cos_sin(positions, None, dtype))
        return rotate_pairs(x, cos, sin, self.config.pairing)
