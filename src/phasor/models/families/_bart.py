"""What BART, mBART, Marian and M2M-100 share: the names of their tensors, and nearly all fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from phasor.config import ModelConfig
from phasor.models.entries import (
    ACTIVATIONS,
    ALL_PROJECTIONS,
    Activation,
    Draft,
    Field,
    FieldEntry,
    InitStd,
    Pinned,
    Repeated,
    SameAs,
    Switch,
)
from phasor.models.family import Family
from phasor.models.fields import Fields
from phasor.models.layout import AsRow, Rule, cross_projections, linear, projections
from phasor.nn.positions import SinusoidalConfig
from phasor.nn.positions.sinusoidal.module import Sinusoidal

TABLES = tuple(f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder"))
OLD_NAMES = {"gelu-tanh": "gelu_new", "silu": "swish"}
# Of training, of other heads, or without effect by now.
HARMLESS = """
    add_bias_logits classif_dropout classifier_dropout decoder_layerdrop encoder_layerdrop
    extra_pos_embeddings force_bos_token_to_be_generated output_past replacing_rate save_step
    student_decoder_layers student_encoder_layers
"""


class Vocabulary(FieldEntry):
    """One vocabulary for encoder and decoder: they share a table with the head, or have one each and the head a third.

    Which of the two it is shows in the tensors.
    """

    def read(self, f: Fields, name: str, draft: Draft) -> None:
        size = draft["vocab_size"] = f.get(name)
        if f.same(*TABLES):
            draft["embedding.tied"] = f.get("tie_word_embeddings", True)
            return
        if draft.has_logits and BartLike.head not in f.tensors:
            raise ValueError(
                f"{f.file}: encoder and decoder have separate token embeddings, and there is no {BartLike.head}"
            )
        f.get("tie_word_embeddings", True)
        draft.values |= {"embedding.tied": False, "embedding.source_vocab_size": size}

    def write(self, name: str, config: ModelConfig) -> dict[str, Any]:
        if config.embedding.source_vocab_size is not None:
            if config.embedding.tied:
                raise ValueError("its head shares a table that encoder and decoder share, or none")
            if config.embedding.source_vocab_size != config.vocab_size:
                raise ValueError("it has one vocabulary for encoder and decoder")
        return {name: config.vocab_size}


class BartLike(Family):
    """A Transformer of 2017 with biases everywhere; placement, embedding norm and positions are the family's."""

    logits_bias: ClassVar[bool] = True
    shapes = ("encoder-decoder",)
    parts = Family.parts | {
        "attention.bias": ALL_PROJECTIONS,
        "feedforward.bias": True,
        "norm": "layernorm",
    }
    fields: ClassVar[dict[str, FieldEntry]] = {
        "is_encoder_decoder": Pinned(True, written=True),
        "vocab_size": Vocabulary(),
        "d_model": Field("dim"),
        "encoder_layers": Field("num_encoder_layers"),
        "decoder_layers": Field("num_layers"),
        "encoder_attention_heads": Field("num_heads"),
        "decoder_attention_heads": Repeated("num_heads"),
        "encoder_ffn_dim": Field("hidden_dim"),
        "decoder_ffn_dim": Repeated("hidden_dim"),
        "num_hidden_layers": Pinned(SameAs("num_encoder_layers")),
        "num_attention_heads": Pinned(SameAs("num_heads")),
        "hidden_size": Pinned(SameAs("dim")),
        "max_position_embeddings": Field("max_length", default=1024),
        "activation_function": Activation("gelu", ACTIVATIONS, written=OLD_NAMES),
        "scale_embedding": Switch("embedding.scale", on="sqrt", off=1.0, default=False),
        "dropout": Field("dropout.residual", "dropout.embedding", default=0.1),
        "attention_dropout": Field("dropout.attention", default=0.0),
        "activation_dropout": Field("dropout.feedforward", default=0.0),
        "init_std": InitStd(),
    }
    unprefixed: ClassVar[tuple[str, ...]] = ("lm_head.", "final_logits_bias", "classification_head.")
    embedding = "model.shared.weight"
    copies: ClassVar[dict[str, str]] = dict.fromkeys(TABLES, embedding)
    derived: ClassVar[tuple[str, ...]] = ("model.encoder.version", "model.decoder.version")
    passthrough: ClassVar[tuple[str, ...]] = (embedding,)  # of no use where encoder and decoder have their own
    harmless = frozenset(HARMLESS.split())
    unsupported: ClassVar[frozenset[str]] = frozenset({"is_decoder"})

    def start(self, f: Fields) -> Draft:
        draft = super().start(f)
        if draft.has_logits:  # a file without the bias means one of zeros
            draft["head.bias"] = self.logits_bias and (not f.tensors or "final_logits_bias" in f.tensors)
        return draft

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
