"""The position contract, module side: hooks at the places where a scheme may act, which do nothing by default.

A scheme overrides the hooks it needs. `prepare` runs once per forward and scheme, and what it returns is
handed to the hooks of every layer, so that nothing is computed twice and nothing about positions is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from phasor.config import ModelConfig, PositionConfig
from phasor.config.model import Side
from phasor.nn.kinds import KindModule
from phasor.nn.layer_step import LayerStep
from phasor.nn.sequence import KeyInfo, SequenceInfo
from phasor.ops.attention import Bias, Mask, ScoreMod, TokenBias
from phasor.ops.decode.arguments import RotaryArgs
from phasor.ops.rope import split_qkv

# Given vectors [rows, dim], the queries [rows, H, D] and the keys [rows, K, D] that a layer projects them to.
ProjectHeads = Callable[[Tensor], tuple[Tensor, Tensor]]
PerHead = TypeVar("PerHead", Tensor, tuple[float, ...])


class Position(KindModule):
    """A position scheme. The base class does nothing.

    A module names the configuration it computes when it is defined: `class ALiBi(Position, config=ALiBiConfig)`.
    """

    config: PositionConfig = PositionConfig.from_dict({"kind": "none"})
    depends_on_window = False  # whether `prepare` runs for each window of layers with a cache: `seq.cached_window`
    head_part = (0, 1)  # which of how many parts of the heads this process has

    @classmethod
    def build(cls, config: Any, model: ModelConfig, side: Side) -> Self:
        """The module of a configuration, for the encoder or the decoder of a model."""
        module = cls()
        module.config = config
        return module

    @property
    def axes(self) -> int:
        """How many position rows a token has."""
        return self.config.axes

    def prepare(self, seq: SequenceInfo, like: Tensor) -> Any:
        """What the hooks inside layers need, for activations of the dtype and device of `like`."""
        return None

    def prepare_keys(self, prepared: Any, keys: KeyInfo, like: Tensor) -> Any:
        """What the hooks inside layers take in place of what was prepared, given the keys that they attend to.

        It is called once for all layers of a forward that have the same scheme and attend to the same keys.
        """
        return prepared

    def on_input(self, x: Tensor, seq: SequenceInfo) -> Tensor:
        """Token vectors `[B, T, dim]` with positions in them."""
        return x

    def code(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        """What `on_input` combines with tokens at int64 positions `[T]`, as `[T, width]`; None where it has none."""
        return None

    def pair_increments(self) -> tuple[int, ...]:
        """The rotation of each pair of features per position, in units of 2^-64 rotations; none without such pairs."""
        return ()

    def code_pairs(self, code: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the second feature of each pair that positions rotate, for schemes with `pair_increments`."""
        first, second = code.chunk(2, dim=-1)
        return first, second

    def layer_weights(self, layer: int) -> tuple[Any, ...]:
        """What the scheme has learned for one layer, which `for_layer` takes; `layer` counts those with the scheme."""
        return ()

    def for_layer(self, x: Tensor, prepared: Any, weights: tuple[Any, ...], step: LayerStep) -> Any:
        """What the later hooks of one layer take in place of what was prepared, given the layer's input `[B, T, dim]`.

        It is called where the configuration says `follows_input`. `weights` are the layer's own, given so that one
        compiled block serves all layers, and `step` stores and returns what `cached_per_token` declares.
        """
        return prepared

    def with_projection(self, project: ProjectHeads, prepared: Any) -> Any:
        """What the later hooks of one layer take after `for_layer`, given how the layer projects queries and keys."""
        return prepared

    def on_query(self, q: Tensor, prepared: Any) -> Tensor:
        """Queries `[B, T, H, D]` with positions in them."""
        return q

    def on_key(self, k: Tensor, prepared: Any) -> Tensor:
        """Keys `[B, T, K, D]` with positions in them."""
        return k

    def on_value(self, v: Tensor, prepared: Any) -> Tensor:
        """Values `[B, T, K, D]` with positions in them."""
        return v

    def on_heads(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the same tokens, each by its hook: for schemes that take them together faster."""
        return self.on_query(q, prepared), self.on_key(k, prepared), self.on_value(v, prepared)

    def why_not(self, seq: SequenceInfo, like: Tensor) -> str | None:
        """Why no kernel applies the scheme to queries and keys of the dtype and device of `like`; None where one does.

        It is what `kernel_why_not` gives of `prepare`, without preparing anything.
        """
        return "the scheme has no kernel"

    def kernel_why_not(self, prepared: Any) -> str | None:
        """Why no kernel applies the scheme to queries and keys as prepared; None where `on_projection` does."""
        return "the scheme has no kernel"

    def on_projection(self, projected: Tensor, prepared: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The same of a projection `[B, T, K, H/K + 2, D]`, in which a group has its queries, its key and its value."""
        q, k, v = split_qkv(projected)
        return self.on_heads(q.flatten(-3, -2), k, v, prepared)

    def on_scores(self, prepared: Any) -> Bias | TokenBias | None:
        """What positions add to scores; None for nothing.

        It is called block by block with positions of queries `[B or 1, T]` and of keys `[B or 1, S]`, and gives
        `[B or 1, H, T, S]`. A `DistanceBias` or a `SumBias` is data that kernels read.
        """
        return None

    def on_attention(
        self, q: Tensor, k: Tensor, mask: Mask, score_mod: ScoreMod, prepared: Any
    ) -> tuple[Tensor, Tensor, ScoreMod]:
        """Queries `[B, T, H, D]` and all keys `[B, S, K, D]`, those of a cache included, as their product is taken."""
        return q, k, score_mod

    def on_output(self, y: Tensor, prepared: Any) -> Tensor:
        """What the heads of attention give, `[B, T, H, D]`, before they are projected."""
        return y

    def max_cached_positions(self, window: int | None, like: Tensor) -> int | None:
        """The number of positions that the scheme is defined for in a layer with that window and a cache, or None."""
        return self.config.max_positions

    def length_key(self, length: int) -> Hashable:
        """What of a planned length the scheme depends on: lengths with equal keys have equal positions."""
        return length if self.config.depends_on_length else None

    def rotary_args(self, length: int | None, device: torch.device) -> RotaryArgs | None:
        """The rotation that decode kernels apply, where the configuration has no `decode_kernel_why_not`."""
        return None

    def own_heads(self, per_head: PerHead) -> PerHead:
        """What is given for all heads along the last dimension, for those that this process has."""
        index, count = self.head_part
        if count == 1:
            return per_head
        size = (len(per_head) if isinstance(per_head, tuple) else per_head.shape[-1]) // count
        own = slice(index * size, (index + 1) * size)
        return per_head[own] if isinstance(per_head, tuple) else per_head[..., own]

    def reset_parameters(self, config: ModelConfig) -> None:
        """Initialize the weights, if the scheme has any."""


def bias_dtype(like: Tensor) -> torch.dtype:
    """The dtype of a bias on the scores of such activations: at least float32.

    >>> bias_dtype(torch.zeros(1, dtype=torch.bfloat16))
    torch.float32
    """
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def relative_init_std(model: ModelConfig) -> float:
    """The standard deviation of what schemes learn inside layers, before training.

    >>> relative_init_std(ModelConfig(vocab_size=9, dim=16, num_layers=1, num_heads=2, init="fan-in"))
    0.25
    """
    return getattr(model.init, "std", model.dim**-0.5)


def layers_with(config: PositionConfig, model: ModelConfig, side: Side) -> int:
    """The number of layers of an encoder or a decoder whose scheme is this one, or has it as a part."""
    return sum(config in model.layer(i).position.parts for i in range(model.depth(side)))


def build_position(config: PositionConfig, model: ModelConfig, side: Side) -> Position:
    """The module that computes a scheme, for the encoder or the decoder of a model."""
    return Position.class_for(type(config)).build(config, model, side)
