"""Kinds of attention: one folder each, named after its kind, with its `config.py` (no torch) and its `module.py`.

A new kind is a new folder here. Importing this package imports the configuration of every folder, which registers its
kind; `build_attention` in `base.py` imports the module of a kind when a model needs it. What is exported here are the
configurations. The list below is for type checkers alone: a kind that is missing from it works the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phasor.config.attention import AttentionConfig
from phasor.config.discovery import config_classes, find_config, import_configs

if TYPE_CHECKING:
    from phasor.nn.attention.softmax.config import SoftmaxAttentionConfig as SoftmaxAttentionConfig


def configs() -> dict[str, type[Any]]:
    """The configuration classes of all kinds of attention, by name.

    >>> configs()["SoftmaxAttentionConfig"].kind
    'softmax'
    """
    return config_classes(AttentionConfig)


def __getattr__(name: str) -> Any:
    return find_config(__name__, name, AttentionConfig)


import_configs(__name__)
