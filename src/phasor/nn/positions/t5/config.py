"""The configuration of T5's relative position bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from phasor.config.positions import PositionConfig
from phasor.config.schema import MOST_FEATURES, positive

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


class T5PositionConfig(PositionConfig, kind="t5"):
    """A learned scalar per head and bucket of distance, added to the scores and shared by all layers.

    With `shared` false every layer has its own (UMT5).
    """

    num_buckets: int = 32
    max_distance: int = 128
    shared: bool = True
    acts_on: ClassVar[tuple[str, ...]] = ("scores",)
    shift_invariant: ClassVar[bool] = True

    def check(self) -> None:
        positive(self, "num_buckets", most=MOST_FEATURES)
        if self.num_buckets < 4 or self.num_buckets % 4:
            raise ValueError(f"T5PositionConfig.num_buckets must be a multiple of 4, not {self.num_buckets}")
        if self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"T5PositionConfig.max_distance ({self.max_distance}) must be greater than half of "
                f"num_buckets ({self.num_buckets}): those distances have a bucket each"
            )

    @property
    def follows_input(self) -> bool:
        return not self.shared

    def weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return ((self.num_buckets, model.num_heads),) if self.shared else ()

    def layer_weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return () if self.shared else ((self.num_buckets, model.num_heads),)

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        small = cls(num_buckets=8, max_distance=16)
        return {"t5": small, "t5-unshared": small.replace(shared=False)}
