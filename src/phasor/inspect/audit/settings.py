"""The rotary settings of a config.json, block by block, as they stand in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

OLD, NEW = "rope_scaling", "rope_parameters"  # where transformers 4 and 5 have them
ORIGINAL, LENGTH = "original_max_position_embeddings", "max_position_embeddings"
THETA, PARTIAL = "rope_theta", "partial_rotary_factor"
SECTIONS = "mrope_section"
USUAL_THETA = 10000.0
MOST_PAIRS, MOST = 2**16, 2.0**63


@dataclass(frozen=True)
class RopeSettings:
    """One set of rotary settings: that of all layers, or of one type of layer; `config` is all of config.json."""

    name: str
    fields: dict[str, Any]
    config: dict[str, Any]
    layer_type: str | None = None

    @property
    def kind(self) -> str:
        """The extension, by either name of the field."""
        return str(self.fields.get("rope_type") or self.fields.get("type") or "default")

    @property
    def is_yarn(self) -> bool:
        return self.kind == "yarn"

    def number(self, name: str) -> float | None:
        """A field that is a number."""
        return as_number(self.fields.get(name), f"{self.name}.{name}")

    @property
    def original(self) -> float | None:
        """The length before the extension, as the block states it."""
        return above_zero(self.number(ORIGINAL), f"{self.name}.{ORIGINAL}")

    @property
    def factor(self) -> float | None:
        return above_zero(self.number("factor"), f"{self.name}.factor")

    @property
    def length(self) -> float | None:
        """The length that the model is said to read."""
        return above_zero(as_number(self.config.get(LENGTH), LENGTH), LENGTH)

    @property
    def partial(self) -> float:
        """The share of each head that is rotated."""
        value = as_number(self.fields.get(PARTIAL, self.config.get(PARTIAL)), PARTIAL)
        return 1.0 if value is None else value

    @property
    def pairs(self) -> int | None:
        """How many pairs of features are rotated; None where the configuration leaves the width of a head open."""
        config = self.config
        names = ("qk_rope_head_dim", "head_dim", "hidden_size", "num_attention_heads")
        rotated, width, hidden, heads = (as_number(config.get(name), name) for name in names)
        width = rotated or width or (hidden // heads if hidden and heads else None)
        return int(width * self.partial) // 2 if width else None

    @property
    def sections(self) -> list[int] | None:
        """How many pairs each row of positions rotates, where there are several rows."""
        given = self.fields.get(SECTIONS)
        if given is not None and not (
            isinstance(given, list) and all(type(pairs) is int and 0 <= pairs <= MOST_PAIRS for pairs in given)
        ):
            raise ValueError(
                f"{self.name}.{SECTIONS} must be a list of integers from 0 to {MOST_PAIRS:,}, not {repr(given)[:40]}"
            )
        return given


@dataclass(frozen=True)
class RopeConfig:
    """The blocks of rotary settings that a config.json has, in either place."""

    config: dict[str, Any]
    old: tuple[RopeSettings, ...]
    new: tuple[RopeSettings, ...]

    @classmethod
    def read(cls, config: dict[str, Any]) -> RopeConfig:
        return cls(config, tuple(blocks(config, OLD)), tuple(blocks(config, NEW)))

    @property
    def blocks(self) -> tuple[RopeSettings, ...]:
        """The blocks that count: those of the newer place, where there are any."""
        return self.new or self.old

    @property
    def theta(self) -> float | None:
        """The base at the top level."""
        return as_number(self.config.get(THETA), THETA)

    @property
    def is_nested(self) -> bool:
        """Whether there is a block for each type of layer."""
        return any(block.layer_type is not None for block in self.blocks)


def as_number(value: Any, name: str) -> float | None:
    """A number of config.json; None where there is none, or one for each layer."""
    if value is None or isinstance(value, list):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MOST:
        raise ValueError(f"{name} must be a number, not {repr(value)[:40]}")
    return float(value)


def above_zero(value: float | None, name: str) -> float | None:
    """The same number, which divides others."""
    if value is not None and value <= 0:
        raise ValueError(f"{name} must be above 0, not {value:g}")
    return value


def blocks(config: dict[str, Any], name: str) -> Iterator[RopeSettings]:
    """The blocks of rotary settings under one name: one of all layers, or one of each type of layer."""
    fields = config.get(name)
    if fields is None:
        return
    if not isinstance(fields, dict):
        raise ValueError(f"{name} must be an object, not {repr(fields)[:40]}")
    nested = {key: value for key, value in fields.items() if isinstance(value, dict)}
    if not nested:
        yield RopeSettings(name, fields, config)
    for key, value in nested.items():
        yield RopeSettings(f"{name}.{key}", value, config, key)
