"""The configuration of contextual positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from phasor.config.positions import PositionConfig
from phasor.config.schema import MOST_WIDTH, at_least_one, at_most

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


class CoPEConfig(PositionConfig, kind="cope"):
    """A learned vector per count of keys, of which each query counts those that it chooses (CoPE).

    Counts are fractions, between two vectors, and at most `max_position`. `share_layers` uses the same vectors in all
    layers; heads share them.
    """

    max_position: int = 64
    share_layers: bool = False
    acts_on: ClassVar[tuple[str, ...]] = ("scores",)
    shift_invariant: ClassVar[bool] = True
    follows_input: ClassVar[bool] = True
    reads_heads: ClassVar[bool] = True

    def check(self) -> None:
        at_least_one(self, "max_position")
        at_most(self, MOST_WIDTH, "max_position")

    def table_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        """The shape of the vectors."""
        return ((self.max_position + 1, model.head_dim),)

    def weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return self.table_shapes(model) if self.share_layers else ()

    def layer_weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return () if self.share_layers else self.table_shapes(model)

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        return {"cope": cls(max_position=5), "cope-shared": cls(max_position=9, share_layers=True)}
