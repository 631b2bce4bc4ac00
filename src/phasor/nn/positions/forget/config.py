"""The configuration of forget gates."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from phasor.config.cached import CachedTensor
from phasor.config.positions import PositionConfig

if TYPE_CHECKING:
    from phasor.config.model import ModelConfig


class ForgetGateConfig(PositionConfig, kind="forget"):
    """A gate per token and head, computed from the input, that lowers the scores of all keys before it (FoX).

    `initial_bias` is that of all gates before training: 0 lets a gate pass one half.
    """

    initial_bias: float = 0.0
    acts_on: ClassVar[tuple[str, ...]] = ("scores",)
    shift_invariant: ClassVar[bool] = True
    follows_input: ClassVar[bool] = True

    def cached_per_token(self, model: ModelConfig) -> dict[str, CachedTensor]:
        return {"gate_sums": CachedTensor((model.num_heads,), "int64")}

    def layer_weight_shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return (model.num_heads, model.dim), (model.num_heads,)
