"""PLBart, of programming languages."""

from __future__ import annotations

from typing import ClassVar

from phasor.models.entries import Field, Switch
from phasor.models.families.bart import Bart
from phasor.models.family import Classifier


class PLBart(Bart):
    """BART with scaled token embeddings."""

    model_type = "plbart"
    title = "PLBart"
    architectures = {"lm": "PLBartForConditionalGeneration", "none": "PLBartModel"}
    classifiers: ClassVar[dict[str, Classifier]] = {}  # their decoders begin with the last token of the source
    fields = Bart.fields | {
        "scale_embedding": Switch("embedding.scale", on="sqrt", off=1.0, default=False, absent=True),
        "attention_dropout": Field("dropout.attention", default=0.1),
    }


FAMILY = PLBart()
