"""Tokens grouped by expert in plain torch: a stable sort of all choices by their expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phasor.config import ExpertsConfig
from phasor.ops.custom_op import needs_dispatcher
from phasor.ops.topk import stable_topk

LEAST_SUM = 1e-20  # of weights that are normalized: sigmoid scores may all be zero


class SortedRouting:
    """The choices of tokens `[N, dim]`, sorted by expert.

    `ends [num_experts]` says where the rows of each expert end. Choices of experts other than the `num_experts` from
    `first_expert` come last, and give zeros.

    >>> tokens, logits = torch.zeros(2, 1), torch.tensor([[0.0, 9.0, 8.0], [9.0, 8.0, 0.0]])
    >>> routing = SortedRouting(tokens, logits, ExpertsConfig(num_experts=3), None, 0, 3)
    >>> routing.gather(torch.tensor([[5.0], [6.0]])).tolist(), routing.ends.tolist()
    ([[6.0], [5.0], [6.0], [5.0]], [1, 3, 4])
    """

    def __init__(
        self,
        tokens: Tensor,
        logits: Tensor,
        config: ExpertsConfig,
        correction: Tensor | None,
        first_expert: int,
        num_experts: int,
    ) -> None:
        self.weights, chosen = route(logits, config, correction)  # [N, k] each
        self.weight_inputs = config.weight_inputs
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
        """The rows of tokens `[N, dim]` for every choice, sorted by expert and perhaps weighted: `[N top_k, dim]`."""
        rows = take_rows(x, self.order, self.inverse, self.weights.shape[1])
        if self.weight_inputs:
            rows = rows * self.weights.flatten()[self.order, None].to(rows.dtype)
        return self.zero_absent(rows)

    def add_bias(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Add its expert's bias, of `[num_experts, dim]`, to each row."""
        return self.zero_absent(x if bias is None else x + bias[self.expert])

    def combine(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The sum of the rows of every token with their biases, by the weights of their experts: `[N, dim]`."""
        rows = take_rows(self.add_bias(x, bias), self.inverse, self.order, 1).view(*self.weights.shape, x.shape[1])
        return (rows if self.weight_inputs else rows * self.weights[..., None].to(rows.dtype)).sum(1)

    def zero_absent(self, x: Tensor) -> Tensor:
        """Zeros in place of rows of experts that are not here, which no matrix product writes."""
        return x if self.absent is None else x.masked_fill(self.absent, 0.0)


def route(logits: Tensor, config: ExpertsConfig, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights and indices of the experts that tokens choose by their logits `[..., experts]`: `[..., top_k]` each.

    Both come with the highest choice first, and of equal ones the lowest index. The computation is in at least float32.

    >>> logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]]).log()
    >>> [x.tolist() for x in route(logits, ExpertsConfig(num_experts=4, top_k=1, normalize=False))]
    [[[0.4000000059604645]], [[1]]]
    >>> corrected = ExpertsConfig(num_experts=4, top_k=1, normalize=False, correction=True)
    >>> [x.tolist() for x in route(logits, corrected, torch.tensor([0.0, 0.0, 0.0, 9.0]))]
    [[[0.20000000298023224]], [[3]]]
    """
    if config.scores == "sparsemixer":
        weights, chosen = sparsemix(logits, config)
        return (weights if config.scale == 1 else weights * config.scale), chosen
    scores = score_experts(logits, config)
    choice = scores if correction is None else scores + correction
    if config.num_groups > 1:
        choice = choice.masked_fill(~in_best_groups(choice, config), -torch.inf)
    _, chosen = stable_topk(choice.detach(), config.top_k)
    weights = scores.gather(-1, chosen)
    if config.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + config.normalize_eps).clamp(min=LEAST_SUM)
    return (weights if config.scale == 1 else weights * config.scale), chosen


def score_experts(logits: Tensor, config: ExpertsConfig) -> Tensor:
    """The scores of all experts, in at least float32."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.sigmoid() if config.scores == "sigmoid" else wide.softmax(-1)


def sparsemix(logits: Tensor, config: ExpertsConfig) -> tuple[Tensor, Tensor]:
    """Weights and indices of experts that are chosen one after the other, each against those near it that remain.

    >>> config = ExpertsConfig(num_experts=3, scores="sparsemixer", normalize=False, jitter=0.1)
    >>> [x.tolist() for x in sparsemix(torch.tensor([[2.0, 1.0, 2.0]]), config)]
    [[[0.5, 1.0]], [[0, 2]]]
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    remaining, weights, chosen = wide, [], []
    for _ in range(config.top_k):
        best, index = stable_topk(remaining.detach(), 1)  # [..., 1]
        far = (best - wide) / wide.abs().clamp(min=best) > 2 * config.jitter
        weights.append(remaining.masked_fill(far, -torch.inf).softmax(-1).gather(-1, index))
        chosen.append(index)
        remaining = remaining.scatter(-1, index, -torch.inf)
    return torch.cat(weights, -1), torch.cat(chosen, -1)


def in_best_groups(choice: Tensor, config: ExpertsConfig) -> Tensor:
    """Whether experts `[..., experts]` are of a group that remains.

    >>> config = ExpertsConfig(num_experts=4, num_groups=2, group_score="max")
    >>> in_best_groups(torch.tensor([0.5, 0.1, 0.4, 0.4]), config).tolist()
    [True, True, False, False]
    """
    groups = choice.detach().unflatten(-1, (config.num_groups, -1))  # [..., groups, experts of a group]
    score = groups.amax(-1) if config.group_score == "max" else groups.topk(2).values.sum(-1)  # [..., groups]
    _, best = stable_topk(score, config.top_groups)
    remains = torch.zeros_like(score, dtype=torch.bool).scatter(-1, best, True)
    return remains[..., None].expand(groups.shape).flatten(-2)


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
