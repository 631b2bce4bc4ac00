"""The configuration of multiplicative GRAPE."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, ClassVar

from phasor.config.positions import PositionConfig
from phasor.config.schema import greater_than_one
from phasor.nn.positions.frequencies import geometric_frequencies
from phasor.nn.positions.rotary.config import Pairing

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


class GRAPEConfig(PositionConfig, kind="grape"):
    """Rotary positions whose frequencies each layer learns: rotations that commute (multiplicative GRAPE).

    `base` and `pairing` are those of the rotary positions that it is before training.
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
            raise ValueError(f"GRAPE rotates pairs of features, and a head has {model.head_dim}")

    def frequencies(self, head_dim: int) -> list[Decimal]:
        """Radians per position for each pair, before training."""
        return geometric_frequencies(self.base, head_dim)

    def layer_weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return ((model.head_dim // 2,),)

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        return {"grape": cls(), "grape-adjacent": cls(pairing="adjacent", base=100.0)}
