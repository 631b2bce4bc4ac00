"""mBART and mBART-50."""

from __future__ import annotations

from phasor.models.entries import Pinned
from phasor.models.families.bart import Bart


class MBart(Bart):
    """BART with the norms before, and one after the last block."""

    model_type = "mbart"
    title = "mBART, mBART-50"
    architectures = {"lm": "MBartForConditionalGeneration", "none": "MBartModel"}
    parts = Bart.parts | {"placement": "pre"}
    fields = Bart.fields | {"normalize_before": Pinned(True), "add_final_layer_norm": Pinned(True)}


FAMILY = MBart()
