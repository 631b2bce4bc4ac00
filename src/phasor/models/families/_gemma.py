"""What the Gemma models share: norms by 1 + weight, token vectors times sqrt(dim), a gated network."""

from __future__ import annotations

from typing import Any, ClassVar

from phasor.config import ModelConfig
from phasor.models.entries import Bias, Draft, Field, FieldEntry
from phasor.models.families._llama import LlamaLike

AROUND = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


class GemmaLike(LlamaLike):
    """Llama's fields with heads of 256 features, and a head that is tied."""

    parts = LlamaLike.parts | {
        "norm": "rmsnorm",
        "norm.unit_offset": True,
        "embedding.scale": "sqrt",
        "embedding.round_scale": True,
    }
    fields: ClassVar[dict[str, FieldEntry]] = LlamaLike.fields | {
        "head_dim": Field("head_dim", default=None, absent=256),
        "max_position_embeddings": Field("max_length", default=8192),
        "tie_word_embeddings": Field("embedding.tied", default=False, absent=True),
        "attention_bias": Bias(False),
        "rms_norm_eps": Field("norm.eps", default=1e-6),
    }


class QueryScalar(Field):
    """`query_pre_attn_scalar`: one over the square of what scores are multiplied by."""

    def __init__(self) -> None:
        super().__init__("attention.scale", default=256, positive=True)

    def decode(self, value: Any, draft: Draft) -> Any:
        return float(value**-0.5)

    def encode(self, value: Any, config: ModelConfig) -> Any:
        scalar = round(value**-2)
        if scalar**-0.5 != value:
            raise ValueError(f"its scale of the scores is one over the root of an integer, not {value}")
        return scalar
