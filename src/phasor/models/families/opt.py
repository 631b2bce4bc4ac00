"""OPT, and Galactica, which kept its shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phasor.config import (
    AttentionConfig,
    DropoutConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LanguageHeadConfig,
    LayerNormConfig,
    ModelConfig,
    NoHeadConfig,
    NormalInitConfig,
    PostConfig,
    PreConfig,
)
from phasor.models.families._gpt import EVERY, older_name
from phasor.models.family import ACTIVATIONS, Family, require_kind
from phasor.models.fields import Fields
from phasor.models.layout import Rule, linear, projections
from phasor.nn.positions import LearnedConfig


class OPT(Family):
    """Pre-norm, or post-norm (350m); learned positions from the table's third row; a table that may be narrower."""

    model_type = "opt"
    title = "OPT"
    architectures = {"lm": "OPTForCausalLM", "none": "OPTModel"}
    embedding = "model.decoder.embed_tokens.weight"
    harmless = frozenset({"activation_dropout", "layerdrop"})  # of training, and phasor has neither
    derived = ("model.decoder.version",)

    def read(self, f: Fields) -> ModelConfig:
        f.expect("learned_embeddings", True)
        f.expect("scale_embeddings", False)
        dim, bias = f.get("hidden_size"), f.get("enable_bias", True)
        width, affine = f.get("word_embed_proj_dim", dim), f.get("layer_norm_elementwise_affine", True)
        before, removed = f.get("do_layer_norm_before", True), f.get("_remove_final_layer_norm", False)
        head = LanguageHeadConfig() if self.head_kind(f) == "lm" else NoHeadConfig(project=width != dim)
        return ModelConfig(
            vocab_size=f.get("vocab_size"),
            dim=dim,
            hidden_dim=f.get("ffn_dim"),
            num_layers=f.get("num_hidden_layers"),
            num_heads=f.get("num_attention_heads"),
            max_length=f.get("max_position_embeddings", 2048),
            position=LearnedConfig(offset=2),
            attention=AttentionConfig(bias=EVERY if bias else ()),
            feedforward=FeedForwardConfig(activation=f.choose("activation_function", ACTIVATIONS, "relu"), bias=bias),
            norm=LayerNormConfig(bias=affine, weight=affine),
            placement=PreConfig() if before else PostConfig(),
            final_norm=before and not removed,
            embedding=EmbeddingConfig(tied=f.get("tie_word_embeddings", True), width=None if width == dim else width),
            head=head,
            dropout=DropoutConfig(residual=f.get("dropout", 0.1), attention=f.get("attention_dropout", 0.0)),
            init=NormalInitConfig(std=f.get("init_std", 0.02)),
        )

    def write(self, config: ModelConfig) -> dict[str, Any]:
        position, norm = require_kind(config.input_position, LearnedConfig), require_kind(config.norm, LayerNormConfig)
        before = isinstance(config.placement, PreConfig)
        return {
            "vocab_size": config.vocab_size,
            "hidden_size": config.dim,
            "ffn_dim": config.hidden_dim,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "max_position_embeddings": position.max_length,
            "enable_bias": bool(config.attention.bias),
            "activation_function": older_name(config.feedforward.activation),
            "layer_norm_elementwise_affine": norm.weight,
            "do_layer_norm_before": before,
            "_remove_final_layer_norm": before and not config.ends_in_norm,
            "word_embed_proj_dim": config.embedding.width or config.dim,
            "dropout": config.dropout.residual,
            "attention_dropout": config.dropout.attention,
            "init_std": getattr(config.init, "std", 0.02),
        }

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding)
        yield Rule("tokens.project.weight", "model.decoder.project_in.weight")
        yield Rule("decoder.positions.0.weight", "model.decoder.embed_positions.weight")
        yield Rule("head.project.weight", "model.decoder.project_out.weight")
        yield Rule("head.weight", self.head)
        yield from linear("decoder.norm", "model.decoder.final_layer_norm")
        block, layer = "decoder.blocks.{i}", "model.decoder.layers.{i}"
        yield from linear(f"{block}.residual.norms.0", f"{layer}.self_attn_layer_norm")
        yield from projections(f"{block}.attention", f"{layer}.self_attn")
        yield from linear(f"{block}.attention.out", f"{layer}.self_attn.out_proj")
        yield from linear(f"{block}.residual.norms.1", f"{layer}.final_layer_norm")
        yield from linear(f"{block}.feedforward.up", f"{layer}.fc1")
        yield from linear(f"{block}.feedforward.down", f"{layer}.fc2")


FAMILY = OPT()
