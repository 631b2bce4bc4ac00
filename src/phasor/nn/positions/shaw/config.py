"""The configuration of Shaw's relative positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from phasor.config.positions import PositionConfig
from phasor.config.schema import MOST_WIDTH, at_least_one, at_most

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


class ShawConfig(PositionConfig, kind="shaw"):
    """A learned vector per distance, clipped, added to each key and value as a query sees it (Shaw et al., 2018).

    Distances are clipped to `max_distance` on either side. `values` adds vectors to values too, `share_heads` and
    `share_layers` use the same vectors in all of them. BERT's `relative_key` is without `values` and with a
    `max_distance` of its positions less one; its `relative_key_query` has `key_products`, the product of the key with
    the vector, besides.
    """

    max_distance: int = 16
    values: bool = True
    key_products: bool = False
    share_heads: bool = True
    share_layers: bool = False
    shift_invariant: ClassVar[bool] = True
    follows_input: ClassVar[bool] = True
    reads_heads: ClassVar[bool] = True

    def check(self) -> None:
        at_least_one(self, "max_distance")
        at_most(self, MOST_WIDTH, "max_distance")

    @property
    def acts_on(self) -> tuple[str, ...]:
        return ("values", "scores") if self.values else ("scores",)

    def table_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        """The shapes of the vectors of keys, and of those of values."""
        heads = 1 if self.share_heads else model.num_kv_heads
        return ((2 * self.max_distance + 1, heads * model.head_dim),) * (2 if self.values else 1)

    def weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return self.table_shapes(model) if self.share_layers else ()

    def layer_weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return () if self.share_layers else self.table_shapes(model)

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        return {
            "shaw": cls(max_distance=5),
            "shaw-heads": cls(max_distance=5, share_heads=False, share_layers=True),
            "shaw-bert": cls(max_distance=7, values=False, key_products=True),
        }
