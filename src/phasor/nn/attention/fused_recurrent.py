"""Attention whose heads keep a state, in the fused decoding step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from phasor.nn.attention.base import AttentionContext
from phasor.nn.attention.fused import Biases, DecodingStep
from phasor.nn.positions.base import Position

if TYPE_CHECKING:
    from phasor.nn.attention.recurrent import RecurrentAttention


class FusedRecurrent:
    """Three kernels: norm, queries, keys, values and gates, a convolution of them included; the states; output and
    residual.

    With many rows the projections are GEMMs of torch, and the convolution is a kernel by itself. Gates with a
    separate projection are one more where weights are quantized or nothing is convolved, and so is a norm over
    several heads.
    """

    takes_context = False

    def __init__(self, attention: RecurrentAttention, step: DecodingStep, scheme: Position, index: int) -> None:
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


def plain_weights(*linears: nn.Module) -> bool:
    """Whether no weights are quantized, so that one kernel can compute several projections."""
    return all(isinstance(linear, nn.Linear) for linear in linears)
