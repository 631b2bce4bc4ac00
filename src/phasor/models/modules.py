"""Which modules of transformers one of our layers was fused of, and which of its rows each of them has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from phasor.config import ModelConfig
from phasor.models.family import Family
from phasor.models.layout import Transposed, expand_rules

WEIGHT = ".weight"


class Module(NamedTuple):
    """A module of theirs with a matrix, and the rows of ours that are its own, in its order; None for all in order.

    `is_transposed` says that its matrix is stored `[in, out]`.
    """

    name: str
    rows: Tensor | None
    is_transposed: bool


def fused_modules(family: Family, config: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, list[Module]]:
    """The modules of each of our linear layers, by its name; `weights` are the model's, of which shapes are read.

    >>> from phasor.models.families import family
    >>> from phasor.models.presets import preset
    >>> from phasor.transformer import Transformer
    >>> model = Transformer(preset("llama-2", dim=8, num_heads=2, num_layers=1, vocab_size=9))
    >>> modules = fused_modules(family("llama"), model.config, model.state_dict())["decoder.blocks.0.attention.qkv"]
    >>> [name.rpartition(".")[2] for name, *_ in modules], modules[1].rows.tolist()
    (['q_proj', 'k_proj', 'v_proj'], [4, 5, 6, 7, 16, 17, 18, 19])
    """
    found: dict[str, list[Module]] = {}
    for ours, theirs, layout, _ in expand_rules(family.all_rules(config), config, dict(weights)):
        is_matrix = ours.endswith(WEIGHT) and theirs.endswith(WEIGHT) and weights[ours].dim() == 2
        if not is_matrix:
            continue
        every = torch.arange(len(weights[ours]))
        rows = layout.save(every[:, None], config).flatten()
        module = Module(
            theirs.removesuffix(WEIGHT),
            None if torch.equal(rows, every) else rows,
            isinstance(layout, Transposed),
        )
        found.setdefault(ours.removesuffix(WEIGHT), []).append(module)
    return found


class ExpertsModule(NamedTuple):
    """Their module of a layer's routed experts, and the order of what `up` gives in theirs; None for that of ours."""

    name: str
    columns: Tensor | None


def experts_modules(family: Family, config: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, ExpertsModule]:
    """The modules of routed experts, by the name of our layer; files may have the experts one by one."""
    found: dict[str, ExpertsModule] = {}
    for ours, theirs, layout, expert in expand_rules(family.all_rules(config), config, dict(weights)):
        layer = re.match(r"(.*?\.\d+)\.", theirs)
        if family.experts_at is None or layer is None:
            continue
        if weights[ours].dim() == 3 and ours.endswith(".up") and expert in (None, 0):
            every = torch.arange(weights[ours].shape[-1])
            columns = layout.save(every[None, None], config).flatten() if expert is None else every
            is_same = torch.equal(columns, every) or len(columns) < len(every)
            name = f"{layer[1]}.{family.experts_at}"
            found[ours.removesuffix(".up")] = ExpertsModule(name, None if is_same else columns)
    return found
