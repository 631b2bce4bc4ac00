"""Gated delta attention: what a layer keeps is a state of constant size, which every token corrects."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.config import ModelConfig, RMSNormConfig
from phasor.nn.attention.base import AttentionContext
from phasor.nn.attention.gated_delta.config import GatedDeltaAttentionConfig
from phasor.nn.attention.recurrence import TokenScan
from phasor.nn.attention.recurrent import RecurrentAttention, draw_time_scales, heads_first
from phasor.nn.norm import at_least_float32, build_norm
from phasor.ops.decode import RecurrentArgs, RotaryArgs
from phasor.ops.linear_attention import gated_delta

NORM_EPS = 1e-6  # of the lengths of queries and keys
SMALLEST_DECAY = 0.01  # of initial decay rates per unit of time


class GatedDeltaAttention(RecurrentAttention, config=GatedDeltaAttentionConfig):
    """`S = exp(g) S`, `S = S + beta k (v - S^T k)^T`, and the output `norm(S^T q) * silu(z)`, for each head.

    The write strengths `beta` and decays `g` come out of a separate projection.
    """

    def __init__(self, config: GatedDeltaAttentionConfig, model: ModelConfig, *, cross: bool = False) -> None:
        super().__init__(config, model)
        heads = self.sizes.heads
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(heads)), nn.Parameter(torch.zeros(heads))
        self.gates = nn.Linear(model.dim, 2 * heads, bias=False)
        self.norm = build_norm(RMSNormConfig(eps=config.norm_eps), self.sizes.value)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        draw_time_scales(self.A_log, self.dt_bias, SMALLEST_DECAY)

    def forward(self, x: Tensor, ctx: AttentionContext) -> Tensor:
        scan: TokenScan = ctx.mask.prepared.scan
        x = scan.enter(x)
        q, k, v, z, _ = self.project(x, scan, ctx.step)  # [B, T, K, key] twice, [B, T, H, value] twice
        q, k = normalize(q) * self.sizes.key**-0.5, normalize(k)
        k, beta, log_decay = scan.without_padding(k, *self.strength_and_decay(x))
        y = ctx.step.recur(gated_delta, *heads_first(q, k, v, log_decay, beta), starts=scan.starts)  # [B, H, T, value]
        y = self.norm(y.transpose(1, 2)) * F.silu(z)  # [B, T, H, value]
        return scan.leave(self.out(y.flatten(-2)))  # [B, T, dim]

    def decode_projections(self) -> Iterator[nn.Module]:
        yield from (*super().decode_projections(), self.gates)

    def decode_args(self, rope: RotaryArgs | None) -> RecurrentArgs:
        return RecurrentArgs(
            self.sizes.key_heads,
            is_delta=True,
            scaled=True,
            key_eps=NORM_EPS,
            log_rate=self.A_log,
            time_bias=self.dt_bias,
            norm=self.decode_norm(),
        )

    def strength_and_decay(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """How strongly each token is written, and the logarithm of what it leaves of the state, `[B, T, H]`."""
        gates = self.gates(x).unflatten(-1, (self.sizes.key_heads, 2, -1))  # [B, T, K, 2, H / K]
        strength, time = (gate.flatten(-2) for gate in at_least_float32(gates).unbind(-2))
        rate = at_least_float32(self.A_log).exp()
        return strength.sigmoid(), -rate * F.softplus(time + self.dt_bias)


def normalize(x: Tensor) -> Tensor:
    """Vectors of length 1, computed in at least float32.

    >>> normalize(torch.tensor([3.0, 4.0])).tolist()
    [0.6000000238418579, 0.800000011920929]
    """
    wide = at_least_float32(x)
    return (wide * (wide.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()).to(x.dtype)
