"""Jais 2."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.models.entries import ACTIVATIONS, Activation, Bias, Field
from phasor.models.families._llama import LlamaLike, plain_network
from phasor.models.layout import Rule
from phasor.models.rope import RopeParameters


class Jais2(LlamaLike):
    """Llama with LayerNorm, biases, and a plain feed-forward network of squared ReLU."""

    model_type = "jais2"
    title = "Jais 2"
    architectures = {"lm": "Jais2ForCausalLM", "none": "Jais2Model"}
    parts = LlamaLike.parts | {"norm": "layernorm"}
    fields = LlamaLike.fields | {
        "max_position_embeddings": Field("max_length", default=8192),
        "hidden_act": Activation("relu2", ACTIVATIONS),
        "attention_bias": Bias(True),
        "mlp_bias": Field("feedforward.bias", default=True),
        "layer_norm_eps": Field("norm.eps", default=1e-5),
        "rope_parameters": RopeParameters(),
    }

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from plain_network(ours, theirs)


FAMILY = Jais2()
