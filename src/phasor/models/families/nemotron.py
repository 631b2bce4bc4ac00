"""Nemotron-4 and Minitron."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.models.entries import ACTIVATIONS, Activation, Bias, Field
from phasor.models.families._llama import LlamaLike, plain_network
from phasor.models.layout import Rule
from phasor.models.rope import RopeParameters


class Nemotron(LlamaLike):
    """LayerNorm whose weights are added to 1, half of a head rotated, a plain network of squared ReLU."""

    model_type = "nemotron"
    title = "Nemotron-4, Minitron"
    architectures = {"lm": "NemotronForCausalLM", "none": "NemotronModel"}
    parts = LlamaLike.parts | {"norm": "layernorm", "norm.unit_offset": True}
    fields = LlamaLike.fields | {
        "max_position_embeddings": Field("max_length", default=4096),
        "hidden_act": Activation("relu2", ACTIVATIONS),
        "attention_bias": Bias(False),
        "mlp_bias": Field("feedforward.bias", default=False),
        "norm_eps": Field("norm.eps", default=1e-5),
        "rope_parameters": RopeParameters(partial=0.5),
    }

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from plain_network(ours, theirs)


FAMILY = Nemotron()
