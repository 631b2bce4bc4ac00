"""A model whose weights are cut over a mesh, and the parts of them that this process holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from phasor.config.weights import shard_dim
from phasor.nn.block import Block
from phasor.parallel.context import cut_rows
from phasor.parallel.cuts import Place, WeightSlices
from phasor.parallel.exchange import Axis, sum_in_place
from phasor.parallel.tensor import cut_blocks
from phasor.parallel.tokens import TokenShare
from phasor.transformer import Transformer


class Shards:
    """The parts of a model's weights that this process holds, as plain parameters under the weights' names.

    They share their memory with the model. The optimizer and averages work on them as on any parameters. `slices` says
    which parts they are; a process for which nothing is left of a weight does not list it. Buffers are whole on every
    process, and listed in `parts` beside those of the weights. `tokens` says which tokens
    of the rows that the model is given this process computes. Of a model on the meta device only the parts are
    allocated, uninitialized: `load` fills them.
    """

    def __init__(self, model: Transformer, mesh: DeviceMesh) -> None:
        self.model, self.mesh = model, mesh
        self.tensor, self.groups = Axis.of(mesh, "tensor"), mesh["replicate"].size()
        place = Place.of(mesh)
        self.slices, self.tokens = WeightSlices(model, place), TokenShare(place)
        if self.tensor.size > 1:
            cut_blocks(model, self.tensor)
        if place.context[1] > 1:
            cut_rows(model, Axis.of(mesh, "context"))

    def shard(self, compute_dtype: torch.dtype | None = None) -> Self:
        """Cut what the tensor axis leaves of the weights by FSDP.

        With a `compute_dtype` blocks are gathered in it, so that nothing else of them is held until the backward.
        """
        shard_blocks(self.model, self.mesh, compute_dtype)
        if self.model.tokens.weight.is_meta:
            self.model.to_empty(device=self.mesh.device_type)
        self.weights = {name: cast(DTensor, weight) for name, weight in self.model.named_parameters()}
        with torch.no_grad():
            self.parts: dict[str, Tensor] = {
                name: nn.Parameter(weight.to_local(), requires_grad=weight.requires_grad)
                for name, weight in self.weights.items()
            }
        self.buffers = dict(self.model.named_buffers())
        self.parts |= self.buffers
        return self

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of whole weights and of buffers, by name."""
        return self.slices.shapes | {name: tuple(buffer.shape) for name, buffer in self.buffers.items()}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, part) for name, part in self.parts.items() if isinstance(part, nn.Parameter) and part.numel())

    def parameters(self) -> Iterator[nn.Parameter]:
        return (part for _, part in self.named_parameters())

    def copies(self, name: str) -> int:
        """How many processes hold the same part of a weight."""
        return self.groups * (self.tensor.size if self.slices.is_copied(name) else 1)

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Have the parts' gradients be those of the model's weights.

        Along the tensor axis, those of weights that every process holds are sums over the tokens or terms of each.
        """
        for name, weight in self.weights.items():
            grad = weight.grad
            self.parts[name].grad = None if grad is None else cast(DTensor, grad).to_local()
        if self.tensor.size > 1:
            copied = [part for name, part in self.named_parameters() if self.slices.is_copied(name)]
            for part in copied:
                if part.grad is None and part.requires_grad:
                    part.grad = torch.zeros_like(part)
            sum_in_place([part.grad for part in copied if part.grad is not None], self.tensor)

    def reshard(self) -> None:
        """Drop the whole weights that a forward left gathered, which are out of date when the parts have changed."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @torch.no_grad()
    def gather(self, name: str, part: Tensor) -> Tensor:
        """A weight, or something of its shape such as an average of it, put together; all processes have to ask."""
        if name in self.buffers:
            return part.detach()
        weight = self.weights[name]
        joined = DTensor.from_local(
            part.detach(),
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        ).full_tensor()
        cut = self.slices.cuts.get(name)
        if cut is None:
            return joined
        parts = [torch.empty_like(joined) for _ in range(self.tensor.size)]
        dist.all_gather(parts, joined.contiguous(), group=self.mesh["tensor"].get_group())
        return cut.join(parts)

    def take(self, name: str, whole: Tensor) -> Tensor:
        """This process's part of a weight, or of something of its shape; empty where nothing is left for it."""
        return whole if name in self.buffers else self.slices.take(name, whole)

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the weights from whole tensors, of which no more than these parts are read."""
        for name, whole in weights:
            self.parts[name].copy_(self.take(name, whole))
        self.reshard()


def shard_blocks(model: Transformer, mesh: DeviceMesh, compute_dtype: torch.dtype | None) -> None:
    """Cut the weights of a model block by block, so that no device holds all of them at once.

    What stands outside of blocks is cut over the tensor axis too, since its tokens are. It is gathered in its own
    dtype, which is that of the tokens between blocks; gradients are summed in float32.
    """
    block_mesh = flat_mesh(mesh, "shard", "context")
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=block_mesh, shard_placement_fn=placement(block_mesh), mp_policy=policy)
    outer_mesh = flat_mesh(mesh, "shard", "context", "tensor")
    fully_shard(model, mesh=outer_mesh, shard_placement_fn=placement(outer_mesh))
    for module in model.modules():
        if isinstance(module, FSDPModule):  # losses are parts of a sum, and so are gradients
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard]:
    """Along which dimension a mesh of `flat_mesh` cuts a weight."""
    return lambda weight: Shard(shard_dim(weight.shape, mesh.size(1)))


def flat_mesh(mesh: DeviceMesh, *axes: str) -> DeviceMesh:
    """A mesh of two axes: `replicate`, and some others of which those with several processes are made one."""
    several = [axis for axis in axes if mesh[axis].size() > 1] or ["shard"]
    if len(several) == 1:
        return mesh["replicate", several[0]]
    flat = mesh[tuple(several)]._flatten("_".join(several))
    return DeviceMesh._concatenate([mesh["replicate"], flat])
