"""RoBERTa: BERT whose positions begin after the number of the padding token."""

from __future__ import annotations

from typing import Any

from phasor.config import ModelConfig
from phasor.models.entries import ACTIVATIONS, Activation, Draft, FieldEntry, require_kind
from phasor.models.families._bert import BertLike, bert_classifiers
from phasor.models.fields import Fields
from phasor.nn.positions import LearnedConfig

DENSE_CLASSIFIER = {"pooler.dense": "classifier.dense", "head.score": "classifier.out_proj"}


class RowsAfterPadding(FieldEntry):
    """The rows of a position table, of which the first `pad_token_id + 1` are no token's.

    Where the padding token is `always` the same, the file's is not read.
    """

    def __init__(self, always: int | None = None, default: int = 512) -> None:
        self.always, self.default = always, default

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        pad = f.get("pad_token_id", 1) if self.always is None else self.always
        draft.values |= {"position.offset": pad + 1, "position.padding_token": pad}
        draft["max_length"] = f.get(name, self.default) - (pad + 1)

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        position = require_kind(config.input_position, LearnedConfig)
        if not position.offset:
            raise ValueError("its positions begin after a padding token's number, and so not at 0")
        rows = (position.max_length or config.max_length) + position.offset
        return {name: rows} | ({"pad_token_id": position.offset - 1} if self.always is None else {})


class Roberta(BertLike):
    """BERT with an activation of the head that is always GELU."""

    model_type = "roberta"
    title = "RoBERTa"
    architectures = {"mlm": "RobertaForMaskedLM", "none": "RobertaModel"}
    classifiers = bert_classifiers("Roberta", DENSE_CLASSIFIER)
    prefix = "roberta."
    unprefixed = ("lm_head.",)
    embedding = "roberta.embeddings.word_embeddings.weight"
    head = "lm_head.decoder.weight"
    copies = {"lm_head.decoder.bias": "lm_head.bias", "lm_head.bias": "lm_head.decoder.bias"}
    masked = "lm_head"
    transform = ("lm_head.dense", "lm_head.layer_norm")
    parts = BertLike.parts | {"head.activation": "gelu"}
    fields = BertLike.fields | {
        "max_position_embeddings": RowsAfterPadding(),
        "hidden_act": Activation("gelu", ACTIVATIONS),
    }


FAMILY = Roberta()
