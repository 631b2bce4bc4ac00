"""Running sums over the input, in 64-bit fixed point: for schemes whose steps depend on the tokens they pass.

A sum wraps around at 2^64, and differences of sums are exact as long as they fit: after 10^9 tokens as after 10. A sum
of floats would have lost every bit of a step by then. The gradient goes through floats.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from phasor.nn.layer_step import LayerStep


class Steps(NamedTuple):
    """What each token adds to the sums `[B, T, sums]`: `fixed` in int64, `values` as floats with their gradient."""

    fixed: Tensor
    values: Tensor

    def mask_padding(self, real: Tensor | None) -> Steps:
        """The same steps, with zeros for tokens that are padding, False in `real` `[B, T]`."""
        if real is None:
            return self
        return Steps(self.fixed * real[..., None], self.values.masked_fill(~real[..., None], 0.0))


class Sums(NamedTuple):
    """Running sums `[B, T, sums]` in int64; `zeros` are floats whose gradient is that of the sums, where there is one.

    Adding `zeros` to what is computed from the integers gives it a gradient and leaves its value.
    """

    fixed: Tensor
    zeros: Tensor | None = None


def running_sums(name: str, steps: Steps, layer: LayerStep) -> tuple[Sums, Sums]:
    """The sums of all steps up to each query, its own included, and up to each key; a cache keeps them by `name`.

    >>> from phasor.ops.attention import Mask
    >>> steps = Steps(torch.tensor([[[3], [5]]]), torch.tensor([[[3.0], [5.0]]]))
    >>> queries, keys = running_sums("sums", steps, LayerStep(Mask(), None))
    >>> queries.fixed.tolist(), keys.fixed is queries.fixed
    ([[[3], [8]]], True)
    """
    before = layer.last(name)
    fixed = layer.cumsum(steps.fixed)
    if before is not None:
        fixed = fixed + before[:, None]
    (keys,) = layer.update(**{name: fixed})
    if before is not None or not (torch.is_grad_enabled() and steps.values.requires_grad):
        return Sums(fixed), Sums(keys)  # no gradient flows through a cache
    sums = layer.cumsum(steps.values)
    zeros = sums - sums.detach()
    (key_zeros,) = layer.update(zeros=zeros)
    return Sums(fixed, zeros), Sums(keys, key_zeros)
