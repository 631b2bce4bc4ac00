"""The layers of a model that can have an adapter, and the rows of those that were fused of several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from phasor.adapters.adapter import is_adapter_weight
from phasor.config.lora import Target
from phasor.models import families
from phasor.models.modules import fused_modules
from phasor.nn.attention.base import Attention
from phasor.nn.embedding import Embedding
from phasor.nn.feed_forward import FeedForward
from phasor.nn.heads import DenseLayer, LogitsHead
from phasor.nn.lora_hook import full_weight
from phasor.nn.moe import Experts
from phasor.nn.positions.base import Position
from phasor.quantization import unquantized_weights
from phasor.transformer import Transformer

SplitRows = dict[str, dict[str, Tensor]]  # of layers that were fused, the rows of each part by its name


class AdaptableLayer(NamedTuple):
    """A layer that can have an adapter, by its name in the model; None is the target of what no choice names."""

    name: str
    module: nn.Module
    target: Target | None


def adaptable_layers(model: Transformer) -> Iterator[AdaptableLayer]:
    """The layers that adapters are made for, in the model's order.

    Routers are not among them, nor are parts of attention that choose tokens, nor layers of positions, whose weights
    are read and not called.
    """
    outside: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, Attention):
            outside += module.without_adapters()
        elif isinstance(module, Experts):
            outside += module.routers
        elif isinstance(module, Position):
            outside.append(module)
    left_out = {id(part) for module in outside for part in module.modules()}
    targets: dict[int, Target] = {}
    for module in model.modules():
        kinds: tuple[tuple[type, Target], ...] = ((Attention, "attention"), (FeedForward, "feedforward"))
        for kind, target in kinds:
            if isinstance(module, kind):
                targets |= {id(part): target for part in module.modules() if is_linear(part)}
    if model.head is not None:
        targets |= {id(part): "head" for part in model.head.modules() if is_linear(part)}
    for name, module in model.named_modules():
        if isinstance(module, Embedding):
            yield AdaptableLayer(name, module, "embedding")
        elif isinstance(module, Experts):
            yield AdaptableLayer(name, module, "experts")
        elif isinstance(module, LogitsHead):
            yield AdaptableLayer(name, module, "head")
        elif is_linear(module) and id(module) not in left_out:
            yield AdaptableLayer(name, module, targets.get(id(module)))


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a matrix product with the weights that it says it has."""
    return hasattr(module, "in_features") and hasattr(module, "out_features") and not isinstance(module, DenseLayer)


def matrix_shape(model: Transformer, layer: Any) -> tuple[int, int]:
    """The shape `[out, in]` of what an adapter updates."""
    if isinstance(layer, Embedding):
        return layer.weight.shape[1], layer.weight.shape[0]
    if isinstance(layer, LogitsHead):
        return model.config.vocab_size, model.config.embedding.width or model.config.dim
    return layer.out_features, layer.in_features


def split_rows(model: Transformer) -> SplitRows:
    """The rows of each part of the layers that were fused of several.

    They are as in the family of the folder that the model came from, and otherwise by what the rows compute.
    """
    family = None if model.origin is None else model.origin.family
    if family in families.names():
        weights = {name: weight for name, weight in unquantized_weights(model).items() if not is_extra(name)}
        fused = fused_modules(families.family(family), model.config, weights)
        return {
            layer: {module.name.rpartition(".")[2]: module.rows for module in modules if module.rows is not None}
            for layer, modules in fused.items()
            if len(modules) > 1
        }
    found: dict[str, dict[str, Tensor]] = {}
    for name, module in model.named_modules():
        linears = {id(part): inner for inner, part in module.named_children()}
        if isinstance(module, Attention):
            for linear, rows in module.rows_by_role():
                if len(rows) > 1:
                    parts = {role: row_numbers(linear.weight, view) for view, role, _ in rows}
                    found[f"{name}.{linears[id(linear)]}"] = parts
        elif isinstance(module, FeedForward) and module.config.gated:
            gate, up = torch.arange(module.up.out_features).chunk(2)
            found[f"{name}.up"] = {"gate": gate, "up": up}
    return found


def is_extra(name: str) -> bool:
    """Whether a tensor is no weight of the model that a family names: of an adapter, or of layers beside the model."""
    return is_adapter_weight(name) or name.startswith("pooler.layers.")


def row_numbers(weight: Tensor, view: Tensor) -> Tensor:
    """Which rows of a matrix `[out, in]` a view `[..., in]` has.

    >>> row_numbers(weight := torch.empty(6, 5), weight.unflatten(0, (2, 3))[:, 1:]).tolist()
    [1, 2, 4, 5]
    """
    width = weight.stride(0)
    first = (view.storage_offset() - weight.storage_offset()) // width
    return (
        torch.arange(len(weight)).as_strided(view.shape[:-1], [s // width for s in view.stride()[:-1]], first).flatten()
    )


def matrix_of(layer: Any, model: Transformer) -> Tensor:
    """The matrix `[out, in]` that the adapter of a layer updates."""
    if isinstance(layer, Embedding):
        return layer.weight.t()
    if isinstance(layer, LogitsHead):
        return cast(Tensor, layer.table(model.tokens.table))
    return full_weight(layer)
