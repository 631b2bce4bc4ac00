"""BERT, and the many encoders of its shape, sentence-embedding ones among them."""

from __future__ import annotations

from collections.abc import Iterable

from phasor.config import ModelConfig
from phasor.models.families._bert import BertLike, bert_classifiers
from phasor.models.fields import Fields

NEXT_SENTENCE = ("cls.seq_relationship.weight", "cls.seq_relationship.bias")


class Bert(BertLike):
    """Learned positions, token types, a pooler. The head that tells next sentences is kept, and not used."""

    model_type = "bert"
    title = "BERT"
    architectures = {"mlm": "BertForMaskedLM", "none": "BertModel"}
    classifiers = bert_classifiers("Bert", {"head.score": "classifier"})
    first_choice = True
    aliases = {"BertForPreTraining": "mlm"}
    prefix = "bert."
    unprefixed = ("cls.",)
    embedding = "bert.embeddings.word_embeddings.weight"
    head = "cls.predictions.decoder.weight"
    copies = {
        "cls.predictions.decoder.bias": "cls.predictions.bias",
        "cls.predictions.bias": "cls.predictions.decoder.bias",
    }
    passthrough = NEXT_SENTENCE

    def pooler(self, f: Fields, kind: str) -> str:
        both = f.get("architectures", None) == ["BertForPreTraining"]
        return "first" if both and not f.tensors else super().pooler(f, kind)

    def architecture(self, config: ModelConfig, passthrough: Iterable[str] = ()) -> str:
        """With both of its heads if the file has both: one that is missing, transformers would draw at random."""
        both = config.head.kind == "mlm" and config.head.pooler == "first" and set(NEXT_SENTENCE) <= set(passthrough)
        return "BertForPreTraining" if both else super().architecture(config, passthrough)


FAMILY = Bert()
