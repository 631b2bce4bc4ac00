"""The rotary settings of a config.json, block by block, as they stand in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

OLD, NEW = "rope_scaling", "rope_parameters"  # where transformers 4 and 5 have them
ORIGINAL, LENGTH = "original_max_position_embeddings", "max_position_embeddings"
THETA, PARTIAL = "rope_theta", "partial_rotary_factor"
USUAL_THETA = 10000.0


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
        value = self.fields.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    @property
    def original(self) -> float | None:
        """The length before the extension, as the block states it."""
        return self.number(ORIGINAL)

    @property
    def factor(self) -> float | None:
        return self.number("factor")

    @property
    def length(self) -> float | None:
        """The length that the model is said to read."""
        value = self.config.get(LENGTH)
        return float(value) if isinstance(value, int | float) else None

    @property
    def partial(self) -> float:
        """The share of each head that is rotated."""
        value = self.fields.get(PARTIAL, self.config.get(PARTIAL))
        return float(value) if isinstance(value, int | float) else 1.0

    @property
    def pairs(self) -> int | None:
        """How many pairs of features are rotated; None where the configuration leaves the width of a head open."""
        config = self.config
        width = config.get("qk_rope_head_dim") or config.get("head_dim")
        if width is None and config.get("hidden_size") and config.get("num_attention_heads"):
            width = config["hidden_size"] // config["num_attention_heads"]
        return int(width * self.partial) // 2 if isinstance(width, int) else None


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
    def is_nested(self) -> bool:
        """Whether there is a block for each type of layer."""
        return any(block.layer_type is not None for block in self.blocks)


def blocks(config: dict[str, Any], name: str) -> Iterator[RopeSettings]:
    """The blocks of rotary settings under one name: one of all layers, or one of each type of layer."""
    fields = config.get(name)
    if not isinstance(fields, dict):
        return
    nested = {key: value for key, value in fields.items() if isinstance(value, dict)}
    if not nested:
        yield RopeSettings(name, fields, config)
    for key, value in nested.items():
        yield RopeSettings(f"{name}.{key}", value, config, key)
