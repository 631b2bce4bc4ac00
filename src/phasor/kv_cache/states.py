"""States: what layers keep of each row of a cache, of any length, in tensors `[B, ...]` by layer and name."""

from __future__ import annotations

import torch
from torch import Tensor

from phasor.config.cached import CachedTensor

States = list[dict[str, Tensor]]


def stored_dtype(kept: CachedTensor, activations: torch.dtype) -> torch.dtype:
    """The dtype of what a cache keeps: that of activations, or the one declared; a floating one is the least.

    >>> stored_dtype(CachedTensor((1,), "float32"), torch.bfloat16), stored_dtype(CachedTensor((1,)), torch.bfloat16)
    (torch.float32, torch.bfloat16)
    """
    if kept.dtype is None:
        return activations
    declared: torch.dtype = getattr(torch, kept.dtype)
    return torch.promote_types(declared, activations) if declared.is_floating_point else declared


def clear_rows(states: States, rows: Tensor | slice) -> None:
    """Let rows, those of a slice or where True, begin with states of zero.

    >>> states = [{"state": torch.ones(2, 1)}]
    >>> clear_rows(states, torch.tensor([False, True]))
    >>> states[0]["state"].tolist()
    [[1.0], [0.0]]
    """
    for x in (x for layer in states for x in layer.values()):
        x[rows] = 0


def copy_states(states: States) -> States:
    """The same states in other memory."""
    return [{name: x.clone() for name, x in layer.items()} for layer in states]


def restore_states(states: States, earlier: States) -> None:
    """Give states the values that a copy has; their memory stays the same."""
    for layer, given in zip(states, earlier, strict=True):
        for name, x in layer.items():
            x.copy_(given[name])


def begins_document(document_ids: Tensor, attention_mask: Tensor | None, last: Tensor) -> Tensor:
    """Whether the first real token `[B]` of each row belongs to another document than the `last [B]` of the row did.

    >>> attention_mask = torch.tensor([[True, True], [False, True]])
    >>> begins_document(torch.tensor([[4, 5], [4, 5]]), attention_mask, torch.tensor([4, 4]))
    tensor([False,  True])
    """
    if attention_mask is None:
        return document_ids[:, 0] != last
    first = attention_mask.int().argmax(1, keepdim=True)
    return (document_ids.gather(1, first)[:, 0] != last) & attention_mask.any(1)
