"""Latent attention in the fused decoding step."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from phasor.nn.attention.base import AttentionContext
from phasor.nn.attention.fused import Biases, DecodingStep

if TYPE_CHECKING:
    from phasor.nn.attention.latent.module import LatentAttention


class FusedLatent:
    """The projections with norms, output and residual; what lies between is the module's."""

    takes_context = True

    def __init__(self, attention: LatentAttention, step: DecodingStep) -> None:
        self.attention, self.step = attention, step

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
