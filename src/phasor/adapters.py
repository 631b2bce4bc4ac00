"""Adapters of a model: low-rank updates that are added to its layers, put in use by name and weight, and merged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from phasor.config.lora import Kind, LoRAConfig, Target, lora_scale
from phasor.config.schema import Config, quote, unknown
from phasor.models import families
from phasor.models.modules import fused_modules
from phasor.nn.adapted import (
    LoRAEmbedding,
    LoRAExperts,
    LoRAHead,
    adapt,
    adapters_of,
    effective_weight,
    full_weight,
    strip_adapters,
)
from phasor.nn.attention.base import Attention
from phasor.nn.attention.latent.indexer import Indexer
from phasor.nn.embedding import Embedding
from phasor.nn.feed_forward import FeedForward
from phasor.nn.heads import DenseLayer, LogitsHead
from phasor.nn.lora import EmbeddingLowRank, ExpertsLowRank, LoRA, LowRank
from phasor.nn.moe import Experts
from phasor.nn.positions.base import Position
from phasor.transformer import Transformer

SplitRows = dict[str, dict[str, Tensor]]  # of layers that were fused, the rows of each part by its name
WHOLE = "whole"  # the one part of a layer that was not fused of several
DEFAULT = "default"  # the name of an adapter that is given none


class PartConfig(Config):
    """The update of one part of a layer: its rank, alpha, and number of rows where the layer has others."""

    rank: int
    alpha: float
    rows: int | None = None


class BaseModel(Config):
    """The model that an adapter is for: its folder as it was given, and the hash of its weights."""

    folder: str
    sha256: str


@dataclass
class Adapter:
    """What an adapter consists of: the parts of each layer, and the names of weights that it has whole.

    Of an adapter that was loaded the latter are in `saved`, and the base's in `originals` while it is in use; one that
    is trained has them in the model.
    """

    kind: Kind
    dropout: float
    layers: dict[str, dict[str, PartConfig]]
    base: BaseModel | None = None
    whole: tuple[str, ...] = ()
    saved: dict[str, Tensor] = field(default_factory=dict)
    originals: dict[str, Tensor] = field(default_factory=dict)
    peft: dict[str, Any] | None = None  # its adapter_config.json, where it was read from PEFT's files


class AdaptableLayer(NamedTuple):
    """A layer that can have an adapter, by its name in the model; None is the target of what no choice names."""

    name: str
    module: nn.Module
    target: Target | None


def adaptable_layers(model: Transformer) -> Iterator[AdaptableLayer]:
    """The layers that adapters are made for, in the model's order.

    Routers and the indexers of sparse attention, which choose, are not among them, nor are layers of positions, whose
    weights are read and not called.
    """
    outside = (module for module in model.modules() if isinstance(module, Indexer | Position))
    left_out = {id(part) for module in outside for part in module.modules()}
    left_out |= {id(router) for module in model.modules() if isinstance(module, Experts) for router in module.routers}
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


def add_adapter(
    model: Transformer, config: LoRAConfig, name: str = DEFAULT, *, dtype: torch.dtype | None = None
) -> Adapter:
    """Add a fresh adapter to a model, which changes nothing yet; A is drawn from torch's default generator.

    Its weights have the dtype of the layers unless another is asked for.

    >>> from phasor import preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50))
    >>> before = model(torch.tensor([[1, 2, 3]]))
    >>> adapter = add_adapter(model, LoRAConfig(rank=4))
    >>> list(adapter.layers["decoder.blocks.0.attention.qkv"]), torch.equal(model(torch.tensor([[1, 2, 3]])), before)
    (['q', 'k', 'v'], True)
    """
    split = split_rows(model)
    rows: dict[str, dict[str, Tensor]] = {}
    layers: dict[str, dict[str, PartConfig]] = {}
    for layer in adaptable_layers(model):
        if layer.target in config.targets:
            rows[layer.name] = split.get(layer.name, {})
            parts: Iterable[str] = ("up", "down") if layer.target == "experts" else rows[layer.name] or (WHOLE,)
            layers[layer.name] = {
                part: PartConfig(
                    rank=config.rank,
                    alpha=config.alpha,
                    rows=len(rows[layer.name][part]) if part in rows[layer.name] else None,
                )
                for part in parts
            }
    missing = [target for target in config.targets if target not in {each.target for each in adaptable_layers(model)}]
    if missing:
        raise ValueError(f"LoRAConfig.targets has {missing[0]!r}, and this model has none")
    adapter = Adapter(config.kind, config.dropout, layers)
    attach(model, adapter, name, rows, dtype=dtype)
    reset_magnitudes(model, name)
    return adapter


def attach(
    model: Transformer,
    adapter: Adapter,
    name: str = DEFAULT,
    rows: Mapping[str, Mapping[str, Tensor]] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Add an adapter to the layers of a model, on the device and in the dtype of each.

    Without `rows` those of parts are to be loaded, with the weights.
    """
    check_name(model, name)
    layers = dict(model.named_modules())
    for path, parts in adapter.layers.items():
        if path not in layers:
            raise ValueError(f"the adapter is for another model: this one has no layer {path}")
        like = next(layers[path].parameters(), model.tokens.weight)
        with torch.device("meta" if like.is_meta else "cpu"):
            lora = build_lora(model, layers[path], parts, adapter, {} if rows is None else rows.get(path, {}))
        own = like.dtype if dtype is None and like.is_floating_point() else dtype
        adapt(layers[path], name, lora.to(like.device, own))
    model.adapters[name] = adapter


