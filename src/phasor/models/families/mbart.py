"""mBART and mBART-50."""

from __future__ import annotations

from typing import ClassVar

from phasor.models.entries import Pinned
from phasor.models.families.bart import Bart
from phasor.models.family import Classifier


class MBart(Bart):
    """BART with the norms before, and one after the last block."""

    model_type = "mbart"
    title = "mBART, mBART-50"
    architectures = {"lm": "MBartForConditionalGeneration", "none": "MBartModel"}
    classifiers: ClassVar[dict[str, Classifier]] = {}  # their decoders begin with the last token of the source
    parts = Bart.parts | {"placement": "pre"}
    fields = Bart.fields | {"normalize_before": Pinned(True), "add_final_layer_norm": Pinned(True)}


FAMILY = MBart()
