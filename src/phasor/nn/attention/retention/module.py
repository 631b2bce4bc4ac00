"""Retention: what a layer keeps is a state of constant size, which decays by the same factor at every token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.config import LayerNormConfig, ModelConfig
from phasor.nn.attention.base import AttentionContext
from phasor.nn.attention.recurrence import TokenScan
from phasor.nn.attention.recurrent import RecurrentAttention, heads_first
from phasor.nn.attention.retention.config import RetentionAttentionConfig
from phasor.nn.norm import build_norm
from phasor.ops.decode import RecurrentArgs, RotaryArgs
from phasor.ops.linear_attention import retention


class Retention(RecurrentAttention, config=RetentionAttentionConfig):
    """`S = gamma S + k v^T`, and the output `norm(S^T q) * silu(z)`, for each head with its `gamma`."""

    first_head = 0  # of all heads, the first that this process has

    def __init__(self, config: RetentionAttentionConfig, model: ModelConfig, *, cross: bool = False) -> None:
        super().__init__(config, model)
        self.norm = build_norm(LayerNormConfig(eps=config.norm_eps), self.sizes.heads, self.sizes.value)

    def keep_part(self, index: int, count: int) -> None:
        super().keep_part(index, count)
        self.first_head = index * self.sizes.heads

    def forward(self, x: Tensor, ctx: AttentionContext) -> Tensor:
        scan: TokenScan = ctx.mask.prepared.scan
        q, k, v, z, _ = self.project(scan.enter(x), scan, ctx.step)  # [B, T, K, key] twice, [B, T, H, value] twice
        q = scan.enter(ctx.position.on_query(scan.leave(q), ctx.prepared)) * self.sizes.key**-0.5
        k = scan.enter(ctx.position.on_key(scan.leave(k), ctx.prepared))
        k, log_decay = scan.without_padding(k, self.log_decays(x).expand(*x.shape[:2], -1))
        y = ctx.step.recur(retention, *heads_first(q, k, v, log_decay), starts=scan.starts)  # [B, H, T, value]
        y = self.norm(y.transpose(1, 2)) * F.silu(z)  # [B, T, H, value]
        return scan.leave(self.out(y.flatten(-2)))  # [B, T, dim]

    def decode_args(self, rope: RotaryArgs | None) -> RecurrentArgs:
        decays = self.log_decays(self.qkvz.weight)
        return RecurrentArgs(
            self.sizes.key_heads, is_delta=False, scaled=True, log_decay=decays, norm=self.decode_norm(), rope=rope
        )

    def log_decays(self, like: Tensor) -> Tensor:
        """The logarithm of what a token leaves of the state of each head, `[H]`."""
        heads = torch.arange(self.sizes.heads, dtype=torch.float64, device=like.device) + self.first_head
        log_decays = torch.log1p(-torch.exp2(-5 - heads))
        return log_decays.to(torch.promote_types(like.dtype, torch.float32))
