"""Placement of norms and residual connections. Each class reads as its equation."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.config import (
    DeepNormConfig,
    ModelConfig,
    OutputConfig,
    ParallelConfig,
    PlacementConfig,
    PostConfig,
    PreConfig,
    SandwichConfig,
)
from phasor.config.model import Side
from phasor.nn.norm import NoNorm, Norm, build_norm

Sublayer = Callable[[Tensor], Tensor]


class Residual(nn.Module):
    """The residual stream of one block: `forward(x, *sublayers)` runs the sub-layers of the block.

    The stream, what sub-layers take and what they return are all `[B, T, dim]`.
    """

    def __init__(self, model: ModelConfig, side: Side, sublayers: int) -> None:
        super().__init__()
        self.multiplier = model.placement.multiplier
        self.norms = nn.ModuleList(build_norm(model.norm, model.dim) for _ in model.placement.norms(sublayers))
        self.dropout = model.dropout.residual

    def branch(self, y: Tensor) -> Tensor:
        """A sub-layer's output as it is added to the residual stream: with dropout and the multiplier."""
        if self.dropout and self.training:
            y = F.dropout(y, self.dropout)
        return y if self.multiplier == 1.0 else y * self.multiplier

    @property
    def changes_branch(self) -> bool:
        """Whether there is dropout or a multiplier, so that a branch is not added as it is."""
        return self.multiplier != 1.0 or (self.dropout > 0 and self.training)

    def add_norm_of(self, x: Tensor, y: Tensor, norm: Norm) -> Tensor:
        """`x + norm(y)`, with what is done to the branch in between."""
        return x + self.branch(norm(y)) if self.changes_branch else norm.norm_add(x, y)

    def forward(self, x: Tensor, *sublayers: Sublayer) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not implement forward")


class Pre(Residual):
    """`x + f(norm(x))`; the sum after one sub-layer and the norm before the next are one operation.

    Where there is an encoder the sums stay finite in float16, which those of T5 would not.
    """

    def __init__(self, model: ModelConfig, side: Side, sublayers: int) -> None:
        super().__init__(model, side, sublayers)
        self.clamped = model.shape != "decoder"

    def forward(self, x: Tensor, *sublayers: Sublayer) -> Tensor:
        if self.clamped and x.dtype == torch.float16:
            for f, norm in zip(sublayers, self.norms, strict=True):
                x = clamp_overflow(x + self.branch(f(norm(x))))
            return x
        first, *rest = (cast(Norm, norm) for norm in self.norms)
        h = first(x)
        for f, norm in zip(sublayers[:-1], rest, strict=True):
            x, h = norm.add_norm(x, self.branch(f(h)))
        return x + self.branch(sublayers[-1](h))


class NormedPre(Residual):
    """`h + f(h)`, `h = norm(x)`."""

    def forward(self, x: Tensor, *sublayers: Sublayer) -> Tensor:
        for f, norm in zip(sublayers, self.norms, strict=True):
            h = norm(x)
            x = h + self.branch(f(h))
        return x


class Post(Residual):
    """`norm(x + f(x))`."""

    def forward(self, x: Tensor, *sublayers: Sublayer) -> Tensor:
        for f, norm in zip(sublayers, self.norms, strict=True):
            x = norm(x + self.branch(f(x)))
        return x


class Sandwich(Residual):
    """`x + norm(f(norm(x)))`; the norm after one sub-layer, the sum and the norm before the next are one operation."""

    def forward(self, x: Tensor, *sublayers: Sublayer) -> Tensor:
        first, *between, last = (cast(Norm, norm) for norm in self.norms)
        h = first(x)
        for f, after, before in zip(sublayers[:-1], between[0::2], between[1::2], strict=True):
            x, h = self.add_norms(x, f(h), after, before)
        return self.add_norm_of(x, sublayers[-1](h), last)

    def add_norms(self, x: Tensor, y: Tensor, after: Norm, before: Norm) -> tuple[Tensor, Tensor]:
        """`x + after(y)`, and `before` of it."""
        if self.changes_branch:
            return before.add_norm(x, self.branch(after(y)))
        return after.norm_add_norm(x, y, before)


