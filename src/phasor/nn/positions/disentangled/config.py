"""The configuration of disentangled attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from phasor.config.parts import LayerNormConfig
from phasor.config.positions import PositionConfig
from phasor.config.schema import at_least_one, positive

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


class DisentangledConfig(PositionConfig, kind="disentangled"):
    """Queries times projected vectors of the distance's bucket, and keys times others (DeBERTa).

    `pos_att_type` lists the products: `c2p` of queries (content to position), `p2c` of keys (position to content).
    Distances below half of `position_buckets` have a row each, those up to `max_relative_positions` log-spaced ones;
    without buckets every distance has a row. The vectors are shared by layers, and normalized where `norm_rel_ebd`.
    Each layer projects them by separate weights, or with `share_att_key` by those of its queries and keys.
    """

    position_buckets: int | None = 256
    max_relative_positions: int = 512
    pos_att_type: tuple[Literal["c2p", "p2c"], ...] = ("c2p", "p2c")
    share_att_key: bool = False
    norm_rel_ebd: bool = True
    norm_eps: float = 1e-7
    acts_on: ClassVar[tuple[str, ...]] = ("scores",)
    shift_invariant: ClassVar[bool] = True
    follows_input: ClassVar[bool] = True
    reads_heads: ClassVar[bool] = True

    def check(self) -> None:
        at_least_one(self, "max_relative_positions")
        positive(self, "norm_eps")
        buckets = self.position_buckets
        if buckets is not None and (buckets < 4 or buckets % 2):
            raise ValueError(
                f"DisentangledConfig.position_buckets must be an even number of at least 4, or None, not {buckets}"
            )
        if buckets is not None and self.max_relative_positions <= buckets // 2 + 1:
            raise ValueError(
                f"DisentangledConfig.max_relative_positions ({self.max_relative_positions}) must be greater than half "
                f"of position_buckets ({buckets}) plus 1: distances up to that half have a row each"
            )
        if not self.pos_att_type or len(set(self.pos_att_type)) < len(self.pos_att_type):
            raise ValueError(f"DisentangledConfig.pos_att_type must list c2p, p2c or both, not {self.pos_att_type}")

    @property
    def span(self) -> int:
        """How many rows the vectors have for distances of either sign."""
        return self.position_buckets or self.max_relative_positions

    @property
    def norm(self) -> LayerNormConfig | None:
        """The norm of the vectors."""
        return LayerNormConfig(eps=self.norm_eps) if self.norm_rel_ebd else None

    def weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return (2 * self.span, model.dim), *((model.dim,),) * (2 if self.norm_rel_ebd else 0)

    def layer_weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        width = model.num_heads * model.head_dim
        return () if self.share_att_key else ((width, model.dim), (width,)) * len(self.pos_att_type)

    @classmethod
    def examples(cls) -> dict[str, PositionConfig]:
        small = cls(position_buckets=8, max_relative_positions=12)
        return {
            "disentangled": small,
            "disentangled-shared": small.replace(share_att_key=True, norm_rel_ebd=False),
            "disentangled-unbucketed": cls(
                position_buckets=None, max_relative_positions=6, pos_att_type=("p2c",), norm_rel_ebd=False
            ),
        }
