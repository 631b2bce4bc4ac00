"""Granite 4."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import ModelConfig
from phasor.models.entries import Draft, FieldEntry
from phasor.models.families._mamba import MambaLayers, WithMamba
from phasor.models.families.granitemoe import GraniteMoE
from phasor.models.fields import Fields
from phasor.models.layout import Rule, linear
from phasor.models.rope import RopeParameters
from phasor.nn.positions import NoPositionConfig


class SharedNetwork(FieldEntry):
    """`shared_intermediate_size`: the width of a network that every token takes, beside experts or in their place."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        width = f.positive(name, 1024)
        experts, chosen = f.get("num_local_experts", 8), f.get("num_experts_per_tok", 2)
        if not experts:
            draft["hidden_dim"] = width
            return
        paths = {"num_experts": experts, "top_k": chosen, "shared_dim": width}
        draft.values |= {f"feedforward.experts.{path}": value for path, value in paths.items()}

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        networks = [config.layer(i).feedforward for i in range(config.num_layers)]
        experts = networks[0].experts
        if any(network.experts != experts for network in networks):
            raise ValueError("its layers all have the same experts, or none")
        if experts is None:
            return {name: config.hidden_dim, "num_local_experts": 0}
        if experts.shared_dim is None:
            raise ValueError("its experts have a shared one beside them")
        return {
            name: experts.shared_dim,
            "num_local_experts": experts.num_experts,
            "num_experts_per_tok": experts.top_k,
            "intermediate_size": experts.hidden_dim or config.hidden_dim,
        }


class PositionType(RopeParameters):
    """`rope_parameters`, which are in use where `position_embedding_type` is "rope"."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        super().read(f, name, draft)
        if f.get("position_embedding_type", None) != "rope":
            draft["position"] = NoPositionConfig()

    def check(self, config: ModelConfig) -> None:
        if not isinstance(config.position, NoPositionConfig):
            super().check(config)

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        if isinstance(config.position, NoPositionConfig):
            return {"position_embedding_type": None}
        return super().write(name, config) | {"position_embedding_type": "rope"}


class GraniteMoEHybrid(WithMamba, GraniteMoE):
    """Mamba-2 and softmax attention, with experts and a shared one or without, and Granite's multipliers."""

    model_type = "granitemoehybrid"
    title = "Granite 4"
    architectures = {"lm": "GraniteMoeHybridForCausalLM", "none": "GraniteMoeHybridModel"}
    parts = GraniteMoE.parts
    fields = (
        WithMamba.fields
        | {name: entry for name, entry in GraniteMoE.fields.items() if "experts" not in name}
        | {
            "rope_parameters": PositionType(),
            "shared_intermediate_size": SharedNetwork(),
            "layer_types": MambaLayers(),
        }
    )
    harmless = WithMamba.harmless | GraniteMoE.harmless | {"init_method", "normalization_function"}

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from super().feedforward(ours, theirs)
        shared = f"{theirs.removesuffix('mlp')}shared_mlp"
        for network in (ours, f"{ours}.shared"):
            yield from linear(f"{network}.up", f"{shared}.input_linear")
            yield from linear(f"{network}.down", f"{shared}.output_linear")


FAMILY = GraniteMoEHybrid()
