"""BART, and what was distilled from it."""

from __future__ import annotations

from typing import Any, ClassVar

from phasor.config import ModelConfig, PlacementConfig, PostConfig
from phasor.models.families._bart import BartLike
from phasor.models.family import require_kind
from phasor.models.fields import Fields
from phasor.nn.positions import LearnedConfig


class Bart(BartLike):
    """Post-norm, a norm after the embedding, learned positions from the table's third row."""

    model_type = "bart"
    title = "BART"
    architectures = {"lm": "BartForConditionalGeneration", "none": "BartModel"}
    placement: ClassVar[PlacementConfig] = PostConfig()
    embedding_norm = True
    flags = {
        "normalize_before": False,
        "add_final_layer_norm": False,
        "normalize_embedding": True,
        "static_position_embeddings": False,
        "do_blenderbot_90_layernorm": False,
    }
    harmless = BartLike.harmless | {"author", "kobart_version"}

    def read_position(self, f: Fields) -> LearnedConfig:
        return LearnedConfig(offset=2)

    def write_position(self, config: ModelConfig) -> dict[str, Any]:
        return {"max_position_embeddings": require_kind(config.input_position, LearnedConfig).max_length}


FAMILY = Bart()
