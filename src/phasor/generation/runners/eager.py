"""The eager step runner: one call of the model per step, with the dynamic cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from phasor.kv_cache.dynamic import KVCache
from phasor.kv_cache.page_table import to_device
from phasor.kv_cache.protocol import EncoderOutput, KVCacheProtocol
from phasor.transformer import Transformer


class EagerRunner:
    """Steps by plain calls of the model; fits every model.

    >>> from phasor import preset
    >>> model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50)).eval()
    >>> runner = EagerRunner(model, model.new_cache(2, 16))
    >>> runner.prefill([[1, 2, 3], [4]]).shape, runner.step([5, 6]).shape
    (torch.Size([2, 50]), torch.Size([2, 50]))
    """

    has_fixed_rows = False

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self.model, self.cache = model, cache

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        memory: EncoderOutput | None = None,
        positions: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        return prefill(self.model, self.cache, prompts, memory, positions)

    def step(self, tokens: Sequence[int] | Tensor) -> Tensor:
        column = torch.as_tensor(tokens, device=self.model.tokens.weight.device)[:, None]
        return last_logits(self.model, self.model.decode(column, self.cache.memory, cache=self.cache))

    def reorder(self, rows: Sequence[int] | Tensor) -> None:
        self.cache.reorder(rows)


def prefill(
    model: Transformer,
    cache: KVCacheProtocol,
    prompts: Sequence[Sequence[int]],
    memory: EncoderOutput | None = None,
    positions: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """Read prompts into a cache, at positions that may be given; the logits `[B, vocab]` after each."""
    tokens, attention_mask = pad_rows(prompts, model.tokens.weight.device)
    given = None if positions is None else pad_rows(positions, tokens.device)[0]
    hidden = model.decode(tokens, memory, positions=given, attention_mask=attention_mask, cache=cache)
    return last_logits(model, hidden)


def last_logits(model: Transformer, hidden: Tensor) -> Tensor:
    """The logits `[B, vocab]` of the last tokens of hidden states `[B, T, dim]`."""
    assert model.head is not None
    return model.head(hidden[:, -1], model.tokens.table)


def pad_rows(rows: Sequence[Sequence[int]], device: torch.device, left: bool = True) -> tuple[Tensor, Tensor | None]:
    """Rows of tokens as one tensor, padded on the left (or right), and its attention mask (None without padding)."""
    width = max(map(len, rows))
    if all(len(row) == width for row in rows):
        return to_device(np.array(rows), device), None
    gaps = [[0] * (width - len(row)) for row in rows]
    padded = [[*gap, *row] if left else [*row, *gap] for gap, row in zip(gaps, rows, strict=True)]
    sizes, columns = to_device(np.array([[len(row)] for row in rows]), device), torch.arange(width, device=device)
    return to_device(np.array(padded), device), columns >= width - sizes if left else columns < sizes
