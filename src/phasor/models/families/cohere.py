"""Cohere's Command R and Command R+, and Aya."""

from __future__ import annotations

from phasor.models.entries import GATES, Activation, Bias, Field, HeadDim, Scale, Switch
from phasor.models.families._llama import LlamaLike
from phasor.models.rope import RopeParameters


class Cohere(LlamaLike):
    """Attention and feed-forward in parallel after one LayerNorm without bias, adjacent pairs, scaled logits."""

    model_type = "cohere"
    title = "Cohere Command R"
    architectures = {"lm": "CohereForCausalLM", "none": "CohereModel"}
    norms = ("input_layernorm",)
    parts = LlamaLike.parts | {"norm": "layernorm", "norm.bias": False, "placement": "parallel"}
    fields = LlamaLike.fields | {
        "head_dim": HeadDim(),
        "max_position_embeddings": Field("max_length", default=8192),
        "tie_word_embeddings": Field("embedding.tied", default=False, absent=True),
        "hidden_act": Activation("silu", GATES),
        "attention_bias": Bias(False),
        "use_qk_norm": Switch("attention.qk_norm", on="heads", off="none", default=False),
        "layer_norm_eps": Field("norm.eps", default=1e-5),
        "rope_parameters": RopeParameters(base=500000.0, pairing="adjacent"),
        "logit_scale": Scale("head.multiplier", default=0.0625, positive=True),
    }
    # the length that the model may be used at, and the tensor-parallel slices of pretraining
    harmless = frozenset({"model_max_length", "pretraining_tp"})


FAMILY = Cohere()
