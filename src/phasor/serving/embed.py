"""Embeddings: vectors of texts by a model whose head pools them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from phasor.config.positions import PositionConfig
from phasor.generation.encode import encode_prompts
from phasor.generation.request import check_max_positions, check_prompt
from phasor.generation.runners.eager import pad_rows
from phasor.nn.mode import eval_mode
from phasor.transformer import Transformer

BATCH_TOKENS = 1 << 14  # that are computed together


class Embedder:
    """Vectors of texts, in batches of about the same length, one call at a time."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.lock = threading.Lock()

    def read(self, texts: Sequence[Any]) -> list[list[int]]:
        """The tokens of texts, checked; those that are token ids already are taken as they are."""
        ids = []
        for text in texts:
            if isinstance(text, str) and self.model.tokenizer is None:
                raise ValueError("this model has no tokenizer: give token ids")
            ids.append(encode_prompts(self.model.tokenizer, [text])[0] if isinstance(text, str) else list(text))
            check_prompt(ids[-1], self.model)
        longest = max(map(len, ids))
        limit = self.model.config.max_length
        if longest > limit:
            raise ValueError(f"a text has {longest} tokens, and this model reads up to {limit}")
        schemes: list[PositionConfig] = [self.model.config.input_position, *self.model.config.layer_positions()]
        check_max_positions(schemes, longest, f"a text of {longest} tokens reaches")
        return ids

    def __call__(self, ids: Sequence[list[int]]) -> list[list[float]]:
        """The vector of each text."""
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        vectors: list[list[float]] = [[] for _ in ids]
        with self.lock, eval_mode(self.model), torch.inference_mode():
            while order:
                longest = len(ids[order[-1]])
                taken = [order.pop() for _ in range(min(len(order), max(1, BATCH_TOKENS // longest)))]
                tokens, real = pad_rows([ids[i] for i in taken], self.model.tokens.weight.device, left=False)
                pooled = self.model(tokens, attention_mask=real).float().cpu()
                for i, vector in zip(taken, pooled.tolist(), strict=True):
                    vectors[i] = vector
        return vectors


def why_no_embeddings(model: Transformer) -> str | None:
    """Why a model has no vectors for texts; None where it has."""
    head = model.config.head.kind
    if head == "pooled":
        return None
    return f"this model gives no embeddings: its head is {head!r}, and those are of the head 'pooled'"
