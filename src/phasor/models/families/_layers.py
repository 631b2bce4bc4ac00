"""Layers that differ from each other: as one part a layer, and as the fields of config.json that say which is which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from phasor.config import LayerConfig, ModelConfig
from phasor.models.fields import Fields, json_repr

FULL, SLIDING = "full_attention", "sliding_attention"


def vary_layers(config: ModelConfig, **parts: Sequence[Any]) -> ModelConfig:
    """A configuration with these parts, one per layer, as the shortest pattern that repeats to them.

    >>> from phasor.config import AttentionConfig
    >>> config = ModelConfig(vocab_size=9, dim=8, num_layers=4, num_heads=1)
    >>> local = vary_layers(config, attention=[AttentionConfig(window=5), AttentionConfig()] * 2)
    >>> len(local.layers), [local.layer(i).attention.window for i in range(4)]
    (2, [5, None, 5, None])
    """
    layers = [
        LayerConfig(**{name: given[i] for name, given in parts.items() if given[i] != getattr(config, name)})
        for i in range(config.num_layers)
    ]
    period = next(n for n in range(1, len(layers) + 1) if layers[n:] == layers[:-n])
    return config.replace(layers=() if layers[:period] == [LayerConfig()] else tuple(layers[:period]))


def read_types(f: Fields, usual: list[str]) -> list[str]:
    """The type of every layer, the usual ones where the file does not say."""
    kinds = f.get("layer_types", usual)
    if not isinstance(kinds, list) or len(kinds) != len(usual) or not all(k in (FULL, SLIDING) for k in kinds):
        raise ValueError(
            f"{f.file}: layer_types must be {len(usual)} times {FULL} or {SLIDING}, not {json_repr(kinds)}"
        )
    return kinds


def windows_of(f: Fields, kinds: list[str], window: int | None) -> list[int | None]:
    """The window of every layer, by its type."""
    if SLIDING in kinds and window is None:
        raise ValueError(f"{f.file}: layer_types has {SLIDING}, but there is no sliding_window in use")
    return [window if kind == SLIDING else None for kind in kinds]


def write_types(config: ModelConfig) -> dict[str, Any]:
    """The type of every layer, and the window where some have one."""
    windows = [config.layer(i).attention.window for i in range(config.num_layers)]
    window = next((w for w in windows if w is not None), None)
    fields: dict[str, Any] = {"layer_types": [FULL if w is None else SLIDING for w in windows]}
    return fields if window is None else fields | {"sliding_window": window}


def read_windows(f: Fields, count: int, usual: Callable[[int], bool]) -> list[int | None]:
    """The window of every layer: those `layer_types` names have one, or `usual` ones, if windows are in use at all."""
    window = f.get("sliding_window", None) if f.get("use_sliding_window", False) else None
    ruled = window is not None and "layer_types" not in f
    kinds = read_types(f, [SLIDING if ruled and usual(i) else FULL for i in range(count)])
    return windows_of(f, kinds, window)


def write_windows(config: ModelConfig) -> dict[str, Any]:
    """The fields `read_windows` reads."""
    fields = write_types(config)
    return fields | {"use_sliding_window": "sliding_window" in fields}
