"""A model by its rotary positions alone: of a preset, or read from the config.json of a checkpoint.

What the page keeps of an opened file is small enough for a URL: the scheme, the head and two lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from phasor.config import ModelConfig
from phasor.config.schema import quote
from phasor.config.text_files import from_json
from phasor.lab.endpoints import MAX_HEAD_DIM, MAX_POSITION, FieldError, LabRequest, bounded_field
from phasor.models.presets import PRESETS, preset
from phasor.nn.positions import RotaryConfig


class RotaryModel(LabRequest):
    """The rotary positions of a model: those of a preset, or `position` with the head and the lengths of a model.

    >>> RotaryModel(preset="llama-3.1").config().max_length
    131072
    >>> RotaryModel(position={"kind": "rotary", "base": 1e6}, head_dim=64, max_length=2048).config().head_dim
    64
    """

    preset: str = "llama-2"
    position: RotaryConfig | None = None
    head_dim: int = bounded_field(128, 2, MAX_HEAD_DIM)
    max_length: int = bounded_field(4096, 1, MAX_POSITION)
    trained_length: int | None = bounded_field(None, 1, MAX_POSITION)

    def check(self) -> None:
        super().check()
        if self.position is None and self.preset not in rotary_presets():
            why = "has no rotary positions" if self.preset in PRESETS else "is unknown"
            raise FieldError(
                "preset", f"the preset {quote(self.preset)} {why}; with rotary: {', '.join(rotary_presets())}"
            )

    def config(self) -> ModelConfig:
        """The configuration of the preset, or of the smallest model with these positions."""
        if self.position is None:
            return preset(self.preset)
        return smallest_model(self.position, self.head_dim, self.max_length, self.trained_length)


def smallest_model(
    position: RotaryConfig, head_dim: int, max_length: int, trained_length: int | None = None
) -> ModelConfig:
    """A model of one layer and one head, for what depends on its positions and lengths alone.

    >>> smallest_model(RotaryConfig(), 64, 512).original_length()
    512
    """
    return ModelConfig(
        vocab_size=2,
        dim=head_dim,
        num_layers=1,
        num_heads=1,
        position=position,
        max_length=max_length,
        trained_length=trained_length,
    )


@functools.cache
def rotary_presets() -> tuple[str, ...]:
    """The names of the presets with rotary positions.

    >>> "llama-3.1" in rotary_presets(), "bert" in rotary_presets()
    (True, False)
    """
    return tuple(name for name in PRESETS if preset(name).extendable_position().extendable)


def read_model_config(text: str, name: str = "config.json") -> ModelConfig:
    """The configuration in the text of a config.json, phasor's own or a Hugging Face one (or its text part).

    >>> read_model_config(preset("palm").to_json()) == preset("palm")
    True
    """
    data = from_json(text, name)
    if not isinstance(data, Mapping):
        raise ValueError(f"{name} must be an object with the fields of a model, not {quote(data)}")
    if "model_type" not in data:
        return ModelConfig.from_dict(data)
    from phasor.checkpoints.hf import family_of
    from phasor.checkpoints.quantized_folders import take_format
    from phasor.checkpoints.text_part import has_text_part, text_fields
    from phasor.models.fields import Fields

    file, fields = Path(name), dict(data)
    if has_text_part(fields):
        fields = text_fields(fields, file)
    fields, _ = take_format(fields, file)
    return family_of(fields, file).read_whole(Fields(fields, file))


def rotary_models(config: ModelConfig) -> list[tuple[RotaryModel, tuple[int, ...]]]:
    """The rotary schemes of a model, each with the layers it serves; a model without any is refused.

    >>> [(model.head_dim, len(layers)) for model, layers in rotary_models(preset("llama-2"))]
    [(128, 32)]
    """
    used: dict[tuple[RotaryConfig, int], list[int]] = {}
    for index in range(config.num_layers):
        position, attention, _ = config.layer(index)
        head_dim = attention.head_dim_of(config)
        if head_dim > MAX_HEAD_DIM:
            raise ValueError(f"the heads of this model have {head_dim:,} features, and {MAX_HEAD_DIM} are the most")
        if isinstance(position, RotaryConfig):
            used.setdefault((position, head_dim), []).append(index)
    if not used:
        kind = config.extendable_position().kind
        raise ValueError(f"this model has no rotary positions to extend: its positions are {kind!r}")
    return [
        (
            RotaryModel(
                position=position,
                head_dim=head_dim,
                max_length=config.max_length,
                trained_length=config.trained_length,
            ),
            tuple(layers),
        )
        for (position, head_dim), layers in used.items()
    ]
