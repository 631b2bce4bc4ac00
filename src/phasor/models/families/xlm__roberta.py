"""XLM-RoBERTa: RoBERTa with many languages; multilingual E5, BGE-M3 and its rerankers are of this family."""

from __future__ import annotations

from phasor.models.families._bert import bert_classifiers
from phasor.models.families.roberta import DENSE_CLASSIFIER, Roberta


class XLMRoberta(Roberta):
    """RoBERTa under another name."""

    model_type = "xlm-roberta"
    title = "XLM-RoBERTa"
    architectures = {"mlm": "XLMRobertaForMaskedLM", "none": "XLMRobertaModel"}
    classifiers = bert_classifiers("XLMRoberta", DENSE_CLASSIFIER)


FAMILY = XLMRoberta()
