"""A model whose weights are cut over a mesh by FSDP, and the parts of them that this process holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from phasor.transformer import Block, Transformer


class Shards:
    """The parts of a model's weights that this process holds, as plain parameters under the weights' names.

    They share their memory with the model. The optimizer and averages work on them as on any parameters. Weights are
    cut along their first dimension; a process for which nothing is left of one does not list it. Of a model on the meta
    device only the parts come into being, with whatever is in their memory: `load` fills them.
    """

    def __init__(self, model: Transformer, mesh: DeviceMesh) -> None:
        self.model, self.mesh = model, mesh
        self.index, self.count = mesh["shard"].get_local_rank(), mesh["shard"].size()
        shard_blocks(model, mesh)
        if model.tokens.weight.is_meta:
            model.to_empty(device=mesh.device_type)
        self.weights = {name: cast(DTensor, weight) for name, weight in model.named_parameters()}
        with torch.no_grad():
            self.parts = {
                name: nn.Parameter(weight.to_local(), requires_grad=weight.requires_grad)
                for name, weight in self.weights.items()
            }

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, part) for name, part in self.parts.items() if part.numel())

    def parameters(self) -> Iterator[nn.Parameter]:
        return (part for _, part in self.named_parameters())

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Have the parts' gradients be those of the model's weights."""
        for name, part in self.parts.items():
            grad = self.weights[name].grad
            part.grad = None if grad is None else cast(DTensor, grad).to_local()

    def reshard(self) -> None:
        """Drop the whole weights that a forward left gathered, which are out of date when the parts have changed."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @torch.no_grad()
    def gather(self, name: str, part: Tensor) -> Tensor:
        """A weight, or something of its shape such as an average of it, put together; all processes have to ask."""
        weight = self.weights[name]
        whole = DTensor.from_local(
            part, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )
        return whole.full_tensor()

    def take(self, name: str, whole: Tensor) -> Tensor:
        """This process's part of a weight, or of something of its shape; empty where nothing is left for it."""
        parts = whole.chunk(self.count)
        return parts[self.index] if self.index < len(parts) else whole[:0]

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the weights from whole tensors, of which no more than these parts are read."""
        for name, whole in weights:
            self.parts[name].copy_(self.take(name, whole))
        self.reshard()


def shard_blocks(model: Transformer, mesh: DeviceMesh) -> None:
    """Cut the weights of a model block by block, so that no device holds all of them at once."""
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # losses are parts of a sum, and so are gradients
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
