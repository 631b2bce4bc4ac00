"""BLOOM and BLOOMZ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import (
    AttentionConfig,
    DropoutConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    GELUTanhConfig,
    LayerNormConfig,
    ModelConfig,
    NormalInitConfig,
    PreConfig,
)
from phasor.models.families._gpt import EVERY, either, plain_head
from phasor.models.families._megatron import block
from phasor.models.family import Family, require_kind
from phasor.models.fields import Fields
from phasor.models.layout import Rule, linear
from phasor.nn.positions import ALiBiConfig

LENGTH = 2048


class Bloom(Family):
    """Pre-norm with ALiBi, a norm after the embedding, biases everywhere."""

    model_type = "bloom"
    title = "BLOOM"
    architectures = {"lm": "BloomForCausalLM", "none": "BloomModel"}
    prefix = "transformer."
    embedding = "transformer.word_embeddings.weight"
    # How training computed the same: kernels, precision, parallelism.
    harmless = frozenset(
        """
        attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi pretraining_tp skip_bias_add
        skip_bias_add_qkv
        """.split()  # noqa: SIM905
    )

    def read(self, f: Fields) -> ModelConfig:
        f.expect("slow_but_exact", False)  # with it transformers leaves out two biases of a model trained in parts
        f.expect("n_inner", None)
        return ModelConfig(
            vocab_size=f.get("vocab_size"),
            dim=either(f, "hidden_size", "n_embed"),
            num_layers=either(f, "n_layer", "num_hidden_layers"),
            num_heads=either(f, "n_head", "num_attention_heads"),
            max_length=f.get("seq_length", LENGTH),
            position=ALiBiConfig(),
            attention=AttentionConfig(bias=EVERY),
            feedforward=FeedForwardConfig(activation=GELUTanhConfig(), bias=True),
            norm=LayerNormConfig(eps=f.get("layer_norm_epsilon", 1e-5)),
            placement=PreConfig(normed_stream=f.get("apply_residual_connection_post_layernorm", False)),
            embedding=EmbeddingConfig(tied=f.get("tie_word_embeddings", True), norm=True),
            head=plain_head(self.head_kind(f)),
            dropout=DropoutConfig(residual=f.get("hidden_dropout", 0.0), attention=f.get("attention_dropout", 0.0)),
            init=NormalInitConfig(std=f.get("initializer_range", 0.02)),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        require_kind(config.position, ALiBiConfig)
        norm, placement = require_kind(config.norm, LayerNormConfig), require_kind(config.placement, PreConfig)
        return {
            "vocab_size": config.vocab_size,
            "hidden_size": config.dim,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "layer_norm_epsilon": norm.eps,
            "apply_residual_connection_post_layernorm": placement.normed_stream,
            "hidden_dropout": config.dropout.residual,
            "attention_dropout": config.dropout.attention,
            "initializer_range": getattr(config.init, "std", 0.02),
        } | ({} if config.max_length == LENGTH else {"seq_length": config.max_length})

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding)
        yield Rule("head.weight", self.head)
        yield from linear("decoder.embedding_norm", "transformer.word_embeddings_layernorm")
        yield from linear("decoder.norm", "transformer.ln_f")
        yield from block("transformer.h.{i}", "self_attention", ("input_layernorm", "post_attention_layernorm"))


FAMILY = Bloom()
