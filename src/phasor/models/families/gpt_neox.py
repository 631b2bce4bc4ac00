"""GPT-NeoX 20B, Pythia, Dolly, RedPajama."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.config import ModelConfig, ParallelConfig, PreConfig
from phasor.models.entries import ACTIVATIONS, Activation, Bias, Draft, Field, InitStd, Switch
from phasor.models.families._megatron import block
from phasor.models.family import Family
from phasor.models.fields import Fields
from phasor.models.layout import Rule, linear
from phasor.models.rope import RopeParameters


class NeoXRotary(RopeParameters):
    """Older files have the base and the rotated share of a head under other names."""

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        base, partial = f.get("rotary_emb_base", self.base), f.get("rotary_pct", self.partial)
        draft["position"] = self.scheme(f, draft, base, partial)


class GPTNeoX(Family):
    """Parallel with a norm each, or pre-norm; rotary on part of a head, biases everywhere."""

    model_type = "gpt_neox"
    title = "GPT-NeoX, Pythia"
    architectures = {"lm": "GPTNeoXForCausalLM", "none": "GPTNeoXModel"}
    prefix = "gpt_neox."
    embedding = "gpt_neox.embed_in.weight"
    parts = Family.parts | {"norm": "layernorm", "feedforward.bias": True}
    fields = {
        "vocab_size": Field("vocab_size"),
        "hidden_size": Field("dim"),
        "intermediate_size": Field("hidden_dim"),
        "num_hidden_layers": Field("num_layers"),
        "num_attention_heads": Field("num_heads"),
        "max_position_embeddings": Field("max_length", default=2048),
        "attention_bias": Bias(True),
        "hidden_act": Activation("gelu", ACTIVATIONS),
        "layer_norm_eps": Field("norm.eps", default=1e-5),
        "use_parallel_residual": Switch(
            "placement", on=ParallelConfig(shared_norm=False), off=PreConfig(), default=True
        ),
        "hidden_dropout": Field("dropout.residual", "dropout.embedding", default=0.0),
        "attention_dropout": Field("dropout.attention", default=0.0),
        "initializer_range": InitStd(),
        "tie_word_embeddings": Field("embedding.tied", default=False),
        "rope_parameters": NeoXRotary(partial=0.25),
    }
    harmless = frozenset({"attention_probs_dropout_prob", "classifier_dropout", "hidden_dropout_prob"})
    renames = {"embed_out.": "lm_head."}
    derived = (
        *("gpt_neox.layers.*.attention.bias", "gpt_neox.layers.*.attention.masked_bias"),
        "gpt_neox.layers.*.attention.rotary_emb.inv_freq",
    )

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding)
        yield Rule("head.weight", self.head)
        yield from linear("decoder.norm", "gpt_neox.final_layer_norm")
        yield from block("gpt_neox.layers.{i}", "attention", ("input_layernorm", "post_attention_layernorm"))


FAMILY = GPTNeoX()
