"""The attention contract: what every kind of attention is called with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from phasor.nn.positions.base import Position
from phasor.nn.positions.sums import Steps, Sums, running_sums
from phasor.ops.attention import Mask


@dataclass(slots=True)
class AttentionContext:
    """What one layer's attention takes besides its input: the mask, and positions as its scheme prepared them.

    `positions` and `key_positions`, `[B or 1, T]`, are for schemes that act on scores. `cross_kv` holds the keys and
    values of cross-attention; without, they are projected from `memory`, the encoder's output, and with `stores_kv`
    they are left in `cross_kv`. `update_kv` adds the keys and values of this call to a cache and returns all of them.
    `sink_positions` are positions (as prepared, and as integers) for queries that attend to sink tokens. Attention
    weights are appended to `weights` where a `Record` asks for them. With `decays` the cache holds keys without the
    decay of their scheme, which this call applies. `layer` counts the layers with the same scheme. `sum_steps` gives
    the running sums up to every query and every key where those are not the same tokens.
    """

    mask: Mask
    position: Position
    prepared: Any = None
    positions: Tensor | None = None
    key_positions: Tensor | None = None
    cross_kv: tuple[Tensor, Tensor] | None = None
    memory: Tensor | None = None
    stores_kv: bool = False
    update_kv: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    sink_positions: tuple[Any, Tensor] | None = None
    weights: list[Tensor] | None = None
    decays: bool = False
    layer: int = 0
    sum_steps: Callable[[Steps], tuple[Sums, Sums]] | None = None

    def with_sums(self, x: Tensor) -> AttentionContext:
        """The same context for a scheme with running sums, prepared with those over a layer's input `[B, T, dim]`."""
        steps = self.position.steps(x, self.layer, self.prepared)
        if self.sum_steps is None:
            queries = keys = running_sums(steps)
        else:
            queries, keys = self.sum_steps(steps)
        return replace(self, prepared=self.position.with_sums(self.prepared, queries, keys))


class Attention(nn.Module):
    """A kind of attention. Positions come in through the hooks of the context's scheme."""

    def prepare_mask(self, mask: Mask, x: Tensor, keys: int, positions: tuple[Tensor, Tensor] | None = None) -> Mask:
        """A call's mask as this kind of attention takes it, for an input `[B, T, dim]` and so many keys.

        It is asked once for all layers with the same configuration. `positions`, of queries and of keys, are given
        where the layer's scheme acts on scores.
        """
        return mask

    def forward(self, x: Tensor, ctx: AttentionContext) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not implement forward")
