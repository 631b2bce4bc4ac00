"""BLOOM and BLOOMZ."""

from __future__ import annotations

from collections.abc import Iterator

from phasor.config import ModelConfig
from phasor.models.entries import ALL_PROJECTIONS, Field, InitStd, Pinned
from phasor.models.families._megatron import block
from phasor.models.family import Family
from phasor.models.layout import Rule, linear


class Bloom(Family):
    """Pre-norm with ALiBi, a norm after the embedding, biases everywhere."""

    model_type = "bloom"
    title = "BLOOM"
    architectures = {"lm": "BloomForCausalLM", "none": "BloomModel"}
    prefix = "transformer."
    embedding = "transformer.word_embeddings.weight"
    parts = Family.parts | {
        "position": "alibi",
        "attention.bias": ALL_PROJECTIONS,
        "feedforward.activation": "gelu-tanh",
        "feedforward.bias": True,
        "norm": "layernorm",
        "placement": "pre",
        "embedding.norm": True,
    }
    fields = {
        "vocab_size": Field("vocab_size"),
        "hidden_size": Field("dim", alias="n_embed"),
        "n_inner": Pinned(None),
        "n_layer": Field("num_layers", alias="num_hidden_layers"),
        "n_head": Field("num_heads", alias="num_attention_heads"),
        "seq_length": Field("max_length", default=2048, omitted=True),
        "layer_norm_epsilon": Field("norm.eps", default=1e-5),
        "apply_residual_connection_post_layernorm": Field("placement.normed_stream", default=False),
        "hidden_dropout": Field("dropout.residual", default=0.0),
        "attention_dropout": Field("dropout.attention", default=0.0),
        "initializer_range": InitStd(),
        "tie_word_embeddings": Field("embedding.tied", default=True),
        "slow_but_exact": Pinned(False),  # with it transformers leaves out two biases of a model trained in parts
    }
    # How training computed the same: kernels, precision, parallelism.
    harmless = frozenset(
        """
        attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi pretraining_tp skip_bias_add
        skip_bias_add_qkv
        """.split()  # noqa: SIM905
    )

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding)
        yield Rule("head.weight", self.head)
        yield from linear("decoder.embedding_norm", "transformer.word_embeddings_layernorm")
        yield from linear("decoder.norm", "transformer.ln_f")
        yield from block("transformer.h.{i}", "self_attention", ("input_layernorm", "post_attention_layernorm"))


FAMILY = Bloom()
