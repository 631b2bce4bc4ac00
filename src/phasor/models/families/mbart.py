"""mBART and mBART-50."""

from __future__ import annotations

from phasor.config import PreConfig
from phasor.models.families.bart import Bart


class MBart(Bart):
    """BART with the norms before, and one after the last block."""

    model_type = "mbart"
    title = "mBART, mBART-50"
    architectures = {"lm": "MBartForConditionalGeneration", "none": "MBartModel"}
    placement = PreConfig()
    flags = Bart.flags | {"normalize_before": True, "add_final_layer_norm": True}


FAMILY = MBart()
