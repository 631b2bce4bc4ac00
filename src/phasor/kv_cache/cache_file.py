"""A cache as one safetensors file: its tensors by name, everything else as JSON in the header."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from phasor.config import ModelConfig
from phasor.config.cached import CachedTensor
from phasor.config.schema import name_some, quote
from phasor.files import atomic_write, safetensors_errors
from phasor.kv_cache.protocol import EncoderOutput

if TYPE_CHECKING:
    from phasor.kv_cache.dynamic import KVCache

Cache = TypeVar("Cache", bound="KVCache")
PER_ROW = ("counts", "peaks", "prefixes")
STATE = "state_"  # begins the names of what layers keep of rows
FORMAT = 2  # which slots a layer has, and what their keys are


def write_cache(cache: KVCache, path: Path) -> None:
    """Write all that a cache holds."""
    metadata = {
        "format": FORMAT,
        "config": cache.config.to_dict(),
        "batch_size": cache.batch_size,
        "max_length": cache.max_length,
        "spare": cache.spare,
        "length": cache.lengths,
        **{name: getattr(cache, name) for name in PER_ROW},
        "next_positions": cache.next_positions if isinstance(cache.next_positions, int) else None,
    }
    tensors = {name: x.contiguous() for name, x in tensors_of(cache).items()}
    with atomic_write(path, unique=True) as staged, safetensors_errors():
        save_file(tensors, staged, {"cache": json.dumps(metadata)})


def read_cache(cls: type[Cache], path: Path, device: torch.device | str) -> Cache:
    """A cache from the file that `write_cache` wrote."""
    try:
        if not path.is_file():
            raise ValueError("there is no such file")
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = json.loads((file.metadata() or {})["cache"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return restore(cls, metadata, tensors)
    except KeyError as error:
        raise ValueError(f"{path} is not a cache that phasor saved: it has no {error}") from None
    except (SafetensorError, ValueError, TypeError, RecursionError, OSError) as error:
        raise ValueError(f"{path} is not a cache that phasor saved: {error}") from None


def restore(cls: type[Cache], metadata: dict[str, Any], tensors: dict[str, Tensor]) -> Cache:
    """The cache of a file's contents, whose every claim is compared with the tensors before it is believed."""
    if metadata["format"] != FORMAT:
        raise ValueError(f"this version reads the format {FORMAT}, and the file is of another: read its tokens again")
    config, rows = ModelConfig.from_dict(metadata["config"]), metadata["batch_size"]
    keeping = {str(index) for index in range(config.num_layers) if kept_by_layer(config, index)}
    of_layers = (name for name in tensors if not name.startswith(("positions.", "document_ids.")))
    if keeping != {name.rpartition(".")[2] for name in of_layers if name[-1:].isdigit()}:
        raise ValueError(f"its configuration has {config.num_layers} layers, and its tensors have not")
    cache = cls(
        config,
        rows,
        metadata["max_length"],
        length=metadata["length"],
        spare=metadata["spare"],
        device="meta",
        dtype=activation_dtype(config, tensors),
    )
    for name in PER_ROW:
        values = metadata[name]
        if not isinstance(values, list) or len(values) != rows or any(type(n) is not int or n < 0 for n in values):
            raise ValueError(f"{name} must be {rows} integers, not {quote(values)}")
        setattr(cache, name, values)
    if max(cache.peaks) > cache.max_length and not cache.endless:
        raise ValueError(f"it holds at most {cache.max_length} tokens, and claims {max(cache.peaks)}")
    if any(count > peak for count, peak in zip(cache.counts, cache.peaks, strict=True)):
        raise ValueError(f"its rows hold {quote(cache.counts)} tokens, more than they ever did")
    next_positions = tensors.get("next_positions", metadata["next_positions"])
    if not isinstance(next_positions, Tensor) and type(next_positions) is not int:
        raise ValueError(f"next_positions must be an integer, not {quote(next_positions)}")
    cache.next_positions = next_positions
    cache.origins = tensors.get("origins")
    for name, x in (("next_positions", cache.next_positions), ("origins", cache.origins)):
        if isinstance(x, Tensor) and (x.dtype != torch.int64 or x.shape not in ((rows,), (rows, 1))):
            raise ValueError(f"{name} must be {rows} integers, not {x.dtype} {list(x.shape)}")
    if any(name.startswith("document_ids.") for name in tensors):
        cache.document_ids = cache.new_table()
    if "memory.hidden" in tensors:
        attention_mask, document_ids = tensors.get("memory.attention_mask"), tensors.get("memory.document_ids")
        cache.memory = EncoderOutput(tensors["memory.hidden"], attention_mask, document_ids)
        if cache.memory.hidden.dim() != 3 or cache.memory.hidden.shape[::2] != (rows, config.for_side("encoder").dim):
            raise ValueError(
                f"memory.hidden is {list(cache.memory.hidden.shape)}, which does not fit its configuration"
            )
    layers = range(config.num_layers if cache.memory is not None else 0)
    kept = [config.layer(i).attention.cached_per_token(config) for i in layers]
    cache.cross = [{name: tensors[f"cross_{name}.{i}"] for name in own} for i, own in enumerate(kept)]
    return fill(cache, tensors)


