"""EuroBERT: Llama's blocks in an encoder."""

from __future__ import annotations

from phasor.models.entries import GATES, Activation, Bias, ClassifierPooling, Field
from phasor.models.families._llama import LlamaLike
from phasor.models.family import Classifier
from phasor.models.rope import RopeParameters


class EuroBert(LlamaLike):
    """Every token attends to every token; the head of the masked language model is one projection."""

    model_type = "eurobert"
    title = "EuroBERT"
    architectures = {"lm": "EuroBertForMaskedLM", "none": "EuroBertModel"}
    classifiers = {
        "sequence-classifier": Classifier(
            "EuroBertForSequenceClassification",
            {"head.dense": "dense", "head.score": "classifier"},
            {"head.dense": "gelu"},
        ),
        "token-classifier": Classifier("EuroBertForTokenClassification", {"head.score": "classifier"}),
    }
    shapes = ("encoder",)
    parts = LlamaLike.parts | {"norm": "rmsnorm"}
    fields = LlamaLike.fields | {
        "max_position_embeddings": Field("max_length", default=8192),
        "hidden_act": Activation("silu", GATES),
        "attention_bias": Bias(False),
        "mlp_bias": Field("feedforward.bias", "head.bias", default=False),
        "classifier_pooling": ClassifierPooling("late", {"bos": "cls", "mean": "mean"}),
        "rms_norm_eps": Field("norm.eps", default=1e-5),
        "rope_parameters": RopeParameters(),
    }
    harmless = frozenset({"clf_pooling", "mask_token_id", "pretraining_tp"})


FAMILY = EuroBert()
