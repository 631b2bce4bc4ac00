"""Checks of values, run eagerly on CPU tensors and never inside compiled code or on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from phasor.config.model import ModelConfig
from phasor.config.parameters import parameters_of
from phasor.config.schema import quote
from phasor.device import check_memory

INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_model(config: ModelConfig) -> None:
    """Refuse what is no configuration, and a model whose weights take more memory than there is where they are made."""
    if not isinstance(config, ModelConfig):
        raise ValueError(f"Transformer takes a ModelConfig, not {type(config).__name__}")
    like = torch.empty(0)
    if type(like) is Tensor:  # and not a fake one, which takes no memory
        size = parameters_of(config).total * like.itemsize
        check_memory(size, like.device, size)


def can_check_values(x: Tensor) -> bool:
    """Whether reading the values of a tensor causes neither a graph break nor a device synchronization."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def check_positions(positions: Tensor, axes: int = 1) -> Tensor:
    """Return the positions, or raise an error that says what they should be."""
    if not isinstance(positions, Tensor) or positions.dtype != torch.int64:
        kind = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise ValueError(f"positions must be an int64 tensor, not {kind}")
    if positions.dim() == 3 and axes == 1:
        raise ValueError(f"this position scheme takes positions [T] or [B, T], not {list(positions.shape)}")
    if positions.dim() == 3 and positions.shape[0] != axes:
        raise ValueError(f"this position scheme takes {axes} position rows, not {positions.shape[0]}")
    if positions.dim() not in (1, 2, 3):
        raise ValueError(f"positions must be [T], [B, T] or [axes, B, T], not {list(positions.shape)}")
    if can_check_values(positions) and positions.numel() and positions.min() < 0:
        raise ValueError(f"positions count from 0; the smallest given is {int(positions.min())}")
    return positions


def check_token_positions(positions: Tensor | None, tokens: Tensor, axes: Iterable[int]) -> None:
    """The positions that a call is given for its tokens, which schemes of some numbers of axes take."""
    if positions is None:
        return
    for count in axes:
        check_positions(positions, count)
    if positions.shape[-1] != tokens.shape[1] or positions.shape[:-1][-1:] not in ((), (1,), (len(tokens),)):
        raise ValueError(f"positions {list(positions.shape)} do not fit tokens {list(tokens.shape)}")


def check_tokens(tokens: Tensor, weight: Tensor) -> None:
    """Token ids `[B, T]` within the vocabulary, which has a row of the weight each, and on its device."""
    vocab_size = len(weight)
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32) or tokens.dim() != 2:
        raise ValueError(f"tokens must be an integer tensor [batch, tokens], not {describe_tensor(tokens)}")
    if tokens.numel() == 0:
        raise ValueError(f"tokens are empty: {list(tokens.shape)}")
    if tokens.device != weight.device:
        raise ValueError(f"tokens are on {tokens.device}, and the model's weights on {weight.device}")
    if can_check_values(tokens):
        low, high = (int(x) for x in tokens.aminmax())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size} (0 to {vocab_size - 1})"
            )


def check_attention_mask(
    attention_mask: Tensor | None, tokens: Tensor, windowed: bool, has_cache: bool = False
) -> None:
    """A boolean `[B, T]`, True for real tokens, at least one per row, and without gaps under a window or a pattern."""
    if attention_mask is None:
        return
    if (
        not isinstance(attention_mask, Tensor)
        or attention_mask.dtype != torch.bool
        or attention_mask.shape != tokens.shape
    ):
        raise ValueError(
            f"attention_mask must be boolean {list(tokens.shape)}, True where a token is real, "
            f"not {describe_tensor(attention_mask)}"
        )
    if not can_check_values(attention_mask):
        return
    empty = (~attention_mask.any(-1)).nonzero()
    if len(empty) and not has_cache:  # a row with cached tokens may have none in this step
        raise ValueError(f"row {int(empty[0])} has no real token: attention_mask is True where a token is real")
    runs = (attention_mask[:, 1:] & ~attention_mask[:, :-1]).sum(-1) + attention_mask[:, 0]
    if windowed and bool((runs > 1).any()):
        raise ValueError(
            f"row {int((runs > 1).nonzero()[0])} has padding between real tokens; "
            "with a sliding window or sparse attention padding belongs at the ends"
        )


