"""What a training step costs on each device of a mesh: memory by kind, bytes exchanged by axis, seconds by cause.

The step that is planned is FSDP2's: weights in `param_dtype` are cut over all devices that do not replicate each
other. Blocks are gathered in bfloat16 one by one, and their gradients summed in float32; what is outside of blocks is
gathered and summed in its own dtype. Between blocks the tokens of a row are cut over the tensor and the context axes. A
block gathers its tokens over the tensor axis, and attention the keys and values of the row over the context axis.
Embedding and head are cut by tokens; logits are never held for all tokens at once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache, partial

from phasor.config import ModelConfig
from phasor.config.parameters import parameters_of
from phasor.parallel.flops import attention_flops, model_flops
from phasor.parallel.hardware import (
    ATTENTION_SHARE,
    MATMUL_SHARE,
    NETWORK_LATENCY,
    NETWORK_SHARE,
    NVLINK_LATENCY,
    NVLINK_SHARE,
    Hardware,
)
from phasor.parallel.memory import ACTIVATION_BYTES, PARAM_BYTES, REDUCE_BYTES, Memory, MemoryCosts, MicroBatches
from phasor.parallel.mesh import Mesh


@dataclass(frozen=True)
class Exchange:
    """Bytes that one device receives in a step, by the axis they travel along."""

    shard: int = 0
    replicate: int = 0
    context: int = 0
    tensor: int = 0

    @property
    def total(self) -> int:
        return self.shard + self.replicate + self.context + self.tensor


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by what the device waits for; `shard` and `replicate` are what computation does not hide."""

    compute: float
    optimizer: float
    tensor: float
    context: float
    shard: float
    replicate: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def largest(self) -> str:
        """What takes most of the step."""
        return max((field.name for field in fields(self)), key=lambda name: getattr(self, name))


class Costs:
    """The costs of one model, by mesh and rows; what does not depend on them is computed once."""

    def __init__(self, model: ModelConfig, hardware: Hardware, devices_per_node: int, param_dtype: str) -> None:
        self.model, self.hardware, self.per_node = model, hardware, devices_per_node
        self.param_bytes = PARAM_BYTES[param_dtype]
        self.parameters = parameters_of(model)
        self.in_blocks = self.parameters.in_blocks
        self.memory_costs = MemoryCosts(model, self.parameters, param_dtype)
        self.depth, self.crossing = self.memory_costs.depth, self.memory_costs.crossing
        self.sizes = self.memory_costs.sizes
        self.attention_flops = cache(partial(attention_flops, model))
        self.model_flops = cache(partial(model_flops, model))

    def memory(self, mesh: Mesh, rows: MicroBatches, *, checkpointing: bool, sync_last: bool = False) -> Memory:
        """The memory of the first device, which has the largest shards."""
        return self.memory_costs.memory(mesh, rows, checkpointing=checkpointing, sync_last=sync_last)

    def exchange(self, mesh: Mesh, rows: MicroBatches, *, checkpointing: bool, sync_last: bool = False) -> Exchange:
        """Bytes that one device receives in a step."""
        passes = 3 if checkpointing else 2  # forward, backward, and forward again
        local, _, blocks, outside = self.sizes(mesh.tensor, mesh.shards)
        sums = 1 if sync_last else rows.accumulation
        tokens = rows.rows * rows.length // mesh.context * rows.accumulation
        # Blocks are gathered forward and backward; what is outside of them stays gathered in between.
        of_block = 2 * ACTIVATION_BYTES * rows.accumulation + REDUCE_BYTES * sums
        of_outside = self.param_bytes * (rows.accumulation + sums)
        times = passes * rows.accumulation
        return Exchange(
            shard=received_bytes(blocks, mesh.shards) * of_block
            + received_bytes(outside, mesh.shards * mesh.tensor) * of_outside,
            replicate=2 * received_bytes(local, mesh.replicate) * REDUCE_BYTES,
            context=received_bytes(self.memory_costs.gathered_keys(mesh, rows), mesh.context) * times,
            tensor=received_bytes(tokens * self.model.dim * ACTIVATION_BYTES, mesh.tensor) * self.gathers * passes,
        )

    @property
    def gathers(self) -> int:
        """How often tokens are gathered or scattered over the tensor axis in a forward pass: twice per sub-layer."""
        return 2 * (2 * self.depth + self.crossing) + self.crossing

    def seconds(self, mesh: Mesh, rows: MicroBatches, *, checkpointing: bool, sync_last: bool = False) -> StepTime:
        """Seconds of a step; exchanges of weights and gradients run beside the computation, the others do not."""
        bytes_ = self.exchange(mesh, rows, checkpointing=checkpointing, sync_last=sync_last)
        compute = self.compute_seconds(mesh, rows, checkpointing=checkpointing)
        groups, times = self.depth + 1, (3 if checkpointing else 2) * rows.accumulation
        calls = groups * (2 * rows.accumulation + (1 if sync_last else rows.accumulation))
        shard = self.transfer(bytes_.shard, mesh.shards, mesh.tensor, calls)
        replicate = self.transfer(bytes_.replicate, mesh.replicate, mesh.tensor * mesh.shards, 2 * groups)
        exposed = max(0.0, shard + replicate - compute)
        local = self.sizes(mesh.tensor, mesh.shards).local * self.param_bytes
        return StepTime(
            compute=compute,
            optimizer=7 * local / self.hardware.memory_bandwidth,  # reads four tensors and writes three
            tensor=self.transfer(bytes_.tensor, mesh.tensor, 1, self.gathers * times),
            context=self.transfer(bytes_.context, mesh.context, mesh.tensor, (self.depth + self.crossing) * times),
            shard=exposed * shard / (shard + replicate) if exposed else 0.0,
            replicate=exposed * replicate / (shard + replicate) if exposed else 0.0,
        )

    def compute_seconds(self, mesh: Mesh, rows: MicroBatches, *, checkpointing: bool) -> float:
        """Seconds of matrix products and attention."""
        passes = 4 if checkpointing else 3  # a backward pass is two forward passes
        matmuls = passes * 2 * self.in_blocks + 6 * self.parameters.in_head
        attention = passes * self.attention_flops(rows.length)
        tokens = rows.rows * rows.length * rows.accumulation / mesh.context / mesh.tensor
        return tokens * (matmuls / MATMUL_SHARE + attention / ATTENTION_SHARE) / self.hardware.flops

    def transfer(self, bytes_: float, size: int, stride: int, calls: int) -> float:
        """Seconds to receive bytes along an axis of this size, whose neighbors are `stride` devices apart, in calls."""
        if size == 1:
            return 0.0
        inside = max(1, min(size, self.per_node // stride))
        nodes = -(-size // inside)
        nvlink = bytes_ * (inside - 1) / inside / (NVLINK_SHARE * self.hardware.nvlink)
        network = bytes_ * (nodes - 1) / nodes / inside / (NETWORK_SHARE * self.hardware.network)
        latency = (inside - 1) * NVLINK_LATENCY + (nodes - 1) * NETWORK_LATENCY
        return max(nvlink, network) * size / (size - 1) + calls * latency


def received_bytes(bytes_: float, size: int) -> int:
    """What one of `size` devices receives of bytes that all of them share.

    >>> received_bytes(800, 8), received_bytes(800, 1)
    (700, 0)
    """
    return int(bytes_ * (size - 1) // size)
