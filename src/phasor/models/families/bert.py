"""BERT, and the many encoders of its shape, sentence-embedding ones among them."""

from __future__ import annotations

from phasor.models.families._bert import BertLike, Pretraining, bert_classifiers


class Bert(BertLike):
    """Learned positions, token types, a pooler. The head that tells next sentences is kept, and not used."""

    model_type = "bert"
    title = "BERT"
    architectures = {"mlm": "BertForMaskedLM", "none": "BertModel"}
    classifiers = bert_classifiers("Bert", {"head.score": "classifier"})
    pretraining = Pretraining("BertForPreTraining", ("cls.seq_relationship.weight", "cls.seq_relationship.bias"))
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


FAMILY = Bert()
