"""Qwen 3.5, its dense text models."""

from __future__ import annotations

from phasor.models.families._delta import Hybrid, LinearLayers
from phasor.models.families._llama import KVHeads
from phasor.models.rope import MultiSectionParameters
from phasor.nn.positions import MultiSectionConfig

INTERLEAVED = MultiSectionParameters(MultiSectionConfig(sections=(11, 11, 10), interleaved=True), partial=0.25)


class Qwen35Text(Hybrid):
    """Positions of time, height and width rotate a quarter of each head of softmax layers, their pairs in turn."""

    model_type = "qwen3_5_text"
    title = "Qwen 3.5 (text)"
    architectures = {"lm": "Qwen3_5ForCausalLM", "none": "Qwen3_5TextModel"}
    fields = Hybrid.fields | {
        "num_key_value_heads": KVHeads(4),
        "rope_parameters": INTERLEAVED,
        "layer_types": LinearLayers(),
    }


FAMILY = Qwen35Text()
