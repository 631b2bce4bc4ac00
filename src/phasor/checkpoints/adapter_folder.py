"""phasor's own adapter folders: adapter.json, which names the base by folder and hash, and adapter.safetensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from phasor.adapters import (
    Adapter,
    BaseModel,
    PartConfig,
    adapter_names,
    adapter_tensors,
    attach,
    is_adapter_weight,
)
from phasor.checkpoints.folder import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    SPECIAL,
    read_generation_settings,
    read_json,
    read_special,
    read_tokenizers,
    special_fields,
    write_json,
    write_tokenizers,
)
from phasor.checkpoints.native import find_misfits
from phasor.checkpoints.opened import OpenedModel
from phasor.checkpoints.swap_positions import carry_over
from phasor.checkpoints.tensors import Tensors, TensorSource, write_sources
from phasor.config import ModelConfig
from phasor.config.schema import name_some
from phasor.nn.lora import LoRA
from phasor.transformer import Transformer

FIELDS = ("kind", "dropout", "layers", "base", "model")


@dataclass
class StoredAdapter:
    """An adapter as it was read: its tensors by the names that its files have, and what a run changed of the base.

    `model` is the configuration it was trained with, and `read_extras` gives a model its special tokens and tokenizers.
    """

    place: Path
    base: BaseModel | None
    adapter: Adapter
    tensors: dict[str, Tensor]
    model: ModelConfig | None = None
    read_extras: Callable[[Transformer], None] = field(default=lambda model: None)

    def for_model(self, model: Transformer) -> StoredAdapter:
        """The same under the names of a model's layers, where its files have those of another library."""
        return self


def describe_adapter(adapter: Adapter, model: ModelConfig) -> dict[str, Any]:
    """An adapter as JSON has it, but for its tensors."""
    return {
        "kind": adapter.kind,
        "dropout": adapter.dropout,
        "base": None if adapter.base is None else adapter.base.to_dict(),
        "layers": {
            layer: {name: part.to_dict() for name, part in parts.items()} for layer, parts in adapter.layers.items()
        },
        "model": model.to_dict(),
    }


def parse_adapter(data: Mapping[str, Any], file: Path) -> tuple[Adapter, ModelConfig]:
    """The inverse of `describe_adapter`."""
    try:
        if set(data) != set(FIELDS) or data["kind"] not in ("lora", "rslora", "dora"):
            raise ValueError(f"it must have the fields {', '.join(FIELDS)}, and these alone")
        layers = {
            str(layer): {str(name): PartConfig.from_dict(part) for name, part in dict(parts).items()}
            for layer, parts in dict(data["layers"]).items()
        }
        dropout = float(data["dropout"])
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), not {dropout}")
        base = None if data["base"] is None else BaseModel.from_dict(data["base"])
        model = ModelConfig.from_dict(data["model"])
        return Adapter(data["kind"], dropout, layers, base), model
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} does not describe an adapter: {error}") from None


def read_adapter(folder: Path) -> StoredAdapter:
    """The adapter in a folder of ours."""
    adapter, config = parse_adapter(read_json(folder / ADAPTER), folder / ADAPTER)
    with Tensors(folder, ADAPTER_WEIGHTS) as opened:
        tensors = {name: opened.get(name) for name in opened.names}

    def read_extras(model: Transformer) -> None:
        special = read_json(folder / SPECIAL)
        model.special = read_special(special, folder / SPECIAL)
        model.generation_settings = read_generation_settings(special)
        read_tokenizers(model, folder)

    return StoredAdapter(folder, adapter.base, adapter, tensors, config, read_extras)


def write_adapter(model: Transformer, folder: Path, name: str, sources: Sequence[TensorSource] | None = None) -> None:
    """Write an adapter into an empty folder; `sources` make the model's weights where it does not hold them."""
    adapter: Adapter = model.adapters[name]
    write_json(folder / ADAPTER, describe_adapter(adapter, model.config))
    write_json(folder / SPECIAL, special_fields(model.special) | model.generation_settings)
    write_tokenizers(model, None if model.origin is None else model.origin.folder, folder)
    if sources is None:
        held = adapter_tensors(model, name)
        sources = [TensorSource(key, x.dtype, tuple(x.shape), lambda x=x: x) for key, x in held.items()]  # type: ignore[misc]
    else:
        made = {source.name: source for source in sources}
        sources = [replace(made[ours], name=theirs) for theirs, ours in adapter_names(model, name).items()]
    write_sources(folder / ADAPTER_WEIGHTS, sources)


def add_adapters(opened: OpenedModel, stored: Mapping[str, tuple[StoredAdapter, float]]) -> OpenedModel:
    """A model that is open with adapters by name, each used with a weight."""
    model = with_config(opened.model, [each for each, _ in stored.values()])
    base = opened.model.state_dict()
    own: dict[str, Tensor] = {}
    for name, (given, _) in stored.items():
        each = given.for_model(model)
        whole = {key: x for key, x in each.tensors.items() if not is_adapter_weight(key)}
        added = {key: x for key, x in whole.items() if key not in base or x.shape != base[key].shape}
        each.adapter.whole = tuple(whole)
        each.adapter.saved = {key: x for key, x in whole.items() if key not in added}
        attach(model, each.adapter, name)
        names, held = adapter_names(model, name), model.state_dict()
        expected = {key: tuple(held[ours].shape) for key, ours in names.items() if ours in held}
        if wrong := find_misfits(expected, {key: tuple(x.shape) for key, x in each.tensors.items()}):
            raise ValueError(f"the adapter {each.place} does not fit the model: {name_some(wrong, separator='; ')}")
        own |= {ours: each.tensors[key] for key, ours in names.items() if key not in each.adapter.saved}
        each.read_extras(model)
        for layer in each.adapter.layers:
            cast(LoRA, cast(nn.ModuleDict, model.get_submodule(layer).lora)[name]).strength = stored[name][1]

    def read(name: str, device: torch.device) -> Tensor:
        return own[name] if name in own else opened.read(name, device)

    weights = {name: weight for name, (_, weight) in stored.items()}
    return replace(opened, model=model, read=read, adapters=weights)


def with_config(model: Transformer, stored: Sequence[StoredAdapter]) -> Transformer:
    """A model on the meta device with the configuration that its adapters were trained with, such as other lengths."""
    configs = [each.model for each in stored if each.model is not None and each.model != model.config]
    if not configs:
        return model
    if any(config != configs[0] for config in configs):
        raise ValueError("adapters that were trained with different configurations of the base are used one at a time")
    with torch.device("meta"):
        changed = Transformer(configs[0]).to(model.tokens.dtype)
    whole = {name for each in stored for name in each.tensors}  # such as the head of another task
    before, after = ({n: tuple(x.shape) for n, x in m.state_dict().items()} for m in (model, changed))
    kept = {name: shape for name, shape in after.items() if name not in whole}
    if wrong := find_misfits(kept, {name: shape for name, shape in before.items() if name in kept}):
        raise ValueError(f"the adapter {stored[0].place} is for another model: {name_some(wrong, separator='; ')}")
    carry_over(model, changed)
    return changed
