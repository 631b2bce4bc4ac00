"""HyperCLOVA X SEED Think."""

from __future__ import annotations

from phasor.config import ModelConfig
from phasor.models.entries import Field, Scale, Switch
from phasor.models.families._llama import PRE, LlamaLike
from phasor.models.families.granite import Granite


class HyperCLOVAX(Granite):
    """Granite whose logits are multiplied, not divided, and in most a norm on the output of each sub-layer too."""

    model_type = "hyperclovax"
    title = "HyperCLOVA X SEED Think"
    architectures = {"lm": "HyperCLOVAXForCausalLM", "none": "HyperCLOVAXModel"}
    parts = {path: part for path, part in Granite.parts.items() if path != "placement"}
    fields = Granite.fields | {
        "head_dim": LlamaLike.fields["head_dim"],
        "use_post_norm": Switch("placement.kind", on="sandwich", off="pre", default=True),
        "attention_multiplier": Field("attention.scale", default=None),
        "logits_scaling": Scale("head.multiplier", default=1.0, positive=True),
    }

    def norms_of(self, config: ModelConfig) -> tuple[str, ...]:
        if config.placement.kind == "pre":
            return PRE
        before, after = PRE, ("post_norm1", "post_norm2")
        return (before[0], after[0], before[1], after[1])


FAMILY = HyperCLOVAX()
