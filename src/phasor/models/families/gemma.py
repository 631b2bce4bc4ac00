"""Gemma 1 and the models that took over its shape (CodeGemma)."""

from __future__ import annotations

from phasor.models.entries import GATES, Activation, Draft, Pinned
from phasor.models.families._gemma import GemmaLike
from phasor.models.families._llama import KVHeads, score_classifiers
from phasor.models.fields import Fields
from phasor.models.rope import RopeParameters


class GemmaActivation(Activation):
    """`hidden_act`, which `hidden_activation` may repeat; "gelu" in its files always meant the tanh approximation."""

    def __init__(self) -> None:
        super().__init__("gelu_pytorch_tanh", GATES | {"gelu": "geglu-tanh"})

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        super().read(f, name, draft)
        if f.choose("hidden_activation", self.known, f.get(name, "gelu")) != draft["feedforward.activation"]:
            raise ValueError(f"{f.file}: hidden_act and hidden_activation name different activations")


class Gemma(GemmaLike):
    """Llama's shape with wide heads."""

    model_type = "gemma"
    title = "Gemma"
    architectures = {"lm": "GemmaForCausalLM", "none": "GemmaModel"}
    classifiers = score_classifiers("Gemma")
    fields = GemmaLike.fields | {
        "num_key_value_heads": KVHeads(16),
        "hidden_act": GemmaActivation(),
        "use_bidirectional_attention": Pinned(False),
        "rope_parameters": RopeParameters(),
    }


FAMILY = Gemma()
