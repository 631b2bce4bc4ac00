"""The configuration of rotary positions with accumulated angles."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, ClassVar

from phasor.config.cached import CachedTensor
from phasor.config.positions import PositionConfig
from phasor.config.schema import greater_than_one
from phasor.nn.positions.frequencies import geometric_frequencies
from phasor.nn.positions.rotary.config import Pairing

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


class AccumulatedRotaryConfig(PositionConfig, kind="accumulated", formerly="selective"):
    """Rotary positions whose angles are running sums: each token turns a pair by its frequency and by what it says.

    `base` and `pairing` are those of rotary positions, which it is while the learned part of the steps is zero.
    """

    base: float = 10000.0
    pairing: Pairing = "half"
    acts_on: ClassVar[tuple[str, ...]] = ("queries", "keys")
    shift_invariant: ClassVar[bool] = True
    follows_input: ClassVar[bool] = True

    def check(self) -> None:
        greater_than_one(self, "base")

    def check_model(self, model: ModelConfig) -> None:
        if model.head_dim % 2:
            raise ValueError(f"accumulated rotary positions rotate pairs, and a head has {model.head_dim} features")

    def frequencies(self, head_dim: int) -> list[Decimal]:
        """Radians per token for each pair, without the learned part."""
        return geometric_frequencies(self.base, head_dim)

    def num_angles(self, model: ModelConfig) -> int:
        """The angles of a token in one layer: one for each pair of each key/value head."""
        return model.num_kv_heads * (model.head_dim // 2)

    def cached_per_token(self, model: ModelConfig) -> dict[str, CachedTensor]:
        return {"angle_sums": CachedTensor((self.num_angles(model),), "int64")}

    def layer_weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return ((self.num_angles(model), model.dim),)

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        return {"accumulated": cls(), "accumulated-adjacent": cls(pairing="adjacent", base=100.0)}
