"""HunYuan, its dense models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import ModelConfig
from phasor.models.entries import GATES, Activation, Bias, Draft, Field, Pinned, SameAs, require_kind
from phasor.models.families._llama import LlamaLike
from phasor.models.fields import Fields
from phasor.models.layout import Rule, linear, projections
from phasor.models.rope import RopeParameters, parameters
from phasor.nn.positions import NTKScaling, RotaryConfig


class AlphaParameters(RopeParameters):
    """`rope_parameters`, whose type "dynamic" with an `alpha` multiplies the base by a power of it at any length."""

    def scheme(self, f: Fields, draft: Draft, base: float, partial: float | None) -> RotaryConfig:
        rope = f.inside(parameters(f, None, {}), "rope_parameters.")
        alpha = rope.get("alpha", None)
        if not alpha or rope.get("rope_type", rope.get("type", "default")) != "dynamic":
            return super().scheme(f, draft, base, partial)
        given = {"rope_theta": rope.get("rope_theta", f.get("rope_theta", base))}
        inner = f.inside(f.data | {"rope_parameters": given, "rope_scaling": None})
        plain = super().scheme(inner, draft, base, partial)
        f.taken |= inner.taken
        return plain.replace(extension=NTKScaling(factor=alpha))

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        position = require_kind(config.position, RotaryConfig)
        if not isinstance(position.extension, NTKScaling):
            return super().write(name, config)
        plain = super().write(name, config.replace(position=position.replace(extension=None)))[name]
        return {name: plain | {"rope_type": "dynamic", "alpha": position.extension.factor, "factor": 1.0}}


class HunYuanDense(LlamaLike):
    """Llama with norms of queries and keys behind their rotation."""

    model_type = "hunyuan_v1_dense"
    title = "HunYuan"
    architectures = {"lm": "HunYuanDenseV1ForCausalLM", "none": "HunYuanDenseV1Model"}
    parts = LlamaLike.parts | {
        "norm": "rmsnorm",
        "attention.qk_norm": "head",
        "attention.qk_norm_after_positions": True,
    }
    fields = LlamaLike.fields | {
        "attention_head_dim": Pinned(None, SameAs("head_dim")),
        "hidden_act": Activation("silu", GATES),
        "attention_bias": Bias(False),
        "rms_norm_eps": Field("norm.eps", default=1e-5),
        "rope_parameters": AlphaParameters(),
        "use_qk_norm": Pinned(True),
        "use_cla": Pinned(False),
        "mlp_bias": Pinned(False),
    }
    # How products were once cut, a special token, and what sharing of keys between layers would use.
    harmless = frozenset({"pretraining_tp", "eod_token_id", "cla_share_factor"})

    def attention(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from projections(ours, theirs)
        yield from linear(f"{ours}.out", f"{theirs}.o_proj")
        yield from linear(f"{ours}.q_norm", f"{theirs}.query_layernorm")
        yield from linear(f"{ours}.k_norm", f"{theirs}.key_layernorm")


FAMILY = HunYuanDense()
