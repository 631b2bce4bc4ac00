"""Heads that classify, on the random configurations of their families."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import transformers

from . import delta, encoders, gemma, llama, llama_like, phi, plain
from .cases import Case, Cases

OTHERS = delta.CASES | encoders.CASES | gemma.CASES | llama.CASES | llama_like.CASES | phi.CASES | plain.CASES


def classifier(family: str, cls: Any, labels: int, **fixed: Any) -> Callable[[random.Random], Case]:
    """A class with this many labels; padding is the last token, which no test draws, and which decoders need."""

    def build(rng: random.Random) -> Case:
        case = OTHERS[family](rng)
        case.cls, config = cls, case.config
        config.id2label = {i: f"the label {i}" for i in range(labels)}
        config.label2id = {name: i for i, name in config.id2label.items()}
        if config.pad_token_id is None:
            config.pad_token_id = config.vocab_size - 1
        for name, value in fixed.items():
            setattr(config, name, value)
        return case

    return build


CASES: Cases = {
    f"{family}/{kind}": classifier(family, getattr(transformers, f"{name}For{cls}Classification"), labels)
    for family, name in {
        "bert": "Bert",
        "roberta": "Roberta",
        "xlm-roberta": "XLMRoberta",
        "camembert": "Camembert",
        "mpnet": "MPNet",
        "electra": "Electra",
        "albert": "Albert",
        "deberta-v2": "DebertaV2",
        "esm": "Esm",
        "nomic_bert": "NomicBert",
        "distilbert": "DistilBert",
        "modernbert": "ModernBert",
        "llama": "Llama",
        "mistral": "Mistral",
        "ministral3": "Ministral3",
        "mixtral": "Mixtral",
        "qwen2": "Qwen2",
        "qwen3": "Qwen3",
        "qwen2_moe": "Qwen2Moe",
        "qwen3_moe": "Qwen3Moe",
        "qwen3_next": "Qwen3Next",
        "gemma": "Gemma",
        "gemma2": "Gemma2",
        "phi3": "Phi3",
    }.items()
    for kind, cls, labels in (("sequence classifier", "Sequence", 3), ("token classifier", "Token", 5))
} | {
    "xlm-roberta/reranker": classifier("xlm-roberta", transformers.XLMRobertaForSequenceClassification, 1),
    "gemma3_text/sequence classifier": classifier("gemma3_text", transformers.Gemma3TextForSequenceClassification, 3),
    "phimoe/sequence classifier": classifier("phimoe", transformers.PhimoeForSequenceClassification, 3),
    "eurobert/sequence classifier": classifier(
        "eurobert", transformers.EuroBertForSequenceClassification, 3, classifier_pooling="mean"
    ),
    "apertus/token classifier": classifier("apertus", transformers.ApertusForTokenClassification, 5),
    "eurobert/token classifier": classifier("eurobert", transformers.EuroBertForTokenClassification, 3),
}
