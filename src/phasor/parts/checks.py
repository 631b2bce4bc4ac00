"""Checks of values, run eagerly on CPU tensors and never inside compiled code or on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def checks_values(x: Tensor) -> bool:
    """Whether looking at the values of a tensor costs neither a graph break nor a wait for a device."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def checked_positions(positions: Tensor, axes: int = 1) -> Tensor:
    """Positions as they came, or one sentence about what they should be."""
    if not isinstance(positions, Tensor) or positions.dtype != torch.int64:
        kind = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise ValueError(f"positions must be an int64 tensor, not {kind}")
    if positions.dim() == 3 and axes == 1:
        raise ValueError(f"this position scheme takes positions [T] or [B, T], not {list(positions.shape)}")
    if positions.dim() == 3 and positions.shape[0] != axes:
        raise ValueError(f"this position scheme takes {axes} position rows, not {positions.shape[0]}")
    if positions.dim() not in (1, 2, 3):
        raise ValueError(f"positions must be [T], [B, T] or [axes, B, T], not {list(positions.shape)}")
    if checks_values(positions) and positions.numel() and positions.min() < 0:
        raise ValueError(f"positions count from 0; the smallest given is {int(positions.min())}")
    return positions


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Token ids `[B, T]` within the vocabulary."""
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32) or tokens.dim() != 2:
        got = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"tokens must be a tensor of whole numbers [batch, tokens], not {got}")
    if tokens.numel() == 0:
        raise ValueError(f"tokens are empty: {list(tokens.shape)}")
    if checks_values(tokens):
        low, high = (int(x) for x in tokens.aminmax())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size} (0 to {vocab_size - 1})"
            )


def check_padding(padding: Tensor | None, tokens: Tensor, windowed: bool) -> None:
    """A boolean `[B, T]`, True for real tokens, at least one a row, and without holes under a window."""
    if padding is None:
        return
    if not isinstance(padding, Tensor) or padding.dtype != torch.bool or padding.shape != tokens.shape:
        got = f"{padding.dtype} {list(padding.shape)}" if isinstance(padding, Tensor) else type(padding).__name__
        raise ValueError(f"padding must be boolean {list(tokens.shape)}, True where a token is real, not {got}")
    if not checks_values(padding):
        return
    empty = (~padding.any(-1)).nonzero()
    if len(empty):
        raise ValueError(f"row {int(empty[0])} has no real token: padding is True where a token is real")
    runs = (padding[:, 1:] & ~padding[:, :-1]).sum(-1) + padding[:, 0]
    if windowed and bool((runs > 1).any()):
        raise ValueError(
            f"row {int((runs > 1).nonzero()[0])} has padding between real tokens; "
            "with a sliding window padding belongs at the ends"
        )


def check_documents(documents: Tensor | None, tokens: Tensor) -> None:
    """Whole numbers `[B, T]`, each document in one run."""
    if documents is None:
        return
    if not isinstance(documents, Tensor) or documents.is_floating_point() or documents.shape != tokens.shape:
        got = (
            f"{documents.dtype} {list(documents.shape)}" if isinstance(documents, Tensor) else type(documents).__name__
        )
        raise ValueError(f"documents must be whole numbers {list(tokens.shape)}, an id a token, not {got}")
    if checks_values(documents):
        for row, ids in enumerate(documents):
            runs = ids.unique_consecutive()
            if len(runs) != len(runs.unique()):
                raise ValueError(f"row {row} goes back to an earlier document: the tokens of one stand together")


def prefix_of(prefix: int | Sequence[int] | Tensor, tokens: Tensor) -> Tensor:
    """A prefix length for each row, `[B]`."""
    rows = tokens.shape[0]
    given = [prefix] * rows if isinstance(prefix, int) else prefix
    lengths = torch.as_tensor(given, device=tokens.device)
    if lengths.shape != (rows,) or lengths.is_floating_point():
        raise ValueError(f"prefix must be a whole number or one a row ({rows}), not {prefix!r}")
    if checks_values(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= tokens.shape[1]:
        raise ValueError(f"prefix must lie between 0 and the {tokens.shape[1]} tokens of a row, not {lengths.tolist()}")
    return lengths
