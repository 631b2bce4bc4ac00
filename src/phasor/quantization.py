"""Weights in fewer bits, for models that are used and no longer trained."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator

from torch import Tensor, nn

from phasor.config.schema import shown, unknown
from phasor.nn.attention import Attention
from phasor.nn.embedding import Embedding
from phasor.nn.feed_forward import FeedForward, untouched
from phasor.nn.heads import LogitsHead
from phasor.nn.int8 import Int8, Int8Embedding, Int8Head, Int8Linear
from phasor.transformer import Block, Transformer

WEIGHTS = ("int8",)


def quantize(model: Transformer, weights: str = "int8") -> Transformer:
    """A copy of a model whose large weights are in 8 bits, a scale for every output; the model itself stays as it is.

    These are the projections of attention and feed-forward networks, and the table that logits are made with: tied,
    token vectors are its rows too. Norms, biases, experts, and layers that are not torch's own stay in their type, and
    so do activations and caches. The copy takes about half the memory of 16 bits, and on a GPU steps through a text as
    much quicker as it reads less. It is neither trained nor saved: keep the model, and quantize it where it is used.

    >>> import torch
    >>> from phasor import generate, preset
    >>> model = Transformer(preset("llama-2", dim=64, num_heads=4, num_layers=2, vocab_size=100)).eval()
    >>> small = quantize(model)
    >>> tokens = torch.randint(0, 100, (1, 20))
    >>> bool((small(tokens) - model(tokens)).std() < 0.02 * model(tokens).std())
    True
    >>> small.decoder.blocks[0].attention.qkv.weight.dtype, len(generate(small, [1, 2, 3], max_new_tokens=5))
    (torch.int8, 5)
    """
    if not isinstance(model, Transformer):
        raise ValueError(f"quantize takes a Transformer, not {shown(model)}")
    if weights not in WEIGHTS:
        raise unknown("type of quantized weights", weights, WEIGHTS)
    if quantized(model):
        raise ValueError("the weights of this model are in int8 already")
    table, held = table_of(model), Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    large = [layer.weight for _, _, layer in projections(model)] + ([] if table is None else [table])
    alike = [*(w for w in large if held[id(w)] == 1), model.tokenizer, model.source_tokenizer]  # need no copy
    small = copy.deepcopy(model, {id(x): x for x in alike if x is not None})
    made: dict[nn.Linear, Int8Linear] = {}
    for part, name, layer in list(projections(small)):
        made[layer] = made.get(layer) or Int8Linear(layer)
        setattr(part, name, made[layer])
    if table is not None:
        head = small.head
        holder = small.tokens if isinstance(head, LogitsHead) and head.weight is None else head
        assert isinstance(holder, nn.Module)
        holder.__class__ = Int8Embedding if holder is small.tokens else Int8Head
        assert isinstance(holder, Int8)
        holder.hold(table)
    return small.requires_grad_(False).eval()


def quantized(model: nn.Module) -> bool:
    """Whether a model has weights in 8 bits.

    >>> quantized(nn.Linear(2, 2))
    False
    """
    return any(isinstance(part, Int8) for part in model.modules())


def projections(model: Transformer) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """The layers of blocks that can have their weights in 8 bits: where each stands, its name there, and itself."""
    for block in (part for part in model.modules() if isinstance(part, Block)):
        for part in (part for part in block.modules() if isinstance(part, Attention | FeedForward)):
            for name, layer in part.named_children():
                if type(layer) is nn.Linear and untouched(layer) and type(layer.weight) is nn.Parameter:
                    yield part, name, layer


def table_of(model: Transformer) -> Tensor | None:
    """The table that logits are made with; None where it cannot be in 8 bits."""
    head = model.head
    if type(head) is not LogitsHead or not untouched(head):
        return None
    if head.weight is None and not (type(model.tokens) is Embedding and untouched(model.tokens)):
        return None
    table = model.tokens.weight if head.weight is None else head.weight
    return table if type(table) is nn.Parameter else None
