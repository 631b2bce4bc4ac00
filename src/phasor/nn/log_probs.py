"""Log-probabilities of given tokens, without the logits of all rows at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phasor.nn.norm import at_least_float32
from phasor.ops.quantized import Matrix

LOGITS_AT_ONCE = 1 << 26  # 256 MiB in float32


def token_log_probs(head: nn.Module, hidden: Tensor, tokens: Matrix, targets: Tensor) -> Tensor:
    """`log p(target)` by hidden states `[B, T, dim]` and the token table, in at least float32; `[B, T]`.

    Where the logits are many, they are computed for some rows at a time, and again in the backward pass.

    >>> from phasor import ModelConfig
    >>> from phasor.nn.heads import build_head
    >>> head = build_head(ModelConfig(vocab_size=9, dim=4, num_layers=1, num_heads=1))
    >>> token_log_probs(head, torch.zeros(1, 2, 4), torch.randn(9, 4), torch.tensor([[1, 8]]))
    tensor([[-2.1972, -2.1972]])
    """
    rows, answers = hidden.flatten(0, 1), targets.flatten()
    step = max(1, LOGITS_AT_ONCE // len(tokens))
    if len(rows) <= step:
        return chunk_log_probs(head, rows, tokens, answers).view_as(targets)
    chunks = zip(rows.split(step), answers.split(step), strict=True)
    parts = [checkpoint(chunk_log_probs, head, h, tokens, t, use_reentrant=False) for h, t in chunks]
    return torch.cat(parts).view_as(targets)


def chunk_log_probs(head: nn.Module, hidden: Tensor, tokens: Matrix, targets: Tensor) -> Tensor:
    """Those of rows `[N, dim]`."""
    return -F.cross_entropy(at_least_float32(head(hidden, tokens)), targets, reduction="none")
