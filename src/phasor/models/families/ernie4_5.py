"""ERNIE 4.5 without experts."""

from __future__ import annotations

from phasor.models.entries import GATES, Activation, Bias, Field
from phasor.models.families._llama import KVHeads, LlamaLike
from phasor.models.rope import RopeParameters


class Ernie45(LlamaLike):
    """Llama with adjacent features rotated."""

    model_type = "ernie4_5"
    title = "ERNIE 4.5"
    architectures = {"lm": "Ernie4_5ForCausalLM", "none": "Ernie4_5Model"}
    parts = LlamaLike.parts | {"norm": "rmsnorm"}
    fields = {name: entry for name, entry in LlamaLike.fields.items() if name != "attention_dropout"} | {
        "num_key_value_heads": KVHeads(2),
        "head_dim": Field("head_dim", default=None, absent=128),
        "max_position_embeddings": Field("max_length", default=131072),
        "hidden_act": Activation("silu", GATES),
        "use_bias": Bias(False, feedforward=True),
        "rms_norm_eps": Field("norm.eps", default=1e-5),
        "tie_word_embeddings": Field("embedding.tied", default=True),
        "rope_parameters": RopeParameters(base=500000.0, pairing="adjacent"),
    }


FAMILY = Ernie45()
