"""The configuration of Transformer-XL's relative positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from phasor.config.positions import PositionConfig
from phasor.config.schema import greater_than_one

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


class TransformerXLConfig(PositionConfig, kind="transformerxl"):
    """Queries times projected sinusoids of the distance, with a learned bias for content and for position.

    `base` is that of the sinusoids. `share_biases` uses the same biases in all layers; the projection is a layer's own.
    """

    base: float = 10000.0
    share_biases: bool = False
    acts_on: ClassVar[tuple[str, ...]] = ("scores",)
    shift_invariant: ClassVar[bool] = True
    follows_input: ClassVar[bool] = True
    reads_heads: ClassVar[bool] = True

    def check(self) -> None:
        greater_than_one(self, "base")

    def check_model(self, model: ModelConfig) -> None:
        if model.dim % 2:
            raise ValueError(f"Transformer-XL's sinusoids are pairs, and the model has {model.dim} features")

    def weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return ((model.num_heads * model.head_dim,),) * (2 if self.share_biases else 0)

    def layer_weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        width = model.num_heads * model.head_dim
        return (width, model.dim), *((width,),) * (0 if self.share_biases else 2)

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        return {"transformerxl": cls(), "transformerxl-shared": cls(base=100.0, share_biases=True)}
