"""What BART, mBART, Marian and M2M-100 share: the names of their tensors, and nearly all fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

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
    PlacementConfig,
    PositionConfig,
)
from phasor.models.family import ACTIVATIONS, Family
from phasor.models.fields import Fields
from phasor.models.layout import AsRow, Rule, cross_projections, linear, projections
from phasor.nn.positions import SinusoidalConfig
from phasor.nn.positions.sinusoidal.module import Sinusoidal

TABLES = tuple(f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder"))
NAMES = {"gelu-tanh": "gelu_new", "silu": "swish"}
# Of training, of other heads, or without effect by now.
HARMLESS = """
    add_bias_logits classif_dropout classifier_dropout decoder_layerdrop encoder_layerdrop
    extra_pos_embeddings force_bos_token_to_be_generated output_past replacing_rate save_step
    student_decoder_layers student_encoder_layers
"""


class BartLike(Family):
    """A Transformer of 2017 with biases everywhere; placement, embedding norm and positions are the family's.

    Encoder and decoder share one token embedding with the head, or have one each and the head a third. `flags` are
    fields of old files and the values they must have.
    """

    placement: ClassVar[PlacementConfig]
    embedding_norm: ClassVar[bool] = False
    logits_bias: ClassVar[bool] = True
    flags: ClassVar[dict[str, bool]]
    unprefixed = ("lm_head.", "final_logits_bias")
    embedding = "model.shared.weight"
    copies = dict.fromkeys(TABLES, embedding)
    derived: ClassVar[tuple[str, ...]] = ("model.encoder.version", "model.decoder.version")
    passthrough = (embedding,)  # of no use where encoder and decoder have their own
    harmless = frozenset(HARMLESS.split())
    unsupported: ClassVar[frozenset[str]] = frozenset({"is_decoder"})

    def read(self, f: Fields) -> ModelConfig:
        f.expect("is_encoder_decoder", True)
        for name, value in self.flags.items():
            f.expect(name, value)
        dim, heads, hidden = f.get("d_model"), f.get("encoder_attention_heads"), f.get("encoder_ffn_dim")
        depth = f.get("encoder_layers")
        for name, value in {"decoder_attention_heads": heads, "decoder_ffn_dim": hidden}.items():
            f.get(name)  # left out, it would be transformers' usual number
            f.expect(name, value)
        for name, value in {"num_hidden_layers": depth, "num_attention_heads": heads, "hidden_size": dim}.items():
            f.expect(name, value)
        kind, drop = self.head_kind(f), f.get("dropout", 0.1)
        # A file without the bias means one of zeros.
        bias = self.logits_bias and (not f.tensors or "final_logits_bias" in f.tensors)
        size, embedding = self.read_tables(f, kind)
        scale = "sqrt" if f.get("scale_embedding", False) else 1.0
        return ModelConfig(
            shape="encoder-decoder",
            vocab_size=size,
            dim=dim,
            hidden_dim=hidden,
            num_layers=f.get("decoder_layers"),
            num_encoder_layers=depth,
            num_heads=heads,
            max_length=f.get("max_position_embeddings", 1024),
            position=self.read_position(f),
            attention=AttentionConfig(bias=("q", "k", "v", "out")),
            feedforward=FeedForwardConfig(activation=f.choose("activation_function", ACTIVATIONS, "gelu"), bias=True),
            norm=LayerNormConfig(),
            placement=self.placement,
            embedding=embedding.replace(scale=scale, norm=self.embedding_norm),
            head=LanguageHeadConfig(bias=bias) if kind == "lm" else NoHeadConfig(),
            dropout=DropoutConfig(
                embedding=drop,
                residual=drop,
                attention=f.get("attention_dropout", 0.0),
                feedforward=f.get("activation_dropout", 0.0),
            ),
            init=NormalInitConfig(std=f.get("init_std", 0.02)),
        )

    def read_tables(self, f: Fields, kind: str) -> tuple[int, EmbeddingConfig]:
        """The size of the decoder's vocabulary, and how many token embeddings there are, according to the file."""
        size, tied = f.get("vocab_size"), f.get("tie_word_embeddings", True)
        if f.same(*TABLES):
            return size, EmbeddingConfig(tied=tied)
        if kind == "lm" and self.head not in f.tensors:
            raise ValueError(
                f"{f.file}: encoder and decoder have separate token embeddings, and there is no {self.head}"
            )
        return size, EmbeddingConfig(tied=False, source_vocab_size=size)

    def read_position(self, f: Fields) -> PositionConfig:
        raise NotImplementedError(f"{type(self).__name__} does not read its positions")

    def write(self, config: ModelConfig) -> dict[str, Any]:
        return {
            **self.write_tables(config),
            **self.write_position(config),
            "d_model": config.dim,
            "encoder_layers": config.depth("encoder"),
            "decoder_layers": config.num_layers,
            "encoder_attention_heads": config.num_heads,
            "decoder_attention_heads": config.num_heads,
            "encoder_ffn_dim": config.hidden_dim,
            "decoder_ffn_dim": config.hidden_dim,
            "activation_function": NAMES.get(config.feedforward.activation.kind, config.feedforward.activation.kind),
            "scale_embedding": config.embedding.scale == "sqrt",
            "dropout": config.dropout.residual,
            "attention_dropout": config.dropout.attention,
            "activation_dropout": config.dropout.feedforward,
            "init_std": getattr(config.init, "std", 0.02),
            "is_encoder_decoder": True,
        }

    def write_tables(self, config: ModelConfig) -> dict[str, Any]:
        size = config.vocab_size
        if config.embedding.source_vocab_size is not None:
            if config.embedding.tied:
                raise ValueError("its head shares a table that encoder and decoder share, or none")
            if config.embedding.source_vocab_size != size:
                raise ValueError("it has one vocabulary for encoder and decoder")
        return {"vocab_size": size}

    def write_position(self, config: ModelConfig) -> dict[str, Any]:
        raise NotImplementedError(f"{type(self).__name__} does not write its positions")

    def embedding_of(self, config: ModelConfig) -> str:
        return self.embedding if config.embedding.source_vocab_size is None else TABLES[1]

    def duplicates(self, config: ModelConfig) -> dict[str, str]:
        """Where the head has its own table, transformers shares none and looks for one on each side."""
        return {} if config.embedding.tied or config.embedding.source_vocab_size is not None else self.copies

    def rules(self, config: ModelConfig) -> Iterator[Rule]:
        yield Rule("tokens.weight", self.embedding_of(config))
        yield Rule("source_tokens.weight", TABLES[0])
        yield Rule("head.weight", self.head)
        yield Rule("head.bias", "final_logits_bias", AsRow())
        yield from self.stack("encoder", ("self_attn_layer_norm", "final_layer_norm"))
        yield from self.stack("decoder", ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"))

    def stack(self, side: str, norms: tuple[str, ...]) -> Iterator[Rule]:
        block, theirs, layer = f"{side}.blocks.{{i}}", f"model.{side}", f"model.{side}.layers.{{i}}"
        yield Rule(f"{side}.positions.0.weight", f"{theirs}.embed_positions.weight")
        yield from linear(f"{side}.embedding_norm", f"{theirs}.layernorm_embedding")
        yield from linear(f"{side}.norm", f"{theirs}.layer_norm")
        yield from projections(f"{block}.attention", f"{layer}.self_attn")
        yield from linear(f"{block}.attention.out", f"{layer}.self_attn.out_proj")
        yield from cross_projections(f"{block}.cross", f"{layer}.encoder_attn")
        yield from linear(f"{block}.cross.out", f"{layer}.encoder_attn.out_proj")
        for index, norm in enumerate(norms):
            yield from linear(f"{block}.residual.norms.{index}", f"{layer}.{norm}")
        yield from linear(f"{block}.feedforward.up", f"{layer}.fc1")
        yield from linear(f"{block}.feedforward.down", f"{layer}.fc2")

    def matches_config(self, name: str, tensor: Tensor, config: ModelConfig) -> bool:
        """A table of sinusoids holds what they are, as far as its type can say, and zeros where padding is."""
        if not isinstance(config.position, SinusoidalConfig) or ".embed_positions." not in name:
            return True
        table = Sinusoidal(config.position.replace(offset=0), dim=config.dim).table(torch.arange(len(tensor)))
        if config.position.zero_padding:
            table[config.position.offset - 1] = 0
        return table.shape == tensor.shape and bool((tensor.float() - table).abs().max() < 0.01)
