"""Add adapters to a model, fresh or as they are described."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from phasor.adapters.adapter import DEFAULT, WHOLE, Adapter, PartConfig
from phasor.adapters.layers import SplitRows, adaptable_layers, matrix_of, matrix_shape, split_rows
from phasor.config.lora import DEFAULT_TARGETS, LoRAConfig, lora_scale
from phasor.config.schema import quote
from phasor.nn.adapted import adapt
from phasor.nn.embedding import Embedding
from phasor.nn.heads import LogitsHead
from phasor.nn.lora import EmbeddingLowRank, ExpertsLowRank, LoRA, LowRank
from phasor.nn.lora_hook import adapters_of
from phasor.nn.moe import Experts
from phasor.transformer import Transformer


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
    present = {layer.target for layer in adaptable_layers(model)}
    targets = config.targets or tuple(target for target in DEFAULT_TARGETS if target in present)
    for layer in adaptable_layers(model):
        if layer.target in targets:
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
    missing = [target for target in targets or DEFAULT_TARGETS if target not in present]
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
            shapes = matrix_shapes(model, layers[path], parts)
            lora = build_lora(layers[path], shapes, parts, adapter, {} if rows is None else rows.get(path, {}))
        own = like.dtype if dtype is None and like.is_floating_point() else dtype
        adapt(layers[path], name, lora.to(like.device, own))
    model.adapters[name] = adapter


def check_name(model: Transformer, name: str) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"the name of an adapter is made of letters, digits and underscores, not {quote(name)}")
    if hasattr(nn.ModuleDict(), name):
        raise ValueError(f"an adapter cannot have the name {name!r}, which is that of something in torch's modules")
    if name in model.adapters:
        raise ValueError(f"the model has an adapter {name!r} already")


def matrix_shapes(model: Transformer, layer: Any, parts: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """The shapes of the matrices that the parts of a layer's adapter update, or update some rows of."""
    if isinstance(layer, Experts):
        return {name: tuple(getattr(layer, name).shape) for name in parts}
    return dict.fromkeys(parts, matrix_shape(model, layer))


def build_lora(
    layer: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    parts: Mapping[str, PartConfig],
    adapter: Adapter,
    rows: Mapping[str, Tensor],
) -> LoRA:
    """The updates of a layer's parts, initialized; rows that are not given are zero."""
    built: dict[str, nn.Module] = {}
    out_features = 0
    for name, part in parts.items():
        scale = lora_scale(adapter.kind, part.rank, part.alpha)
        if isinstance(layer, Experts):
            built[name] = ExpertsLowRank(shapes[name], part.rank, scale)
            continue
        out_features, in_features = shapes[name]
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
    return LoRA(built, out_features, adapter.dropout)


@torch.no_grad()
def reset_magnitudes(model: Transformer, name: str) -> None:
    """Set the magnitudes of a DoRA adapter to those of the weights it is for; on the meta device nothing happens."""
    for layer in model.modules():
        lora = adapters_of(layer).get(name)
        if lora is not None and lora.has_magnitude and not next(lora.parameters()).is_meta:
            lora.reset_magnitude(matrix_of(layer, model))


def adapter_weights(model: Transformer, name: str, rows: SplitRows) -> Iterator[tuple[str, Tensor]]:
    """The weights of a fresh adapter one layer after another, for a model on the meta device that has it.

    They are drawn as `add_adapter` draws them; magnitudes are one. The model may be cut before they are read.
    """
    layers, adapter = dict(model.named_modules()), model.adapters[name]
    shapes = {path: matrix_shapes(model, layers[path], parts) for path, parts in adapter.layers.items()}

    def draw() -> Iterator[tuple[str, Tensor]]:
        for path, parts in adapter.layers.items():
            lora = build_lora(layers[path], shapes[path], parts, adapter, rows.get(path, {}))
            yield from ((f"{path}.lora.{name}.{key}", x.detach()) for key, x in lora.state_dict().items())

    return draw()


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
