"""Checks of values, run eagerly on CPU tensors and never inside compiled code or on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phasor.config.schema import quote

WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


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
        raise ValueError(f"tokens must be a tensor of whole numbers [batch, tokens], not {described(tokens)}")
    if tokens.numel() == 0:
        raise ValueError(f"tokens are empty: {list(tokens.shape)}")
    if checks_values(tokens):
        low, high = (int(x) for x in tokens.aminmax())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size} (0 to {vocab_size - 1})"
            )


def check_padding(attention_mask: Tensor | None, tokens: Tensor, windowed: bool, going_on: bool = False) -> None:
    """A boolean `[B, T]`, True for real tokens, at least one a row, and without holes under a window."""
    if attention_mask is None:
        return
    if (
        not isinstance(attention_mask, Tensor)
        or attention_mask.dtype != torch.bool
        or attention_mask.shape != tokens.shape
    ):
        raise ValueError(
            f"attention_mask must be boolean {list(tokens.shape)}, True where a token is real, "
            f"not {described(attention_mask)}"
        )
    if not checks_values(attention_mask):
        return
    empty = (~attention_mask.any(-1)).nonzero()
    if len(empty) and not going_on:  # a row that has tokens in a cache may rest
        raise ValueError(f"row {int(empty[0])} has no real token: attention_mask is True where a token is real")
    runs = (attention_mask[:, 1:] & ~attention_mask[:, :-1]).sum(-1) + attention_mask[:, 0]
    if windowed and bool((runs > 1).any()):
        raise ValueError(
            f"row {int((runs > 1).nonzero()[0])} has padding between real tokens; "
            "with a sliding window padding belongs at the ends"
        )


def check_documents(document_ids: Tensor | None, tokens: Tensor) -> None:
    """Whole numbers `[B, T]`, each document in one run."""
    if document_ids is None:
        return
    if not isinstance(document_ids, Tensor) or document_ids.dtype not in WHOLE or document_ids.shape != tokens.shape:
        raise ValueError(
            f"document_ids must be integers {list(tokens.shape)}, one id per token, not {described(document_ids)}"
        )
    if checks_values(document_ids):
        for row, ids in enumerate(document_ids):
            runs = ids.unique_consecutive()
            if len(runs) != len(runs.unique()):
                raise ValueError(f"row {row} goes back to an earlier document: the tokens of one stand together")


def prefix_of(prefix_length: int | Sequence[int] | Tensor, tokens: Tensor) -> Tensor:
    """A prefix length for each row, `[B]`."""
    rows, count = tokens.shape
    lengths = prefix_length
    if not isinstance(lengths, Tensor):
        each = [prefix_length] * rows if isinstance(prefix_length, int) else prefix_length
        whole = isinstance(each, Sequence) and all(type(n) is int and abs(n) < 1 << 63 for n in each)
        lengths = torch.tensor(each if whole else [], device=tokens.device)
    if lengths.shape != (rows,) or lengths.dtype not in WHOLE:
        raise ValueError(f"prefix_length must be an integer or one per row ({rows}), not {quote(prefix_length)}")
    if checks_values(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= count:
        raise ValueError(f"prefix_length must lie between 0 and the {count} tokens of a row, not {lengths.tolist()}")
    return lengths


def check_token_types(token_types: Tensor | None, tokens: Tensor, known: int) -> None:
    """Whole numbers `[B, T]` below the number of types the model has."""
    if token_types is None:
        return
    if not known:
        raise ValueError("this model has no token types: set EmbeddingConfig.token_types")
    whole = isinstance(token_types, Tensor) and token_types.dtype in (torch.int64, torch.int32)
    if not whole or token_types.shape != tokens.shape:
        raise ValueError(
            f"token_types must be whole numbers {list(tokens.shape)}, one a token, not {described(token_types)}"
        )
    if checks_values(token_types) and not 0 <= int(token_types.min()) <= int(token_types.max()) < known:
        raise ValueError(f"token_types must lie in [0, {known}), and reach from {range_of(token_types)}")


def check_sources(source: tuple[Tensor | None, Tensor | None], target: tuple[Tensor | None, Tensor | None]) -> None:
    """Every document of the target has real tokens in the source; each is (document_ids, attention_mask)."""
    (source_ids, source_attention_mask), (target_ids, target_attention_mask) = source, target
    if source_ids is None and target_ids is None:
        return
    if source_ids is None or target_ids is None:
        raise ValueError("document_ids must be given for both source and target of an encoder-decoder, or for neither")
    if not (checks_values(source_ids) and checks_values(target_ids)):
        return
    for row in range(len(target_ids)):
        missing = real_ids(target_ids[row], target_attention_mask, row) - real_ids(
            source_ids[row], source_attention_mask, row
        )
        if missing:
            raise ValueError(f"document {min(missing)} of the target's row {row} has no tokens in the source")


def real_ids(document_ids: Tensor, attention_mask: Tensor | None, row: int) -> set[int]:
    return set((document_ids if attention_mask is None else document_ids[attention_mask[row]]).tolist())


def described(given: object) -> str:
    """A tensor's type and shape, or the type of what is not one."""
    return f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__


def range_of(x: Tensor) -> str:
    return f"{int(x.min())} to {int(x.max())}"
