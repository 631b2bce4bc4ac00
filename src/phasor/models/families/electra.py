"""ELECTRA: BERT whose first layer may be narrower."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from phasor.config import ModelConfig
from phasor.models.entries import ACTIVATIONS, Activation, EmbeddingWidth
from phasor.models.families._bert import BertLike, bert_classifiers
from phasor.models.layout import Rule, linear

DISCRIMINATOR = "discriminator_predictions."


class Electra(BertLike):
    """The generator has logits. The discriminator's head, which tells replaced tokens, is kept and not used."""

    model_type = "electra"
    title = "ELECTRA"
    architectures = {"mlm": "ElectraForMaskedLM", "none": "ElectraModel"}
    aliases = {"ElectraForPreTraining": "none"}
    classifiers = bert_classifiers(
        "Electra", {"head.dense": "classifier.dense", "head.score": "classifier.out_proj"}, pooler="cls", dense="gelu"
    )
    prefix = "electra."
    unprefixed = ("generator_", DISCRIMINATOR)
    embedding = "electra.embeddings.word_embeddings.weight"
    head = "generator_lm_head.weight"
    transform = ("generator_predictions.dense", "generator_predictions.LayerNorm")
    has_pooler = False
    parts = BertLike.parts | {"head.activation": "gelu"}
    fields = BertLike.fields | {
        "embedding_size": EmbeddingWidth(project="sum", absent=128),
        "hidden_act": Activation("gelu", ACTIVATIONS),
    }

    def architecture(self, config: ModelConfig, passthrough: Iterable[str] = ()) -> str:
        """With the discriminator's head if the file has it."""
        discriminates = any(name.startswith(DISCRIMINATOR) for name in passthrough)
        return "ElectraForPreTraining" if discriminates else super().architecture(config, passthrough)

    def head_rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield from linear("head.dense", self.transform[0])
        yield from linear("head.norm", self.transform[1])
        yield from linear("head", "generator_lm_head")


FAMILY = Electra()
