"""CamemBERT: RoBERTa in French."""

from __future__ import annotations

from phasor.models.families.roberta import Roberta


class Camembert(Roberta):
    """RoBERTa under another name."""

    model_type = "camembert"
    title = "CamemBERT"
    architectures = {"mlm": "CamembertForMaskedLM", "none": "CamembertModel"}


FAMILY = Camembert()
