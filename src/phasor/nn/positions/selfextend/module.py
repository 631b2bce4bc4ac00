"""Self-Extend and ReRoPE: far keys are rotated again, to the positions of their groups."""

from __future__ import annotations

from torch import Tensor

from phasor.nn.positions.rotary.pieces import PiecewiseRotary
from phasor.nn.positions.selfextend.config import SelfExtendConfig
from phasor.ops.attention import ScorePiece, Span


class SelfExtend(PiecewiseRotary, config=SelfExtendConfig):
    """The distance `d` from `window` on becomes `window + floor(m/g) - floor(n/g) - floor(window/g)`."""

    config: SelfExtendConfig

    def pieces(self, q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, causal: bool) -> tuple[ScorePiece, ...]:
        window = self.config.window
        shift = window if self.config.group is None else window - window // self.config.group
        far_keys = self.rotate_by(k, self.group_of(keys) - keys)
        grouped = self.group_of(queries) - queries
        near = ScorePiece(q, k, Span(None if causal else 1 - window, window - 1))
        behind = ScorePiece(self.rotate_by(q, grouped + shift), far_keys, Span(window, None))
        if causal:
            return near, behind
        return near, behind, ScorePiece(self.rotate_by(q, grouped - shift), far_keys, Span(None, -window))

    def group_of(self, positions: Tensor) -> Tensor:
        """The positions of groups; without groups all are one."""
        return positions * 0 if self.config.group is None else positions // self.config.group
