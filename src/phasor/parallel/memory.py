"""What one device of a mesh holds in a training step, by kind, and the most of all together.

Matrix products are in bfloat16. The residual stream has the dtype of the weights, as under torch's autocast: the
embedding gives it, and sums keep it. One device holds autocast's bfloat16 copies of weights. Several gather blocks in
bfloat16, each while the one before it is at work, and what is outside of blocks in its own dtype for the whole step
(FSDP2). The most is held at one of few moments, each of them a method of `MemoryCosts`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from phasor.config import LogitsConfig, ModelConfig, OutputConfig, SandwichConfig
from phasor.config.model import Layer
from phasor.config.parameters import Parameters, sides_of
from phasor.parallel.mesh import Mesh

ACTIVATION_BYTES = 2  # bfloat16
REDUCE_BYTES = 4  # gradients of blocks are summed in float32
NORM_BYTES = 4  # under autocast a norm gives float32
PARAM_BYTES = {"float32": 4, "bfloat16": 2}
LOGITS_AT_ONCE = 1 << 27  # elements: the cross-entropy takes the rows in chunks
SMALL_NORM = 1 << 23  # elements: fewer are normalized by torch's operations and not by a kernel
WORKSPACES = 2 << 25  # cuBLAS has 32 MiB on a Hopper GPU for each thread: one runs forward, one backward


@dataclass(frozen=True)
class Memory:
    """Bytes on one device: the most of each kind, and `peak`, the most of all together.

    `activations` are those at the start of the backward pass. `buffers` are copies of weights, gathered from other
    devices or cast by autocast, gradients on their way to other devices, and workspaces. The kinds do not add up to the
    peak: in a step of one backward pass gradients come while activations go.
    """

    weights: int
    gradients: int
    moments: int
    activations: int
    buffers: int
    peak: int


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


class Activations(NamedTuple):
    """Bytes of activations: what all blocks keep for the backward pass, and what is at work beside that."""

    kept: int
    stream: int  # the input or the output of a block, or the gradient of either
    recomputed: int  # what a block at work has with activation checkpointing, besides its input
    gradients: int  # inside of a block at work
    head: int  # of the cross-entropy in the forward pass
    head_backward: int

    @property
    def block(self) -> int:
        """What a block at work has besides what blocks keep."""
        return self.stream + self.recomputed + self.gradients


class MemoryCosts:
    """The memory of one model's steps, by mesh and rows; what does not depend on them is computed once."""

    def __init__(self, model: ModelConfig, parameters: Parameters, param_dtype: str) -> None:
        self.model, self.parameters = model, parameters
        self.param_bytes = PARAM_BYTES[param_dtype]
        layers = [
            (model.for_side(side).layer(index), side == "decoder" and model.shape == "encoder-decoder")
            for side in sides_of(model)
            for index in range(model.depth(side))
        ]
        self.depth = len(layers)
        self.crossing = sum(crosses for _, crosses in layers)  # layers with cross-attention
        self.layers = list(Counter(layers).items())  # distinct ones, and how many of each
        self.sizes = cache(self.find_sizes)

    def find_sizes(self, tensor: int, shards: int) -> LocalSizes:
        """Elements on one device."""
        found = self.parameters
        blocks = found.gathered_block_size(tensor)
        return LocalSizes(
            found.local(tensor, shards), found.largest_block(tensor), blocks, found.gathered_size(tensor) - blocks
        )

    def memory(self, mesh: Mesh, rows: MicroBatches, *, checkpointing: bool, sync_last: bool) -> Memory:
        """The memory of the first device, which has the largest shards."""
        local, _, blocks, outside = self.sizes(mesh.tensor, mesh.shards)
        local *= self.param_bytes
        several = rows.accumulation > 1
        gradients = max(local, (blocks + outside) * REDUCE_BYTES if sync_last and several else 0)
        earlier = gradients if several else 0  # of earlier backward passes
        if mesh.devices > 1:
            earlier += local  # of the step before, which are held until those of this step are complete
        activations = self.activations(mesh, rows, checkpointing=checkpointing)
        # Between the first and the last blocks of the backward pass all that is held grows or shrinks evenly.
        done = {n for n in (0, 1, self.depth - 2, self.depth - 1) if 0 <= n < self.depth}
        moments = [
            self.at_head(mesh, activations, checkpointing=checkpointing),
            self.at_embedding(mesh, rows, activations),
            *(self.at_block(n, mesh, rows, activations, checkpointing=checkpointing) for n in done),
        ]
        peak = max(gradients, earlier + max(moments))
        return Memory(
            weights=local,
            gradients=gradients,
            moments=2 * local,
            activations=activations.kept + max(activations.stream + activations.head, activations.block),
            buffers=self.buffers(mesh) + WORKSPACES,
            peak=3 * local + peak + WORKSPACES,
        )

    def at_head(self, mesh: Mesh, activations: Activations, *, checkpointing: bool) -> int:
        """Bytes at the head, forward or backward; blocks that recompute have no copies of weights by then."""
        copies = self.weight_copies(mesh)
        head = max(copies + activations.head, activations.head_backward + (0 if checkpointing else copies))
        return activations.kept + activations.stream + head + self.gathered_outside(mesh)

    def at_block(
        self, done: int, mesh: Mesh, rows: MicroBatches, activations: Activations, *, checkpointing: bool
    ) -> int:
        """Bytes in the backward pass of a block, after that of some others."""
        left, kept = self.depth - done, activations.kept // self.depth
        held = self.gathered_outside(mesh) + self.block_gradients(done, mesh, rows) + self.head_gradient
        if mesh.devices == 1:
            copies = self.weight_copies(mesh) // self.depth
            return held + left * kept + activations.block + copies * (1 if checkpointing else left)
        block = self.sizes(mesh.tensor, mesh.shards).largest_block
        gathered, reduced = block * ACTIVATION_BYTES, block * REDUCE_BYTES
        # The weights of this block, and those of the next on their way; the gradients of the one before on theirs.
        inside = left * kept + activations.block + min(2, left) * gathered + (reduced if done else 0)
        # The next block's weights, and the gradients of this one, as computed and to be summed.
        after = (left - 1) * kept + activations.stream + min(1, left - 1) * gathered + gathered + reduced
        return held + max(inside, after)

    def at_embedding(self, mesh: Mesh, rows: MicroBatches, activations: Activations) -> int:
        """Bytes at the end of the backward pass, where the gradients of all that is outside of blocks are complete."""
        sizes = self.sizes(mesh.tensor, mesh.shards)
        held = self.block_gradients(self.depth, mesh, rows) + sizes.outside * self.param_bytes
        if mesh.devices > 1:
            held += self.gathered_outside(mesh) + sizes.largest_block * REDUCE_BYTES
        return held + mesh.tensor * activations.stream

    def buffers(self, mesh: Mesh) -> int:
        """Bytes of copies of weights and of gradients on their way."""
        block = self.sizes(mesh.tensor, mesh.shards).largest_block
        if mesh.devices == 1:
            return self.weight_copies(mesh)
        # Two blocks gathered; the gradients of a block as computed and as summed.
        return self.gathered_outside(mesh) + 2 * ACTIVATION_BYTES * block + (ACTIVATION_BYTES + REDUCE_BYTES) * block

    def gathered_outside(self, mesh: Mesh) -> int:
        """Bytes of the weights outside of blocks, which stay gathered from forward to backward."""
        return self.sizes(mesh.tensor, mesh.shards).outside * self.param_bytes if mesh.devices > 1 else 0

    def weight_copies(self, mesh: Mesh) -> int:
        """Bytes of autocast's copies of the weights of blocks; a fused down projection casts its own for itself."""
        if mesh.devices > 1 or self.param_bytes == ACTIVATION_BYTES:
            return 0
        fused = sum(
            count * layer.feedforward.hidden_dim_of(self.model)
            for (layer, _), count in self.layers
            if self.is_fused(layer)
        )
        return ACTIVATION_BYTES * (self.sizes(1, 1).blocks - self.model.dim * fused)

    def block_gradients(self, done: int, mesh: Mesh, rows: MicroBatches) -> int:
        """Bytes of the gradients of that many blocks, as far as they are not added to those of earlier backward passes.

        FSDP2 holds their sums in float32 to the end of the backward pass; in another dtype gradients are copies.
        """
        sizes, shards = self.sizes(mesh.tensor, mesh.shards), mesh.tensor * mesh.shards
        own = (sizes.local - sizes.outside // shards) * done // self.depth
        added = rows.accumulation > 1
        sums = mesh.devices > 1 and (added or self.param_bytes != REDUCE_BYTES)
        return own * (REDUCE_BYTES * sums + self.param_bytes * (not added))

    @property
    def head_gradient(self) -> int:
        """Bytes of the gradients of the output layer, which wait whole for those of the embedding."""
        return (sum(w.size for w in self.parameters.outside) - self.parameters.embedding) * self.param_bytes

    def tokens(self, mesh: Mesh, rows: MicroBatches) -> int:
        """Tokens at once of all devices of the tensor axis together."""
        return rows.rows * rows.length // mesh.context

    def activations(self, mesh: Mesh, rows: MicroBatches, *, checkpointing: bool) -> Activations:
        tokens = self.tokens(mesh, rows) // mesh.tensor
        stream = tokens * self.model.dim * self.param_bytes
        saved = [(self.saved_bytes(layer, crosses, mesh, rows), count) for (layer, crosses), count in self.layers]
        kept, recomputed = sum(each * count for each, count in saved), 0
        if checkpointing:
            kept, recomputed = self.depth * stream, max(each for each, _ in saved) - stream
        gradients = max(self.workspace_bytes(layer, mesh, rows) for (layer, _), _ in self.layers)
        return Activations(kept, stream, recomputed, gradients, *self.head_bytes(tokens))

    def saved_bytes(self, layer: Layer, crosses: bool, mesh: Mesh, rows: MicroBatches) -> int:
        """Bytes that a block keeps for its backward pass."""
        model, tensor, tokens = self.model, mesh.tensor, self.tokens(mesh, rows)
        qkv = layer.attention.saved_elements(model)
        if mesh.context == 1:
            qkv += layer.attention.kv_width(model)
        attentions = layer.attention.present + crosses
        sublayers = attentions + layer.feedforward.present
        after = sublayers if isinstance(model.placement, SandwichConfig | OutputConfig) else 0
        elements = tokens * (attentions * qkv // tensor + self.saved_by_network(layer, tensor) + sublayers * model.dim)
        norm_elements = tokens // tensor * model.dim
        norms = (sublayers + after) * norm_elements * self.param_bytes  # their inputs
        if norm_elements < SMALL_NORM and mesh.devices > 1 and self.param_bytes > ACTIVATION_BYTES:
            norms *= 2  # weights gathered in bfloat16 scale in a second operation, which keeps what it scales
        log_sums = 4 * tokens * attentions * model.num_heads // tensor
        return elements * ACTIVATION_BYTES + norms + log_sums + attentions * self.row_keys(layer, mesh, rows)

    def row_keys(self, layer: Layer, mesh: Mesh, rows: MicroBatches) -> int:
        """Bytes of the keys and values of whole rows, which attention gathers over the context axis, or the like."""
        if mesh.context == 1:
            return 0
        width = layer.attention.gathered_elements(self.model, mesh.tensor)
        return rows.rows * rows.length * width * ACTIVATION_BYTES

    def gathered_keys(self, mesh: Mesh, rows: MicroBatches) -> int:
        """The same of all layers, with their cross-attention."""
        return sum(
            count * (2 if crosses else 1) * self.row_keys(layer, mesh, rows) for (layer, crosses), count in self.layers
        )

    def is_fused(self, layer: Layer) -> bool:
        """Whether gated units are one operation with the projection that follows, which recomputes their output."""
        config = layer.feedforward
        return config.gated and config.experts is None and not config.bias and not self.model.dropout.feedforward

    def saved_by_network(self, layer: Layer, tensor: int) -> int:
        """Elements per token that the feed-forward network keeps: the up projection, and the activation of it."""
        recomputed = layer.feedforward.hidden_dim_of(self.model) // tensor if self.is_fused(layer) else 0
        return self.network_elements(layer, tensor) - recomputed

    def network_elements(self, layer: Layer, tensor: int) -> int:
        """Elements per token inside of the feed-forward network."""
        config, experts = layer.feedforward, layer.feedforward.experts
        width = 3 if config.gated else 2
        if experts is None:
            return width * config.hidden_dim_of(self.model) // tensor
        hidden = experts.hidden_dim or config.hidden_dim_of(self.model)
        # Every device of the tensor axis has room for all choices, since all may fall on its experts.
        choices = experts.top_k * (width * hidden + 2 * (experts.latent_dim or self.model.dim))
        return choices + width * (experts.shared_dim or 0) // tensor

    def workspace_bytes(self, layer: Layer, mesh: Mesh, rows: MicroBatches) -> int:
        """Bytes of gradients inside of a block: of its feed-forward network, or of attention after that is done."""
        model, tokens = self.model, self.tokens(mesh, rows)
        network = tokens * self.network_elements(layer, mesh.tensor)
        if mesh.tensor > 1 or self.param_bytes > ACTIVATION_BYTES:
            network += tokens * model.dim  # of its output, in bfloat16 and of all tokens of the tensor axis
        experts, hidden = layer.feedforward.experts, layer.feedforward.hidden_dim_of(model)
        if experts is not None:
            hidden = experts.num_experts * (experts.hidden_dim or hidden)
        weight = model.dim * hidden // mesh.tensor  # the down projection, whose gradient autocast's copy has first
        cast = self.param_bytes if mesh.devices == 1 and self.param_bytes > ACTIVATION_BYTES else 0
        done = tokens * (self.saved_by_network(layer, mesh.tensor) + model.dim)
        attention = tokens * layer.attention.working_elements(model) // mesh.tensor
        return max(
            network * ACTIVATION_BYTES + weight * (ACTIVATION_BYTES + cast),
            (attention - done) * ACTIVATION_BYTES + self.row_keys(layer, mesh, rows),
        )

    def head_bytes(self, tokens: int) -> tuple[int, int]:
        """Bytes of the cross-entropy, forward and backward: logits in chunks, hidden states, table, gradients of both.

        It computes the gradients in the forward pass, that of the table in float32, and scales them in the backward.
        """
        if not isinstance(self.model.head, LogitsConfig):
            return 0, 0
        vocabulary, width = self.model.vocab_size, self.model.embedding.width or self.model.dim
        chunks = -(-tokens // max(LOGITS_AT_ONCE // vocabulary, 2048))
        hidden, table = tokens * width, vocabulary * width
        logits = -(-tokens // chunks) * vocabulary
        copied = table if self.param_bytes > ACTIVATION_BYTES else 0
        forward = (logits + 2 * hidden + copied) * ACTIVATION_BYTES + hidden * NORM_BYTES + table * REDUCE_BYTES
        backward = hidden * (ACTIVATION_BYTES + NORM_BYTES) + 2 * table * self.param_bytes
        return forward, backward