def check_name(model: Transformer, name: str) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"the name of an adapter is made of letters, digits and underscores, not {quote(name)}")
    if name in model.adapters:
        raise ValueError(f"the model has an adapter {name!r} already")


def build_lora(
    model: Transformer, layer: Any, parts: Mapping[str, PartConfig], adapter: Adapter, rows: Mapping[str, Tensor]
) -> LoRA:
    """The updates of a layer's parts, initialized; rows that are not given are zero."""
    built: dict[str, nn.Module] = {}
    for name, part in parts.items():
        scale = lora_scale(adapter.kind, part.rank, part.alpha)
        if isinstance(layer, Experts):
            matrices = getattr(layer, name)
            built[name] = ExpertsLowRank(matrices.shape, part.rank, scale)
            continue
        out_features, in_features = matrix_shape(model, layer)
        own = rows.get(name)
        if own is None and part.rows is not None:
            own = torch.zeros(part.rows, dtype=torch.int32)
        kind = EmbeddingLowRank if isinstance(layer, Embedding) else LowRank
        built[name] = kind(
            out_features if own is None else len(own),
            in_features,
            part.rank,
            scale,
            has_magnitude=adapter.kind == "dora",
            rows=own,
        )
    out_features = 0 if isinstance(layer, Experts) else matrix_shape(model, layer)[0]
    return LoRA(built, out_features, adapter.dropout)


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
        weights = {name: weight for name, weight in model.state_dict().items() if not is_extra(name)}
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


def is_adapter_weight(name: str) -> bool:
    """Whether a tensor of a model belongs to an adapter, by its name.

    >>> is_adapter_weight("tokens.lora.default.whole.A"), is_adapter_weight("tokens.weight")
    (True, False)
    """
    return ".lora." in name


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


@torch.no_grad()
def reset_magnitudes(model: Transformer, name: str) -> None:
    """Set the magnitudes of a DoRA adapter to those of the weights it is for; on the meta device nothing happens."""
    for layer in model.modules():
        lora = adapters_of(layer).get(name)
        if lora is not None and lora.has_magnitude and not next(lora.parameters()).is_meta:
            lora.reset_magnitude(matrix_of(layer, model))


def matrix_of(layer: Any, model: Transformer) -> Tensor:
    """The matrix `[out, in]` that the adapter of a layer updates."""
    if isinstance(layer, Embedding):
        return layer.weight.t()
    if isinstance(layer, LogitsHead):
        return cast(Tensor, layer.table(model.tokens.table))
    return full_weight(layer)


def adapter_weights(model: Transformer, name: str, rows: SplitRows) -> Iterator[tuple[str, Tensor]]:
    """The weights of a fresh adapter one layer after another, for a model on the meta device that has it.

    They are drawn as `add_adapter` draws them; magnitudes are one.
    """
    layers = dict(model.named_modules())
    for path, parts in model.adapters[name].layers.items():
        lora = build_lora(model, layers[path], parts, model.adapters[name], rows.get(path, {}))
        yield from ((f"{path}.lora.{name}.{key}", x.detach()) for key, x in lora.state_dict().items())


