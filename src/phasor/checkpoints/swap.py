"""Another position scheme for a model that has its weights already."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from phasor.config import Extension, ModelConfig, PositionConfig
from phasor.config.model import Side
from phasor.config.schema import fit
from phasor.nn.positions import LearnedConfig, NoPositionConfig
from phasor.transformer import Stack, Transformer

Named = str | Mapping[str, Any]


def swap_positions(
    model: Transformer, position: PositionConfig | Named | None = None, extension: Extension | Named | None = None
) -> Transformer:
    """The model with another position scheme or extension; its other weights are the same tensors.

    A table of learned positions keeps the rows both have. What had to be drawn anew, and what had no more use, is
    told in a warning, and listed in `model.fresh`.

    >>> from phasor import preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=50))
    >>> swapped = swap_positions(model, extension={"kind": "yarn", "factor": 4.0, "original_length": 4096})
    >>> swapped.config.position.extension.factor, swapped.fresh
    (4.0, ())
    """
    config = swapped_config(model.config, position, extension)
    with torch.device("meta"):
        made = Transformer(config)
    old, like = dict(model.state_dict(keep_vars=True)), model.tokens.weight
    fresh: list[str] = []
    left: list[str] = []
    tables: dict[str, Tensor] = {}
    for side, stack in stacks(made):
        stack.positions.to_empty(device=like.device).to(like.dtype)
        for index, scheme in enumerate(stack.schemes):
            stack.position(index).reset_parameters(config)
            for name, tensor in stack.positions[index].named_parameters(prefix=f"{side}.positions.{index}"):
                rows = kept_rows(tensor, old.get(name), scheme, scheme_at(model, side, index))
                fresh += [] if rows == len(tensor) else [name if rows == 0 else f"{name}[{rows}:]"]
                left += [name] if rows == 0 and name in old else []
                tables[name] = tensor
    kept = {name: tables[name] if name in tables else old[name] for name in made.state_dict()}
    made.load_state_dict(kept, assign=True)
    made.tokenizer, made.source_tokenizer = model.tokenizer, model.source_tokenizer
    made.special, made.origin, made.fresh = model.special, model.origin, tuple(fresh)
    left += [name for name in old if name not in kept]
    told = {"drawn anew": fresh, "left out": left}
    if any(told.values()):
        said = "; ".join(f"{what}: {', '.join(names)}" for what, names in told.items() if names)
        warnings.warn(f"weights of the position scheme that are {said}", stacklevel=3)
    return made.requires_grad_(True).train(model.training)


def stacks(model: Transformer) -> list[tuple[Side, Stack]]:
    """The encoder and the decoder, those there are."""
    both: list[tuple[Side, Stack | None]] = [("encoder", model.encoder), ("decoder", model.decoder)]
    return [(side, stack) for side, stack in both if stack is not None]


def scheme_at(model: Transformer, side: Side, index: int) -> PositionConfig | None:
    """The scheme whose weights stand at an index, if there is one."""
    schemes = dict(stacks(model))[side].schemes
    return schemes[index] if index < len(schemes) else None


def kept_rows(new: Tensor, old: Tensor | None, scheme: PositionConfig, before: PositionConfig | None) -> int:
    """Copy the rows that a scheme's table shares with the old one, and say how many they are."""
    same = type(scheme) is type(before) and getattr(scheme, "offset", 0) == getattr(before, "offset", 0)
    if not same or old is None or old.shape[1:] != new.shape[1:]:
        return 0
    if not isinstance(scheme, LearnedConfig) and (old.shape != new.shape or scheme != before):
        return 0
    rows = min(len(old), len(new))
    with torch.no_grad():
        new[:rows] = old[:rows]
    return rows


def swapped_config(
    config: ModelConfig, position: PositionConfig | Named | None, extension: Extension | Named | None
) -> ModelConfig:
    """A configuration with another scheme, in every layer that has positions, or another extension of its own."""
    if position is not None:
        layers = [
            layer if isinstance(layer.position, NoPositionConfig) else layer.replace(position=None)
            for layer in config.layers
        ]
        config = config.replace(position=position, layers=tuple(layers))
    if extension is not None:
        config = config.with_extension(None if extension == "none" else fit(extension, Extension, "extension"))
    return config
