"""Attention of one layer in the fused step, by kernels: over keys and values, or over the states of heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

from torch import Tensor, nn

from phasor.config.model import Layer
from phasor.nn.attention.base import Attention, AttentionContext
from phasor.nn.attention.latent.module import LatentAttention
from phasor.nn.attention.recurrent import RecurrentAttention
from phasor.nn.attention.softmax.module import SoftmaxAttention
from phasor.nn.norm import RMSNorm
from phasor.nn.positions.base import Position
from phasor.ops.attention import Bias
from phasor.ops.decode import QKNormArgs

if TYPE_CHECKING:
    from phasor.generation.runners.fused import FusedStep

Biases = dict[tuple[int, int], Tensor]  # of scores, by scheme and keys


class FusedAttention(Protocol):
    """The attention of one layer, by kernels."""

    takes_context: bool  # of the layer

    def __call__(self, x: Tensor, norm: nn.Module, ctx: AttentionContext | None, biases: Biases) -> None:
        """`x += multiplier * attention(norm(x))`."""


def fused_attention(
    step: FusedStep, attention: Attention, layer: Layer, scheme: Position, index: int
) -> FusedAttention:
    """The kernels for the attention of a layer, which has no `decode_kernel_why_not`."""
    if isinstance(attention, RecurrentAttention):
        return FusedRecurrent(step, attention, scheme, index)
    if isinstance(attention, LatentAttention):
        return FusedLatent(step, attention)
    return FusedSoftmax(step, cast(SoftmaxAttention, attention), layer, scheme, index)


class FusedSoftmax:
    """Three kernels: norm, queries, keys and values; attention over the cache; output and residual."""

    def __init__(
        self, step: FusedStep, attention: SoftmaxAttention, layer: Layer, scheme: Position, index: int
    ) -> None:
        from phasor.ops.decode.decode_attention import decode_attention

        cache, self.step, self.attention, self.attend = step.cache, step, attention, decode_attention
        self.keys, self.values = cache.layers[index]["keys"], cache.layers[index]["values"]
        qk_norm = None
        if attention.has_qk_norm:
            q, k = cast(RMSNorm, attention.q_norm), cast(RMSNorm, attention.k_norm)
            qk_norm = QKNormArgs(cast(Tensor, q.weight), cast(Tensor, k.weight), q.offset, q.eps)
        self.given: dict[str, Any] = {
            "scale": attention.scale,
            "rope": scheme.rotary_args(cache.length, self.keys.device),
            "qk_norm": qk_norm,
            "sink_logits": attention.sinks,
            **cache.kernel_args(index),  # where a row's tokens are
        }
        self.takes_context = "scores" in layer.position.acts_on  # for a bias

    def __call__(self, x: Tensor, norm: nn.Module, ctx: AttentionContext | None, biases: Biases) -> None:
        step, attention = self.step, self.attention
        heads = self.attend(
            step.project(x, attention.qkv, step.output(attention.qkv.out_features), norm),
            self.keys,
            self.values,
            step.cache.counts,
            step.positions,
            step.heads,
            step.workspace,
            bias=bias_row(ctx, biases) if self.takes_context and ctx is not None else None,
            pdl=step.pdl,
            **self.given,
        )
        step.add(heads, attention.out, x)


class FusedRecurrent:
    """Three kernels: norm, queries, keys, values and gates, a convolution of them included; the states; output and
    residual.

    With many rows the projections are GEMMs of torch, and the convolution is a kernel by itself. Gates with a
    separate projection are one more where weights are quantized or nothing is convolved, and so is a norm over
    several heads.
    """

    takes_context = False

    def __init__(self, step: FusedStep, attention: RecurrentAttention, scheme: Position, index: int) -> None:
        from phasor.ops.decode.recurrent_step import recurrent_step

        cache, self.step, self.attention, self.recurrent_step = step.cache, step, attention, recurrent_step
        states, self.slots = cache.states[index], cache.state_slots
        self.state = states["state"]
        self.convolution = attention.decode_convolution(states["inputs"], self.slots) if "inputs" in states else None
        self.args = attention.decode_args(scheme.rotary_args(cache.length, self.state.device))
        self.gates: nn.Linear | None = getattr(attention, "gates", None)

    def __call__(self, x: Tensor, norm: nn.Module, ctx: AttentionContext | None, biases: Biases) -> None:
        step, attention = self.step, self.attention
        given: dict[str, Any] = {"slots": self.slots, "positions": step.positions, "pdl": step.pdl}
        projected, gates = self.project(x, norm)
        out = step.output(attention.out.in_features, "heads with a state")
        heads = self.recurrent_step(projected, gates, self.state, out, self.args, **given)
        if self.args.norm is not None:
            step.add(heads, attention.out, x)
        elif self.args.key_heads == 1 and step.few:
            step.add(heads, attention.out, x, attention.norm)
        else:
            by_key_head = heads.unflatten(-1, (self.args.key_heads, -1))
            step.add(attention.norm(by_key_head).flatten(-2), attention.out, x)

    def project(self, x: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Queries, keys, values and gates of results, convolved where there is a convolution, and other gates."""
        step, linear, conv, gates = self.step, self.attention.qkvz, self.convolution, None
        out, other = step.output(linear.out_features), None
        if self.gates is not None:
            gates = step.output(self.gates.out_features, "gates")
            if not step.few:
                x, norm = step.normalize(x, norm), nn.Identity()  # once for both projections
            if step.few and conv is not None and plain_weights(linear, self.gates):
                other = self.gates.weight, gates
            else:
                gates = step.project(x, self.gates, gates, norm)
        return step.project(x, linear, out, norm, conv, other), gates


class FusedLatent:
    """The projections of latent attention with norms, output and residual; what lies between is the module's."""

    takes_context = True

    def __init__(self, step: FusedStep, attention: LatentAttention) -> None:
        self.step, self.attention = step, attention

    def __call__(self, x: Tensor, norm: nn.Module, ctx: AttentionContext | None, biases: Biases) -> None:
        step, attention = self.step, self.attention
        given = (x, norm) if step.few else (step.normalize(x, norm), nn.Identity())  # once for both projections
        kv = self.project("kv_down", *given)
        if attention.config.q_rank is None:
            q = self.project("q", *given)
        else:
            q = self.project("q_up", self.project("q_down", *given), attention.q_norm)
        y = attention.attend(q[:, None], kv[:, None], cast(AttentionContext, ctx))
        step.add(y[:, 0], attention.out, x)

    def project(self, name: str, x: Tensor, norm: nn.Module) -> Tensor:
        """`norm(x)` by one of the projections."""
        linear = getattr(self.attention, name)
        return self.step.project(x, linear, self.step.output(linear.out_features, name), norm)


def plain_weights(*linears: nn.Module) -> bool:
    """Whether no weights are quantized, so that one kernel can compute several projections."""
    return all(isinstance(linear, nn.Linear) for linear in linears)


def bias_row(ctx: AttentionContext, biases: Biases) -> Tensor:
    """What positions add to the scores of a step, `[B or 1, H, slots]`; computed once for all layers with its keys."""
    key = id(ctx.position), id(ctx.step.key_positions)
    if key not in biases:
        bias, queries, keys = ctx.position.on_scores(ctx.prepared), ctx.positions, ctx.step.key_positions
        biases[key] = cast(Bias, bias)(cast(Tensor, queries), cast(Tensor, keys))[:, :, 0]
    return biases[key]
