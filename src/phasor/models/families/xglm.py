"""XGLM."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.config import ModelConfig
from phasor.models.entries import ACTIVATIONS, ALL_PROJECTIONS, Activation, Field, InitStd, Switch
from phasor.models.families._fairseq import block
from phasor.models.family import Family
from phasor.models.layout import Rule, linear


class XGLM(Family):
    """Pre-norm, sines and then cosines of positions from the table's third row, biases everywhere."""

    model_type = "xglm"
    title = "XGLM"
    architectures = {"lm": "XGLMForCausalLM", "none": "XGLMModel"}
    parts = Family.parts | {
        "position": "sinusoidal",
        "position.layout": "halves",
        "position.spacing": "ends",
        "position.offset": 2,
        "norm": "layernorm",
        "norm.eps": 1e-5,
        "attention.bias": ALL_PROJECTIONS,
        "feedforward.bias": True,
    }
    fields = {
        "vocab_size": Field("vocab_size"),
        "d_model": Field("dim", alias="hidden_size"),
        "ffn_dim": Field("hidden_dim"),
        "num_layers": Field("num_layers", alias="num_hidden_layers"),
        "attention_heads": Field("num_heads", alias="num_attention_heads"),
        "max_position_embeddings": Field("max_length", default=2048),
        "activation_function": Activation("gelu", ACTIVATIONS),
        "scale_embedding": Switch("embedding.scale", on="sqrt", off=1.0, default=False, absent=True),
        "dropout": Field("dropout.residual", "dropout.embedding", default=0.1),
        "attention_dropout": Field("dropout.attention", default=0.1),
        "activation_dropout": Field("dropout.feedforward", default=0.0),
        "init_std": InitStd(),
        "tie_word_embeddings": Field("embedding.tied", default=True),
    }
    harmless = frozenset({"layerdrop"})  # of training, and phasor has none
    unsupported = frozenset({"add_cross_attention"})
    derived = ("model.embed_positions.weights",)

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding)
        yield Rule("head.weight", self.head)
        yield from linear("decoder.norm", "model.layer_norm")
        yield from block("model.layers.{i}")


FAMILY = XGLM()
