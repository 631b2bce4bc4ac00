"""Weight-only quantization, for inference."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from phasor.config.schema import quote
from phasor.nn.attention.base import Attention
from phasor.nn.block import Block
from phasor.nn.embedding import Embedding
from phasor.nn.feed_forward import FeedForward
from phasor.nn.heads import LogitsHead
from phasor.nn.hooks import calls_own_forward
from phasor.nn.moe import Experts
from phasor.nn.quantized import NF4, Quantization, Quantized, QuantizedEmbedding, QuantizedHead, QuantizedLinear
from phasor.nn.quantized_experts import QuantizedStack, quantize_stack
from phasor.ops.quantized import GROUP_SIZES
from phasor.transformer import Transformer

BITS = (8, 4)
WEIGHTS = {f"int{bits}": bits for bits in BITS}  # names of quantized weights


def quantize(model: Transformer, bits: int | str = 8, *, group_size: int = 32) -> Transformer:
    """A copy of a model with its large weights in 8 or 4 bits; the model itself does not change.

    In 8 bits a row of a matrix has one scale; in 4 bits `group_size` neighbors in a row share one: 32, 64 or 128. A
    matrix whose rows are no multiple of that stays in 8 bits. With `bits="nf4"` the values are those of QLoRA's NF4,
    bit for bit those of bitsandbytes with double quantization.

    Quantized are the projections of attention and feed-forward networks and the output projection of the head; where
    that is tied, the token embedding with it. NF4 leaves head and embedding as they are. Norms, biases, experts and
    layers that are not plain `nn.Linear` keep their dtype, and so do activations and the KV cache. The copy decodes
    faster, on a GPU and on a CPU. It can be saved, and cannot be trained.

    >>> import torch
    >>> from phasor import generate, preset
    >>> model = Transformer(preset("llama-2", dim=64, num_heads=4, num_layers=2, vocab_size=100)).eval()
    >>> small = quantize(model)
    >>> tokens = torch.randint(0, 100, (1, 20))
    >>> bool((small(tokens) - model(tokens)).std() < 0.02 * model(tokens).std())
    True
    >>> small.decoder.blocks[0].attention.qkv.weight.dtype, len(generate(small, [1, 2, 3], max_new_tokens=5))
    (torch.int8, 5)
    >>> bool((quantize(model, bits=4)(tokens) - model(tokens)).std() < 0.2 * model(tokens).std())
    True
    """
    if not isinstance(model, Transformer):
        raise ValueError(f"quantize takes a Transformer, not {quote(model)}")
    if isinstance(bits, bool) or not isinstance(bits, int | str) or bits not in (*BITS, NF4):
        raise ValueError(f'bits must be 8, 4 or "nf4", not {quote(bits)}')
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size not in GROUP_SIZES:
        raise ValueError(f"group_size must be one of {', '.join(map(str, GROUP_SIZES))}, not {quote(group_size)}")
    if has_quantized_weights(model):
        raise ValueError("the weights of this model are quantized already")
    if model.adapters:
        raise ValueError("a model with adapters is quantized when they are merged into its weights (phasor.merge)")
    quantization = Quantization(bits, group_size)
    table = None if bits == NF4 else output_weight(model)
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    large = [layer.weight for _, _, layer in projections(model)] + ([] if table is None else [table])
    shared = [
        *(w for w in large if uses[id(w)] == 1),
        model.tokenizer,
        model.source_tokenizer,
    ]  # need no copy: replaced, or immutable
    small = copy.deepcopy(model, {id(x): x for x in shared if x is not None})
    replaced: dict[nn.Linear, QuantizedLinear] = {}
    for part, name, layer in list(projections(small)):
        replaced[layer] = replaced.get(layer) or QuantizedLinear(layer, quantization.quantize(layer.weight))
        setattr(part, name, replaced[layer])
    if table is not None:
        head = small.head
        holder = small.tokens if isinstance(head, LogitsHead) and head.weight is None else head
        assert isinstance(holder, nn.Module)
        holder.__class__ = QuantizedEmbedding if holder is small.tokens else QuantizedHead
        assert isinstance(holder, Quantized)
        holder.set_weight(quantization.quantize(table))
    return small.requires_grad_(False).eval()


def quantize_base(model: Transformer, quantization: Quantization) -> None:
    """Quantize projections and experts of a model in place, to be frozen while adapters on it are trained.

    Head and embedding stay as they are, as in QLoRA.

    >>> from phasor import preset
    >>> model = Transformer(preset("llama-2", dim=64, num_heads=4, num_layers=1, vocab_size=100))
    >>> quantize_base(model, Quantization(NF4))
    >>> model.decoder.blocks[0].feedforward.down
    QuantizedLinear(in_features=172, out_features=64, bias=False, bits=nf4)
    """
    for name, each in base_weights(model).items():
        each.quantize(model.get_parameter(name), quantization)


def has_quantized_weights(model: nn.Module) -> bool:
    """Whether a model has quantized weights.

    >>> has_quantized_weights(nn.Linear(2, 2))
    False
    """
    return any(isinstance(part, Quantized) for part in model.modules())


def quantization_of(model: nn.Module) -> Quantization | None:
    """How the weights of a model are quantized; None where they are not.

    >>> quantization_of(nn.Linear(2, 2)) is None
    True
    """
    parts = [part for part in model.modules() if isinstance(part, Quantized)]
    if any(part.nested_scales is not None for part in parts):
        return Quantization(NF4)
    groups = (2 * part.weight.shape[1] // part.scales.shape[1] for part in parts if part.weight.dtype == torch.uint8)
    group_size = next(groups, None)
    if group_size is not None:
        return Quantization(4, group_size)
    return Quantization() if parts else None


def quantize_like(model: Transformer, other: nn.Module) -> Transformer:
    """A model quantized as another one is."""
    quantization = quantization_of(other)
    assert quantization is not None
    return quantize(model, quantization.bits, group_size=quantization.group_size)


def projections(model: Transformer) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """The layers of the blocks whose weights can be quantized: the parent module, the name in it, and the layer."""
    for block in (part for part in model.modules() if isinstance(part, Block)):
        for part in (part for part in block.modules() if isinstance(part, Attention | FeedForward)):
            for name, layer in part.quantizable() if isinstance(part, Attention) else part.named_children():
                if type(layer) is nn.Linear and calls_own_forward(layer) and type(layer.weight) is nn.Parameter:
                    yield part, name, layer


class BaseWeight(NamedTuple):
    """A weight that is quantized in a frozen base: the part of the model that has it, under which name, and the part
    that takes its place, by its name in the model. The layer is absent for matrices of experts.
    """

    part: nn.Module
    name: str
    place: str
    layer: nn.Linear | None

    def quantize(self, weight: Tensor, quantization: Quantization) -> Quantized:
        """Put the quantized weight in its place."""
        if self.layer is None:
            return quantize_stack(cast(Experts, self.part), self.name, weight, quantization)
        held = QuantizedLinear(self.layer, quantization.quantize(weight)).requires_grad_(False)
        setattr(self.part, self.name, held)
        return held


def base_weights(model: Transformer) -> dict[str, BaseWeight]:
    """The weights of a model that a frozen base can have quantized: projections of blocks, and routed experts.

    >>> from phasor import preset
    >>> model = Transformer(preset("gpt-2", dim=32, num_heads=2, num_layers=1, vocab_size=50))
    >>> list(base_weights(model))[0]
    'decoder.blocks.0.attention.qkv.weight'
    """
    names = {module: name for name, module in model.named_modules()}
    places = {f"{names[part]}.{name}": (part, name, layer) for part, name, layer in projections(model)}
    found = {f"{place}.weight": BaseWeight(part, name, place, layer) for place, (part, name, layer) in places.items()}
    for experts, path in names.items():
        if type(experts) is Experts and experts.first_expert is None and calls_own_forward(experts):
            found |= {f"{path}.{name}": BaseWeight(experts, name, f"{path}.{name}", None) for name in ("up", "down")}
    return found


def unquantized_weights(model: nn.Module) -> dict[str, Tensor]:
    """A model's tensors by name, with an empty tensor on the meta device for each weight that is quantized.

    >>> layer = QuantizedLinear(nn.Linear(64, 32, bias=False))
    >>> {name: weight.shape for name, weight in unquantized_weights(nn.Sequential(layer)).items()}
    {'0.weight': torch.Size([32, 64])}
    """
    found = dict(model.state_dict())
    for place, part in model.named_modules():
        if isinstance(part, Quantized):
            for name in part.FIXED:
                found.pop(f"{place}.{name}", None)
            name = place if isinstance(part, QuantizedStack) else f"{place}.weight"
            found[name] = torch.empty(part.full_shape, device="meta")
    return found


def output_weight(model: Transformer) -> Tensor | None:
    """The weight of the output projection; None where it cannot be quantized."""
    head = model.head
    if type(head) is not LogitsHead or not calls_own_forward(head):
        return None
    if head.weight is None and not (type(model.tokens) is Embedding and calls_own_forward(model.tokens)):
        return None
    table = model.tokens.weight if head.weight is None else head.weight
    return table if type(table) is nn.Parameter else None
