"""Cohere's Command R7B and Command A."""

from __future__ import annotations

from phasor.models.families.cohere import Cohere
from phasor.models.layer_types import RotaryInWindows
from phasor.models.rope import RopeParameters


class Cohere2(Cohere):
    """Command R with windows in three of four layers, and no positions in the others."""

    model_type = "cohere2"
    title = "Cohere Command R7B, Command A"
    architectures = {"lm": "Cohere2ForCausalLM", "none": "Cohere2Model"}
    fields = {name: entry for name, entry in Cohere.fields.items() if name != "use_qk_norm"} | {
        "rope_parameters": RopeParameters(pairing="adjacent"),
        "layer_types": RotaryInWindows(
            lambda f, draft, i: (i + 1) % f.positive("sliding_window_pattern", 4) != 0, absent=4096
        ),
    }


FAMILY = Cohere2()
