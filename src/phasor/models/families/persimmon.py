"""Persimmon 8B."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.config import ModelConfig
from phasor.models.entries import ACTIVATIONS, ALL_PROJECTIONS, Activation, Field, Pinned, SameAs, Switch
from phasor.models.families._llama import PRE, LlamaLike
from phasor.models.families._megatron import block
from phasor.models.layout import Rule, linear
from phasor.models.rope import RopeParameters


class Persimmon(LlamaLike):
    """Megatron's blocks with half of a head rotated, norms on heads, biases everywhere, squared ReLU."""

    model_type = "persimmon"
    title = "Persimmon"
    architectures = {"lm": "PersimmonForCausalLM", "none": "PersimmonModel"}
    parts = LlamaLike.parts | {"norm": "layernorm", "attention.bias": ALL_PROJECTIONS, "feedforward.bias": True}
    fields = {name: entry for name, entry in LlamaLike.fields.items() if name != "num_key_value_heads"} | {
        "head_dim": Pinned(SameAs("head_dim")),
        "max_position_embeddings": Field("max_length", default=16384),
        "hidden_act": Activation("relu2", ACTIVATIONS),
        "qk_layernorm": Switch("attention.qk_norm", on="head", off="none", default=True),
        "layer_norm_eps": Field("norm.eps", default=1e-5),
        "hidden_dropout": Pinned(0.0),  # on the feed-forward network alone
        "rope_parameters": RopeParameters(partial=0.5),
    }

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding)
        yield Rule("head.weight", self.head)
        yield from linear("decoder.norm", "model.final_layernorm")
        yield from block("model.layers.{i}", "self_attn", PRE)
        for part in "qk":
            theirs = f"model.layers.{{i}}.self_attn.{part}_layernorm"
            yield from linear(f"decoder.blocks.{{i}}.attention.{part}_norm", theirs)


FAMILY = Persimmon()
