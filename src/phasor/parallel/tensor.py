"""The tensor axis: blocks whose heads, hidden features and experts are cut, and between them the tokens.

A cut module is an ordinary module of fewer heads, features or experts. Before it the tokens of all processes are
gathered, and after it the sum of all results is scattered, so that within it nothing knows of other processes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phasor.nn.adapted import change_class
from phasor.nn.attention.base import Attention
from phasor.nn.block import Block
from phasor.nn.lora_hook import adapters_of
from phasor.nn.moe import Experts
from phasor.nn.positions.base import Position
from phasor.parallel.cuts import tensor_cuts
from phasor.parallel.exchange import Axis, gather_tokens, scatter_sums, sum_values
from phasor.parallel.tokens import own_slice
from phasor.transformer import Stack, Transformer


class PartialLinear(nn.Linear):
    """A projection of some of the features, one of the terms of a sum: its bias is added in another term."""

    adds_bias = False

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight)


def cut_blocks(model: Transformer, axis: Axis) -> None:
    """Leave this process's part of every block, with exchanges around the parts of blocks."""
    cut_weights(model, axis.index, axis.size, partial(sum_values, axis=axis))

    def enter(part: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return gather_tokens(args[0], axis), *args[1:]

    def leave(part: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
        return scatter_sums(y, axis)

    # All blocks have the same hooks, so that the compiler sees blocks that are alike.
    for block in (part for part in model.modules() if isinstance(part, Block)):
        for part in (block.attention, block.cross, block.feedforward):
            if part is not None:
                part.register_forward_pre_hook(enter)
                part.register_forward_hook(leave)
    for stack in (part for part in model.modules() if isinstance(part, Stack)):
        stack.blocks[0].register_forward_pre_hook(
            lambda _, args: (own_slice(args[0], axis.index, axis.size), *args[1:])
        )
        if stack.side == "encoder" and model.decoder is not None:
            stack.register_forward_hook(lambda _module, _args, hidden: gather_tokens(hidden, axis))


@torch.no_grad()
def cut_weights(
    model: Transformer, index: int, count: int, sum_parts: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Make every block one of `count` parts, whose results are terms of a sum; `sum_parts` gives those of norms."""
    weights, cuts = dict(model.named_parameters()), tensor_cuts(model)
    for path, layer in model.named_modules():
        for lora in adapters_of(layer).values():
            cut = cuts.get(f"{path}.weight")
            if cut is not None and cut.dim == 0:
                lora.keep_rows(index, count, cut.pieces)
            elif cut is not None and sum_parts is not None:
                lora.keep_columns(sum_parts)
    for name, cut in cuts.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        part = cut.part(weights[name], index, count).clone()
        setattr(module, leaf, nn.Parameter(part, weights[name].requires_grad))
        if isinstance(module, nn.Linear) and cut.dim == 1:
            end_in_sum(module, index)
    for module in model.modules():
        if isinstance(module, Position):
            module.head_part = (index, count)
        elif isinstance(module, Attention):
            module.keep_part(index, count)
        elif isinstance(module, Experts):
            module.first_expert = index * len(module.up)
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape


def end_in_sum(linear: nn.Linear, index: int) -> None:
    """Have the first process alone add the bias of a projection whose results are summed."""
    if linear.bias is not None and index > 0:
        change_class(linear, PartialLinear)
