"""Mixtures of experts as Qwen's files have them: beside plain layers, experts one by one, perhaps a shared one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import ExpertsConfig, FeedForwardConfig, ModelConfig
from phasor.models.families._llama import LlamaLike
from phasor.models.fields import Fields
from phasor.models.layout import Rule, experts, linear


class WithExperts(LlamaLike):
    """Names and fields of Qwen's mixtures."""

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from super().feedforward(ours, theirs)
        yield from linear(f"{ours}.router", f"{theirs}.gate")
        names = (f"{theirs}.experts.{{e}}.{name}_proj.weight" for name in ("gate", "up", "down"))
        yield from experts(ours, *names)
        yield from super().feedforward(f"{ours}.shared", f"{theirs}.shared_expert")
        yield from linear(f"{ours}.shared_gate", f"{theirs}.shared_expert_gate")

    def feedforwards(self, f: Fields, sparse: FeedForwardConfig, count: int) -> list[FeedForwardConfig]:
        """The network of every layer: experts in every `decoder_sparse_step`-th except those listed as dense."""
        step, plain = f.positive("decoder_sparse_step", 1), f.get("mlp_only_layers", [])
        dense = sparse.replace(experts=None)
        return [dense if i in plain or (i + 1) % step else sparse for i in range(count)]

    def write_experts(self, config: ModelConfig) -> tuple[ExpertsConfig, dict[str, Any]]:
        """The mixture of a configuration, and the fields that most of it goes into."""
        mixtures = [config.layer(i).feedforward.experts for i in range(config.num_layers)]
        mixture = next((m for m in mixtures if m is not None), None)
        if mixture is None:
            raise ValueError("its models have experts")
        return mixture, {
            "num_experts": mixture.num_experts,
            "num_experts_per_tok": mixture.top_k,
            "moe_intermediate_size": mixture.hidden_dim or config.hidden_dim,
            "norm_topk_prob": mixture.normalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, m in enumerate(mixtures) if m is None],
        }
