"""T5, T5 v1.1, Flan-T5, UL2, and their encoders alone."""

from __future__ import annotations

from phasor.models.entries import Draft, Switch
from phasor.models.families._t5 import Depths, FeedForwardProj, T5Like, t5_classifiers
from phasor.models.fields import Fields


class ScaledOutputs(Switch):
    """`scale_decoder_outputs`; a file that does not say so means it by its tie."""

    def value(self, f: Fields, name: str, draft: Draft) -> bool:
        return f.flag(name, f.get("tie_word_embeddings", self.default))


class T5(T5Like):
    """Version 1.0 divides what its head reads by sqrt(dim)."""

    model_type = "t5"
    title = "T5, T5 v1.1"
    architectures = {"lm": "T5ForConditionalGeneration", "none": "T5Model"}
    first_choice = True
    aliases = {"T5WithLMHeadModel": "lm", "T5EncoderModel": "none"}
    encoder = "T5EncoderModel"
    classifiers = t5_classifiers("T5")
    fields = T5Like.fields | {
        "num_layers": Depths(encoder, classifiers["token-classifier"].architecture),
        "feed_forward_proj": FeedForwardProj("relu"),
        "scale_decoder_outputs": ScaledOutputs("head.multiplier", on="rsqrt", off=1.0, default=True),
    }


FAMILY = T5()
