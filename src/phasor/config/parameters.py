"""Every weight of a model by its shape, and how a mesh cuts it: arithmetic on a configuration, without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from phasor.config.model import ModelConfig, Side
from phasor.config.parts import (
    ClassifierConfig,
    MaskedHeadConfig,
    NoHeadConfig,
    ParallelConfig,
    PooledHeadConfig,
    PreConfig,
    SandwichConfig,
)
from phasor.config.weights import Weight, Weights, linear, with_prefixes

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
    outside = [weight for side in sides for weight in around_blocks(model, side)]
    tables = [model.vocab_size, *([model.embedding.source_vocab_size] if model.embedding.source_vocab_size else [])]
    width = model.embedding.width or model.dim
    source = model.for_side("encoder").dim if model.embedding.width is None else width
    widths = [width, source][: len(tables)]
    for rows, columns in zip(tables, widths, strict=True):
        outside.append(Weight((rows, columns)))
        if model.embedding.width is not None and model.embedding.project == "tokens":
            outside.append(Weight((model.dim, width)))
    looked_up = sum(rows * columns for rows, columns in zip(tables, widths, strict=True))
    if (per_layer := model.embedding.per_layer_width) is not None:
        outside += [Weight((model.vocab_size, model.num_layers * per_layer))]
        outside += [Weight((model.num_layers * per_layer, model.dim)), *model.norm.weights(per_layer).values()]
        looked_up += model.vocab_size * model.num_layers * per_layer
    if model.embedding.front_end is not None:
        outside += model.embedding.front_end.weights().values()
    outside += head(model)
    experts = [model.layer(i).feedforward.experts for i in range(max(1, len(model.layers)))]
    if model.has_logits and model.embedding.tied:  # the head multiplies with the table of the target's tokens
        looked_up -= tables[0] * width
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
        if (width := model.embedding.per_layer_width) is not None:
            parts |= {"layer_input.gate": linear(width, model.dim), "layer_input.project": linear(model.dim, width)}
            parts["layer_input.norm"] = model.norm.weights(model.dim)
        norms = [f"residual.norms.{number}" for number in norms_of_block(model, count, first=index == 0)]
        if layer.feedforward.branch_norms:
            del norms[-2 if isinstance(model.placement, SandwichConfig) else -1]
            norms += [f"feedforward.norms.{number}" for number in range(4)]
        if layer.feedforward.experts is not None and layer.feedforward.experts.router_norm:
            norms.append("feedforward.router_norm")
        parts |= {norm: model.norm.weights(model.dim) for norm in norms}
        yield with_prefixes(parts) | ({"scale": Weight((1,))} if model.placement.block_scale else {})


def norms_of_block(model: ModelConfig, sublayers: int, *, first: bool) -> range:
    """The numbers of the norms that the residual stream of a block has."""
    placement = model.placement
    if isinstance(placement, ParallelConfig) and placement.shared_norm:
        return range(1)
    if isinstance(placement, PreConfig) and first and not placement.first_norm:
        return range(1, sublayers)
    return range(sublayers * (2 if isinstance(placement, SandwichConfig) else 1))


def around_blocks(model: ModelConfig, side: Side) -> Iterator[Weight]:
    """What a stack has besides its blocks: positions, token types, norms and a projection."""
    model = model.for_side(side)
    schemes, layers = model.schemes(side)
    for index, (scheme, its_model) in enumerate(schemes):
        yield from map(Weight, scheme.weight_shapes(its_model))
        yield from map(Weight, scheme.layer_weight_shapes(its_model) * layers.count(index))
    if model.embedding.token_types:
        yield Weight((model.embedding.token_types, model.input_width))
    if model.embedding.norm:
        yield from model.norm.weights(model.input_width).values()
    if model.embedding.project == "sum":
        yield from linear(model.dim, model.input_width, bias=True).values()
    if model.ends_in_norm:
        yield from model.norm.weights(model.dim).values()


def head(model: ModelConfig) -> Iterator[Weight]:
    """The pooler and the output layer."""
    config, width = model.head, model.embedding.width or model.dim
    if config.pooler == "first":
        yield from linear(model.dim, model.dim, bias=True).values()
    if not model.has_logits:
        if isinstance(config, NoHeadConfig) and config.project:
            yield from linear(width, model.dim).values()
        if isinstance(config, ClassifierConfig):
            if config.dense is not None:
                yield from linear(model.dim, model.dim, bias=config.dense_bias).values()
            if config.dense_norm:
                yield from model.norm.weights(model.dim).values()
            yield from linear(len(config.labels), model.dim, bias=config.score_bias).values()
        if isinstance(config, PooledHeadConfig):
            features = model.dim
            for layer in config.dense:
                yield from linear(layer.out_features, features, bias=layer.bias).values()
                features = layer.out_features
        return
    masked = isinstance(config, MaskedHeadConfig)
    if isinstance(config, MaskedHeadConfig):
        yield from linear(model.input_width, model.dim, bias=config.dense_bias).values()
        yield from model.norm.weights(model.input_width).values()
    if model.embedding.width is not None and (not masked or model.embedding.project == "tokens"):
        yield from linear(width, model.dim).values()
    if not model.embedding.tied:
        yield Weight((model.vocab_size, width))
    if getattr(config, "bias", False):
        yield Weight((model.vocab_size,))