class DeepNorm(Residual):
    """`norm(alpha x + f(x))`."""

    def __init__(self, model: ModelConfig, side: Side, sublayers: int) -> None:
        super().__init__(model, side, sublayers)
        self.alpha, _ = deepnorm_constants(model, side)

    def forward(self, x: Tensor, *sublayers: Sublayer) -> Tensor:
        for f, norm in zip(sublayers, self.norms, strict=True):
            x = norm(self.alpha * x + self.branch(f(x)))
        return x


class Output(Residual):
    """`x + norm(f(x))`."""

    def forward(self, x: Tensor, *sublayers: Sublayer) -> Tensor:
        for f, norm in zip(sublayers, self.norms, strict=True):
            x = self.add_norm_of(x, f(x), cast(Norm, norm))
        return x


class Parallel(Residual):
    """`x + f(norm(x)) + g(norm(x))`, each with its own norm."""

    def forward(self, x: Tensor, *sublayers: Sublayer) -> Tensor:
        return x + sum(self.branch(f(norm(x))) for f, norm in zip(sublayers, self.norms, strict=True))


class SharedParallel(Residual):
    """`x + f(h) + g(h)`, `h = norm(x)`."""

    def forward(self, x: Tensor, *sublayers: Sublayer) -> Tensor:
        h = self.norms[0](x)
        return x + sum(self.branch(f(h)) for f in sublayers)


def clamp_overflow(x: Tensor) -> Tensor:
    """Numbers that overflowed, as large finite ones; all are brought below them, with some room for what is added.

    >>> clamp_overflow(torch.tensor([65504.0, torch.inf, 1.0], dtype=torch.float16)).tolist()
    [64512.0, 64512.0, 1.0]
    """
    most = torch.finfo(x.dtype).max
    limit = torch.where(torch.isinf(x).any(), most - 1000, most)
    return x.clamp(-limit, limit)


def deepnorm_constants(model: ModelConfig, side: Side) -> tuple[float, float]:
    """DeepNorm's alpha (on the residual stream) and beta (in the initialization), by architecture and depth.

    >>> config = ModelConfig(vocab_size=9, dim=8, num_layers=200, num_heads=1, placement="deepnorm")
    >>> [round(c, 3) for c in deepnorm_constants(config, "decoder")]
    [4.472, 0.158]
    """
    layers = model.depth(side)
    if model.shape != "encoder-decoder":
        return (2 * layers) ** 0.25, (8 * layers) ** -0.25
    if side == "decoder":
        return (3 * layers) ** 0.25, (12 * layers) ** -0.25
    mixed = (layers**4 * model.depth("decoder")) ** (1 / 16)
    return 0.81 * mixed, 0.87 / mixed


RESIDUALS: dict[type[PlacementConfig], type[Residual]] = {
    PostConfig: Post,
    SandwichConfig: Sandwich,
    DeepNormConfig: DeepNorm,
    OutputConfig: Output,
}


def build_residual(
    model: ModelConfig, side: Side, sublayers: int, first: bool = False, branch_norms: bool = False
) -> Residual:
    """The residual module of a block, or of the first one, around some number of sub-layers.

    With `branch_norms` the last sub-layer takes the stream as it is, and normalizes it itself.
    """
    residual = residual_of(model, side, sublayers, first)
    if branch_norms:
        residual.norms[-model.placement.norms_per_sublayer] = NoNorm()
    return residual


def residual_of(model: ModelConfig, side: Side, sublayers: int, first: bool) -> Residual:
    """The residual module of the placement."""
    placement = model.placement
    if isinstance(placement, ParallelConfig):
        return (SharedParallel if placement.shared_norm else Parallel)(model, side, sublayers)
    if isinstance(placement, PreConfig):
        pre = (NormedPre if placement.normed_stream else Pre)(model, side, sublayers)
        if first and not placement.first_norm:
            pre.norms[0] = NoNorm()
        return pre
    return RESIDUALS[type(placement)](model, side, sublayers)
