"""The largest elements in a fixed order; which of equal ones `torch.topk` takes depends on how many there are."""

from __future__ import annotations

import torch
from torch import Tensor


def stable_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and indices of the `k` largest of the last dimension, largest first; of equal ones the lowest indices.

    >>> [y.tolist() for y in stable_topk(torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0]), 3)]
    [[3.0, 3.0, 2.0], [1, 3, 2]]
    """
    size = x.shape[-1]
    least = x.topk(k).values[..., -1:]
    rank = ((x > least).int() + (x >= least)) * size - torch.arange(size, dtype=torch.int32, device=x.device)
    indices = rank.topk(k).indices
    values, order = x.gather(-1, indices).sort(dim=-1, descending=True, stable=True)
    return values, indices.gather(-1, order)
