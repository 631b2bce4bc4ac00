"""The configuration of a bias that queries mix from profiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

from phasor.config.positions import PositionConfig
from phasor.config.schema import MOST_FEATURES, MOST_WIDTH, positive

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


class ProfilesConfig(PositionConfig, kind="profiles"):
    """A bias by distance that every query mixes from learned profiles, by weights projected from its token (Inkling).

    A layer has `rank` profiles over the distances 0 to `extent - 1`, shared by its heads, and a projection to `rank`
    weights per head. Farther keys and keys ahead have no bias. With `log_floor` the scores of a query with `n`
    tokens up to it, the bias included, are multiplied by `1 + log_scale log(max(n / log_floor, 1))`.
    """

    extent: int = 1024
    rank: int = 16
    log_floor: int | None = None
    log_scale: float = 0.1
    follows_input: ClassVar[bool] = True
    multiplies_input: ClassVar[bool] = True

    def check(self) -> None:
        positive(self, "extent", most=MOST_WIDTH)
        positive(self, "rank", most=MOST_FEATURES)
        positive(self, "log_floor", "log_scale")

    @property
    def acts_on(self) -> tuple[str, ...]:
        return ("scores",) if self.log_floor is None else ("queries", "scores")

    @property
    def shift_invariant(self) -> bool:
        return self.log_floor is None

    def layer_weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return (model.num_heads * self.rank, model.dim), (self.rank, self.extent)

    @classmethod
    def for_lengths(cls, trained: int, largest: int) -> Self:
        return cls(extent=trained)

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        return {"profiles": cls(extent=5, rank=3), "profiles-log": cls(extent=9, rank=5, log_floor=4)}
