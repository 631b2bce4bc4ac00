"""The configuration of polar coordinate positions."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, ClassVar

from phasor.config.positions import PositionConfig
from phasor.config.schema import greater_than_one
from phasor.nn.positions.frequencies import geometric_frequencies

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


class PoPEConfig(PositionConfig, kind="pope"):
    """Features of queries and keys as magnitudes, whose phases are positions alone, plus a learned shift (PoPE).

    `base` is that of the frequencies, one for each feature of a head.
    """

    base: float = 10000.0
    acts_on: ClassVar[tuple[str, ...]] = ("queries", "keys")
    shift_invariant: ClassVar[bool] = True
    follows_input: ClassVar[bool] = True
    reads_heads: ClassVar[bool] = True

    def check(self) -> None:
        greater_than_one(self, "base")

    def frequencies(self, head_dim: int) -> list[Decimal]:
        """Radians per position for each feature of a head."""
        return geometric_frequencies(self.base, 2 * head_dim)

    def layer_weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return ((model.num_kv_heads * model.head_dim,),)

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        return {"pope": cls(), "pope-base": cls(base=100.0)}
