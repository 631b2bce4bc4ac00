"""Apertus, of the Swiss AI Initiative."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.models.entries import ACTIVATIONS, Activation, Bias, Field, HeadDim, Pinned
from phasor.models.families._llama import LlamaLike, plain_network
from phasor.models.family import Classifier
from phasor.models.layout import Rule
from phasor.models.rope import RopeParameters

USUAL_ROPE = {"rope_type": "llama3", "rope_theta": 12e6, "original_max_position_embeddings": 8192}
USUAL_ROPE |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


class Apertus(LlamaLike):
    """Norms on each head of queries and keys, and a plain network of xIELU."""

    model_type = "apertus"
    title = "Apertus"
    architectures = {"lm": "ApertusForCausalLM", "none": "ApertusModel"}
    classifiers = {"token-classifier": Classifier("ApertusForTokenClassification", {"head.score": "score"})}
    norms = ("attention_layernorm", "feedforward_layernorm")
    parts = LlamaLike.parts | {"norm": "rmsnorm", "attention.qk_norm": "head"}
    fields = LlamaLike.fields | {
        "head_dim": HeadDim(),
        "max_position_embeddings": Field("max_length", default=65536),
        "hidden_act": Activation("xielu", ACTIVATIONS | {"xielu": "xielu"}),
        "attention_bias": Bias(False),
        "mlp_bias": Pinned(False),
        "qk_norm": Pinned(True),
        "post_norm": Pinned(False),
        "rms_norm_eps": Field("norm.eps", default=1e-5),
        "rope_parameters": RopeParameters(12e6, usual=USUAL_ROPE),
    }

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from plain_network(ours, theirs)
        for name in ("alpha_p", "alpha_n", "beta", "eps"):
            yield Rule(f"{ours}.activation.{name}", f"{theirs}.act_fn.{name}")


FAMILY = Apertus()
