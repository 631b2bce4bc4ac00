"""BioGPT."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.config import ModelConfig
from phasor.models.entries import ACTIVATIONS, ALL_PROJECTIONS, Activation, Field, InitStd, Switch, TableLength
from phasor.models.families._fairseq import block
from phasor.models.family import Family
from phasor.models.layout import Rule, linear


class BioGPT(Family):
    """Pre-norm, learned positions from the table's third row, scaled token embeddings, biases everywhere."""

    model_type = "biogpt"
    title = "BioGPT"
    architectures = {"lm": "BioGptForCausalLM", "none": "BioGptModel"}
    prefix = "biogpt."
    unprefixed = ("output_projection.",)
    embedding = "biogpt.embed_tokens.weight"
    head = "output_projection.weight"
    parts = Family.parts | {
        "position": "learned",
        "position.offset": 2,
        "norm": "layernorm",
        "norm.eps": 1e-5,
        "attention.bias": ALL_PROJECTIONS,
        "feedforward.bias": True,
    }
    fields = {
        "vocab_size": Field("vocab_size"),
        "hidden_size": Field("dim"),
        "intermediate_size": Field("hidden_dim"),
        "num_hidden_layers": Field("num_layers"),
        "num_attention_heads": Field("num_heads"),
        "max_position_embeddings": TableLength(default=1024),
        "hidden_act": Activation("gelu", ACTIVATIONS),
        "scale_embedding": Switch("embedding.scale", on="sqrt", off=1.0, default=False, absent=True),
        "hidden_dropout_prob": Field("dropout.residual", "dropout.embedding", default=0.1),
        "attention_probs_dropout_prob": Field("dropout.attention", default=0.1),
        "activation_dropout": Field("dropout.feedforward", default=0.0),
        "initializer_range": InitStd(),
        "tie_word_embeddings": Field("embedding.tied", default=True),
    }
    harmless = frozenset({"layerdrop", "layer_norm_eps"})  # its norms have 1e-5 in transformers, not the file's eps

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding)
        yield Rule("decoder.positions.0.weight", "biogpt.embed_positions.weight")
        yield Rule("head.weight", self.head)
        yield from linear("decoder.norm", "biogpt.layer_norm")
        yield from block("biogpt.layers.{i}")


FAMILY = BioGPT()
