"""Losses of preference pairs, as functions of the log-probabilities of both replies.

`c` and `r` are those of the preferred and the rejected reply less those of the reference, of which there is none for
SimPO and ORPO; per token where the loss averages. Each loss is that of one pair.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.config.preference import PreferenceConfig, PreferenceLoss

Loss = Callable[[PreferenceConfig, Tensor, Tensor], Tensor]


def negative_log_sigmoid(logits: Tensor, smoothing: float) -> Tensor:
    """`-log sigmoid` of logits where that share of the pairs is labeled the other way round (cDPO, Mitchell 2023).

    >>> negative_log_sigmoid(torch.tensor(0.0), 0.1)
    tensor(0.6931)
    """
    return -(1 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)


def sigmoid(config: PreferenceConfig, c: Tensor, r: Tensor) -> Tensor:
    """DPO (Rafailov et al. 2023), by its equation 7; per token that of Tülu 3 (Lambert et al. 2024)."""
    return negative_log_sigmoid(config.beta * (c - r), config.label_smoothing)


def robust(config: PreferenceConfig, c: Tensor, r: Tensor) -> Tensor:
    """DPO whose mean over wrong labels is that over right ones (Chowdhury et al. 2024)."""
    logits, wrong = config.beta * (c - r), config.label_smoothing
    return (-(1 - wrong) * F.logsigmoid(logits) + wrong * F.logsigmoid(-logits)) / (1 - 2 * wrong)


def hinge(config: PreferenceConfig, c: Tensor, r: Tensor) -> Tensor:
    """SLiC (Zhao et al. 2023) with the differences of DPO."""
    return torch.relu(1 - config.beta * (c - r))


def ipo(config: PreferenceConfig, c: Tensor, r: Tensor) -> Tensor:
    """IPO (Azar et al. 2023), by its equation 17, per token as its authors advise."""
    return (c - r - 1 / (2 * config.beta)).square()


def simpo(config: PreferenceConfig, c: Tensor, r: Tensor) -> Tensor:
    """SimPO (Meng et al. 2024), by its equation 6."""
    return negative_log_sigmoid(config.beta * (c - r) - config.margin, config.label_smoothing)


def orpo(config: PreferenceConfig, c: Tensor, r: Tensor) -> Tensor:
    """ORPO (Hong et al. 2024), by its equations 6 and 7: cross-entropy, and the ratio of odds."""
    return -c - config.beta * F.logsigmoid(log_odds(c) - log_odds(r))


def log_odds(log_p: Tensor) -> Tensor:
    """`log(p / (1 - p))` by `log p`.

    >>> log_odds(torch.tensor(0.5).log())
    tensor(0.)
    """
    return log_p - torch.log(-torch.expm1(log_p))


LOSSES: dict[PreferenceLoss, Loss] = {
    "sigmoid": sigmoid,
    "sigmoid_norm": sigmoid,
    "ipo": ipo,
    "hinge": hinge,
    "robust": robust,
    "simpo": simpo,
    "orpo": orpo,
}
