"""Qwen 3 with a mixture of experts."""

from __future__ import annotations

from typing import Any

from phasor.config import AttentionConfig, ExpertsConfig, FeedForwardConfig, ModelConfig, RMSNormConfig
from phasor.models.families._experts import WithExperts
from phasor.models.families._layers import vary_layers
from phasor.models.families._llama import EVERY_BIAS
from phasor.models.family import GATES, activation_name, require_kind
from phasor.models.fields import Fields
from phasor.models.rope import read_rotary, write_rotary
from phasor.nn.positions import RotaryConfig


class Qwen3MoE(WithExperts):
    """Qwen 3 with experts in some layers; a window is the same in every layer."""

    model_type = "qwen3_moe"
    title = "Qwen 3 MoE"
    architectures = {"lm": "Qwen3MoeForCausalLM", "none": "Qwen3MoeModel"}
    defaults = {"num_key_value_heads": 4, "max_position_embeddings": 32768, "sliding_window": 4096}
    has_head_dim = False
    # A window nobody asks for, a field of its sister families, which outputs are returned, and a loss.
    harmless = frozenset({"sliding_window", "max_window_layers", "output_router_logits", "router_aux_loss_coef"})

    def read(self, f: Fields) -> ModelConfig:
        plain, bias = ModelConfig(**self.sizes(f)), f.get("attention_bias", False)
        f.expect("qkv_bias", False)
        f.expect("use_qk_norm", True)
        f.expect("shared_expert_intermediate_size", 0)
        mixture = ExpertsConfig(
            num_experts=f.get("num_experts", f.get("num_local_experts", 128)),
            top_k=f.get("num_experts_per_tok", 8),
            hidden_dim=f.get("moe_intermediate_size", 768),
            normalize=f.get("norm_topk_prob", False),
        )
        sparse = FeedForwardConfig(activation=f.choose("hidden_act", GATES, "silu"), experts=mixture)
        window = f.get("sliding_window", None) if f.get("use_sliding_window", False) else None
        config = plain.replace(
            position=read_rotary(f, plain.head_dim, plain.max_length),
            attention=AttentionConfig(bias=EVERY_BIAS if bias else (), qk_norm="head", window=window),
            feedforward=sparse,
            norm=RMSNormConfig(eps=f.get("rms_norm_eps", 1e-6)),
        )
        return vary_layers(config, feedforward=self.feedforwards(f, sparse, plain.num_layers))

    def write(self, config: ModelConfig) -> dict[str, Any]:
        position, norm = require_kind(config.position, RotaryConfig), require_kind(config.norm, RMSNormConfig)
        attention, (_, mixture) = config.layer(0).attention, self.write_experts(config)
        return self.write_sizes(config) | {
            "hidden_act": activation_name(config.feedforward.activation),
            "attention_bias": bool(attention.bias),
            "use_sliding_window": attention.window is not None,
            **({} if attention.window is None else {"sliding_window": attention.window}),
            "rms_norm_eps": norm.eps,
            "rope_parameters": write_rotary(position, config),
            **mixture,
        }


FAMILY = Qwen3MoE()
