"""What a training step costs on each device of a mesh: memory by kind, bytes exchanged by axis, seconds by cause.

The step that is planned is FSDP2's: weights in `param_dtype` are cut over all devices that do not replicate each other
and gathered in bfloat16 block by block; gradients are summed in float32. Between blocks the tokens of a row are cut
over the tensor and the context axes. A block gathers its tokens over the tensor axis, and attention the keys and values
of the row over the context axis. Embedding and head are cut by tokens; logits are never held for all tokens at once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import NamedTuple

from phasor.config import LogitsConfig, ModelConfig, OutputConfig, SandwichConfig
from phasor.config.model import Layer
from phasor.parallel.flops import attention_flops, model_flops, sides_of
from phasor.parallel.hardware import (
    ATTENTION_SHARE,
    MATMUL_SHARE,
    NETWORK_LATENCY,
    NETWORK_SHARE,
    NVLINK_LATENCY,
    NVLINK_SHARE,
    Hardware,
)
from phasor.parallel.mesh import Mesh
from phasor.parallel.parameters import parameters_of

ACTIVATION_BYTES = 2  # bfloat16
REDUCE_BYTES = 4  # gradients are summed in float32
PARAM_BYTES = {"float32": 4, "bfloat16": 2}
LOGITS_AT_ONCE = 1 << 27  # elements: the cross-entropy takes the rows in chunks


@dataclass(frozen=True)
class Memory:
    """Bytes on one device: the most of each kind, and `peak`, the most of all together.

    `buffers` are weights gathered from other devices for the blocks at work, and the gradients on their way back. The
    peak is less than the sum where gradients come while activations go: in a step of one backward pass.
    """

    weights: int
    gradients: int
    moments: int
    activations: int
    buffers: int
    peak: int


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


@dataclass(frozen=True)
class MicroBatches:
    """The rows of a step: `rows` of `length` tokens at once on each group of devices, `accumulation` times."""

    length: int
    rows: int = 1
    accumulation: int = 1


class LocalSizes(NamedTuple):
    """Elements of weights on one device: its own, and those of others as they are gathered."""

    local: int
    largest_block: int
    blocks: int
    outside: int


class Costs:
    """The costs of one model, by mesh and rows; what does not depend on them is computed once."""

    def __init__(self, model: ModelConfig, hardware: Hardware, devices_per_node: int, param_dtype: str) -> None:
        self.model, self.hardware, self.per_node = model, hardware, devices_per_node
        self.param_bytes = PARAM_BYTES[param_dtype]
        self.parameters = parameters_of(model)
        self.in_blocks = self.parameters.in_blocks
        layers = [
            (model.layer(index), side == "decoder" and model.shape == "encoder-decoder")
            for side in sides_of(model)
            for index in range(model.depth(side))
        ]
        self.depth = len(layers)
        self.crossing = sum(crosses for _, crosses in layers)  # layers with cross-attention
        self.layers = list(Counter(layers).items())  # distinct ones, and how many of each
        self.attention_flops = cache(partial(attention_flops, model))
        self.model_flops = cache(partial(model_flops, model))
        self.sizes = cache(self.find_sizes)

    def find_sizes(self, tensor: int, shards: int) -> LocalSizes:
        """Elements on one device."""
        found = self.parameters
        blocks = found.gathered_block_size(tensor)
        return LocalSizes(
            found.local(tensor, shards), found.largest_block(tensor), blocks, found.gathered_size(tensor) - blocks
        )

    def memory(self, mesh: Mesh, rows: MicroBatches, *, checkpointing: bool, sync_last: bool = False) -> Memory:
        """The memory of the first device, which has the largest shards."""
        local, block, blocks, outside = self.sizes(mesh.tensor, mesh.shards)
        whole_gradients = sync_last and rows.accumulation > 1
        gradients = (blocks + outside) * REDUCE_BYTES if whole_gradients else 0
        gradients = max(gradients, local * self.param_bytes)
        if mesh.devices > 1:
            # Two blocks and all outside of blocks gathered; the gradients of a block as computed and as summed.
            buffers = ACTIVATION_BYTES * (2 * block + outside) + (ACTIVATION_BYTES + REDUCE_BYTES) * block
        else:
            buffers = (
                ACTIVATION_BYTES * local if self.param_bytes > ACTIVATION_BYTES else 0
            )  # weights as autocast casts
        activations, last = self.activations(mesh, rows, checkpointing=checkpointing)
        both = gradients + activations if rows.accumulation > 1 else max(activations, gradients + last)
        states = 3 * local * self.param_bytes
        return Memory(
            weights=local * self.param_bytes,
            gradients=gradients,
            moments=2 * local * self.param_bytes,
            activations=activations,
            buffers=buffers,
            peak=states + buffers + both,
        )

    def activations(self, mesh: Mesh, rows: MicroBatches, *, checkpointing: bool) -> tuple[int, int]:
        """Bytes of activations where the backward pass begins and where it ends.

        They are what all blocks keep, and what one block or the head works with.
        """
        tokens = rows.rows * rows.length // mesh.context
        stream = tokens // mesh.tensor * self.model.dim * self.stream_bytes(mesh)  # the input of a block
        kept = [(self.saved_bytes(layer, crosses, mesh, rows), count) for (layer, crosses), count in self.layers]
        largest = max(saved for saved, _ in kept)
        working = max(self.working(layer, mesh, rows) for (layer, _), _ in self.layers) + 2 * stream
        head = self.head_bytes(tokens // mesh.tensor)
        if checkpointing:
            return self.depth * stream + max(largest + working, head), largest + working
        return sum(saved * count for saved, count in kept) + max(working, head), largest + working

    def stream_bytes(self, mesh: Mesh) -> int:
        """Bytes of an element of the residual stream, which on one device has the dtype of the weights."""
        return self.param_bytes if mesh.devices == 1 else ACTIVATION_BYTES

    def saved_bytes(self, layer: Layer, crosses: bool, mesh: Mesh, rows: MicroBatches) -> int:
        """Bytes that a block keeps for its backward pass."""
        model, tensor = self.model, mesh.tensor
        tokens = rows.rows * rows.length // mesh.context  # of all devices of the tensor axis together
        heads, kv_heads = model.num_heads * model.head_dim // tensor, model.num_kv_heads * model.head_dim // tensor
        qkv = 2 * heads + 2 * kv_heads  # queries, keys, values, and the output
        if layer.attention.qk_norm != "none":
            qkv += heads + kv_heads
        attentions = 2 if crosses else 1
        sublayers = attentions + 1
        after = sublayers if isinstance(model.placement, SandwichConfig | OutputConfig) else 0
        elements = tokens * (attentions * qkv + self.hidden_elements(layer, tensor) + sublayers * model.dim)
        norms = tokens // tensor * (sublayers + after) * model.dim * self.stream_bytes(mesh)  # their inputs
        log_sums = 4 * tokens * attentions * model.num_heads // tensor
        return elements * ACTIVATION_BYTES + norms + log_sums + attentions * self.row_keys(mesh, rows)

    def row_keys(self, mesh: Mesh, rows: MicroBatches) -> int:
        """Bytes of the keys and values of whole rows, which attention gathers over the context axis."""
        if mesh.context == 1:
            return 0
        width = 2 * self.model.num_kv_heads * self.model.head_dim // mesh.tensor
        return rows.rows * rows.length * width * ACTIVATION_BYTES

    def hidden_elements(self, layer: Layer, tensor: int) -> int:
        """Elements per token that the feed-forward network keeps: the up projection, and the activation of it.

        Where gated units are one operation with the projection that follows, their output is recomputed.
        """
        config, experts = layer.feedforward, layer.feedforward.experts
        width = 3 if config.gated else 2
        if experts is None:
            recomputed = config.gated and not config.bias and not self.model.dropout.feedforward
            return (width - recomputed) * self.model.hidden_dim // tensor
        hidden = experts.hidden_dim or self.model.hidden_dim
        # Every device of the tensor axis has room for all choices, since all may fall on its experts.
        choices = experts.top_k * (width * hidden + 2 * self.model.dim)
        return choices + width * (experts.shared_dim or 0) // tensor

    def working(self, layer: Layer, mesh: Mesh, rows: MicroBatches) -> int:
        """Bytes of gradients inside of a block while it runs backward: of its widest part, and of gathered keys."""
        tokens = rows.rows * rows.length // mesh.context
        model = self.model
        attention = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim // mesh.tensor
        widest = max(attention, self.hidden_elements(layer, mesh.tensor)) + 2 * model.dim
        return tokens * widest * ACTIVATION_BYTES + self.row_keys(mesh, rows)

    def head_bytes(self, tokens: int) -> int:
        """Bytes of the cross-entropy: logits in chunks, the gradients of hidden states and of the table."""
        if not isinstance(self.model.head, LogitsConfig):
            return 0
        vocabulary, width = self.model.vocab_size, self.model.embedding.width or self.model.dim
        chunk = min(tokens, max(LOGITS_AT_ONCE // vocabulary, 2048)) * vocabulary
        return (chunk + tokens * width + vocabulary * width) * ACTIVATION_BYTES

    def exchange(self, mesh: Mesh, rows: MicroBatches, *, checkpointing: bool, sync_last: bool = False) -> Exchange:
        """Bytes that one device receives in a step."""
        passes = 3 if checkpointing else 2  # forward, backward, and forward again
        local, _, blocks, outside = self.sizes(mesh.tensor, mesh.shards)
        sums = 1 if sync_last else rows.accumulation
        tokens = rows.rows * rows.length // mesh.context * rows.accumulation
        weights = received_bytes(blocks, mesh.shards) + received_bytes(outside, mesh.shards * mesh.tensor)
        times = passes * rows.accumulation
        return Exchange(
            shard=weights * (2 * ACTIVATION_BYTES * rows.accumulation + REDUCE_BYTES * sums),
            replicate=2 * received_bytes(local, mesh.replicate) * REDUCE_BYTES,
            context=received_bytes(self.row_keys(mesh, rows), mesh.context) * (self.depth + self.crossing) * times,
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
