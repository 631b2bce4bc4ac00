"""Weight-only quantization, for inference."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator

from torch import Tensor, nn

from phasor.config.schema import quote, unknown
from phasor.nn.attention import Attention
from phasor.nn.embedding import Embedding
from phasor.nn.feed_forward import FeedForward, calls_own_forward
from phasor.nn.heads import LogitsHead
from phasor.nn.int8 import Int8, Int8Embedding, Int8Head, Int8Linear
from phasor.transformer import Block, Transformer

WEIGHTS = ("int8",)


def quantize(model: Transformer, weights: str = "int8") -> Transformer:
    """A copy of a model with its large weights in int8, one scale per output; the model itself does not change.

    Quantized are the projections of attention and feed-forward networks and the output projection of the head; where
    that is tied, the token embedding with it. Norms, biases, experts and layers that are not plain `nn.Linear` keep
    their dtype, and so do activations and the KV cache. The copy takes about half the memory of bfloat16, and decodes
    faster on a GPU in the same proportion. It can be neither trained nor saved: save the model, and quantize after
    loading.

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
        raise ValueError(f"quantize takes a Transformer, not {quote(model)}")
    if weights not in WEIGHTS:
        raise unknown("dtype of quantized weights", weights, WEIGHTS)
    if has_int8_weights(model):
        raise ValueError("the weights of this model are in int8 already")
    table, uses = output_weight(model), Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    large = [layer.weight for _, _, layer in projections(model)] + ([] if table is None else [table])
    shared = [
        *(w for w in large if uses[id(w)] == 1),
        model.tokenizer,
        model.source_tokenizer,
    ]  # need no copy: replaced, or immutable
    small = copy.deepcopy(model, {id(x): x for x in shared if x is not None})
    replaced: dict[nn.Linear, Int8Linear] = {}
    for part, name, layer in list(projections(small)):
        replaced[layer] = replaced.get(layer) or Int8Linear(layer)
        setattr(part, name, replaced[layer])
    if table is not None:
        head = small.head
        holder = small.tokens if isinstance(head, LogitsHead) and head.weight is None else head
        assert isinstance(holder, nn.Module)
        holder.__class__ = Int8Embedding if holder is small.tokens else Int8Head
        assert isinstance(holder, Int8)
        holder.set_weight(table)
    return small.requires_grad_(False).eval()


def has_int8_weights(model: nn.Module) -> bool:
    """Whether a model has weights in int8.

    >>> has_int8_weights(nn.Linear(2, 2))
    False
    """
    return any(isinstance(part, Int8) for part in model.modules())


def projections(model: Transformer) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """The layers of the blocks whose weights can be quantized: the parent module, the name in it, and the layer."""
    for block in (part for part in model.modules() if isinstance(part, Block)):
        for part in (part for part in block.modules() if isinstance(part, Attention | FeedForward)):
            for name, layer in part.named_children():
                if type(layer) is nn.Linear and calls_own_forward(layer) and type(layer.weight) is nn.Parameter:
                    yield part, name, layer


def output_weight(model: Transformer) -> Tensor | None:
    """The weight of the output projection; None where it cannot be quantized."""
    head = model.head
    if type(head) is not LogitsHead or not calls_own_forward(head):
        return None
    if head.weight is None and not (type(model.tokens) is Embedding and calls_own_forward(model.tokens)):
        return None
    table = model.tokens.weight if head.weight is None else head.weight
    return table if type(table) is nn.Parameter else None
