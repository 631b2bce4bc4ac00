"""Rotation of feature pairs by given cosines and sines: `(u, v) -> (u cos - v sin, u sin + v cos)`."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, pairing: str) -> Tensor:
    """Turn the first `2 * cos.shape[-1]` features of `x` in pairs; the rest pass through.

    The arithmetic is at least float32 whatever the type of `x`, and the result has the type of `x`.

    >>> x, quarter = torch.tensor([1.0, 2.0, 3.0, 4.0]), (torch.zeros(2), torch.ones(2))
    >>> rotate_pairs(x, *quarter, "half").tolist(), rotate_pairs(x, *quarter, "adjacent").tolist()
    ([-3.0, -4.0, 1.0, 2.0], [-2.0, 1.0, -4.0, 3.0])
    """
    width = 2 * cos.shape[-1]
    turned = x if width == x.shape[-1] else x[..., :width]
    if pairing == "half":
        u, v = turned.chunk(2, dim=-1)
        pairs = torch.cat((u * cos - v * sin, v * cos + u * sin), dim=-1)
    else:
        u, v = turned.unflatten(-1, (-1, 2)).unbind(-1)
        pairs = torch.stack((u * cos - v * sin, v * cos + u * sin), dim=-1).flatten(-2)
    pairs = pairs.to(x.dtype)
    return pairs if width == x.shape[-1] else torch.cat((pairs, x[..., width:]), dim=-1)
