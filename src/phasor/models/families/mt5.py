"""mT5, and its encoder alone."""

from __future__ import annotations

from phasor.models.families._t5 import T5Like


class MT5(T5Like):
    """T5 v1.1 with many languages: what the head reads is never scaled."""

    model_type = "mt5"
    title = "mT5"
    architectures = {"lm": "MT5ForConditionalGeneration", "none": "MT5Model"}
    aliases = {"MT5EncoderModel": "none"}
    encoder, usual = "MT5EncoderModel", "gated-gelu"


FAMILY = MT5()
