"""GPT, of 2018."""

from __future__ import annotations

from phasor.models.entries import Activation
from phasor.models.families.gpt2 import GPT2

KNOWN = {"gelu": "gelu-tanh", "relu": "relu", "silu": "silu", "swish": "silu"}


class OpenAIGPT(GPT2):
    """GPT-2 with norms behind the sub-layers."""

    model_type = "openai-gpt"
    title = "GPT (2018)"
    architectures = {"lm": "OpenAIGPTLMHeadModel", "none": "OpenAIGPTModel"}
    first_choice = False
    embedding = "transformer.tokens_embed.weight"
    positions = "transformer.positions_embed.weight"
    parts = GPT2.parts | {"placement": "post", "init.by_depth": False}
    fields = {
        name: entry
        for name, entry in GPT2.fields.items()
        if name not in ("n_inner", "activation_function", "scale_attn_weights", "scale_attn_by_inverse_layer_idx")
    } | {"afn": Activation("gelu", KNOWN, written={"gelu-tanh": "gelu"})}
    unsupported = frozenset()


FAMILY = OpenAIGPT()
