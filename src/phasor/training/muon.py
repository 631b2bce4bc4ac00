"""Muon for the matrices of blocks, AdamW for all other weights, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phasor.nn.block import Block
from phasor.ops.adamw import AdamW


class MuonAdamW(AdamW):
    """`torch.optim.Muon` over some matrices, and AdamW over its own groups; the state of both is in one place.

    Updates of matrices are scaled to the size of AdamW's (Liu et al. 2025), so that both take one learning rate. A step
    with `found_inf` changes nothing; unlike AdamW's it waits for that.

    >>> matrix, bias = (nn.Parameter(torch.ones(*shape)) for shape in ((3, 2), (3,)))
    >>> optimizer = MuonAdamW({"params": [matrix]}, [{"params": [bias]}], lr=0.1)
    >>> (matrix.sum() + bias.sum()).backward()
    >>> optimizer.step()
    >>> sorted(optimizer.state[matrix]), sorted(optimizer.state[bias])
    (['momentum_buffer'], ['exp_avg', 'exp_avg_sq', 'step'])
    """

    def __init__(
        self,
        matrices: dict[str, Any],
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(groups, lr, betas, eps, fused=True)
        self.muon = torch.optim.Muon([matrices], lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        self.muon.state = self.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.muon.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.found_inf is not None and bool(self.found_inf):
            return None
        group = self.muon.param_groups[0]
        gradients = [weight.grad for weight in group["params"] if weight.grad is not None]
        if self.scale is not None and gradients:
            torch._foreach_mul_(gradients, self.scale)
        group["lr"] = self.param_groups[0]["lr"]
        self.muon.step()
        return super().step(closure)


def matrix_names(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[str]:
    """The names of those weights that are matrices of blocks."""
    blocks = tuple(f"{name}." for name, part in model.named_modules() if isinstance(part, Block))
    return (name for name, weight in weights.items() if name.startswith(blocks) and weight.ndim == 2)
