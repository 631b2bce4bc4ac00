"""Rows of one text each, as models with a head over texts read them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.data.batch import Batch, pad_rows
from phasor.nn.norm import at_least_float32
from phasor.nn.record import Record
from phasor.transformer import Transformer


def text_args(model: Transformer, batch: Batch) -> dict[str, Any]:
    """What a model takes of a batch by name: which tokens are real and, where it has token types, of which text."""
    args = batch.sequence_args
    if not model.config.embedding.token_types:
        args.pop("token_types", None)
    return args


def embed_rows(model: Transformer, tokens: Tensor, mask: Tensor, record: Record | None = None) -> Tensor:
    """Vectors of length 1 for texts `[N, T]` that are real where the mask says so, in at least float32."""
    first = torch.arange(mask.shape[1], device=mask.device) == 0
    whole = mask | (first & ~mask.any(-1, keepdim=True))  # a row without a text has a vector too, which nobody reads
    return F.normalize(at_least_float32(model(tokens, attention_mask=whole, record=record)), dim=-1)


def embed_batch(model: Transformer, batch: Batch, record: Record | None = None) -> tuple[Tensor, Tensor]:
    """Vectors of anchors `[B, features]` and of candidates `[B, K, features]`, by one forward of all."""
    assert batch.attention_mask is not None
    assert batch.candidates is not None
    assert batch.candidate_mask is not None
    rows, count, _ = batch.candidates.shape
    width = max(batch.tokens.shape[1], batch.candidates.shape[2])
    texts = torch.cat([to_width(batch.tokens, width), to_width(batch.candidates.flatten(0, 1), width)])
    masks = torch.cat([to_width(batch.attention_mask, width), to_width(batch.candidate_mask.flatten(0, 1), width)])
    vectors = embed_rows(model, texts, masks, record)
    return vectors[:rows], vectors[rows:].unflatten(0, (rows, count))


def to_width(x: Tensor, width: int) -> Tensor:
    return pad_rows(x, width - x.shape[1])
