"""Mamba-2: what a layer keeps is a state of constant size, which decays by as much as each token says."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.config import ModelConfig, RMSNormConfig
from phasor.nn.attention.base import AttentionContext
from phasor.nn.attention.mamba2.config import Mamba2AttentionConfig
from phasor.nn.attention.recurrence import TokenScan
from phasor.nn.attention.recurrent import RecurrentAttention, draw_time_scales, heads_first
from phasor.nn.norm import at_least_float32, build_norm
from phasor.ops.decode import RecurrentArgs, RotaryArgs
from phasor.ops.linear_attention import retention

SMALLEST_DECAY = 1.0  # of initial decay rates per unit of time


class Mamba2Attention(RecurrentAttention, config=Mamba2AttentionConfig):
    """`S = exp(-A dt) S + k (dt v)^T`, and the output `norm((S^T q + D v) * silu(z))`, normalized over groups of heads.

    The input is projected to `dt` too, of which the softplus is taken.
    """

    def __init__(self, config: Mamba2AttentionConfig, model: ModelConfig, *, cross: bool = False) -> None:
        super().__init__(config, model)
        heads, key_heads, _, value = self.sizes
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(heads)), nn.Parameter(torch.zeros(heads))
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = build_norm(RMSNormConfig(eps=config.norm_eps), key_heads, heads // key_heads * value)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        draw_time_scales(self.A_log, self.dt_bias, SMALLEST_DECAY)
        nn.init.ones_(self.D)

    def forward(self, x: Tensor, ctx: AttentionContext) -> Tensor:
        scan: TokenScan = ctx.mask.prepared.scan
        q, k, v, z, dt = self.project(scan.enter(x), scan, ctx.step)  # as in RecurrentAttention.project; dt [B, T, H]
        time = F.softplus(at_least_float32(dt) + self.dt_bias)  # [B, T, H]
        k, time = scan.without_padding(k, time)
        written = (time[..., None] * v).to(v.dtype)  # [B, T, H, value]
        log_decay = -at_least_float32(self.A_log).exp() * time
        y = ctx.step.recur(retention, *heads_first(q, k, written, log_decay), starts=scan.starts)  # [B, H, T, value]
        y = (y.transpose(1, 2) + self.D[:, None] * v) * F.silu(z)  # [B, T, H, value]
        y = self.norm(y.flatten(-2).unflatten(-1, (self.sizes.key_heads, -1)))  # [B, T, K, H / K value]
        return scan.leave(self.out(y.flatten(-2)))  # [B, T, dim]

    def decode_args(self, rope: RotaryArgs | None) -> RecurrentArgs:
        return RecurrentArgs(
            self.sizes.key_heads,
            is_delta=False,
            scaled=False,
            log_rate=self.A_log,
            time_bias=self.dt_bias,
            skip=self.D,
        )
