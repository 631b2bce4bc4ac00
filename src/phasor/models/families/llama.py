"""Llama 1, 2, 3 and 3.1, and the many models that took over its shape."""

from __future__ import annotations

from phasor.models.entries import GATES, Activation, Bias, Field
from phasor.models.families._llama import LlamaLike, score_classifiers
from phasor.models.rope import RopeParameters


class Llama(LlamaLike):
    """Pre-norm with RMSNorm, rotary, grouped heads, SwiGLU."""

    model_type = "llama"
    title = "Llama 1, 2, 3, 3.1"
    architectures = {"lm": "LlamaForCausalLM", "none": "LlamaModel"}
    classifiers = score_classifiers("Llama")
    aliases = {"LLaMAForCausalLM": "lm"}  # as the first files have it
    first_choice = True
    parts = LlamaLike.parts | {"norm": "rmsnorm"}
    fields = LlamaLike.fields | {
        "hidden_act": Activation("silu", GATES),
        "attention_bias": Bias(False),
        "mlp_bias": Field("feedforward.bias", default=False),
        "rms_norm_eps": Field("norm.eps", default=1e-6),
        "rope_parameters": RopeParameters(),
    }
    harmless = frozenset({"pretraining_tp"})  # the tensor-parallel slices of pretraining: the same result


FAMILY = Llama()
