"""RoFormer: BERT with rotary positions, and a first layer that may be narrower."""

from __future__ import annotations

import torch
from torch import Tensor

from phasor.config import ModelConfig
from phasor.models.entries import EmbeddingWidth, Field, require_kind
from phasor.models.families._bert import BertLike
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
    parts = BertLike.parts | {"position": "rotary", "position.pairing": "adjacent"}
    fields = BertLike.fields | {
        "embedding_size": EmbeddingWidth(project="sum"),
        "max_position_embeddings": Field("max_length", default=1536),
        "rotary_value": Field("position.rotate_values", default=False),
    }

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