def initial_magnitudes(
    model: Transformer, name: str, rows: SplitRows, given: str, weight: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """The magnitudes of a fresh DoRA adapter that follow from a weight of a base, which is given with its name."""
    adapter: Adapter = model.adapters[name]
    tied = isinstance(model.head, LogitsHead) and model.head.weight is None
    for path, parts in adapter.layers.items() if adapter.kind == "dora" else ():
        layer = model.get_submodule(path)
        if given == ("tokens.weight" if tied and layer is model.head else f"{path}.weight"):
            split = rows.get(path, {})
            matrix = weight.t() if isinstance(layer, Embedding) else weight
            for part in parts:
                own = matrix[split[part]] if part in split else matrix
                yield f"{path}.lora.{name}.{part}.magnitude", torch.linalg.vector_norm(own, dim=1)


def adapter_names(model: Transformer, name: str = DEFAULT) -> dict[str, str]:
    """The names of an adapter's tensors in a model, by those that its files have: without the adapter's own.

    >>> from phasor import preset
    >>> model = Transformer(preset("gpt-2", dim=32, num_heads=2, num_layers=1, vocab_size=50))
    >>> _ = add_adapter(model, LoRAConfig(targets=("embedding",)), "mine")
    >>> adapter_names(model, "mine")
    {'tokens.lora.whole.A': 'tokens.lora.mine.whole.A', 'tokens.lora.whole.B': 'tokens.lora.mine.whole.B'}
    """
    middle = f".lora.{name}."
    updates = {key.replace(middle, ".lora."): key for key in model.state_dict() if middle in key}
    return updates | {key: key for key in model.adapters[name].whole}


def adapter_tensors(model: Transformer, name: str) -> dict[str, Tensor]:
    """The tensors of an adapter under the names that its files have."""
    held = dict(model.state_dict()) | model.adapters[name].saved
    return {theirs: held[ours] for theirs, ours in adapter_names(model, name).items()}


def set_adapters(model: Transformer, adapters: str | Sequence[str] | Mapping[str, float]) -> None:
    """Put adapters in use, each with a weight that its update is multiplied by; all others are out of use.

    What several adapters change is added up: `W x + w_a s_a B_a A_a x + w_b s_b B_b A_b x`, which is PEFT's
    `add_weighted_adapter` with the combination "cat". Weights that an adapter has whole take the place of the base's.

    >>> from phasor import preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50))
    >>> _ = add_adapter(model, LoRAConfig(rank=4), "a"), add_adapter(model, LoRAConfig(rank=8), "b")
    >>> set_adapters(model, {"a": 0.5, "b": 1.0})
    >>> set_adapters(model, "b")
    """
    names = [adapters] if isinstance(adapters, str) else list(adapters)
    weights = {name: float(adapters[name]) if isinstance(adapters, Mapping) else 1.0 for name in names}
    for name in names:
        if name not in model.adapters:
            raise unknown("adapter", name, model.adapters)
    owners: dict[str, str] = {}
    for name, weight in weights.items():
        for tensor in model.adapters[name].saved if weight else ():
            if weight != 1.0:
                raise ValueError(
                    f"the adapter {name!r} has {tensor} whole, so it is used with the weight 1 or not at all"
                )
            if tensor in owners:
                raise ValueError(
                    f"the adapters {owners[tensor]!r} and {name!r} both have {tensor} whole: use one of them"
                )
            owners[tensor] = name
    for layer in model.modules():
        for name, lora in adapters_of(layer).items():
            lora.strength = weights.get(name, 0.0)
    held = dict(model.named_parameters())
    for name, adapter in model.adapters.items():
        for tensor, original in adapter.originals.items():
            held[tensor].data = original
        adapter.originals = {}
        if weights.get(name):
            adapter.originals = {tensor: held[tensor].data for tensor in adapter.saved}
            for tensor, own in adapter.saved.items():
                held[tensor].data = own.to(held[tensor])


def used_adapters(model: Transformer) -> dict[str, float]:
    """The adapters of a model that are in use, with their weights."""
    return {
        name: lora.strength for layer in model.modules() for name, lora in adapters_of(layer).items() if lora.strength
    }


@contextmanager
def disable_adapters(model: Transformer) -> Iterator[None]:
    """Use a model without its adapters inside a `with`: it is the base.

    >>> from phasor import preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50))
    >>> _ = add_adapter(model, LoRAConfig())
    >>> with disable_adapters(model):
    ...     used_adapters(model)
    {}
    >>> used_adapters(model)
    {'default': 1.0}
    """
    used = used_adapters(model)
    set_adapters(model, [])
    try:
        yield
    finally:
        set_adapters(model, used)


@torch.no_grad()
def merge_adapters(model: Transformer) -> None:
    """Put what a model's adapters in use change into its weights, and leave it without adapters.

    A head that is tied gets a matrix of its own where an adapter changes it, or changes the table alone.
    """
    tokens, head = model.tokens, model.head
    tied = isinstance(head, LogitsHead) and head.weight is None
    if tied and (adapters_of(tokens) or adapters_of(cast(nn.Module, head))):
        table = head.merged_table(tokens.weight) if isinstance(head, LoRAHead) else tokens.weight.clone()
        cast(LogitsHead, head).weight = nn.Parameter(table)
        model.config = model.config.replace(embedding=model.config.embedding.replace(tied=False))
    elif isinstance(head, LoRAHead):
        cast(nn.Parameter, head.weight).data = head.merged_table(tokens.weight)
    for layer in model.modules():
        if isinstance(layer, LoRAEmbedding):
            layer.weight.data = layer.merged_table()
        elif isinstance(layer, LoRAExperts):
            layer.up.data, layer.down.data = layer.merged_matrices("up"), layer.merged_matrices("down")
        elif adapters_of(layer) and not isinstance(layer, LoRAHead):
            cast(nn.Linear, layer).weight.data = effective_weight(layer)
    for layer in list(model.modules()):
        strip_adapters(layer)
    model.adapters = {}
