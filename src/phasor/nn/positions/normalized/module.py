"""A count divided by the length: a naive scheme, kept to show what fails."""

from __future__ import annotations

from torch import Tensor

from phasor.nn.positions.counting.module import Counting
from phasor.nn.positions.normalized.config import NormalizedConfig
from phasor.nn.sequence import SequenceInfo


class Normalized(Counting, config=NormalizedConfig):
    """`t / (n - 1)` times a learned direction (0 where n is 1): a step means another distance at every n."""

    config: NormalizedConfig

    def factor(self, seq: SequenceInfo) -> Tensor:
        length = seq.length
        if length is None:
            raise ValueError("the normalized scheme depends on the sequence's length, and none is known")
        last = max(length - 1, 1) if isinstance(length, int) else (length - 1).clamp(min=1).to(seq.positions.device)
        return super().factor(seq) / last
