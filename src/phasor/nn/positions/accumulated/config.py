"""The configuration of rotary positions with accumulated angles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phasor.config.cached import CachedTensor
from phasor.nn.positions.rotary.config import LearnedRotaryConfig

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


class AccumulatedRotaryConfig(LearnedRotaryConfig, kind="accumulated", formerly="selective"):
    """Rotary positions whose angles are running sums: each token turns a pair by its frequency and by what it says.

    `base` and `pairing` are those of rotary positions, which it is while the learned part of the steps is zero.
    """

    def num_angles(self, model: ModelConfig) -> int:
        """The angles of a token in one layer: one for each pair of each key/value head."""
        return model.num_kv_heads * (model.head_dim // 2)

    def cached_per_token(self, model: ModelConfig) -> dict[str, CachedTensor]:
        return {"angle_sums": CachedTensor((self.num_angles(model),), "int64")}

    def layer_weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return ((self.num_angles(model), model.dim),)
