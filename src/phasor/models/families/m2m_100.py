"""M2M-100 and NLLB."""

from __future__ import annotations

from typing import Any

from phasor.config import ModelConfig, PreConfig
from phasor.models.families._bart import BartLike
from phasor.models.family import require_kind
from phasor.models.fields import Fields
from phasor.nn.positions import SinusoidalConfig


class M2M100(BartLike):
    """Pre-norm, sines and then cosines of positions that count from after the padding token's number."""

    model_type = "m2m_100"
    title = "M2M-100, NLLB"
    architectures = {"lm": "M2M100ForConditionalGeneration", "none": "M2M100Model"}
    placement, logits_bias = PreConfig(), False
    flags = {
        "normalize_before": True,
        "add_final_layer_norm": True,
        "normalize_embedding": False,
        "static_position_embeddings": True,
    }
    unsupported = frozenset()
    derived = (*BartLike.derived, "model.*coder.embed_positions.weights")

    def read(self, f: Fields) -> ModelConfig:
        f.set_defaults({"activation_function": "relu", "scale_embedding": True, "attention_dropout": 0.1})
        return super().read(f)

    def read_position(self, f: Fields) -> SinusoidalConfig:
        pad = f.get("pad_token_id", 1)
        return SinusoidalConfig(layout="halves", spacing="ends", offset=pad + 1, zero_padding=True, padding_token=pad)

    def write_position(self, config: ModelConfig) -> dict[str, Any]:
        offset = require_kind(config.position, SinusoidalConfig).offset
        if not 1 <= offset <= config.vocab_size:
            raise ValueError("its positions count from after the number of a token, the padding")
        return {"max_position_embeddings": config.max_length, "pad_token_id": offset - 1}


FAMILY = M2M100()
