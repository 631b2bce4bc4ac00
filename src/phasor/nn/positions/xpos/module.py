"""xPos: rotary positions whose queries shrink and whose keys grow with the position."""

from __future__ import annotations

import torch
from torch import Tensor

from phasor.nn.checks import can_check_values
from phasor.nn.positions.rotary.module import Angles, Rotary, headwise
from phasor.nn.positions.xpos.config import XPosConfig
from phasor.nn.sequence import SequenceInfo


class XPos(Rotary, config=XPosConfig):
    """Cosines and sines of queries times `zeta^(m / decay)`, those of keys over it."""

    config: XPosConfig

    def why_not(self, seq: SequenceInfo, like: Tensor) -> str | None:
        return "xPos scales queries and keys differently"

    def angles(self, cos: Tensor, sin: Tensor, seq: SequenceInfo, like: Tensor) -> Angles:
        scale = self.decay_scale(seq, cos.dtype, like.dtype)
        query = headwise(cos * scale), headwise(sin * scale)
        return Angles(query, (headwise(cos / scale), headwise(sin / scale)))

    def decay_scale(self, seq: SequenceInfo, dtype: torch.dtype, activations: torch.dtype) -> Tensor:
        """`zeta_i^((m - c) / decay)` with `c` the first position of the row or document."""
        span, pairs = self.config.max_positions, self.rotary_dim // 2
        if activations == torch.float16:  # it reaches 2^16 where float32 reaches 2^127
            span = span // 8
        since = (seq.positions - seq.origin())[..., None]
        if can_check_values(since) and since.numel() and since.abs().max() >= span:
            name = str(activations).removeprefix("torch.")
            raise ValueError(f"xPos spans at most {span} positions of one sequence: beyond it {name} overflows")
        zeta = (torch.arange(pairs, device=since.device, dtype=torch.float64) / pairs + 0.4) / 1.4
        return torch.exp2(torch.log2(zeta) * (since.to(torch.float64) / self.config.decay)).to(dtype)
