"""mT5, and its encoder alone."""

from __future__ import annotations

from phasor.models.families._t5 import Depths, FeedForwardProj, T5Like, t5_classifiers


class MT5(T5Like):
    """T5 v1.1 with many languages: what the head reads is never scaled."""

    model_type = "mt5"
    title = "mT5"
    architectures = {"lm": "MT5ForConditionalGeneration", "none": "MT5Model"}
    aliases = {"MT5EncoderModel": "none"}
    encoder = "MT5EncoderModel"
    classifiers = t5_classifiers("MT5")
    fields = T5Like.fields | {
        "num_layers": Depths(encoder, classifiers["token-classifier"].architecture),
        "feed_forward_proj": FeedForwardProj("gated-gelu"),
    }


FAMILY = MT5()
