"""Magnitudes times the cosines and sines of phases, in plain torch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus


class PolarArgs(NamedTuple):
    """The phases of features, in 2^-64 of a full rotation, less a shift for every group of heads of equal size.

    `radians` are zeros whose gradient is that of the shifts.
    """

    phases: Tensor  # int64, [B or 1, T, D]
    shifts: Tensor | None = None  # int64, [groups, D]
    radians: Tensor | None = None  # float32, [groups, D]


def polar_features_ref(x: Tensor, args: PolarArgs, positive: bool) -> Tensor:
    """Magnitudes `[B, T, H, D]`, or by group `[B, T, K, H/K, D]`, as cosines and then sines `[B, T, H, 2 D]`.

    Magnitudes are the softplus of `x`, or `x` itself where that is positive.

    >>> args = PolarArgs(torch.tensor([[[0, 2**62]]]))
    >>> polar_features_ref(torch.tensor([[[[2.0, 3.0]]]]), args, positive=True).round().tolist()
    [[[[2.0, 0.0, 0.0, 3.0]]]]
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide, phases = x.flatten(2, -2).to(dtype), args.phases[:, :, None]
    magnitudes = wide if positive else softplus(wide)
    if args.shifts is not None:
        phases = phases - args.shifts.repeat_interleave(wide.shape[2] // len(args.shifts), dim=0)
    angle = phases.to(torch.float64) * (2 * math.pi / 2**64)
    if args.radians is not None:
        angle = angle - args.radians.repeat_interleave(wide.shape[2] // len(args.radians), dim=0)
    return torch.cat((magnitudes * angle.cos().to(dtype), magnitudes * angle.sin().to(dtype)), dim=-1).to(x.dtype)
