"""UMT5, and its encoder alone."""

from __future__ import annotations

from phasor.config import ModelConfig
from phasor.models.entries import Switch
from phasor.models.families._t5 import Depths, FeedForwardProj, T5Like, t5_classifiers


class UMT5(T5Like):
    """mT5 with a bias by distance of every layer's own; outputs are scaled where the file says the head is tied."""

    model_type = "umt5"
    title = "UMT5"
    architectures = {"lm": "UMT5ForConditionalGeneration", "none": "UMT5Model"}
    aliases = {"UMT5EncoderModel": "none"}
    encoder = "UMT5EncoderModel"
    parts = T5Like.parts | {"position.shared": False}
    classifiers = t5_classifiers("UMT5")
    fields = T5Like.fields | {
        "num_layers": Depths(encoder, classifiers["token-classifier"].architecture),
        "feed_forward_proj": FeedForwardProj("gated-gelu"),
        "tie_word_embeddings": Switch("head.multiplier", on="rsqrt", off=1.0, default=True),
    }

    def differs_from_transformers(self, config: ModelConfig) -> str | None:
        if getattr(config.head, "multiplier", "rsqrt") == "rsqrt":
            return None
        return "transformers divides the logits of UMT5 by sqrt(d_model) where tie_word_embeddings is false too"


FAMILY = UMT5()
