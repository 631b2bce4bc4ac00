"""Pegasus."""

from __future__ import annotations

from phasor.models.entries import Pinned
from phasor.models.families._bart import BartLike


class Pegasus(BartLike):
    """Pre-norm with a norm after the last block, sines and then cosines of the position."""

    model_type = "pegasus"
    title = "Pegasus"
    architectures = {"lm": "PegasusForConditionalGeneration", "none": "PegasusModel"}
    parts = BartLike.parts | {"position": "sinusoidal", "position.layout": "halves", "placement": "pre"}
    fields = BartLike.fields | {
        "normalize_before": Pinned(True),
        "add_final_layer_norm": Pinned(True),
        "normalize_embedding": Pinned(False),
        "static_position_embeddings": Pinned(True),
    }
    derived = (*BartLike.derived, "model.*coder.embed_positions.weight")


FAMILY = Pegasus()
