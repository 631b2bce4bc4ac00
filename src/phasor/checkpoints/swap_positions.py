"""Give a loaded model another position scheme or rotary extension."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from phasor.config import Extension, ModelConfig, PositionConfig
from phasor.config.model import Side
from phasor.config.schema import coerce
from phasor.quantization import has_quantized_weights
from phasor.transformer import Stack, Transformer

Named = str | Mapping[str, Any]


def swap_positions(
    model: Transformer, position: PositionConfig | Named | None = None, extension: Extension | Named | None = None
) -> Transformer:
    """The model with another position scheme or extension; its other weights are the same tensors.

    A learned position embedding keeps the rows that both have. A warning names the weights that were newly initialized
    and those that were dropped; `model.newly_initialized` lists the former.

    >>> from phasor import preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=50))
    >>> swapped = swap_positions(model, extension={"kind": "yarn", "factor": 4.0, "original_length": 4096})
    >>> swapped.config.position.extension.factor, swapped.newly_initialized
    (4.0, ())
    """
    return swap_config(model, replace_positions(model.config, position, extension))


def swap_config(model: Transformer, config: ModelConfig) -> Transformer:
    """The model with a configuration of other positions or windows; its other weights are the same tensors.

    >>> from phasor import preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=2, vocab_size=50))
    >>> windowed = swap_config(model, model.config.replace(attention=model.config.attention.replace(window=8)))
    >>> windowed.tokens.weight is model.tokens.weight
    True
    """
    if has_quantized_weights(model):
        raise ValueError("a model of quantized weights keeps its positions and windows: change them before quantizing")
    with torch.device("meta"):
        swapped = Transformer(config)
    old, like = dict(model.state_dict(keep_vars=True)), model.tokens.weight
    frozen = [weight for weight in model.parameters() if not weight.requires_grad]
    new: list[str] = []
    dropped: list[str] = []
    tables: dict[str, Tensor] = {}
    for side, stack in stacks(swapped):
        stack.positions.to_empty(device=like.device).to(like.dtype)
        for index, scheme in enumerate(stack.schemes):
            stack.position(index).reset_parameters(config)
            for name, tensor in stack.positions[index].named_parameters(prefix=f"{side}.positions.{index}"):
                rows = copy_rows(tensor, old.get(name), scheme, scheme_at(model, side, index))
                new += [] if rows == len(tensor) else [name if rows == 0 else f"{name}[{rows}:]"]
                dropped += [name] if rows == 0 and name in old else []
                tables[name] = tensor
    kept = {name: tables[name] if name in tables else old[name] for name in swapped.state_dict()}
    swapped.load_state_dict(kept, assign=True)
    carry_over(model, swapped)
    swapped.newly_initialized = tuple(new)
    dropped += [name for name in old if name not in kept]
    changes = {"newly initialized": new, "dropped": dropped}
    if any(changes.values()):
        text = "; ".join(f"{what}: {', '.join(names)}" for what, names in changes.items() if names)
        warnings.warn(f"weights of the position scheme that are {text}", stacklevel=4)
    swapped.requires_grad_(True)
    for weight in frozen:  # loading it into a new model has let it have gradients again
        weight.requires_grad_(False)
    return swapped.train(model.training)


def stacks(model: Transformer) -> list[tuple[Side, Stack]]:
    """The encoder and the decoder, those there are."""
    both: list[tuple[Side, Stack | None]] = [("encoder", model.encoder), ("decoder", model.decoder)]
    return [(side, stack) for side, stack in both if stack is not None]


def scheme_at(model: Transformer, side: Side, index: int) -> PositionConfig | None:
    """The scheme whose weights stand at an index, if there is one."""
    schemes = dict(stacks(model))[side].schemes
    return schemes[index] if index < len(schemes) else None


def copy_rows(new: Tensor, old: Tensor | None, scheme: PositionConfig, before: PositionConfig | None) -> int:
    """Copy the rows that a scheme's table shares with the old one, and say how many they are."""
    if before is None or not scheme.keeps_rows(before) or old is None or old.shape[1:] != new.shape[1:]:
        return 0
    rows = min(len(old), len(new))
    with torch.no_grad():
        new[:rows] = old[:rows]
    return rows


def replace_positions(
    config: ModelConfig, position: PositionConfig | Named | None, extension: Extension | Named | None
) -> ModelConfig:
    """A configuration with another scheme, in every layer that has positions, or the same with another extension."""
    if position is not None:
        swapped = config.change_layers(
            lambda layer: layer.replace(position=None) if layer.position is None or layer.position.acts_on else layer,
            position=position,
        )
        new = getattr(swapped.position, "extension", None)
        if new is not None and new != getattr(config.position, "extension", None):
            swapped = swapped.replace(max_length=config.extended_length(config.position, new))
        config = swapped
    if extension is not None:
        config = config.with_extension(None if extension == "none" else coerce(extension, Extension, "extension"))
    return config


def carry_over(source: Transformer, model: Transformer) -> None:
    """Give a model everything of another beside its weights and configuration."""
    model.tokenizer, model.source_tokenizer = source.tokenizer, source.source_tokenizer
    model.chat_template = source.chat_template
    model.special, model.generation_settings = source.special, source.generation_settings
    model.origin = source.origin
