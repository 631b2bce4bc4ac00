"""The choices phasor knows, by group, with a line each: read from the code that defines them."""

from __future__ import annotations

import typing

from phasor.config import AttentionConfig, Extension, PositionConfig
from phasor.config.activations import ActivationConfig
from phasor.config.heads import POOLERS, HeadConfig
from phasor.config.model import SHAPES
from phasor.config.parts import InitConfig, NormConfig, PlacementConfig
from phasor.config.schedules import ScheduleConfig
from phasor.config.schema import Choice, summary, unknown
from phasor.config.sparse import SparseConfig
from phasor.models.presets import PRESETS
from phasor.nn.attention.softmax.config import QK_NORMS
from phasor.nn.positions.rotary.config import Pairing

CHOICES: dict[str, type[Choice]] = {
    "positions": PositionConfig,
    "extensions": Extension,
    "attention": AttentionConfig,
    "activations": ActivationConfig,
    "sparse": SparseConfig,
    "norms": NormConfig,
    "placements": PlacementConfig,
    "heads": HeadConfig,
    "initializations": InitConfig,
    "schedules": ScheduleConfig,
}
PAIRINGS = dict(
    zip(
        typing.get_args(Pairing),
        ("feature i is rotated with i + d/2 (Llama, GPT-NeoX)", "feature 2i is rotated with 2i + 1 (RoFormer, GPT-J)"),
        strict=True,
    )
)
TABLES = {"shapes": SHAPES, "pairings": PAIRINGS, "qk-norms": QK_NORMS, "poolers": POOLERS}
GROUPS = (*CHOICES, *TABLES, "presets")


def describe_kinds(group: str) -> dict[str, str]:
    """Each choice of a group with its line.

    >>> describe_kinds("norms")["none"]
    'x, unchanged.'
    """
    if not isinstance(group, str):
        raise unknown("group of kinds", group, GROUPS)
    if group in CHOICES:
        return {kind: summary(cls) for kind, cls in CHOICES[group].kinds.items()}
    if group in TABLES:
        return dict(TABLES[group])
    if group == "presets":
        return {name: summary(make) for name, make in PRESETS.items()}
    raise unknown("group of kinds", group, GROUPS)


def kinds(group: str) -> list[str]:
    """The names of the registered choices of a group.

    >>> kinds("placements")
    ['pre', 'post', 'sandwich', 'deepnorm', 'output', 'parallel']
    """
    return list(describe_kinds(group))
