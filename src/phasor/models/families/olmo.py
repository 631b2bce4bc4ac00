"""OLMo 1."""

from __future__ import annotations

from phasor.models.entries import GATES, Activation, Bias, Field, HeadDim
from phasor.models.families._llama import LlamaLike
from phasor.models.rope import RopeParameters


class Olmo(LlamaLike):
    """Llama with LayerNorms that learn nothing, and perhaps with clipped queries, keys and values."""

    model_type = "olmo"
    title = "OLMo 1"
    architectures = {"lm": "OlmoForCausalLM", "none": "OlmoModel"}
    parts = LlamaLike.parts | {"norm": "layernorm", "norm.eps": 1e-5, "norm.weight": False, "norm.bias": False}
    fields = LlamaLike.fields | {
        "head_dim": HeadDim(),
        "hidden_act": Activation("silu", GATES),
        "attention_bias": Bias(False),
        "clip_qkv": Field("attention.clip", default=None),
        "rope_parameters": RopeParameters(),
    }
    harmless = frozenset({"pretraining_tp"})  # the tensor-parallel slices of pretraining: the same result


FAMILY = Olmo()
