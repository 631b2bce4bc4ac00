"""Configurations that read further than they were trained: a method by name, for a length (no torch)."""

from __future__ import annotations

from typing import Any

from phasor.config import Extension, ModelConfig, PositionConfig
from phasor.config.schema import check_integer, coerce, names, quote, unknown

DROP, NONE = "drop", "none"


def methods() -> list[str]:
    """The names that `extend_config` knows: every extension, `none` and `drop`."""
    return [NONE, *Extension.kinds, DROP]


def parse_length(text: int | str) -> int:
    """A number of tokens; 1k is 1,024.

    >>> parse_length("128k"), parse_length(6000)
    (131072, 6000)
    """
    number = str(text).strip().lower()
    size = 1024 if number.endswith("k") else 1
    number = number.removesuffix("k")
    if isinstance(text, bool) or not number.isdecimal() or int(number) * size < 2:
        raise ValueError(f"a length is an integer from 2 on, or one with k for 1,024 such as 8k, not {quote(text)}")
    return int(number) * size


def trained_length(config: ModelConfig, *positions: PositionConfig) -> int:
    """The longest that a model was trained at: as its training recorded it, or else the length before any extension.

    >>> from phasor.models.presets import preset
    >>> trained_length(preset("llama-3.1")), trained_length(preset("llama-2", trained_length=512))
    (8192, 512)
    """
    return config.trained_length or config.original_length(*positions)


def extend_config(config: ModelConfig, method: str, length: int, **fields: Any) -> ModelConfig:
    """The configuration of a model that is to read `length` tokens, by a method.

    A method is the name of an extension, `none` (the same positions without an extension) or `drop` (no positions in
    the layers that rotated them, as in DroPE). An extension's `original_length` is the length before any extension,
    and its `factor` the ratio of both lengths; `fields` set these and its other fields. Dynamic extensions start at the
    original length and follow the length of the text from there, so that the factor of `dynamic-ntk` is 1. Without
    its own factors, `longrope` divides each pair by as much as YaRN would, beyond the original length.

    >>> from phasor.models.presets import preset
    >>> extended = extend_config(preset("llama-2"), "yarn", 16384)
    >>> extended.position.extension.factor, extended.position.extension.original_length, extended.max_length
    (4.0, 4096, 16384)
    >>> extend_config(preset("llama-2"), "drop", 16384).position.kind
    'none'
    """
    if not isinstance(method, str) or method not in methods():
        raise unknown("method", method, methods())
    check_integer("length", length)
    check_extendable(config)
    if method in (NONE, DROP):
        if fields:
            raise ValueError(f"the method {method!r} has no field {next(iter(fields))!r}")
        plain = config.with_extension(None) if method == NONE else drop_positions(config)
        return plain.replace(max_length=length, trained_length=trained_length(config))
    original = coerce(fields.get("original_length", original_length(config)), int, "original_length")
    if length < original:
        raise ValueError(f"a length of {length:,} is below the {original:,} tokens the model was trained at")
    fields = Extension.kinds[method].fields_for(config, length / max(original, 1), original) | fields
    return config.with_extension(make_extension(method, config, **fields))


def original_length(config: ModelConfig) -> int:
    """The length before any extension of the scheme that is extended."""
    return config.original_length(config.extendable_position())


def make_extension(kind: str, config: ModelConfig, **fields: Any) -> Extension:
    """An extension by name for a model; the original length is the one before any extension unless given.

    >>> from phasor.models.presets import preset
    >>> make_extension("yarn", preset("llama-3.1"), factor=8.0).original_length
    8192
    """
    if kind not in Extension.kinds:
        raise unknown("extension", kind, Extension.kinds)
    chosen = Extension.kinds[kind]
    if "original_length" in names(chosen):
        fields.setdefault("original_length", original_length(config))
    return chosen(**fields)


def check_extendable(config: ModelConfig) -> None:
    """Refuse a model without rotary positions."""
    position = config.extendable_position()
    if position.extendable:
        return
    what = f"this model's are {position.kind!r}"
    most = config.input_position.max_positions
    if most is not None:
        what += f", a table of {most:,} positions"
    raise ValueError(f"an extension needs rotary positions, and {what}")


def drop_positions(config: ModelConfig) -> ModelConfig:
    """The same model without rotations in the layers that have them.

    >>> from phasor.models.presets import preset
    >>> drop_positions(preset("llama-2", position="combined")).position.kind
    'alibi'
    """
    layers = tuple(
        layer if layer.position is None else layer.replace(position=layer.position.without_rotation())
        for layer in config.layers
    )
    return config.replace(position=config.position.without_rotation(), layers=layers)


def fold_extension(config: ModelConfig) -> ModelConfig:
    """The same positions without an extension, where they can be said so: `ntk` is a greater base.

    >>> from phasor.models.presets import preset
    >>> position = fold_extension(extend_config(preset("llama-2"), "ntk", 16384)).position
    >>> round(position.base), position.extension
    (40890, None)
    """
    position = config.extendable_position()
    plain = position.fold_extension(config)
    if plain == position:
        return config
    layers = tuple(layer.replace(position=plain) if layer.position == position else layer for layer in config.layers)
    return config.replace(
        position=plain if config.position == position else config.position,
        layers=layers,
        trained_length=trained_length(config),
    )
