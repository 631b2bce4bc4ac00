"""One AdamW step in plain torch (Loshchilov and Hutter 2019), and stochastic rounding to bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor


def adamw_step_ref(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    scale: float = 1.0,
    random_bits: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The new parameter, mean and mean square of optimizer step number `step`, which counts from 1.

    All of it is computed in the dtype of `param`: give it float64 tensors for an exact result. `scale` multiplies the
    gradient first, as for clipping. With `random_bits`, the new parameter is a float32 tensor that has been rounded to
    a bfloat16 value by `stochastic_round_ref`.

    >>> zeros = torch.zeros(2)
    >>> new, _, _ = adamw_step_ref(
    ...     torch.tensor([1.0, 2.0]), torch.tensor([30.0, -40.0]), zeros, zeros, 1,
    ...     lr=0.5, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
    ... )
    >>> new.tolist()
    [0.5, 2.5]
    """
    beta1, beta2 = betas
    grad = grad * scale
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad**2
    mean = exp_avg / (1 - beta1**step)
    mean_square = exp_avg_sq / (1 - beta2**step)
    param = param - lr * weight_decay * param
    param = param - lr * mean / (mean_square.sqrt() + eps)
    if random_bits is not None:
        param = stochastic_round_ref(param.float(), random_bits)
    return param, exp_avg, exp_avg_sq


def stochastic_round_ref(x: Tensor, random_bits: Tensor) -> Tensor:
    """Round float32 to one of its two neighbors in bfloat16, to the nearer one more often; the result is float32.

    `random_bits` are integers in [0, 2^16), one per element. A value whose lower 16 bits are `n` is rounded away from
    zero where `n` plus the random bits carry, with probability `n / 2^16`, so the mean is kept. NaN stays NaN.

    >>> x = torch.tensor([1 + 2**-9, 1 + 2**-9])  # a quarter of the way from 1 to 1 + 2^-7
    >>> stochastic_round_ref(x, torch.tensor([0xBFFF, 0xC000])).tolist()
    [1.0, 1.0078125]
    """
    bits = x.view(torch.int32).long() & 0xFFFFFFFF
    above = (bits + random_bits) & 0xFFFF0000
    above = torch.where(above >= 2**31, above - 2**32, above)  # as a signed integer of 32 bits
    return torch.where(x.isnan(), x, above.int().view(torch.float32))
