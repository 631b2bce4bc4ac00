"""Sparse attention in readable torch: all scores at once, those of other keys hidden."""

from __future__ import annotations

import torch
from torch import Tensor

from phasor.ops.attention import Mask, ScoreMod, attention_ref, dense_mask
from phasor.ops.attention.reference import attention_weights, weighted_values
from phasor.ops.sparse_attention.patterns import TopBlocks
from phasor.ops.sparse_attention.selection import selected_keys


def sparse_attention_ref(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> tuple[Tensor, Tensor]:
    """Queries `[B, Tq, H, D]` over keys and values `[B, Tk, K, D]`, as `[B, Tq, H, D]`; and the attention weights.

    >>> q, k, v = torch.randn(3, 1, 6, 2, 4)
    >>> mask = Mask(causal=True, pattern=TopBlocks(block=2, top_k=1))
    >>> sparse_attention_ref(q, k, v, mask, ScoreMod(scale=0.5))[1][0, 0, 5].gt(0).tolist()
    [False, False, False, False, True, True]
    """
    if not isinstance(mask.pattern, TopBlocks):
        return attention_ref(q, k, v, mask, score_mod)
    queries = torch.arange(q.shape[1], device=q.device)
    keys = torch.arange(k.shape[1], device=q.device)
    visible = selected_keys(q, k, mask, mask.pattern, 0, q.shape[1])
    shown = dense_mask(mask, q.shape[1], k.shape[1], q.device)
    visible = visible if shown is None else visible & shown[:, None]
    weights = attention_weights(q, k, visible, score_mod.block_bias(queries, keys, mask, q), score_mod)
    return weighted_values(weights, v, queries, keys, score_mod), weights
