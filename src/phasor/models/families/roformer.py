"""RoFormer: BERT with rotary positions, and a first layer that may be narrower."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phasor.config import ModelConfig
from phasor.models.families._bert import BertLike
from phasor.models.family import require_kind
from phasor.models.fields import Fields
from phasor.nn.positions import RotaryConfig


class RoFormer(BertLike):
    """Rotary positions on adjacent pairs, of values too where `rotary_value` is true."""

    model_type = "roformer"
    title = "RoFormer"
    architectures = {"mlm": "RoFormerForMaskedLM", "none": "RoFormerModel"}
    prefix = "roformer."
    unprefixed = ("cls.",)
    embedding = "roformer.embeddings.word_embeddings.weight"
    head = "cls.predictions.decoder.weight"
    copies = {
        "cls.predictions.decoder.bias": "cls.predictions.bias",
        "cls.predictions.bias": "cls.predictions.decoder.bias",
    }
    derived = (*BertLike.derived, "roformer.encoder.embed_positions.weight")
    has_pooler = False

    def read_embedding(self, f: Fields) -> dict[str, Any]:
        width = f.get("embedding_size", None)
        narrow = width is not None and width != f.get("hidden_size")
        return super().read_embedding(f) | ({"width": width, "project": "sum"} if narrow else {})

    def write_embedding(self, config: ModelConfig) -> dict[str, Any]:
        return super().write_embedding(config) | {"embedding_size": config.embedding.width or config.dim}

    def read_positions(self, f: Fields) -> dict[str, Any]:
        f.expect("position_embedding_type", "absolute")  # in the file of every BERT, and without effect
        position = RotaryConfig(pairing="adjacent", rotate_values=f.get("rotary_value", False))
        return {"position": position, "max_length": f.get("max_position_embeddings", 1536)}

    def write_positions(self, config: ModelConfig) -> dict[str, Any]:
        position = require_kind(config.position, RotaryConfig)
        return {"max_position_embeddings": config.max_length, "rotary_value": position.rotate_values}

    def matches_config(self, name: str, tensor: Tensor, config: ModelConfig) -> bool:
        """The table of sines and cosines is what it should be, as far as its dtype can tell."""
        if not name.endswith("embed_positions.weight"):
            return super().matches_config(name, tensor, config)
        position = require_kind(config.position, RotaryConfig)
        frequencies = torch.tensor([float(x) for x in position.frequencies(config.head_dim)], dtype=torch.float64)
        angles = torch.arange(len(tensor), dtype=torch.float64)[:, None] * frequencies
        table = torch.cat((angles.sin(), angles.cos()), dim=-1)
        return tensor.shape == table.shape and bool((tensor - table).abs().max() <= torch.finfo(tensor.dtype).eps)


FAMILY = RoFormer()
