"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import AttentionConfig, ExpertsConfig, FeedForwardConfig, ModelConfig, RMSNormConfig
from phasor.models.families._llama import LlamaLike
from phasor.models.family import GATES, activation_name, require_kind
from phasor.models.fields import Fields
from phasor.models.layout import Rule, experts, linear
from phasor.models.rope import read_rotary, write_rotary
from phasor.nn.positions import RotaryConfig


class Mixtral(LlamaLike):
    """A router sends each token to a few experts, whose weights add up to one."""

    model_type = "mixtral"
    title = "Mixtral"
    architectures = {"lm": "MixtralForCausalLM", "none": "MixtralModel"}
    defaults = {"num_key_value_heads": 8, "max_position_embeddings": 131072}
    harmless = frozenset({"output_router_logits", "router_aux_loss_coef"})  # which outputs are returned, and a loss

    def read(self, f: Fields) -> ModelConfig:
        plain = ModelConfig(**self.sizes(f))
        f.expect("router_jitter_noise", 0.0)
        mixture = ExpertsConfig(
            num_experts=f.get("num_local_experts", f.get("num_experts", 8)), top_k=f.get("num_experts_per_tok", 2)
        )
        return plain.replace(
            position=read_rotary(f, plain.head_dim, plain.max_length, base=1e6),
            attention=AttentionConfig(window=f.get("sliding_window", None)),
            feedforward=FeedForwardConfig(activation=f.choose("hidden_act", GATES, "silu"), experts=mixture),
            norm=RMSNormConfig(eps=f.get("rms_norm_eps", 1e-5)),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        position, norm = require_kind(config.position, RotaryConfig), require_kind(config.norm, RMSNormConfig)
        mixture = config.feedforward.experts
        if mixture is None:
            raise ValueError("it has experts in every layer")
        return self.write_sizes(config) | {
            "hidden_act": activation_name(config.feedforward.activation),
            "num_local_experts": mixture.num_experts,
            "num_experts_per_tok": mixture.top_k,
            "sliding_window": config.layer(0).attention.window,
            "rms_norm_eps": norm.eps,
            "rope_parameters": write_rotary(position, config),
        }

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        mixture = f"{theirs.removesuffix('mlp')}block_sparse_moe"
        yield from linear(f"{ours}.router", f"{mixture}.gate")
        each = f"{mixture}.experts.{{e}}"
        yield from experts(ours, f"{each}.w1.weight", f"{each}.w3.weight", f"{each}.w2.weight")


FAMILY = Mixtral()
