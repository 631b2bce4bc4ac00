"""Sinusoidal codes: sines and cosines of exact phases, on the input."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.nn.positions.base import Position
from phasor.nn.positions.frequencies import sinusoidal_frequencies
from phasor.nn.positions.phase import cos_sin_of, increments
from phasor.nn.positions.sinusoidal.config import SinusoidalConfig
from phasor.nn.sequence import SequenceInfo
from phasor.ops.constants import constant


class Sinusoidal(Position, config=SinusoidalConfig):
    """`sin(t theta_i)` and `cos(t theta_i)`, interleaved or in halves, added or concatenated and projected.

    >>> table = Sinusoidal(SinusoidalConfig(), dim=6).table(torch.arange(3))
    >>> table[0].tolist()
    [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    """

    config: SinusoidalConfig

    def __init__(self, config: SinusoidalConfig, *, dim: int) -> None:
        super().__init__()
        self.config = config
        self.width = config.width or dim
        self.increments = increments(sinusoidal_frequencies(config.base, self.width, config.spacing))
        self.project = nn.Linear(dim + self.width, dim, bias=False) if config.combine == "concat" else None

    @classmethod
    def build(cls, config: SinusoidalConfig, model: ModelConfig, side: Side) -> Self:
        return cls(config, dim=model.input_width)

    def table(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The codes of int64 positions `[...]`, as `[..., width]`."""
        inc = constant(self.increments, positions.device, torch.int64)
        cos, sin = cos_sin_of((positions + self.config.offset)[..., None], inc, dtype)
        if self.config.layout == "interleaved":
            code = torch.stack((sin, cos), dim=-1).flatten(-2)
        else:
            code = torch.cat((sin, cos), dim=-1)
        missing = self.width - code.shape[-1]
        return nn.functional.pad(code, (0, missing)) if missing > 0 else code[..., : self.width]

    def code(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        return self.table(positions, dtype)

    def pair_increments(self) -> tuple[int, ...]:
        return self.increments[: self.width // 2]

    def code_pairs(self, code: Tensor) -> tuple[Tensor, Tensor]:
        pairs, sines = self.width // 2, len(self.increments)
        if self.config.layout == "interleaved":
            return code[..., 1 : 2 * pairs : 2], code[..., 0 : 2 * pairs : 2]
        return code[..., sines : sines + pairs], code[..., :pairs]

    def on_input(self, x: Tensor, seq: SequenceInfo) -> Tensor:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        code = self.table(seq.positions, dtype)
        if self.config.zero_padding:
            real = seq.positions >= 0 if seq.attention_mask is None else seq.attention_mask
            code = code * real[..., None]
        code = code.to(x.dtype)
        if self.project is None:
            return x + code
        return self.project(torch.cat((x, code.expand(*x.shape[:-1], self.width)), dim=-1))
