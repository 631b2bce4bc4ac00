"""Every weight of a model by its shape, and how a mesh cuts it: arithmetic on a configuration, without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from phasor.config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerNormConfig,
    MaskedHeadConfig,
    ModelConfig,
    NoHeadConfig,
    NormConfig,
    ParallelConfig,
    PreConfig,
    RMSNormConfig,
    SandwichConfig,
)
from phasor.config.model import Layer, Side


def shard_dim(shape: Sequence[int], shards: int) -> int:
    """The dimension along which FSDP cuts a weight: the first; the second of experts that shards cannot share evenly.

    >>> shard_dim((8, 4096, 14336), 8), shard_dim((8, 4096, 14336), 64), shard_dim((32000, 4096), 64)
    (0, 1, 0)
    """
    return 1 if len(shape) > 2 and shape[0] % shards and not shape[1] % shards else 0


@dataclass(frozen=True)
class Weight:
    """A weight's shape and the dimension that tensor parallelism cuts; None where each process has all of it.

    `experts` is how many experts it is stacked of, where a token passes through a few of them.
    """

    shape: tuple[int, ...]
    cut: int | None = None
    experts: int = 0

    @property
    def size(self) -> int:
        return prod(self.shape)

    def local_shape(self, tensor: int) -> tuple[int, ...]:
        """The shape after the cut over the tensor axis."""
        return tuple(n // tensor if dim == self.cut else n for dim, n in enumerate(self.shape))

    def local_size(self, tensor: int, shards: int) -> int:
        """Elements on the first process: FSDP2 cuts a dimension into `shards` pieces, rounded up.

        >>> Weight((10, 4)).local_size(1, 8), Weight((16, 4), cut=0).local_size(2, 4)
        (8, 8)
        """
        shape = self.local_shape(tensor)
        length = shape[shard_dim(shape, shards)]
        return -(-length // shards) * (prod(shape) // length)


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

    @property
    def total(self) -> int:
        return sum(w.size for w in self.outside) + sum(n * sum(w.size for w in block) for block, n in self.blocks)

    @property
    def in_blocks(self) -> float:
        """Elements of blocks that one token is multiplied with."""
        return sum(n * sum(self.active(weight) for weight in block) for block, n in self.blocks)

    @property
    def in_head(self) -> int:
        """Elements outside of blocks that one token is multiplied with."""
        return sum(w.size for w in self.outside) - self.embedding

    def active(self, weight: Weight) -> float:
        """Elements of a weight that one token is multiplied with: those of its own experts."""
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


def parameters_of(model: ModelConfig) -> Parameters:
    """The weights of a model."""
    sides: list[Side] = ["encoder", "decoder"] if model.shape == "encoder-decoder" else [model.shape]
    blocks = Counter(tuple(block) for side in sides for block in stack_blocks(model, side))
    outside = [weight for side in sides for weight in around_blocks(model, side)]
    tables = [model.vocab_size, *([model.embedding.source_vocab_size] if model.embedding.source_vocab_size else [])]
    width = model.embedding.width or model.dim
    for rows in tables:
        outside.append(Weight((rows, width)))
        if model.embedding.width is not None and model.embedding.project == "tokens":
            outside.append(Weight((model.dim, width)))
    outside += head(model)
    experts = [model.layer(i).feedforward.experts for i in range(max(1, len(model.layers)))]
    # A tied head multiplies with the table of the target's tokens.
    looked_up = sum(tables[1:]) if model.has_logits and model.embedding.tied else sum(tables)
    return Parameters(
        tuple(blocks.items()), tuple(outside), looked_up * width, max((e.top_k for e in experts if e), default=1)
    )


def stack_blocks(model: ModelConfig, side: Side) -> Iterator[list[Weight]]:
    """The weights of each block of the encoder or the decoder."""
    for index in range(model.depth(side)):
        layer = model.layer(index)
        crosses = side == "decoder" and model.shape == "encoder-decoder"
        block = attention(layer.attention, model)
        if crosses:
            block += attention(layer.attention, model, cross=True)
        block += network(layer, model)
        for _ in range(norms_of_block(model, 3 if crosses else 2, first=index == 0)):
            block += norm(model.norm, model.dim)
        yield block


def norms_of_block(model: ModelConfig, sublayers: int, *, first: bool) -> int:
    """How many norms the residual stream of a block has."""
    placement = model.placement
    if isinstance(placement, ParallelConfig) and placement.shared_norm:
        return 1
    if isinstance(placement, PreConfig) and first and not placement.first_norm:
        return sublayers - 1
    return sublayers * (2 if isinstance(placement, SandwichConfig) else 1)


def linear(rows: int, columns: int, bias: bool, cut: int | None = None) -> list[Weight]:
    """A projection; where its rows are cut the bias is too."""
    return [Weight((rows, columns), cut), *([Weight((rows,), 0 if cut == 0 else None)] if bias else [])]


def norm(config: NormConfig, *shape: int, cut: int | None = None) -> list[Weight]:
    if isinstance(config, LayerNormConfig):
        return [Weight(shape, cut)] * (config.weight + config.bias)
    return [Weight(shape, cut)] if isinstance(config, RMSNormConfig) else []


def attention(config: AttentionConfig, model: ModelConfig, *, cross: bool = False) -> list[Weight]:
    """The weights of attention, or of cross-attention, cut by key/value heads."""
    heads = {"q": model.num_heads, "k": model.num_kv_heads, "v": model.num_kv_heads}
    found: list[Weight] = []
    for parts in [("q",), ("k", "v")] if cross else [("q", "k", "v")]:
        biased = [part for part in parts if part in config.bias]
        rows = sum(heads[part] for part in parts) * model.head_dim
        found += linear(rows, model.dim, len(biased) == len(parts), cut=0)
        if len(biased) < len(parts):
            found += [Weight((heads[part], model.head_dim), 0) for part in biased]
    found += linear(model.dim, model.num_heads * model.head_dim, "out" in config.bias, cut=1)
    qk = model.norm
    if isinstance(qk, LayerNormConfig) and not config.qk_norm_bias:
        qk = qk.replace(bias=False)
    for count in (model.num_heads, model.num_kv_heads):
        if config.qk_norm == "head":
            found += norm(qk, model.head_dim)
        elif config.qk_norm == "heads":
            found += norm(qk, count, model.head_dim, cut=0)
        elif config.qk_norm == "whole":
            found += norm(qk, count * model.head_dim)
    return [*found, Weight((model.num_heads,), 0)] if config.sink_logits else found


def network(layer: Layer, model: ModelConfig) -> list[Weight]:
    """The weights of a feed-forward network or of a mixture of experts."""
    config, experts = layer.feedforward, layer.feedforward.experts
    if experts is None:
        return feed_forward(config, model.dim, model.hidden_dim)
    count, hidden = experts.num_experts, experts.hidden_dim or model.hidden_dim
    up = hidden * (2 if config.gated else 1)
    shapes: list[tuple[int, ...]] = [(count, model.dim, up), (count, hidden, model.dim)]
    if config.bias:
        shapes += [(count, up), (count, model.dim)]
    found = [Weight(shape, 0, count) for shape in shapes] + linear(count, model.dim, experts.router_bias)
    if experts.shared_dim is not None:
        found += feed_forward(config, model.dim, experts.shared_dim)
    return found + (linear(1, model.dim, bias=False) if experts.shared_gate else [])


def feed_forward(config: FeedForwardConfig, dim: int, hidden: int) -> list[Weight]:
    up = hidden * (2 if config.gated else 1)
    return linear(up, dim, config.bias, cut=0) + linear(dim, hidden, config.bias, cut=1)


def around_blocks(model: ModelConfig, side: Side) -> Iterator[Weight]:
    """What a stack has besides its blocks: positions, token types, norms and a projection."""
    layers = [model.layer(i).position for i in range(model.depth(side))]
    for scheme in dict.fromkeys([model.input_position, *layers]):
        yield from map(Weight, scheme.weight_shapes(model))
        yield from map(Weight, scheme.layer_weight_shapes(model) * layers.count(scheme))
    if model.embedding.token_types:
        yield Weight((model.embedding.token_types, model.input_width))
    if model.embedding.norm:
        yield from norm(model.norm, model.input_width)
    if model.embedding.project == "sum":
        yield from linear(model.dim, model.input_width, bias=True)
    if model.ends_in_norm:
        yield from norm(model.norm, model.dim)


def head(model: ModelConfig) -> Iterator[Weight]:
    """The pooler and the output layer."""
    config, width = model.head, model.embedding.width or model.dim
    if config.pooler == "first":
        yield from linear(model.dim, model.dim, bias=True)
    if not model.has_logits:
        if isinstance(config, NoHeadConfig) and config.project:
            yield from linear(width, model.dim, bias=False)
        return
    masked = isinstance(config, MaskedHeadConfig)
    if isinstance(config, MaskedHeadConfig):
        yield from linear(model.input_width, model.dim, config.dense_bias)
        yield from norm(model.norm, model.input_width)
    if model.embedding.width is not None and (not masked or model.embedding.project == "tokens"):
        yield from linear(width, model.dim, bias=False)
    if not model.embedding.tied:
        yield Weight((model.vocab_size, width))
    if getattr(config, "bias", False):
        yield Weight((model.vocab_size,))
