"""Gated short convolution: each token takes in the few before it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.nn.attention.base import Attention, AttentionContext, CalledOperation, StandIn
from phasor.nn.attention.recurrence import TokenScan, called_convolution, initialize_convolution, prepare_scan
from phasor.nn.attention.short_convolution.config import ShortConvolutionAttentionConfig
from phasor.ops.attention import Mask


class ShortConvolution(Attention, config=ShortConvolutionAttentionConfig):
    """`out(after * convolution(before * value))`, where gates and values are projections of the input."""

    def __init__(self, config: ShortConvolutionAttentionConfig, model: ModelConfig, *, cross: bool = False) -> None:
        super().__init__()
        self.kind = config.kind
        self.convolution = nn.Parameter(torch.zeros(model.dim, config.conv_width))
        self.convolution_bias = nn.Parameter(torch.zeros(model.dim)) if config.bias else None
        self.gates_and_values = nn.Linear(model.dim, 3 * model.dim, bias=config.bias)
        self.out = nn.Linear(model.dim, model.dim, bias=config.bias)

    def reset_parameters(self) -> None:
        initialize_convolution(self.convolution, self.convolution_bias)

    def prepare_mask(self, mask: Mask, x: Tensor, keys: int, positions: tuple[Tensor, Tensor] | None = None) -> Mask:
        return prepare_scan(mask, self.kind)

    def operations(self, tokens: int, tensor: StandIn, ctx: AttentionContext) -> Iterator[CalledOperation]:
        yield called_convolution(self.convolution, tokens, tensor)

    def keep_part(self, index: int, count: int) -> None:
        """Features are where their weights are."""

    def forward(self, x: Tensor, ctx: AttentionContext) -> Tensor:
        scan: TokenScan = ctx.mask.prepared.scan
        before, after, values = self.gates_and_values(scan.enter(x)).chunk(3, dim=-1)  # [B, T, dim] each
        convolved = scan.convolve(before * values, self.convolution, self.convolution_bias, ctx.step)
        return scan.leave(self.out(after * convolved))  # [B, T, dim]
