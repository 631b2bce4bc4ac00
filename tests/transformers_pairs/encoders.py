"""Encoders: BERT and RoFormer."""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor

from phasor import ModelConfig, preset

from .weights import (
    EPS,
    HEADS,
    LAYERS,
    OURS,
    SIZES,
    Case,
    Theirs,
    both,
    fuse,
    qkv,
    right_padding,
    same_names,
    token_types,
)


def bert_rules(prefix: str) -> Any:
    def rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
        names = {
            "tokens": "embeddings.word_embeddings",
            "encoder.token_types": "embeddings.token_type_embeddings",
            "encoder.embedding_norm": "embeddings.LayerNorm",
            "encoder.blocks.{}.attention.out": "encoder.layer.{}.attention.output.dense",
            "encoder.blocks.{}.residual.norms.0": "encoder.layer.{}.attention.output.LayerNorm",
            "encoder.blocks.{}.feedforward.up": "encoder.layer.{}.intermediate.dense",
            "encoder.blocks.{}.feedforward.down": "encoder.layer.{}.output.dense",
            "encoder.blocks.{}.residual.norms.1": "encoder.layer.{}.output.LayerNorm",
        }
        found = same_names(prefix, names)(theirs, config)
        for i in range(LAYERS):
            parts = [f"{prefix}encoder.layer.{i}.attention.self.{p}" for p in ("query", "key", "value")]
            found |= fuse(theirs, f"encoder.blocks.{i}.attention.qkv", parts, lambda *x: qkv(*x, HEADS))
        return found

    return rules


def bert() -> Case:
    config = transformers.BertConfig(**SIZES, max_position_embeddings=40, layer_norm_eps=EPS)

    def rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
        found = bert_rules("")(theirs, config) | both(theirs, "pooler.dense", "pooler.dense")
        return found | both(theirs, "encoder.positions.0", "embeddings.position_embeddings")

    ours = preset("bert", **OURS, max_length=40, norm={"kind": "layernorm", "eps": EPS})
    about = {"token_types": token_types(), "attention_mask": right_padding()}
    inputs = {"token_type_ids": token_types(), "attention_mask": right_padding().long()}
    return Case(transformers.BertModel(config), ours, rules, inputs, about)


def roformer() -> Case:
    config = transformers.RoFormerConfig(**SIZES, max_position_embeddings=40, layer_norm_eps=EPS, rotary_value=False)

    def rules(theirs: Theirs, config: ModelConfig) -> dict[str, Tensor]:
        found = bert_rules("roformer.")(theirs, config)
        found |= both(theirs, "head.dense", "cls.predictions.transform.dense")
        found |= both(theirs, "head.norm", "cls.predictions.transform.LayerNorm")
        return found | {"head.bias": theirs("cls.predictions.bias")}

    ours = preset("roformer", **OURS, max_length=40, norm={"kind": "layernorm", "eps": EPS})
    about = {"token_types": token_types(), "attention_mask": right_padding()}
    inputs = {"token_type_ids": token_types(), "attention_mask": right_padding().long()}
    return Case(transformers.RoFormerForMaskedLM(config), ours, rules, inputs, about)
