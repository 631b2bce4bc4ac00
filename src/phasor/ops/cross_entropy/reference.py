"""Cross-entropy in plain torch: over all logits at once, and per chunk with the gradient written over the logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class LossSums(NamedTuple):
    """Sums over all rows, each times its weight.

    `cross_entropy` of `-log p`, `z` of the squared log of the partition function (0 unless `z_loss` is given), and
    `loss = cross_entropy + z_loss * z`, which carries the gradient.
    """

    loss: Tensor
    cross_entropy: Tensor
    z: Tensor


def linear_cross_entropy_ref(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    multiplier: float = 1.0,
    softcap: float | None = None,
) -> LossSums:
    """`linear_cross_entropy` with all logits at once.

    >>> sums = linear_cross_entropy_ref(torch.zeros(3, 4), torch.randn(8, 4), None, torch.arange(3), torch.ones(3))
    >>> round(float(sums.loss) / 3, 4)  # the log of 8
    2.0794
    """
    logits = scale_and_softcap(F.linear(hidden, weight, bias), multiplier, softcap)
    return logits_cross_entropy(logits, targets, weights, label_smoothing, z_loss)


def logits_cross_entropy(
    logits: Tensor, targets: Tensor, weights: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> LossSums:
    """The sums for logits `[N, V]` that are given.

    >>> round(float(logits_cross_entropy(torch.zeros(1, 8), torch.tensor([3]), torch.ones(1)).loss), 4)
    2.0794
    """
    logits = logits.to(sum_dtype(logits.dtype))
    losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=label_smoothing)
    cross_entropy = weighted_sum(losses, weights)
    if not z_loss:
        return LossSums(cross_entropy, cross_entropy.detach(), torch.zeros_like(cross_entropy))
    z = weighted_sum(logits.logsumexp(-1) ** 2, weights)
    return LossSums(cross_entropy + z_loss * z, cross_entropy.detach(), z.detach())


def cross_entropy_ref(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor,
    label_smoothing: float,
    z_loss: float,
    multiplier: float,
    softcap: float | None,
    gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy and log-sum-exp of each row of logits, as the Triton kernel computes them.

    With `gradient`, the logits are overwritten by the gradient of the sum of
    `weights * (cross_entropy + z_loss * lse^2)`.

    >>> loss, lse = cross_entropy_ref(torch.zeros(1, 8), torch.tensor([3]), torch.ones(1), 0.0, 0.0, 1.0, None, False)
    >>> round(float(loss), 4), round(float(lse), 4)
    (2.0794, 2.0794)
    """
    z = scale_and_softcap(logits.to(sum_dtype(logits.dtype)), multiplier, softcap)
    lse = z.logsumexp(-1)
    losses = lse - (1 - label_smoothing) * z.gather(-1, targets[:, None])[:, 0]
    if label_smoothing:
        losses = losses - label_smoothing * z.mean(-1)
    if gradient:
        slope = None if softcap is None else 1 - (z / softcap) ** 2
        z.sub_(lse[:, None]).exp_().mul_((1 + 2 * z_loss * lse)[:, None])
        if label_smoothing:
            z.sub_(label_smoothing / z.shape[-1])
        z.scatter_add_(-1, targets[:, None], z.new_full((), label_smoothing - 1).expand(len(z), 1))
        if slope is not None:
            z.mul_(slope)
        z.mul_((weights * multiplier)[:, None]).masked_fill_((weights == 0)[:, None], 0.0)
        if z is not logits:
            logits.copy_(z)
    return losses, lse


def scale_and_softcap(logits: Tensor, multiplier: float, softcap: float | None) -> Tensor:
    """`softcap(multiplier * logits)`; the logits themselves where neither changes them.

    >>> scale_and_softcap(torch.tensor([0.5]), 2.0, None).tolist()
    [1.0]
    """
    if multiplier != 1.0:
        logits = logits * multiplier
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum. Values of weight 0 are replaced: 0 times the infinity of a padding token would be NaN.

    >>> float(weighted_sum(torch.tensor([2.0, torch.inf]), torch.tensor([3.0, 0.0])))
    6.0
    """
    return torch.where(weights > 0, values * weights, 0.0).sum()


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over values of a dtype: at least float32."""
    return torch.promote_types(dtype, torch.float32)
