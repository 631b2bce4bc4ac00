"""Marian: the Transformer of 2017 as the OPUS-MT models have it."""

from __future__ import annotations

from typing import Any

from phasor.config import EmbeddingConfig, ModelConfig, PostConfig
from phasor.models.families._bart import BartLike
from phasor.models.family import require_kind
from phasor.models.fields import Fields
from phasor.nn.positions import SinusoidalConfig


class Marian(BartLike):
    """Post-norm, sines and then cosines of the position; encoder and decoder may have vocabularies of their own."""

    model_type = "marian"
    title = "Marian"
    architectures = {"lm": "MarianMTModel", "none": "MarianModel"}
    placement = PostConfig()
    flags = {
        "normalize_before": False,
        "add_final_layer_norm": False,
        "normalize_embedding": False,
        "do_blenderbot_90_layernorm": False,
    }
    derived = (*BartLike.derived, "model.*coder.embed_positions.weight")
    harmless = BartLike.harmless | {"static_position_embeddings"}  # they always are, and tables of others refused

    def read_tables(self, f: Fields, kind: str) -> tuple[int, EmbeddingConfig]:
        size = f.get("vocab_size")
        if f.get("share_encoder_decoder_embeddings", True):
            f.expect("decoder_vocab_size", size)
            return super().read_tables(f, kind)
        tied = f.get("tie_word_embeddings", True)
        return f.get("decoder_vocab_size", size), EmbeddingConfig(tied=tied, source_vocab_size=size)

    def read_position(self, f: Fields) -> SinusoidalConfig:
        return SinusoidalConfig(layout="halves")

    def write_tables(self, config: ModelConfig) -> dict[str, Any]:
        source = config.embedding.source_vocab_size
        return {
            "vocab_size": config.vocab_size if source is None else source,
            "decoder_vocab_size": config.vocab_size,
            "share_encoder_decoder_embeddings": source is None,
        }

    def write_position(self, config: ModelConfig) -> dict[str, Any]:
        require_kind(config.position, SinusoidalConfig)
        return {"max_position_embeddings": config.max_length}


FAMILY = Marian()
