"""Phi 1, 1.5 and 2."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.models.entries import ACTIVATIONS, ALL_PROJECTIONS, Activation, Field, HeadDim, Switch
from phasor.models.families._llama import LlamaLike
from phasor.models.layout import Rule, linear, projections
from phasor.models.rope import RopeParameters


class Phi(LlamaLike):
    """Attention and feed-forward in parallel after one LayerNorm, part of a head rotated, biases everywhere."""

    model_type = "phi"
    title = "Phi 1, 1.5, 2"
    architectures = {"lm": "PhiForCausalLM", "none": "PhiModel"}
    norms = ("input_layernorm",)
    last_norm = "final_layernorm"
    parts = LlamaLike.parts | {
        "attention.bias": ALL_PROJECTIONS,
        "feedforward.bias": True,
        "norm": "layernorm",
        "placement": "parallel",
        "head.bias": True,
    }
    fields = LlamaLike.fields | {
        "head_dim": HeadDim(),
        "hidden_act": Activation("gelu_new", ACTIVATIONS, written={"gelu-tanh": "gelu_new"}),
        "qk_layernorm": Switch("attention.qk_norm", on="head", off="none", default=False),
        "layer_norm_eps": Field("norm.eps", default=1e-5),
        "embd_pdrop": Field("dropout.embedding", default=0.0),
        "resid_pdrop": Field("dropout.residual", default=0.0),
        "rope_parameters": RopeParameters(partial=0.5),
    }

    def attention(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from projections(ours, theirs)
        yield from linear(f"{ours}.out", f"{theirs}.dense")
        yield from linear(f"{ours}.q_norm", f"{theirs}.q_layernorm")
        yield from linear(f"{ours}.k_norm", f"{theirs}.k_layernorm")

    def feedforward(self, ours: str, theirs: str) -> Iterator[Rule]:
        yield from linear(f"{ours}.up", f"{theirs}.fc1")
        yield from linear(f"{ours}.down", f"{theirs}.fc2")


FAMILY = Phi()
