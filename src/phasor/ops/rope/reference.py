"""Rotation of feature pairs in plain torch, and the layout of a fused query, key and value projection."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class RopeArgs(NamedTuple):
    """What rotates the heads of tokens: angles `position * increment` in 2^-64 of a full rotation, and a factor.

    The product wraps around in 64 bits, which drops full rotations exactly. The factor multiplies the result.
    """

    positions: Tensor  # int64, [T] or [B or 1, T]
    increments: Tensor  # int64, [pairs]
    factor: Tensor  # float32, [1]


class PhaseArgs(NamedTuple):
    """What rotates the heads of tokens by angles that are given for each, in 2^-64 of a full rotation.

    Each group of heads of equal size has angles. `radians` are zeros whose gradient is that of the angles.
    The scales multiply the pairs of rotated queries and keys.
    """

    phases: Tensor  # int64, [B or 1, T, groups, pairs]
    radians: Tensor | None = None  # float32, of the same shape
    q_scale: Tensor | None = None  # float32, [B or 1, T, pairs]
    k_scale: Tensor | None = None


def rotate_pairs_ref(x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> Tensor:
    """Rotate the first `2 * cos.shape[-1]` features of `x` in pairs, `(u, v) -> (u cos - v sin, u sin + v cos)`.

    >>> rotate_pairs_ref(torch.tensor([1.0, 2.0, 3.0]), torch.zeros(1), torch.ones(1), "half").tolist()
    [-2.0, 1.0, 3.0]
    """
    rotary_dim = 2 * cos.shape[-1]
    u, v = split_pairs(x[..., :rotary_dim], pairing)
    pairs = (u * cos - v * sin, v * cos + u * sin)
    rotated = torch.cat(pairs, dim=-1) if pairing == "half" else torch.stack(pairs, dim=-1).flatten(-2)
    return torch.cat((rotated.to(x.dtype), x[..., rotary_dim:]), dim=-1)


def rope_ref(q: Tensor, k: Tensor, args: RopeArgs, pairing: str) -> tuple[Tensor, Tensor]:
    """Queries `[B, T, H, D]`, or by group `[B, T, K, H/K, D]`, and keys `[B, T, K, D]`, rotated by their positions.

    >>> quarter = RopeArgs(torch.tensor([1]), torch.tensor([2**62]), torch.ones(1))
    >>> q, _ = rope_ref(torch.tensor([[[[1.0, 0.0]]]]), torch.zeros(1, 1, 1, 2), quarter, "half")
    >>> q.round().tolist()
    [[[[0.0, 1.0]]]]
    """
    phase = args.positions[..., None] * args.increments  # [..., T, pairs]
    angle = phase.to(torch.float64)[..., None, :] * (2 * math.pi / 2**64)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    cos, sin = torch.cos(angle).to(dtype) * args.factor, torch.sin(angle).to(dtype) * args.factor
    q = q.flatten(2, -2)
    return rotate_pairs_ref(q, cos, sin, pairing), rotate_pairs_ref(k, cos, sin, pairing)


def rope_phases_ref(q: Tensor, k: Tensor, args: PhaseArgs, pairing: str) -> tuple[Tensor, Tensor]:
    """Queries `[B, T, H, D]`, or by group `[B, T, K, H/K, D]`, and keys `[B, T, K, D]`, rotated by given phases.

    >>> quarter = PhaseArgs(torch.tensor([[[[2**62]]]]), q_scale=torch.tensor([[[3.0]]]))
    >>> q, k = rope_phases_ref(*torch.tensor([1.0, 0.0]).expand(2, 1, 1, 1, 2), quarter, "half")
    >>> q.round().tolist(), k.round().tolist()
    ([[[[0.0, 3.0]]]], [[[[0.0, 1.0]]]])
    """
    angle = args.phases.to(torch.float64) * (2 * math.pi / 2**64)
    if args.radians is not None:
        angle = angle + args.radians
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    rotated = []
    for x, scale in ((q.flatten(2, -2), args.q_scale), (k, args.k_scale)):
        by_head = angle.repeat_interleave(x.shape[2] // angle.shape[2], dim=2)
        cos, sin = by_head.cos().to(dtype), by_head.sin().to(dtype)
        if scale is not None:
            cos, sin = cos * scale[:, :, None], sin * scale[:, :, None]
        rotated.append(rotate_pairs_ref(x, cos, sin, pairing))
    return rotated[0], rotated[1]


def rope_qkv_ref(qkv: Tensor, args: RopeArgs, pairing: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries `[B, T, H, D]` and keys, and values, of a projection `[B, T, K, H/K + 2, D]`.

    >>> zero = RopeArgs(torch.zeros(3).long(), torch.ones(2).long(), torch.ones(1))
    >>> [list(x.shape) for x in rope_qkv_ref(torch.randn(1, 3, 2, 5, 4), zero, "half")]
    [[1, 3, 6, 4], [1, 3, 2, 4], [1, 3, 2, 4]]
    """
    q, k, v = split_qkv(qkv)
    return *rope_ref(q, k, args, pairing), v


def split_pairs(x: Tensor, pairing: str) -> tuple[Tensor, Tensor]:
    """The first and the second features of all pairs, as views."""
    if pairing == "half":
        u, v = x.chunk(2, dim=-1)
        return u, v
    return x[..., 0::2], x[..., 1::2]


def split_qkv(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries by group `[B, T, K, H/K, D]`, keys and values `[B, T, K, D]`, as views of `[B, T, K, H/K + 2, D]`.

    >>> [list(x.shape) for x in split_qkv(torch.zeros(1, 3, 2, 5, 4))]
    [[1, 3, 2, 3, 4], [1, 3, 2, 4], [1, 3, 2, 4]]
    """
    group_size = qkv.shape[-2] - 2
    if not (torch.is_grad_enabled() and qkv.requires_grad):
        return qkv.narrow(-2, 0, group_size), qkv.select(-2, group_size), qkv.select(-2, group_size + 1)
    q, k, v = qkv.split((group_size, 1, 1), dim=-2)  # its gradient joins the three in one copy
    return q, k.squeeze(-2), v.squeeze(-2)
