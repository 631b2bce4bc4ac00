"""Rotary angles as they are usually computed, by a product of floats: what phasor's exact ones are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phasor.nn.positions.rotary.config import RotaryConfig
from phasor.nn.positions.rotary.module import Rotary
from phasor.nn.sequence import SequenceInfo


class FloatRotary(Rotary):
    """Rotary whose angles are products in a floating-point dtype: position times frequency, each rounded to it.

    The frequencies are the exact ones, rounded once, so that every error is one of the dtype.

    >>> rope = FloatRotary(RotaryConfig(), head_dim=4, angle_dtype=torch.bfloat16)
    >>> rope.cos_sin(torch.tensor([256, 257]))[0][:, 0].diff().item()  # bfloat16 knows no 257
    0.0
    """

    def __init__(self, config: RotaryConfig, *, head_dim: int, angle_dtype: torch.dtype) -> None:
        super().__init__(config, head_dim=head_dim)
        exact = torch.tensor([float(f) for f in self.frequencies()], dtype=torch.float64)
        self.rounded_frequencies = exact.to(angle_dtype)

    def why_not(self, seq: SequenceInfo, like: Tensor) -> str | None:
        return "angles are products of floats"

    def _cos_sin(self, positions: Tensor, length: int | Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        frequencies = self.rounded_frequencies.to(positions.device)
        angles = self.positions_by_pair(positions).to(frequencies.dtype) * frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)


class RowwiseRotary(Rotary):
    """Rotary whose batch is divided into equal parts, each with the angles of another rotary module.

    >>> exact = Rotary(head_dim=4)
    >>> rounded = FloatRotary(RotaryConfig(), head_dim=4, angle_dtype=torch.bfloat16)
    >>> cos, sin = RowwiseRotary([exact, rounded]).cos_sin(torch.full((2, 1), 257))
    >>> torch.equal(cos[0], cos[1])
    False
    """

    def __init__(self, ropes: Sequence[Rotary]) -> None:
        super().__init__(ropes[0].config, head_dim=ropes[0].head_dim)
        self.ropes = tuple(ropes)

    def why_not(self, seq: SequenceInfo, like: Tensor) -> str | None:
        return "rows have angles of different kinds"

    def _cos_sin(self, positions: Tensor, length: int | Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rows = positions.chunk(len(self.ropes))
        parts = [rope._cos_sin(own, length, dtype) for rope, own in zip(self.ropes, rows, strict=True)]
        cos, sin = zip(*parts, strict=True)
        return torch.cat(cos), torch.cat(sin)
