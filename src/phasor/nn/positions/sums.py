"""Running sums over the input, in 64-bit fixed point: for schemes whose steps depend on the tokens they pass.

A sum wraps around at 2^64, and differences of sums are exact as long as they fit: after 10^9 tokens as after 10. A sum
of floats would have lost every bit of a step by then. The gradient goes through floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phasor.ops.custom_op import custom_op


class Steps(NamedTuple):
    """What each token adds to the sums `[B, T, sums]`: `fixed` in int64, `values` as floats with their gradient."""

    fixed: Tensor
    values: Tensor

    def at(self, real: Tensor | None) -> Steps:
        """The same steps, none at tokens `[B, T]` that are not real."""
        if real is None:
            return self
        return Steps(self.fixed * real[..., None], self.values.masked_fill(~real[..., None], 0.0))


class Sums(NamedTuple):
    """Running sums `[B, T, sums]` in int64; `zeros` are floats whose gradient is that of the sums, where there is one.

    Adding `zeros` to what is computed from the integers gives it a gradient and leaves its value.
    """

    fixed: Tensor
    zeros: Tensor | None = None

    def split(self, sizes: list[int]) -> list[Sums]:
        """The sums of several schemes."""
        zeros: Sequence[Tensor | None] = [None] * len(sizes) if self.zeros is None else self.zeros.split(sizes, -1)
        return [Sums(fixed, own) for fixed, own in zip(self.fixed.split(sizes, -1), zeros, strict=True)]


@custom_op("phasor::cumsum_int64")
def cumsum_int64(x: Tensor) -> Tensor:
    """Running sums along dimension 1 of integers: an operation for compilers, some of which fail on such sums."""
    return x.cumsum(1)


cumsum_int64.register_fake(lambda x: torch.empty_like(x, memory_format=torch.contiguous_format))


def running_sums(steps: Steps, before: Tensor | None = None) -> Sums:
    """The sum of all steps up to each token, its own included, after sums `before` `[B, sums]` of earlier tokens.

    >>> steps = Steps(torch.tensor([[[3], [5]]]), torch.tensor([[[3.0], [5.0]]]))
    >>> running_sums(steps, before=torch.tensor([[2**63 - 4]])).fixed.flatten().tolist()
    [9223372036854775807, -9223372036854775804]
    """
    fixed: Tensor = cumsum_int64(steps.fixed)
    if before is not None:
        fixed = fixed + before[:, None]
    if not (torch.is_grad_enabled() and steps.values.requires_grad):
        return Sums(fixed)
    sums = steps.values.cumsum(1)
    return Sums(fixed, sums - sums.detach())
