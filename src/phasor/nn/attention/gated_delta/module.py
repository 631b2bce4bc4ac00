"""Gated delta attention: what a layer keeps is a state of constant size, which every token corrects."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.config import ModelConfig, RMSNormConfig
from phasor.nn.attention.base import Attention, AttentionContext
from phasor.nn.attention.gated_delta.config import GatedDeltaAttentionConfig
from phasor.nn.attention.recurrence import TokenScan, prepare_scan
from phasor.nn.norm import at_least_float32, build_norm
from phasor.ops.attention import Mask
from phasor.ops.linear_attention import gated_delta

NORM_EPS = 1e-6  # of the lengths of queries and keys
LARGEST_DECAY = 16.0  # of initial decay rates per unit of time
TIMES = 1e-3, 0.1  # initial units of time per token, between these


class GatedDeltaAttention(Attention, config=GatedDeltaAttentionConfig):
    """`S = exp(g) S`, `S = S + beta k (v - S^T k)^T`, and the output `norm(S^T q) * silu(z)`, for each head.

    Queries, keys, values and gates `z` come out of one projection whose rows are ordered by key head (its query, its
    key, the values and the gates of its heads), and the write strengths `beta` and decays `g` out of another, so that
    tensor parallelism can split between key heads.
    """

    def __init__(self, config: GatedDeltaAttentionConfig, model: ModelConfig, *, cross: bool = False) -> None:
        super().__init__()
        self.config, self.sizes = config, config.sizes(model)
        heads, width = self.sizes.heads, config.output_width(model)
        self.convolution = nn.Parameter(torch.zeros(self.sizes.channels, config.conv_width))
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(heads)), nn.Parameter(torch.zeros(heads))
        self.qkvz = nn.Linear(model.dim, self.sizes.channels + width, bias=False)
        self.gates = nn.Linear(model.dim, 2 * heads, bias=False)
        self.norm = build_norm(RMSNormConfig(eps=config.norm_eps), self.sizes.value)
        self.out = nn.Linear(width, model.dim, bias=False)

    def reset_parameters(self) -> None:
        """As in Mamba-2 and Gated DeltaNet: decays of many time scales."""
        nn.init.uniform_(self.convolution, -(self.config.conv_width**-0.5), self.config.conv_width**-0.5)
        self.A_log.uniform_(0.01, LARGEST_DECAY).log_()
        time = self.dt_bias.uniform_(*map(math.log, TIMES)).exp_()
        time.add_(torch.log(-torch.expm1(-time)))  # softplus of the bias is the time

    def prepare_mask(self, mask: Mask, x: Tensor, keys: int, positions: tuple[Tensor, Tensor] | None = None) -> Mask:
        return prepare_scan(mask, self.config.kind)

    def keep_part(self, index: int, count: int) -> None:
        self.sizes = self.sizes._replace(heads=self.sizes.heads // count, key_heads=self.sizes.key_heads // count)

    def forward(self, x: Tensor, ctx: AttentionContext) -> Tensor:
        scan: TokenScan = ctx.mask.prepared.scan
        x = scan.enter(x)
        inputs, z = self.project(x)  # [B, T, channels], [B, T, H, value]
        inputs, last = scan.convolve(inputs, self.convolution, None, ctx.step.state("inputs"))
        q, k, v = self.split(F.silu(inputs))  # [B, T, K, key], [B, T, K, key], [B, T, H, value]
        q, k = normalize(q) * self.sizes.key**-0.5, normalize(k)
        k, beta, log_decay = scan.without_padding(k, *self.strength_and_decay(x))
        q, k, v, log_decay, beta = (tensor.transpose(1, 2) for tensor in (q, k, v, log_decay, beta))  # heads first
        y, state = gated_delta(q, k, v, log_decay, beta, ctx.step.state("state"), scan.starts)
        ctx.step.store(state=state, inputs=last)
        y = self.norm(y.transpose(1, 2)) * F.silu(z)  # [B, T, H, value]
        return scan.leave(self.out(y.flatten(-2)))  # [B, T, dim]

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of the convolution `[B, T, channels]` and gates `[B, T, H, value]`."""
        by_head = self.qkvz(x).unflatten(-1, (self.sizes.key_heads, -1))  # [B, T, K, ...]
        shared = self.sizes.heads // self.sizes.key_heads * self.sizes.value
        inputs, z = by_head.split((by_head.shape[-1] - shared, shared), dim=-1)
        return inputs.flatten(-2), z.flatten(-2).unflatten(-1, (self.sizes.heads, self.sizes.value))

    def split(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys `[B, T, K, key]` and values `[B, T, H, value]`."""
        by_head = inputs.unflatten(-1, (self.sizes.key_heads, -1))  # [B, T, K, ...]
        q, k, v = by_head.split((self.sizes.key, self.sizes.key, by_head.shape[-1] - 2 * self.sizes.key), dim=-1)
        return q, k, v.flatten(-2).unflatten(-1, (self.sizes.heads, self.sizes.value))

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
