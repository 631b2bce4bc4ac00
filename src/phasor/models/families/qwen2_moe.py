"""Qwen 1.5 and 2 with a mixture of experts."""

from __future__ import annotations

from typing import Any

from phasor.config import AttentionConfig, ExpertsConfig, FeedForwardConfig, ModelConfig, RMSNormConfig
from phasor.models.families._experts import WithExperts
from phasor.models.families._layers import read_windows, vary_layers, write_windows
from phasor.models.family import GATES, activation_name, require_kind
from phasor.models.fields import Fields
from phasor.models.rope import read_rotary, write_rotary
from phasor.nn.positions import RotaryConfig


class Qwen2MoE(WithExperts):
    """Qwen 2 with experts in some layers, one of which every token takes, and windows in every other layer."""

    model_type = "qwen2_moe"
    title = "Qwen 2 MoE"
    architectures = {"lm": "Qwen2MoeForCausalLM", "none": "Qwen2MoeModel"}
    defaults = {"num_key_value_heads": 16, "max_position_embeddings": 32768, "sliding_window": 4096}
    has_head_dim = False
    # Where no layer asks for them; which outputs are returned, and a loss.
    harmless = frozenset({"sliding_window", "max_window_layers", "output_router_logits", "router_aux_loss_coef"})

    def read(self, f: Fields) -> ModelConfig:
        plain = ModelConfig(**self.sizes(f))
        attention = AttentionConfig(bias=("q", "k", "v") if f.get("qkv_bias", True) else ())
        mixture = ExpertsConfig(
            num_experts=f.get("num_experts", 60),
            top_k=f.get("num_experts_per_tok", 4),
            hidden_dim=f.get("moe_intermediate_size", 1408),
            normalize=f.get("norm_topk_prob", False),
            shared_dim=f.get("shared_expert_intermediate_size", 5632),
            shared_gate=True,
        )
        sparse = FeedForwardConfig(activation=f.choose("hidden_act", GATES, "silu"), experts=mixture)
        windows = read_windows(f, plain.num_layers, lambda i: i % 2 == 0 and i < f.get("max_window_layers", 28))
        config = plain.replace(
            position=read_rotary(f, plain.head_dim, plain.max_length),
            attention=attention,
            feedforward=sparse,
            norm=RMSNormConfig(eps=f.get("rms_norm_eps", 1e-6)),
        )
        return vary_layers(
            config,
            attention=[attention.replace(window=w) for w in windows],
            feedforward=self.feedforwards(f, sparse, plain.num_layers),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        position, norm = require_kind(config.position, RotaryConfig), require_kind(config.norm, RMSNormConfig)
        mixture, fields = self.write_experts(config)
        return self.write_sizes(config) | {
            "hidden_act": activation_name(config.feedforward.activation),
            "qkv_bias": bool(config.layer(0).attention.bias),
            "shared_expert_intermediate_size": mixture.shared_dim,
            "rms_norm_eps": norm.eps,
            "rope_parameters": write_rotary(position, config),
            **write_windows(config),
            **fields,
        }


FAMILY = Qwen2MoE()
