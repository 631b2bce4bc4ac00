"""OLMo 2."""

from __future__ import annotations

from phasor.models.entries import GATES, Activation, Bias, Field, HeadDim
from phasor.models.families._llama import LlamaLike
from phasor.models.rope import RopeParameters


class Olmo2(LlamaLike):
    """Norms on the outputs of attention and feed-forward, and on all queries and all keys as a whole."""

    model_type = "olmo2"
    title = "OLMo 2"
    architectures = {"lm": "Olmo2ForCausalLM", "none": "Olmo2Model"}
    norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    parts = LlamaLike.parts | {"norm": "rmsnorm", "placement": "output", "attention.qk_norm": "whole"}
    fields = LlamaLike.fields | {
        "head_dim": HeadDim(),
        "hidden_act": Activation("silu", GATES),
        "attention_bias": Bias(False),
        "rms_norm_eps": Field("norm.eps", default=1e-5),
        "rope_parameters": RopeParameters(),
    }


FAMILY = Olmo2()
