"""GLM-4 as `glm`: glm-4-9b and its relatives of 2024."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.models.entries import GATES, Activation, Bias, Field
from phasor.models.families._llama import KVHeads, LlamaLike, fused_gate
from phasor.models.layout import Rule
from phasor.models.rope import RopeParameters


class Glm(LlamaLike):
    """Llama with half of a head rotated in adjacent pairs, biases on queries, keys and values, a fused gate."""

    model_type = "glm"
    title = "GLM-4 (2024)"
    architectures = {"lm": "GlmForCausalLM", "none": "GlmModel"}
    parts = LlamaLike.parts | {"norm": "rmsnorm", "placement": "pre"}
    fields = LlamaLike.fields | {
        "num_key_value_heads": KVHeads(2),
        "head_dim": Field("head_dim", default=None, absent=128),
        "max_position_embeddings": Field("max_length", default=131072),
        "hidden_act": Activation("silu", GATES),
        "attention_bias": Bias(True, ("q", "k", "v")),
        "rms_norm_eps": Field("norm.eps", default=1.5625e-07),
        "rope_parameters": RopeParameters(partial=0.5, pairing="adjacent"),
    }

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from fused_gate(ours, theirs)


FAMILY = Glm()
