"""Arcee's AFM."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.models.entries import ACTIVATIONS, Activation, Bias, Field
from phasor.models.families._llama import LlamaLike, plain_network
from phasor.models.layout import Rule
from phasor.models.rope import RopeParameters


class Arcee(LlamaLike):
    """Llama with a plain feed-forward network, of squared ReLU."""

    model_type = "arcee"
    title = "Arcee AFM"
    architectures = {"lm": "ArceeForCausalLM", "none": "ArceeModel"}
    parts = LlamaLike.parts | {"norm": "rmsnorm"}
    fields = LlamaLike.fields | {
        "max_position_embeddings": Field("max_length", default=4096),
        "hidden_act": Activation("relu2", ACTIVATIONS),
        "attention_bias": Bias(False),
        "mlp_bias": Field("feedforward.bias", default=False),
        "rms_norm_eps": Field("norm.eps", default=1e-5),
        "rope_parameters": RopeParameters(),
    }

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from plain_network(ours, theirs)


FAMILY = Arcee()
