"""Heads that classify, on the random configurations of their families."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import transformers

from . import delta, encoders, gemma, llama, llama_like, phi, plain, seq2seq
from .cases import Case, Cases

OTHERS = delta.CASES | encoders.CASES | gemma.CASES | llama.CASES | llama_like.CASES | phi.CASES | plain.CASES
OTHERS |= seq2seq.CASES


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


def seq2seq_classifier(family: str, cls: Any, labels: int) -> Callable[[random.Random], Case]:
    """A class of an encoder-decoder. The end of a text is a token that no test draws: scores are of the last one.

    The encoder alone may say in transformers that it is an encoder-decoder with a decoder.
    """

    def build(rng: random.Random) -> Case:
        case = classifier(family, cls, labels)(rng)
        case.config.eos_token_id = case.config.vocab_size - 4
        case.may_differ = (*case.may_differ, "is_encoder_decoder", "num_decoder_layers", "tie_word_embeddings")
        return case

    return build


SEQ2SEQ = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5", "bart": "Bart"}
CASES: Cases = (
    {
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
    }
    | {
        "xlm-roberta/reranker": classifier("xlm-roberta", transformers.XLMRobertaForSequenceClassification, 1),
        "gemma3_text/sequence classifier": classifier(
            "gemma3_text", transformers.Gemma3TextForSequenceClassification, 3
        ),
        "phimoe/sequence classifier": classifier("phimoe", transformers.PhimoeForSequenceClassification, 3),
        "eurobert/sequence classifier": classifier(
            "eurobert", transformers.EuroBertForSequenceClassification, 3, classifier_pooling="mean"
        ),
        "apertus/token classifier": classifier("apertus", transformers.ApertusForTokenClassification, 5),
        "eurobert/token classifier": classifier("eurobert", transformers.EuroBertForTokenClassification, 3),
    }
    | {
        f"{family}/{kind}": seq2seq_classifier(family, getattr(transformers, f"{name}For{cls}Classification"), labels)
        for family, name in SEQ2SEQ.items()
        for kind, cls, labels in (("sequence classifier", "Sequence", 3), ("token classifier", "Token", 5))
        if hasattr(transformers, f"{name}For{cls}Classification")
    }
)
