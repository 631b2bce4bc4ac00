"""Every weight of a model by its shape, and how a mesh cuts it: arithmetic on a configuration, without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from phasor.config.model import ModelConfig, Side
from phasor.config.weights import Weight, Weights, with_prefixes

TABLES = ("tokens.weight", "source_tokens.weight", "per_layer.weight")  # which are looked up
BlockWeights = tuple[Weight, ...]


@dataclass(frozen=True)
class Parameters:
    """The weights of a model: of its blocks, equal ones counted, and of all that stands outside of blocks.

    >>> from phasor.models.presets import preset
    >>> parameters_of(preset("llama-3.1")).total
    8030261248
    """

    blocks: tuple[tuple[BlockWeights, int], ...]
    outside: BlockWeights
    embedding: int  # elements of token tables that are looked up and not multiplied with
    top_k: int
    layers_per_block: int = 1

    @property
    def total(self) -> int:
        return sum(w.size for w in self.outside) + sum(n * sum(w.size for w in block) for block, n in self.blocks)

    @property
    def in_blocks(self) -> float:
        """Elements of blocks that one token is multiplied with."""
        once = sum(n * sum(self.active(weight) for weight in block) for block, n in self.blocks)
        return once * self.layers_per_block

    @property
    def in_head(self) -> int:
        """Elements outside of blocks that one token is multiplied with."""
        return sum(w.size for w in self.outside) - self.embedding

    def active(self, weight: Weight) -> float:
        """Elements of a weight that one token is multiplied with: those of the experts it is routed to."""
        return weight.size * self.top_k / weight.experts if weight.experts else weight.size

    def local(self, tensor: int, shards: int) -> int:
        """Elements that the first process of a mesh holds: blocks cut by both, all else over both together."""
        blocks = sum(n * sum(w.local_size(tensor, shards) for w in block) for block, n in self.blocks)
        return blocks + sum(w.local_size(1, tensor * shards) for w in self.outside)

    def largest_block(self, tensor: int) -> int:
        """Elements of the largest block on one process, gathered from all shards."""
        return max(sum(w.local_size(tensor, 1) for w in block) for block, _ in self.blocks)

    def gathered_size(self, tensor: int) -> int:
        """Elements of all weights on one process, gathered from all shards."""
        return self.gathered_block_size(tensor) + sum(w.size for w in self.outside)

    def gathered_block_size(self, tensor: int) -> int:
        """Elements of all blocks on one process, gathered from all shards."""
        return sum(n * sum(w.local_size(tensor, 1) for w in block) for block, n in self.blocks)


def sides_of(model: ModelConfig) -> list[Side]:
    """The stacks of a model."""
    return ["encoder", "decoder"] if model.shape == "encoder-decoder" else [model.shape]


def parameters_of(model: ModelConfig) -> Parameters:
    """The weights of a model."""
    sides = sides_of(model)
    blocks = Counter(tuple(block.values()) for side in sides for block in stack_blocks(model, side))
    before = model.embedding.weights(model)
    outside = [*before.values(), *(weight for side in sides for weight in around_blocks(model, side))]
    outside += [*model.head.pooler_weights(model).values(), *model.head.weights(model).values()]
    looked_up = sum(before[table].size for table in TABLES if table in before)
    experts = [model.layer(i).feedforward.experts for i in range(max(1, len(model.layers)))]
    if model.has_logits and model.embedding.tied:  # the head multiplies with the table of the target's tokens
        looked_up -= before["tokens.weight"].size
    top_k = max((e.top_k for e in experts if e), default=1)
    return Parameters(tuple(blocks.items()), tuple(outside), looked_up, top_k, model.layers_per_block)


def stack_blocks(model: ModelConfig, side: Side) -> Iterator[Weights]:
    """The weights of each block of the encoder or the decoder, by their names in it."""
    model = model.for_side(side)
    for index in range(0, model.depth(side), model.layers_per_block):
        layer = model.layer(index)
        crosses = side == "decoder" and model.shape == "encoder-decoder"
        count = layer.attention.present + crosses + layer.feedforward.present
        parts = {"attention": layer.attention.weights(model)}
        if crosses:
            parts["cross"] = layer.attention.weights(model, cross=True)
        parts["feedforward"] = layer.feedforward.weights(model.dim, layer.feedforward.hidden_dim_of(model))
        norms = [f"residual.norms.{number}" for number in model.placement.norms(count, first=index == 0)]
        if layer.feedforward.branch_norms:
            del norms[-model.placement.norms_per_sublayer]
            norms += [f"feedforward.norms.{number}" for number in range(4)]
        if layer.feedforward.experts is not None and layer.feedforward.experts.router_norm:
            norms.append("feedforward.router_norm")
        parts |= {norm: model.norm.weights(model.dim) for norm in norms}
        scale = {"scale": Weight((1,))} if model.placement.block_scale else {}
        yield with_prefixes(parts) | model.embedding.block_weights(model) | scale


def around_blocks(model: ModelConfig, side: Side) -> Iterator[Weight]:
    """What a stack has besides its blocks: positions, token types, norms and a projection."""
    model = model.for_side(side)
    schemes, layers = model.schemes(side)
    for index, (scheme, its_model) in enumerate(schemes):
        yield from map(Weight, scheme.weight_shapes(its_model))
        yield from map(Weight, scheme.layer_weight_shapes(its_model) * layers.count(index))
    yield from model.embedding.stack_weights(model).values()
    if model.ends_in_norm:
        yield from model.norm.weights(model.dim).values()