def activation_dtype(config: ModelConfig, tensors: dict[str, Tensor]) -> torch.dtype | None:
    """The dtype of what layers keep in the dtype of activations; where there is no such, that of the first state."""
    every = [(f"{name}.{i}", x) for i in range(config.num_layers) for name, x in kept_by_layer(config, i).items()]
    name = next((name for name, kept in every if kept.dtype is None), every[0][0] if every else None)
    return None if name is None else tensors[name].dtype


def kept_by_layer(config: ModelConfig, index: int) -> dict[str, CachedTensor]:
    """What a layer keeps of tokens and of rows, by the names of its tensors in a file."""
    states = {f"{STATE}{name}": kept for name, kept in config.cached_per_sequence(index).items()}
    return config.cached_per_token(index) | states


def fill(cache: Cache, tensors: dict[str, Tensor]) -> Cache:
    """Put tensors in the place of those that a cache on the meta device stands for."""
    expected = tensors_of(cache)
    missing, extra = (sorted(one.keys() - other.keys()) for one, other in ((expected, tensors), (tensors, expected)))
    if missing or extra:
        wrong = [f"{what} {name_some(names, 5)}" for what, names in (("lacks", missing), ("has", extra)) if names]
        raise ValueError(
            f"its tensors are not those that a cache of this version has (it {' and '.join(wrong)}): read its tokens "
            "again with the model, and save that cache"
        )
    for name, x in expected.items():
        stored = tensors[name]
        if x.shape != stored.shape or x.dtype != stored.dtype:
            raise ValueError(
                f"{name} is {stored.dtype} {list(stored.shape)} where {x.dtype} {list(x.shape)} is expected"
            )
    for prefix, layers in (("", cache.layers), (STATE, cache.states)):
        for i, layer in enumerate(layers):
            layer.update({name: tensors[f"{prefix}{name}.{i}"] for name in layer})
    for name, table in (("positions", cache.positions), ("document_ids", cache.document_ids or {})):
        table.update({layout: tensors[f"{name}.{i}"] for i, layout in enumerate(table)})
    return cache


def tensors_of(cache: KVCache) -> dict[str, Tensor]:
    """Every tensor of a cache by name."""
    named: dict[str, Tensor | None] = {"origins": cache.origins}
    if isinstance(cache.next_positions, Tensor):
        named["next_positions"] = cache.next_positions
    for prefix, layers in (("", cache.layers), (STATE, cache.states), ("cross_", cache.cross)):
        named |= {f"{prefix}{name}.{i}": x for i, layer in enumerate(layers) for name, x in layer.items()}
    for name, table in (("positions", cache.positions), ("document_ids", cache.document_ids or {})):
        named |= {f"{name}.{i}": x for i, x in enumerate(table.values())}
    if cache.memory is not None:
        named |= {f"memory.{name}": x for name, x in vars(cache.memory).items()}
    return {name: x for name, x in named.items() if x is not None}
