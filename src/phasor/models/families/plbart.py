"""PLBart, of programming languages."""

from __future__ import annotations

from phasor.models.entries import Field, Switch
from phasor.models.families.bart import Bart


class PLBart(Bart):
    """BART with scaled token embeddings."""

    model_type = "plbart"
    title = "PLBart"
    architectures = {"lm": "PLBartForConditionalGeneration", "none": "PLBartModel"}
    fields = Bart.fields | {
        "scale_embedding": Switch("embedding.scale", on="sqrt", off=1.0, default=False, absent=True),
        "attention_dropout": Field("dropout.attention", default=0.1),
    }


FAMILY = PLBart()
