"""Cohere's Command R and Command R+, and Aya."""

from __future__ import annotations

from typing import Any

from phasor.config import AttentionConfig, FeedForwardConfig, LayerNormConfig, LogitsConfig, ModelConfig, ParallelConfig
from phasor.models.families._llama import EVERY_BIAS, LlamaLike
from phasor.models.family import GATES, activation_name, require_kind
from phasor.models.fields import Fields
from phasor.models.rope import read_rotary, write_rotary
from phasor.nn.positions import RotaryConfig


class Cohere(LlamaLike):
    """Attention and feed-forward in parallel after one LayerNorm without bias, adjacent pairs, scaled logits."""

    model_type = "cohere"
    title = "Cohere Command R"
    architectures = {"lm": "CohereForCausalLM", "none": "CohereModel"}
    norms = ("input_layernorm",)
    defaults = {"max_position_embeddings": 8192, "tie_word_embeddings": True}
    has_head_dim = False
    # the second is the length that the model may be used at, the third the tensor-parallel slices of pretraining
    harmless = frozenset({"logit_scale", "model_max_length", "pretraining_tp"})

    def read(self, f: Fields) -> ModelConfig:
        plain = ModelConfig(**self.sizes(f))
        bias = EVERY_BIAS if f.get("attention_bias", False) else ()
        head = plain.head
        if isinstance(head, LogitsConfig):  # without a head there are no logits to scale
            head = head.replace(multiplier=f.positive("logit_scale", 0.0625))
        return plain.replace(
            position=read_rotary(f, plain.head_dim, plain.max_length, base=500000.0, pairing="adjacent"),
            attention=AttentionConfig(bias=bias, qk_norm="heads" if f.get("use_qk_norm", False) else "none"),
            feedforward=FeedForwardConfig(activation=f.choose("hidden_act", GATES, "silu")),
            norm=LayerNormConfig(eps=f.get("layer_norm_eps", 1e-5), bias=False),
            placement=ParallelConfig(),
            head=head,
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        fields = self.write_sizes(config) | {
            "hidden_act": activation_name(config.feedforward.activation),
            "attention_bias": bool(config.attention.bias),
            "use_qk_norm": config.attention.qk_norm == "heads",
            "layer_norm_eps": require_kind(config.norm, LayerNormConfig).eps,
            "rope_parameters": write_rotary(require_kind(config.position, RotaryConfig), config),
        }
        if isinstance(config.head, LogitsConfig):
            scale = config.head.multiplier
            fields["logit_scale"] = config.dim**-0.5 if scale == "rsqrt" else scale
        return fields


FAMILY = Cohere()