def check_documents(document_ids: Tensor | None, tokens: Tensor) -> None:
    """Integers `[B, T]`, the tokens of a document contiguous."""
    if document_ids is None:
        return
    if (
        not isinstance(document_ids, Tensor)
        or document_ids.dtype not in INTEGER_DTYPES
        or document_ids.shape != tokens.shape
    ):
        raise ValueError(
            f"document_ids must be integers {list(tokens.shape)}, one id per token, not {describe_tensor(document_ids)}"
        )
    if can_check_values(document_ids):
        for row, ids in enumerate(document_ids):
            runs = ids.unique_consecutive()
            if len(runs) != len(runs.unique()):
                raise ValueError(
                    f"row {row} returns to an earlier document: the tokens of a document must be contiguous"
                )


def prefix_lengths(prefix_length: int | Sequence[int] | Tensor, tokens: Tensor) -> Tensor:
    """A prefix length for each row, `[B]`."""
    rows, count = tokens.shape
    lengths = prefix_length
    if not isinstance(lengths, Tensor):
        each = [prefix_length] * rows if isinstance(prefix_length, int) else prefix_length
        integers = isinstance(each, Sequence) and all(type(n) is int and abs(n) < 1 << 63 for n in each)
        lengths = torch.tensor(each if integers else [], device=tokens.device)
    if lengths.shape != (rows,) or lengths.dtype not in INTEGER_DTYPES:
        raise ValueError(f"prefix_length must be an integer or one per row ({rows}), not {quote(prefix_length)}")
    if can_check_values(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= count:
        raise ValueError(f"prefix_length must lie between 0 and the {count} tokens of a row, not {lengths.tolist()}")
    return lengths


def check_token_types(token_types: Tensor | None, tokens: Tensor, num_types: int) -> None:
    """Integers `[B, T]` below the number of token types of the model."""
    if token_types is None:
        return
    if not num_types:
        raise ValueError("this model has no token types: set EmbeddingConfig.token_types")
    integers = isinstance(token_types, Tensor) and token_types.dtype in (torch.int64, torch.int32)
    if not integers or token_types.shape != tokens.shape:
        raise ValueError(
            f"token_types must be integers {list(tokens.shape)}, one per token, not {describe_tensor(token_types)}"
        )
    if can_check_values(token_types) and not 0 <= int(token_types.min()) <= int(token_types.max()) < num_types:
        raise ValueError(f"token_types must lie in [0, {num_types}), not {value_range(token_types)}")


def check_sources(source: tuple[Tensor | None, Tensor | None], target: tuple[Tensor | None, Tensor | None]) -> None:
    """Every document of the target has real tokens in the source; each is (document_ids, attention_mask)."""
    (source_ids, source_attention_mask), (target_ids, target_attention_mask) = source, target
    if source_ids is None and target_ids is None:
        return
    if source_ids is None or target_ids is None:
        raise ValueError("document_ids must be given for both source and target of an encoder-decoder, or for neither")
    if not (can_check_values(source_ids) and can_check_values(target_ids)):
        return
    for row in range(len(target_ids)):
        missing = real_ids(target_ids[row], target_attention_mask, row) - real_ids(
            source_ids[row], source_attention_mask, row
        )
        if missing:
            raise ValueError(f"document {min(missing)} of the target's row {row} has no tokens in the source")


def real_ids(document_ids: Tensor, attention_mask: Tensor | None, row: int) -> set[int]:
    return set((document_ids if attention_mask is None else document_ids[attention_mask[row]]).tolist())


def describe_tensor(given: object) -> str:
    """The dtype and shape of a tensor, or the type of any other object."""
    return f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__


def value_range(x: Tensor) -> str:
    return f"{int(x.min())} to {int(x.max())}"


def require_tokens(tokens: Tensor | None) -> Tensor:
    if tokens is None:
        raise ValueError("tokens are missing; only an encoder-decoder whose cache holds its source goes without")
    return tokens
