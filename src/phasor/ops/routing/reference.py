"""Tokens grouped by expert in plain torch: a stable sort of all choices by their expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phasor.ops.custom_op import needs_dispatcher


class SortedRouting:
    """The choices of tokens `[N, dim]`, sorted by expert.

    `ends [num_experts]` says where the rows of each expert end. Choices of experts other than the `num_experts` from
    `first_expert` come last, and give zeros.

    >>> routing = SortedRouting(torch.zeros(2, 1), torch.tensor([[0.0, 9.0, 8.0], [9.0, 8.0, 0.0]]), 2, True, 0, 3)
    >>> routing.gather(torch.tensor([[5.0], [6.0]])).tolist(), routing.ends.tolist()
    ([[6.0], [5.0], [6.0], [5.0]], [1, 3, 4])
    """

    def __init__(
        self, tokens: Tensor, logits: Tensor, top_k: int, normalize: bool, first_expert: int, num_experts: int
    ) -> None:
        self.weights, chosen = choose_experts(logits, top_k, normalize)  # [N, k] each
        chosen, absent_too = chosen.flatten(), num_experts < logits.shape[-1]
        if absent_too:
            here = (chosen >= first_expert) & (chosen < first_expert + num_experts)
            chosen = torch.where(here, chosen - first_expert, num_experts)
        expert, self.order = chosen.sort(stable=True)
        places = torch.arange(max(len(chosen), num_experts), device=chosen.device)
        self.inverse = torch.empty_like(self.order).scatter_(0, self.order, places[: len(chosen)])
        self.ends = torch.searchsorted(expert, places[:num_experts], right=True, out_int32=True)
        self.absent = (expert == num_experts)[:, None] if absent_too else None
        self.expert = expert.clamp(max=num_experts - 1) if absent_too else expert

    def gather(self, x: Tensor) -> Tensor:
        """The rows of tokens `[N, dim]` for every choice, sorted by expert: `[N top_k, dim]`."""
        return self.zero_absent(take_rows(x, self.order, self.inverse, self.weights.shape[1]))

    def add_bias(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Add its expert's bias, of `[num_experts, dim]`, to each row."""
        return self.zero_absent(x if bias is None else x + bias[self.expert])

    def combine(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The sum of the rows of every token with their biases, by the weights of their experts: `[N, dim]`."""
        rows = take_rows(self.add_bias(x, bias), self.inverse, self.order, 1).view(*self.weights.shape, x.shape[1])
        return (rows * self.weights[..., None].to(rows.dtype)).sum(1)

    def zero_absent(self, x: Tensor) -> Tensor:
        """Zeros in place of rows of experts that are not here, which no matrix product writes."""
        return x if self.absent is None else x.masked_fill(self.absent, 0.0)


def choose_experts(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Weights and indices of the chosen experts, `[N, top_k]` each; the softmax runs in at least float32.

    >>> weights, chosen = choose_experts(torch.tensor([[0.0, 2.0, 2.0, 1.0]]).log(), 1, normalize=False)
    >>> weights.tolist()
    [[0.4000000059604645]]
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    weights, chosen = wide.softmax(-1).topk(top_k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if normalize else weights), chosen


class TakeRows(torch.autograd.Function):
    """`x[index // copies]`, where `index` is a permutation of all copies of the rows, and `inverse` its inverse.

    The gradient of a row is the sum of those of its copies, read in the other order: no atomic additions, no sort.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, index: Tensor, inverse: Tensor, copies: int) -> Tensor:
        return x.index_select(0, index if copies == 1 else index // copies)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, inverse, ctx.copies = inputs
        ctx.save_for_backward(inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        grad = grad.index_select(0, inverse)
        if ctx.copies > 1:
            grad = grad.view(len(inverse) // ctx.copies, ctx.copies, grad.shape[1]).sum(1)
        return grad, None, None, None


# That of the base class: the function's own inspects the signature of its forward at every call, for `torch.func`.
take_rows_eagerly = super(torch.autograd.Function, TakeRows).apply


def take_rows(x: Tensor, index: Tensor, inverse: Tensor, copies: int) -> Tensor:
    """`x[index // copies]` for a permutation `index` with its `inverse`.

    >>> take_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([3, 0, 2, 1]), torch.tensor([1, 3, 2, 0]), 2).tolist()
    [[2.0], [1.0], [2.0], [1.0]]
    """
    rows: Tensor = (TakeRows.apply if needs_dispatcher() else take_rows_eagerly)(x, index, inverse, copies)
    return rows
