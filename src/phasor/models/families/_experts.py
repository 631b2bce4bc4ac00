"""Mixtures of experts as Qwen's files have them: beside plain layers, experts one by one, perhaps a shared one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.models.entries import GATES, Activation, Draft, Field, FieldEntry, HeadDim
from phasor.models.families._llama import LlamaLike
from phasor.models.fields import Fields
from phasor.models.layout import Rule, experts, linear

SIDES: tuple[Side, Side] = ("encoder", "decoder")


class OfMixture(Field):
    """A field of experts in a family whose models need not have any."""

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        for side in map(config.for_side, SIDES):
            if any(side.layer(i).feedforward.experts is not None for i in range(side.num_layers)):
                return super().write(name, side)
        return {}


class DenseLayers(FieldEntry):
    """`mlp_only_layers` have no experts, and of the others only every `decoder_sparse_step`-th does."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        step, dense, config = f.positive("decoder_sparse_step", 1), f.get(name, []), draft.config()
        mixture = config.feedforward.experts
        draft.layers["feedforward.experts"] = [
            None if i in dense or (i + 1) % step else mixture for i in range(config.num_layers)
        ]

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        dense = [i for i in range(config.num_layers) if config.layer(i).feedforward.experts is None]
        return {"decoder_sparse_step": 1, name: dense}


class WithExperts(LlamaLike):
    """Names and fields of Qwen's mixtures."""

    parts = LlamaLike.parts | {"norm": "rmsnorm"}
    fields: ClassVar[dict[str, FieldEntry]] = LlamaLike.fields | {
        "head_dim": HeadDim(),
        "max_position_embeddings": Field("max_length", default=32768),
        "hidden_act": Activation("silu", GATES),
        "rms_norm_eps": Field("norm.eps", default=1e-6),
        "norm_topk_prob": Field("feedforward.experts.normalize", default=False),
    }
    # A field that layers without windows have no use for, which outputs are returned, and a loss.
    harmless = frozenset({"sliding_window", "max_window_layers", "output_router_logits", "router_aux_loss_coef"})

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from super().feedforward(ours, theirs)
        yield from linear(f"{ours}.router", f"{theirs}.gate")
        names = (f"{theirs}.experts.{{e}}.{name}_proj.weight" for name in ("gate", "up", "down"))
        yield from experts(ours, *names)
        yield from super().feedforward(f"{ours}.shared", f"{theirs}.shared_expert")
        yield from linear(f"{ours}.shared_gate", f"{theirs}.shared_expert_gate")
