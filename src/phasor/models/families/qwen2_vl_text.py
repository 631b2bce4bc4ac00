"""Qwen2-VL, its text part."""

from __future__ import annotations

from phasor.models.entries import Field, Pinned, SameAs
from phasor.models.families._llama import KVHeads
from phasor.models.families.qwen2 import Qwen2
from phasor.models.layer_types import LayerTypes
from phasor.models.rope import MultiSectionParameters
from phasor.nn.positions import MultiSectionConfig


class Qwen2VLText(Qwen2):
    """Qwen 2 with positions of time, height and width, each of which rotates a section of the pairs."""

    model_type = "qwen2_vl_text"
    title = "Qwen2-VL (text)"
    architectures = {"lm": "Qwen2VLForConditionalGeneration", "none": "Qwen2VLTextModel"}
    classifiers = {}
    body = "Qwen2VLTextModel"
    fields = Qwen2.fields | {
        "num_key_value_heads": KVHeads(8),
        "head_dim": Pinned(None, SameAs("head_dim")),
        "rms_norm_eps": Field("norm.eps", default=1e-5),
        "rope_parameters": MultiSectionParameters(MultiSectionConfig(sections=(16, 24, 24)), base=1e6),
        "layer_types": LayerTypes(lambda f, draft, i: i >= f.get("max_window_layers", 80), absent=4096, switch=True),
    }


FAMILY = Qwen2VLText()
