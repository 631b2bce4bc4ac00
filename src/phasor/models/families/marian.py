"""Marian: the Transformer of 2017 as the OPUS-MT models have it."""

from __future__ import annotations

from typing import Any

from phasor.config import ModelConfig
from phasor.models.entries import Draft, Pinned
from phasor.models.families._bart import BartLike, Vocabulary
from phasor.models.fields import Fields


class TwoVocabularies(Vocabulary):
    """A vocabulary for both sides, or with `share_encoder_decoder_embeddings` false one each."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        size = f.get(name)
        if f.get("share_encoder_decoder_embeddings", True):
            f.expect("decoder_vocab_size", size)
            super().read(f, name, draft)
            return
        draft.values |= {
            "vocab_size": f.get("decoder_vocab_size", size),
            "embedding.tied": f.get("tie_word_embeddings", True),
            "embedding.source_vocab_size": size,
        }

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        source = config.embedding.source_vocab_size
        return {
            name: config.vocab_size if source is None else source,
            "decoder_vocab_size": config.vocab_size,
            "share_encoder_decoder_embeddings": source is None,
        }


class Marian(BartLike):
    """Post-norm, sines and then cosines of the position; encoder and decoder may have different vocabularies."""

    model_type = "marian"
    title = "Marian"
    architectures = {"lm": "MarianMTModel", "none": "MarianModel"}
    parts = BartLike.parts | {"position": "sinusoidal", "position.layout": "halves", "placement": "post"}
    fields = BartLike.fields | {
        "vocab_size": TwoVocabularies(),
        "normalize_before": Pinned(False),
        "add_final_layer_norm": Pinned(False),
        "normalize_embedding": Pinned(False),
        "do_blenderbot_90_layernorm": Pinned(False),
    }
    derived = (*BartLike.derived, "model.*coder.embed_positions.weight")
    harmless = BartLike.harmless | {"static_position_embeddings"}  # they always are, and tables of others refused


FAMILY = Marian()
