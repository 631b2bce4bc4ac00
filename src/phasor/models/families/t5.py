"""T5, T5 v1.1, Flan-T5, UL2, and their encoders alone."""

from __future__ import annotations

from typing import Any

from phasor.config import HeadConfig, LanguageHeadConfig, ModelConfig
from phasor.models.families._t5 import T5Like
from phasor.models.fields import Fields


class T5(T5Like):
    """Version 1.0 divides what its head reads by sqrt(dim); a file that does not say so means it by its tie."""

    model_type = "t5"
    title = "T5, T5 v1.1"
    architectures = {"lm": "T5ForConditionalGeneration", "none": "T5Model"}
    first_choice = True
    aliases = {"T5WithLMHeadModel": "lm", "T5EncoderModel": "none"}
    encoder, usual = "T5EncoderModel", "relu"
    harmless = T5Like.harmless | {"scale_decoder_outputs"}

    def read_head(self, f: Fields) -> HeadConfig:
        head = super().read_head(f)
        if not isinstance(head, LanguageHeadConfig):
            return head
        scaled = f.flag("scale_decoder_outputs", f.get("tie_word_embeddings", True))
        return head.replace(multiplier="rsqrt") if scaled else head

    def write(self, config: ModelConfig) -> dict[str, Any]:
        fields = super().write(config)
        if isinstance(config.head, LanguageHeadConfig):
            fields["scale_decoder_outputs"] = config.head.multiplier == "rsqrt"
        return fields


FAMILY = T5()
