"""The attention contract, module side: what every kind of attention is called with, and what it says of itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from phasor.config import AttentionConfig, ModelConfig
from phasor.nn.attention.fused import DecodingStep, FusedAttention
from phasor.nn.kinds import KindModule
from phasor.nn.layer_step import LayerStep
from phasor.nn.positions.base import Position, ProjectHeads
from phasor.nn.sequence import SequenceInfo
from phasor.ops.attention import Mask, ScoreMod, attention, attention_ref
from phasor.ops.dispatch import Dispatch, Path, supports_all
from phasor.ops.sparse_attention import Pattern, sparse_attention, sparse_attention_ref


class CappedSinks(NamedTuple):
    """Positions of queries that attend to sink tokens: as the scheme prepared them, and as integers `[B or 1, T]`."""

    prepared: Any
    positions: Tensor


def no_projection(vectors: Tensor) -> tuple[Tensor, Tensor]:
    raise ValueError(
        "the positions take the layer's projections of queries and keys, which this attention does not give"
    )


@dataclass(slots=True)
class AttentionContext:
    """What one layer's attention takes besides its input: the mask, and positions as its scheme prepared them.

    `position_weights` are what the scheme has learned for this layer alone. `step` stores what the layer keeps for its
    tokens and returns that of all keys; that of cross-attention is a `CrossStep`. `positions`, `[B or 1, T]`, and those
    of the keys in `step` are for schemes that act on scores. `capped_sinks` has the positions of queries that attend to
    sink tokens, where that distance is capped. Attention weights are appended to `weights` where a `Record` asks for
    them.
    """

    mask: Mask
    position: Position
    step: LayerStep
    prepared: Any = None
    position_weights: tuple[Any, ...] = ()
    positions: Tensor | None = None
    capped_sinks: CappedSinks | None = None
    weights: list[Tensor] | None = None

    def for_layer(self, x: Tensor, project: ProjectHeads = no_projection) -> AttentionContext:
        """The context with positions that follow the layer's input `[B, T, dim]`, where the scheme's do.

        `project` is how the layer projects vectors to queries and keys, for schemes that project theirs alike.
        """
        if not self.position.config.follows_input:
            return self
        prepared = self.position.for_layer(x, self.prepared, self.position_weights, self.step)
        return replace(self, prepared=self.position.with_projection(project, prepared))

    def score_mod(self, *, scale: float, **options: Any) -> ScoreMod:
        """How scores are modified, with what positions add to them; `options` are fields of `ScoreMod`."""
        options |= {"bias": self.position.on_scores(self.prepared), "counted": self.step.counted}
        return ScoreMod(scale=scale, query_positions=self.positions, key_positions=self.step.key_positions, **options)


def cap_sinks(scheme: Position, seq: SequenceInfo, attention: AttentionConfig, x: Tensor) -> CappedSinks | None:
    """Positions of queries that attend to sink tokens, capped at the length of window and sinks together."""
    if not attention.cap_sinks:
        return None
    reach = (attention.window or 0) + attention.sink_tokens - 1
    positions = seq.rows.minimum(seq.origin() + reach)  # [B or 1, T]
    return CappedSinks(scheme.prepare(replace(seq, positions=positions), x), positions)


Rows = tuple[Tensor, str, int]  # rows of a projection, their role, their number


StandIn = Callable[..., Tensor]  # gives a tensor of a shape, and perhaps a dtype, which may have no storage


class CalledOperation(NamedTuple):
    """An operation of a layer: its name, its dispatch table, and what it is called with."""

    name: str
    table: Dispatch
    args: tuple[Any, ...]


# Attention whose queries and keys are not rows of one projection calls the position scheme for each of them.
ROTATION = Dispatch(
    Path("Triton kernel on queries and keys", supports_all, lambda ctx: ctx.position.kernel_why_not(ctx.prepared)),
    Path("torch, one pass per half", supports_all),
)


class AttendShapes(NamedTuple):
    """The heads and widths of the queries, keys and values that `attend` is called with."""

    num_heads: int
    head_dim: int
    num_kv_heads: int
    value_dim: int


def attend(q: Tensor, k: Tensor, v: Tensor, ctx: AttentionContext, score_mod: ScoreMod) -> Tensor:
    """Queries `[B, T, H, D]` over keys `[B, S, K, D]` and values `[B, S, K, E]` under the mask, as `[B, T, H, E]`.

    The hooks of the position scheme act on what attention takes and on what it gives. Where a `Record` asks for
    attention weights they are computed by the reference, which alone holds them.
    """
    q, k, score_mod = ctx.position.on_attention(q, k, ctx.mask, score_mod, ctx.prepared)
    sparse = ctx.mask.pattern is not None
    if ctx.weights is None:
        y = (sparse_attention if sparse else attention)(q, k, v, ctx.mask, score_mod)
    else:
        y, weights = (sparse_attention_ref if sparse else attention_ref)(q, k, v, ctx.mask, score_mod)
        ctx.weights.append(weights)
    return ctx.position.on_output(y, ctx.prepared)


class Attention(KindModule):
    """A kind of attention. Positions come in through the hooks of the context's scheme.

    A module names the configuration it computes when it is defined: `class Name(Attention, config=NameConfig)`. It is
    built as `Name(config, model, cross=...)`, with the weights that the configuration declares.
    """

    pattern: Pattern | None = None  # of the keys that queries attend to, where they are not all that the mask shows

    def prepare_mask(self, mask: Mask, x: Tensor, keys: int, positions: tuple[Tensor, Tensor] | None = None) -> Mask:
        """A call's mask as this kind of attention takes it, for an input `[B, T, dim]` and that many keys.

        It is asked once for all layers with the same configuration. `positions`, of queries and of keys, are given
        where the layer's scheme acts on scores.
        """
        return mask

    def forward(self, x: Tensor, ctx: AttentionContext) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not implement forward")

    def attend_shapes(self, queries: int, keys: int) -> AttendShapes | None:
        """What `attend` is called with for that many queries over that many keys; None where it is not."""
        return None

    def score_options(self) -> dict[str, Any]:
        """How scores are modified, but for what depends on the call."""
        return {}

    def operations(self, tokens: int, tensor: StandIn, ctx: AttentionContext) -> Iterator[CalledOperation]:
        """The operations that it calls besides `attend`, for a row of that many tokens."""
        if "keys" in ctx.position.config.acts_on:
            yield CalledOperation("rotation", ROTATION, (ctx,))

    def project_heads(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys of vectors `[rows, dim]`, for schemes that project theirs as the layer does."""
        return no_projection(vectors)

    def rows_by_role(self) -> Iterator[tuple[nn.Linear, list[Rows]]]:
        """The projections with an initialization by role ("q", "k", "v", "out"), each split into its rows by role.

        All others are initialized as other projections of a model are.
        """
        return iter(())

    def reset_parameters(self) -> None:
        """Initialize what is neither a projection nor a norm, if there is any."""

    def quantizable(self) -> Iterator[tuple[str, nn.Module]]:
        """The projections whose weights may be quantized, by name: those that are called and not read."""
        return self.named_children()

    def without_adapters(self) -> Iterator[nn.Module]:
        """The parts that no adapter changes, such as those that choose tokens."""
        return iter(())

    def keep_part(self, index: int, count: int) -> None:
        """Become one of `count` parts of all heads, for tensor parallelism, after the weights are cut."""
        raise NotImplementedError(f"{type(self).__name__} cannot be cut")

    def decode_kernel_why_not(self) -> str | None:
        """Why the kernels of the fused decoding step do not compute this attention; None where they do."""
        return f"no decode kernel has {type(self).__name__}"

    def fused_attention(self, step: DecodingStep, scheme: Position, index: int) -> FusedAttention:
        """The attention of the layer `index` by those kernels, where no reason speaks against them."""
        raise NotImplementedError(f"{type(self).__name__} does not implement fused_attention")

    def decode_projections(self) -> Iterator[nn.Module]:
        """The projections that these kernels compute."""
        return iter(())

    def decode_norms(self) -> Iterator[nn.Module]:
        """The norms inside of the attention that these kernels compute."""
        return iter(())


def build_attention(config: AttentionConfig, model: ModelConfig, *, cross: bool = False) -> Attention:
    """The module that computes a kind of attention, or of cross-attention, for the layers of a model."""
    return Attention.class_for(type(config))(config, model, cross=cross)
