"""Qwen2.5-VL, its text part."""

from __future__ import annotations

from phasor.models.families.qwen2_vl_text import Qwen2VLText


class Qwen25VLText(Qwen2VLText):
    """The same as in Qwen2-VL."""

    model_type = "qwen2_5_vl_text"
    title = "Qwen2.5-VL (text)"
    architectures = {"lm": "Qwen2_5_VLForConditionalGeneration", "none": "Qwen2_5_VLTextModel"}
    body = "Qwen2_5_VLTextModel"


FAMILY = Qwen25VLText()
