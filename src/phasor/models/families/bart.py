"""BART, and what was distilled from it."""

from __future__ import annotations

from typing import ClassVar

from phasor.models.entries import Pinned, TableLength
from phasor.models.families._bart import BartLike
from phasor.models.family import Classifier


class Bart(BartLike):
    """Post-norm, a norm after the embedding, learned positions from the table's third row."""

    model_type = "bart"
    title = "BART"
    architectures = {"lm": "BartForConditionalGeneration", "none": "BartModel"}
    classifiers: ClassVar[dict[str, Classifier]] = {
        "sequence-classifier": Classifier(
            "BartForSequenceClassification",
            {"pooler.dense": "classification_head.dense", "head.score": "classification_head.out_proj"},
            {"head.pooler": "last-dense"},
        )
    }
    parts = BartLike.parts | {
        "position": "learned",
        "position.offset": 2,
        "placement": "post",
        "embedding.norm": True,
    }
    fields = BartLike.fields | {
        "max_position_embeddings": TableLength(default=1024),
        "normalize_before": Pinned(False),
        "add_final_layer_norm": Pinned(False),
        "normalize_embedding": Pinned(True),
        "static_position_embeddings": Pinned(False),
        "do_blenderbot_90_layernorm": Pinned(False),
    }
    harmless = BartLike.harmless | {"author", "kobart_version"}


FAMILY = Bart()
