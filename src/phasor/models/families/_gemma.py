"""What the Gemma models share: norms by 1 + weight, token vectors times sqrt(dim), a gated network."""

from __future__ import annotations

from typing import Any, ClassVar

from phasor.config import AttentionConfig, FeedForwardConfig, LogitsConfig, ModelConfig, RMSNormConfig
from phasor.models.families._llama import EVERY_BIAS, LlamaLike
from phasor.models.family import GATES, activation_name, require_kind
from phasor.models.fields import Fields

AROUND = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


class GemmaLike(LlamaLike):
    """`activation` is the field that names it, `gates` what its words mean."""

    activation: ClassVar[str] = "hidden_activation"
    gates: ClassVar[dict[str, str]] = GATES

    def read_shared(self, f: Fields) -> ModelConfig:
        plain = ModelConfig(**self.sizes(f))
        return plain.replace(
            attention=AttentionConfig(bias=EVERY_BIAS if f.get("attention_bias", False) else ()),
            feedforward=FeedForwardConfig(activation=f.choose(self.activation, self.gates, "gelu_pytorch_tanh")),
            norm=RMSNormConfig(eps=f.get("rms_norm_eps", 1e-6), unit_offset=True),
            embedding=plain.embedding.replace(scale="sqrt", round_scale=True),
        )

    def write_shared(self, config: ModelConfig) -> dict[str, Any]:
        """The fields `read_shared` reads."""
        return self.write_sizes(config) | {
            "attention_bias": bool(config.layer(0).attention.bias),
            self.activation: activation_name(config.feedforward.activation),
            "rms_norm_eps": require_kind(config.norm, RMSNormConfig).eps,
        }


def read_softcap(f: Fields, config: ModelConfig) -> ModelConfig:
    """The head's soft-cap; a model without a head has no use for the field."""
    if not isinstance(config.head, LogitsConfig):
        return config
    return config.replace(head=config.head.replace(softcap=f.get("final_logit_softcapping", None)))


def write_softcap(config: ModelConfig) -> dict[str, Any]:
    return {"final_logit_softcapping": config.head.softcap} if isinstance(config.head, LogitsConfig) else {}


def read_scale(f: Fields) -> float:
    """What scores are multiplied by."""
    return float(f.positive("query_pre_attn_scalar", 256) ** -0.5)


def write_scale(config: ModelConfig) -> dict[str, Any]:
    scale = config.layer(0).attention.scale
    squared = config.head_dim if scale is None else round(scale**-2)
    if scale is not None and squared**-0.5 != scale:
        raise ValueError(f"its scale of the scores is one over the root of an integer, not {scale}")
    return {"query_pre_attn_scalar": squared}
