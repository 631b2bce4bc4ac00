"""RoBERTa: BERT whose positions begin after the number of the padding token."""

from __future__ import annotations

from typing import Any

from phasor.config import ModelConfig
from phasor.models.families._bert import BertLike
from phasor.models.family import require_kind
from phasor.models.fields import Fields
from phasor.nn.positions import LearnedConfig


class Roberta(BertLike):
    """The first `pad_token_id + 1` rows of the position table are no token's; the head's activation is always GELU."""

    model_type = "roberta"
    title = "RoBERTa"
    architectures = {"mlm": "RobertaForMaskedLM", "none": "RobertaModel"}
    prefix = "roberta."
    unprefixed = ("lm_head.",)
    embedding = "roberta.embeddings.word_embeddings.weight"
    head = "lm_head.decoder.weight"
    copies = {"lm_head.decoder.bias": "lm_head.bias", "lm_head.bias": "lm_head.decoder.bias"}
    masked = "lm_head"
    transform = ("lm_head.dense", "lm_head.layer_norm")
    head_activation = "gelu"

    def read_positions(self, f: Fields) -> dict[str, Any]:
        f.expect("position_embedding_type", "absolute")
        pad = f.get("pad_token_id", 1)
        offset = pad + 1
        return {
            "position": LearnedConfig(offset=offset, padding_token=pad),
            "max_length": f.get("max_position_embeddings", 512) - offset,
        }

    def write_positions(self, config: ModelConfig) -> dict[str, Any]:
        position = require_kind(config.input_position, LearnedConfig)
        if not position.offset:
            raise ValueError("its positions begin after a padding token's number, and so not at 0")
        rows = (position.max_length or config.max_length) + position.offset
        return {"max_position_embeddings": rows, "pad_token_id": position.offset - 1}


FAMILY = Roberta()
