"""GLM-4.1V, its text part."""

from __future__ import annotations

from phasor.models.entries import Field, Pinned, SameAs
from phasor.models.families.glm4 import Glm4
from phasor.models.rope import MultiSectionParameters
from phasor.nn.positions import MultiSectionConfig


class Glm4VText(Glm4):
    """GLM-4 with positions of time, height and width, each of which rotates a section of the pairs."""

    model_type = "glm4v_text"
    title = "GLM-4.1V (text)"
    architectures = {"lm": "Glm4vForConditionalGeneration", "none": "Glm4vTextModel"}
    body = "Glm4vTextModel"
    parts = Glm4.parts | {"attention.bias": ("q", "k", "v")}
    fields = {name: entry for name, entry in Glm4.fields.items() if name != "attention_bias"} | {
        "head_dim": Pinned(None, SameAs("head_dim")),
        "max_position_embeddings": Field("max_length", default=32768),
        "rms_norm_eps": Field("norm.eps", default=1e-5),
        "rope_parameters": MultiSectionParameters(
            MultiSectionConfig(sections=(8, 12, 12), pairing="adjacent"), partial=1.0
        ),
    }


FAMILY = Glm4VText()
