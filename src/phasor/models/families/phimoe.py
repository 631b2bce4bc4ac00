"""Phi-3.5-MoE, Phi-mini-MoE and Phi-tiny-MoE."""

from __future__ import annotations

from typing import Any

from phasor.config import ModelConfig
from phasor.models.entries import Bias, Draft, Field, HeadDim, Pinned
from phasor.models.families._llama import score_classifiers
from phasor.models.families.mixtral import Mixtral
from phasor.models.fields import Fields
from phasor.models.rope import RopeParameters, parameters
from phasor.nn.positions import LongRoPE, RotaryConfig


class PhimoeRotary(RopeParameters):
    """Rotary parameters whose attention factor is named twice, for short and for long texts."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        rope = f.inside(parameters(f, None, {}), "rope_parameters.")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            super().read(f, name, draft)
            return
        rope.expect("rope_type" if "rope_type" in rope else "type", "longrope")
        factor = rope.get("short_mscale")
        rope.expect("long_mscale", factor)
        others = {n: v for n, v in rope.data.items() if n not in ("short_mscale", "long_mscale")}
        inner = f.inside(f.data | {"rope_parameters": others | {"attention_factor": factor}, "rope_scaling": None})
        draft["position"] = self.scheme(inner, draft, self.base, self.partial)
        f.taken |= inner.taken

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        fields = super().write(name, config)[name]
        if isinstance(config.position, RotaryConfig) and config.position.extension is not None:
            fields |= dict.fromkeys(("short_mscale", "long_mscale"), fields.pop("attention_factor", None))
        return {name: fields}


class Phimoe(Mixtral):
    """Mixtral with LayerNorm, whose router is a SparseMixer; biases on attention and the head."""

    model_type = "phimoe"
    title = "Phi-3.5-MoE, Phi-mini-MoE"
    architectures = {"lm": "PhimoeForCausalLM", "none": "PhimoeModel"}
    aliases = {"PhiMoEForCausalLM": "lm"}  # as the published files have it
    classifiers = score_classifiers("Phimoe", tokens=False)
    parts = Mixtral.parts | {
        "norm": "layernorm",
        "feedforward.experts.scores": "sparsemixer",
        "feedforward.experts.normalize": False,
        "feedforward.experts.top_k": 2,
    }
    fields = Mixtral.fields | {
        "head_dim": HeadDim(),
        "attention_bias": Bias(False),
        "lm_head_bias": Field("head.bias", default=False),
        "num_local_experts": Field("feedforward.experts.num_experts", default=16),
        "num_experts_per_tok": Pinned(2),
        "router_jitter_noise": Field("feedforward.experts.jitter", default=0.01),
        "rope_parameters": PhimoeRotary(base=1e6),
    }
    # noise on the router's input in training, which phasor does not add
    harmless = Mixtral.harmless | {"input_jitter_noise"}

    def differs_from_transformers(self, config: ModelConfig) -> str | None:
        if not isinstance(config.position, RotaryConfig) or not isinstance(config.position.extension, LongRoPE):
            return None
        return (
            "transformers takes the short factors of LongRoPE at any length, and phasor the long ones where they apply"
        )


FAMILY = Phimoe()
