"""OLMo 3."""

from __future__ import annotations

from phasor.models.families.olmo2 import Olmo2
from phasor.models.layer_types import FULL, SLIDING, LayerTypes
from phasor.models.rope import RopeParametersByLayer


class Olmo3(Olmo2):
    """OLMo 2 with windows in three of four layers, which an extension of the rotary positions leaves alone."""

    model_type = "olmo3"
    title = "OLMo 3"
    architectures = {"lm": "Olmo3ForCausalLM", "none": "Olmo3Model"}
    fields = {name: entry for name, entry in Olmo2.fields.items() if name != "rope_parameters"} | {
        "layer_types": LayerTypes(lambda f, draft, i: (i + 1) % 4 != 0, absent=4096),
        "rope_parameters": RopeParametersByLayer(
            {FULL: ("rope_theta", 500000.0), SLIDING: ("rope_theta", 500000.0)}, scaled=(FULL,)
        ),
    }


FAMILY = Olmo3()
