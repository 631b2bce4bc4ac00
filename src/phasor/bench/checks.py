"""Errors of results against a reference in a higher precision."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def relative_error(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The norm of the difference over the norm of the reference, over all tensors together; infinite for NaN.

    >>> import torch
    >>> relative_error([torch.tensor([3.0, 4.5])], [torch.tensor([3.0, 4.0])])
    0.1
    """
    wrong = size = 0.0
    for one, other in zip(found, expected, strict=True):
        wide = other.detach().double()
        wrong += float((one.detach().double() - wide).square().sum())
        size += float(wide.square().sum())
    error = (wrong / size) ** 0.5
    return error if error == error else float("inf")


def max_relative_error(found: Iterable[Tensor], expected: Iterable[Tensor], tokens: int) -> float:
    """The relative error of the worst token, so that a single wrong one shows; `tokens` is their dimension.

    >>> import torch
    >>> max_relative_error([torch.tensor([[3.0, 4.0], [3.0, 4.5]])], [torch.tensor([[3.0, 4.0], [3.0, 4.0]])], 0)
    0.1
    """
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        wide = other.detach().double().movedim(tokens, 0).flatten(1)
        wrong = one.detach().double().movedim(tokens, 0).flatten(1) - wide
        error = float((wrong.norm(dim=1) / wide.norm(dim=1)).max())
        worst = max(worst, error if error == error else float("inf"))
    return worst
