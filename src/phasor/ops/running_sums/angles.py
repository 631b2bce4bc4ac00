"""Angles in 64-bit fixed point: fractions of a rotation, which add up exactly and drop full rotations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from phasor.ops.custom_op import custom_op
from phasor.ops.dispatch import triton_why_not

BITS = 52  # of a fraction of a rotation: all that float64 has


def fixed_angles(radians: Tensor, own: Tensor) -> Tensor:
    """Angles `own` `[N]` in 2^-64 of a rotation and `radians` `[..., N]` together, in int64; no gradient goes through.

    >>> quarter = torch.tensor([-math.pi / 2], dtype=torch.float64)
    >>> fixed_angles(quarter, torch.tensor([5])).tolist() == [5 - 2**62]
    True
    """
    radians = radians.detach()
    if radians.dtype == torch.float32 and triton_why_not(radians) is None:
        angles: Tensor = fixed_angles_op(radians, own)
        return angles
    return fixed_angles_ref(radians, own)


def fixed_angles_ref(radians: Tensor, own: Tensor) -> Tensor:
    """`fixed_angles` in plain torch."""
    turns = radians.double() / (2 * math.pi)
    return own + ((turns - turns.round()) * 2**BITS).round().to(torch.int64) * 2 ** (64 - BITS)


@custom_op("phasor::fixed_angles")
def fixed_angles_op(radians: Tensor, own: Tensor) -> Tensor:
    from phasor.ops.running_sums.kernels import launch_angles

    out = empty_angles(radians)
    launch_angles(radians, own, out)
    return out


def empty_angles(radians: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(radians, dtype=torch.int64, memory_format=torch.contiguous_format)


fixed_angles_op.register_fake(empty_angles)
