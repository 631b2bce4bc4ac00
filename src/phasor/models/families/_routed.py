"""Mixtures of experts as DeepSeek's files have them: dense layers first, groups of experts, several shared ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, ClassVar

from phasor.config import ModelConfig
from phasor.models.entries import Draft, Field, FieldEntry, get_path
from phasor.models.families._llama import LlamaLike
from phasor.models.fields import Fields
from phasor.models.layout import SAME, Layout, Rule, experts, linear


class FirstDense(FieldEntry):
    """How many of the first layers have no experts."""

    def __init__(self, default: int) -> None:
        self.default = default

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        dense, config = f.get(name, self.default), draft.config()
        draft.layers["feedforward.experts"] = [
            None if i < dense else config.feedforward.experts for i in range(config.num_layers)
        ]

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        dense = [config.layer(i).feedforward.experts is None for i in range(config.num_layers)]
        if not all(before or not after for before, after in pairwise(dense)):
            raise ValueError("its layers without experts come first")
        return {name: sum(dense)}


class SharedExperts(FieldEntry):
    """How many experts of the routed ones' width every token takes, which are one of their joint width."""

    def __init__(self, default: int) -> None:
        self.default = default

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        count = f.get(name, self.default)
        draft["feedforward.experts.shared_dim"] = count * draft["feedforward.experts.hidden_dim"] or None

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        width = get_path(config, "feedforward.experts.hidden_dim") or config.hidden_dim
        count, rest = divmod(get_path(config, "feedforward.experts.shared_dim") or 0, width)
        if rest:
            raise ValueError(f"its shared expert is a multiple of the experts' width, {width}")
        return {name: count}


class Routed(LlamaLike):
    """Names and fields of DeepSeek's mixtures: sigmoid scores of groups of experts, with a correction of the choice."""

    parts = LlamaLike.parts | {
        "norm": "rmsnorm",
        "feedforward.experts.scores": "sigmoid",
        "feedforward.experts.correction": True,
    }
    mixture: ClassVar[dict[str, FieldEntry]] = {
        "n_routed_experts": Field("feedforward.experts.num_experts", fallback="num_local_experts"),
        "num_experts_per_tok": Field("feedforward.experts.top_k"),
        "moe_intermediate_size": Field("feedforward.experts.hidden_dim", default=1408),
        "n_shared_experts": SharedExperts(1),
        "routed_scaling_factor": Field("feedforward.experts.scale", default=1.0),
        "n_group": Field("feedforward.experts.num_groups", default=1),
        "topk_group": Field("feedforward.experts.top_groups", default=1),
    }

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from super().feedforward(ours, theirs)
        yield from routed_experts(ours, theirs)
        yield from super().feedforward(f"{ours}.shared", f"{theirs}.shared_experts")


def routed_experts(
    ours: str, theirs: str, correction: str = "gate.e_score_correction_bias", layout: Layout = SAME
) -> Iterator[Rule]:
    """A router with its correction, and experts one by one."""
    yield from linear(f"{ours}.router", f"{theirs}.gate")
    yield Rule(f"{ours}.correction", f"{theirs}.{correction}", layout)
    yield from experts(ours, *(f"{theirs}.experts.{{e}}.{name}_proj.weight" for name in ("gate", "up", "down")))
