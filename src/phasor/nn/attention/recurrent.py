"""What kinds of attention with a state share: projections by key head, a short convolution, parts of the heads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.config.recurrent import RecurrentAttentionConfig
from phasor.nn.attention.base import Attention, AttentionContext, CalledOperation, StandIn
from phasor.nn.attention.fused import DecodingStep
from phasor.nn.attention.fused_recurrent import FusedRecurrent
from phasor.nn.attention.recurrence import TokenScan, called_convolution, initialize_convolution, prepare_scan
from phasor.nn.layer_step import LayerStep
from phasor.nn.norm import RowNorm
from phasor.nn.positions.base import Position
from phasor.ops.attention import Mask
from phasor.ops.decode import ConvolutionArgs, HeadNormArgs, RecurrentArgs, RotaryArgs
from phasor.ops.launch import next_power_of_2
from phasor.ops.linear_attention import GATED_DELTA, LinearAttentionArgs

MAX_DECODE_STATE = 2**15  # elements of a head's state that a decode kernel holds at once
LARGEST_DECAY = 16.0  # of initial decay rates per unit of time
TIMES = 1e-3, 0.1  # initial units of time per token, between these


class RecurrentAttention(Attention):
    """Attention whose heads keep a state.

    Queries, keys, values and gates `z` come out of one projection whose rows are ordered by key head (its query, its
    key, the values and the gates of its heads, and what other gates there are), so that tensor parallelism can split
    between key heads.
    """

    norm: nn.Module  # of results

    def __init__(self, config: RecurrentAttentionConfig, model: ModelConfig) -> None:
        super().__init__()
        self.kind, self.sizes, width = config.kind, config.sizes(model), config.output_width(model)
        self.is_delta = config.is_delta  # whether tokens correct what their keys find in the state
        channels, taps, bias = self.sizes.channels, config.conv_width, config.bias
        self.convolution = None if taps is None else nn.Parameter(torch.zeros(channels, taps))
        self.convolution_bias = nn.Parameter(torch.zeros(channels)) if config.conv_bias else None
        self.qkvz = nn.Linear(model.dim, config.projected_width(model), bias=bias)
        self.out = nn.Linear(width, model.dim, bias=bias)

    def reset_parameters(self) -> None:
        if self.convolution is not None:
            initialize_convolution(self.convolution, self.convolution_bias)

    def prepare_mask(self, mask: Mask, x: Tensor, keys: int, positions: tuple[Tensor, Tensor] | None = None) -> Mask:
        return prepare_scan(mask, self.kind)

    def keep_part(self, index: int, count: int) -> None:
        self.sizes = self.sizes._replace(heads=self.sizes.heads // count, key_heads=self.sizes.key_heads // count)

    def project(self, x: Tensor, scan: TokenScan, step: LayerStep) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Queries and keys `[B, T, K, key]`, values and gates `[B, T, H, value]`, other gates `[B, T, ...]`.

        `x` has its tokens in the order of the scan.
        """
        heads, key_heads, key, value = self.sizes
        by_head = self.qkvz(x).unflatten(-1, (key_heads, -1))  # [B, T, K, ...]
        shared = heads // key_heads * value
        inputs, z, gates = by_head.tensor_split((2 * key + shared, 2 * (key + shared)), dim=-1)
        if self.convolution is not None:
            inputs = scan.convolve(inputs.flatten(-2), self.convolution, self.convolution_bias, step)
            inputs = F.silu(inputs).unflatten(-1, (key_heads, -1))
        q, k, v = inputs.split((key, key, shared), dim=-1)
        v, z = (x.flatten(-2).unflatten(-1, (heads, value)) for x in (v, z))
        return q, k, v, z, gates.flatten(-2)

    def operations(self, tokens: int, tensor: StandIn, ctx: AttentionContext) -> Iterator[CalledOperation]:
        yield from super().operations(tokens, tensor, ctx)
        if self.convolution is not None:
            yield called_convolution(self.convolution, tokens, tensor)
        heads, key_heads, key, value = self.sizes
        keys, values = tensor(1, key_heads, tokens, key), tensor(1, heads, tokens, value)
        gates = tensor(1, heads, tokens, dtype=torch.float32)
        name = "gated delta rule" if self.is_delta else "retention"
        args = LinearAttentionArgs(keys, keys, values, gates, gates if self.is_delta else None)
        yield CalledOperation(name, GATED_DELTA, (args,))

    def decode_kernel_why_not(self) -> str | None:
        size = next_power_of_2(self.sizes.key) * next_power_of_2(self.sizes.value)
        if size > MAX_DECODE_STATE:
            return f"a state of {self.sizes.key} x {self.sizes.value} is larger than a kernel holds"
        return None

    def fused_attention(self, step: DecodingStep, scheme: Position, index: int) -> FusedRecurrent:
        return FusedRecurrent(self, step, scheme, index)

    def decode_projections(self) -> Iterator[nn.Module]:
        yield from (self.qkvz, self.out)

    def decode_norms(self) -> Iterator[nn.Module]:
        yield self.norm

    def decode_args(self, rope: RotaryArgs | None) -> RecurrentArgs:
        """How the decode kernels compute the heads of a token."""
        raise NotImplementedError(f"{type(self).__name__} does not implement decode_args")

    def decode_convolution(self, state: Tensor, slots: Tensor | None) -> ConvolutionArgs | None:
        """The convolution as the decode kernels take it, over the inputs that a cache keeps; None without one."""
        if self.convolution is None:
            return None
        heads, key_heads, key, value = self.sizes
        group, convolved = self.qkvz.out_features // key_heads, 2 * key + heads // key_heads * value
        return ConvolutionArgs(self.convolution, self.convolution_bias, state, slots, group, convolved)

    def decode_norm(self) -> HeadNormArgs:
        """The norm of each head's result as the decode kernels take it."""
        norm = cast(RowNorm, self.norm)
        return HeadNormArgs(norm.weight, norm.bias, norm.offset, norm.eps, norm.centered)


def heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors `[B, T, H, ...]` as `[B, H, T, ...]`."""
    return tuple(x.transpose(1, 2) for x in tensors)


def draw_time_scales(log_rate: Tensor, dt_bias: Tensor, least: float) -> None:
    """Draw decays of many time scales, as in Mamba-2: rates from `least` on, and times per token.

    >>> log_rate, dt_bias = torch.zeros(2, 9)
    >>> draw_time_scales(log_rate, dt_bias, 1.0)
    >>> bool((log_rate >= 0).all() and (torch.nn.functional.softplus(dt_bias) <= 0.1001).all())
    True
    """
    log_rate.uniform_(least, LARGEST_DECAY).log_()
    time = dt_bias.uniform_(*map(math.log, TIMES)).exp_()
    time.add_(torch.log(-torch.expm1(-time)))  # softplus of the bias is the time
