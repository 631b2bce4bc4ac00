"""CamemBERT: RoBERTa in French."""

from __future__ import annotations

from phasor.models.families._bert import bert_classifiers
from phasor.models.families.roberta import DENSE_CLASSIFIER, Roberta


class Camembert(Roberta):
    """RoBERTa under another name."""

    model_type = "camembert"
    title = "CamemBERT"
    architectures = {"mlm": "CamembertForMaskedLM", "none": "CamembertModel"}
    classifiers = bert_classifiers("Camembert", DENSE_CLASSIFIER)


FAMILY = Camembert()
