"""Attention over lists of key blocks as torch operations: blocks by index, or those of highest score."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from phasor.ops import dispatch
from phasor.ops.attention import Mask, ScoreMod, flash
from phasor.ops.attention.sdpa import unsupported_scores
from phasor.ops.custom_op import custom_op, save_record, saved_record
from phasor.ops.dispatch import compute_dtype
from phasor.ops.launch import cdiv, empty_dense
from phasor.ops.sparse_attention.patterns import KeyBlocks, TopBlocks
from phasor.ops.sparse_attention.selection import mean_keys
from phasor.ops.sparse_attention.tile_lists import key_block_lists, selected_block_lists

MIN_TILE = 16  # tokens, for a matrix product
# Outputs of all slots of a query are held at once, for as many heads at a time as make up at most this many elements.
MAX_SLOT_ELEMENTS = 1 << 30


def block_lists_unsupported_reason(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> str | None:
    """Why the kernel over lists of key blocks does not support this call; None where it does."""
    pattern = mask.pattern
    if not isinstance(pattern, KeyBlocks | TopBlocks):
        return "the pattern does not go by blocks of keys"
    reason = dispatch.triton_why_not(q, k, v) or unsupported_scores(score_mod)
    if reason is not None:
        return reason
    if score_mod.scale <= 0:
        return "the scale of scores is not positive"
    if q.shape[1] == 1:
        return "one query needs no tiles of queries"
    if score_mod.dropout > 0:
        return "attention weights are dropped out"
    if mask.order is not None or mask.key_document_ids is not None or mask.key_mask is not None:
        return "the blocks of packed documents and of padded rows begin at any token"
    if mask.window is not None or mask.first_key:
        return "a window hides keys of some blocks, or the first keys are not there"
    if mask.query_index is not None or mask.key_index is not None:
        return "the rows of the cache differ in length, or its slots do not hold the keys in order"
    if pattern.block % MIN_TILE:
        return f"a block of {pattern.block} tokens is not a multiple of {MIN_TILE}"
    if isinstance(pattern, TopBlocks) and q.shape[1] * pattern.top_k >= 1 << 31:
        return "queries times blocks are more than 2^31"
    return flash.unsupported_heads(q, k, v)


def block_list_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score_mod: ScoreMod) -> Tensor:
    """Queries `[B, Tq, H, D]` over the blocks of keys and values `[B, Tk, K, D]` that a pattern shows."""
    q, k, v = (x.to(compute_dtype(x)) for x in (q, k, v))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    pattern = mask.pattern
    if isinstance(pattern, KeyBlocks):
        fields = pattern.block, pattern.local, pattern.stride or 0, pattern.global_blocks
        y, _ = key_block_attention(q, k, v, KeyBlockArgs(*fields, mask.offset, mask.causal, score_mod.scale))
        return y
    assert isinstance(pattern, TopBlocks)
    top_k = min(pattern.top_k, cdiv(k.shape[1], pattern.block))  # no more than there are
    heads = heads_at_a_time(q, k, top_k)
    group_size = q.shape[2] // k.shape[2]
    args = TopBlockArgs(pattern.block, top_k, mask.offset, score_mod.scale)
    parts = []
    for part in zip(q.split(heads * group_size, 2), k.split(heads, 2), v.split(heads, 2), strict=True):
        y, _, _ = top_block_attention(*part, args)
        parts.append(y)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def heads_at_a_time(q: Tensor, k: Tensor, slots: int) -> int:
    """For how many heads of keys the outputs of all slots may be held at once.

    >>> x = torch.empty(1, 1 << 17, 8, 128, device="meta")
    >>> heads_at_a_time(x, x, 16)
    4
    """
    per_head = q.shape[0] * q.shape[1] * q.shape[3] * slots * (q.shape[2] // k.shape[2])
    return max(1, min(k.shape[2], MAX_SLOT_ELEMENTS // per_head))


class KeyBlockArgs(NamedTuple):
    """The fields of `KeyBlocks`, with 0 for no stride, how many queries came before, whether order hides keys, and the
    scale of scores.
    """

    block: int
    local: int
    stride: int
    global_blocks: int
    offset: int
    causal: bool
    scale: float

    def list_args(self, q: Tensor, k: Tensor) -> Any:
        """The lists of key blocks, and what else the kernels take."""
        from phasor.ops.sparse_attention import list_launch

        pattern = KeyBlocks(self.block, self.local, self.stride or None, self.global_blocks)
        block_m = list_launch.tile_queries(q, self.block)
        lists = key_block_lists(pattern, q.shape[1], k.shape[1], self.offset, self.causal, block_m, q.device)
        return list_launch.ListArgs(lists, block_m, self.block, 1, self.offset, self.causal, self.scale, False)


class TopBlockArgs(NamedTuple):
    """The fields of `TopBlocks`, how many queries came before, and the scale of scores."""

    block: int
    top_k: int
    offset: int
    scale: float

    def list_args(self, kernel: str, q: Tensor, k: Tensor, chosen: Tensor) -> Any:
        """The lists of key blocks for the `"forward"` or the `"dq"` kernel, and what else the kernels take."""
        from phasor.ops.sparse_attention import list_launch

        block_m = list_launch.selected_tile(kernel, q, self.block, self.top_k)
        lists = selected_block_lists(chosen, cdiv(k.shape[1], self.block), block_m)
        return list_launch.ListArgs(lists, block_m, self.block, self.top_k, self.offset, True, self.scale, True, chosen)


@custom_op("phasor::key_block_attention")
def key_block_attention(q: Tensor, k: Tensor, v: Tensor, args: KeyBlockArgs) -> tuple[Tensor, Tensor]:
    """Outputs, and the logsumexp of the scores to base 2, float32 `[B, H, Tq]`."""
    from phasor.ops.sparse_attention import list_launch

    return list_launch.forward(q, k, v, args.list_args(q, k))


@custom_op("phasor::key_block_attention_backward")
def key_block_attention_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, args: KeyBlockArgs
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    from phasor.ops.sparse_attention import list_launch

    return list_launch.backward(grad, out, lse, q, k, v, args.list_args(q, k))


@custom_op("phasor::top_block_attention")
def top_block_attention(q: Tensor, k: Tensor, v: Tensor, args: TopBlockArgs) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, the logsumexp of the scores to base 2, and the blocks chosen, int32 `[B, H, Tq, top_k]`."""
    from phasor.ops.sparse_attention import list_launch

    chosen = list_launch.choose_blocks(q, mean_keys(k, args.block), args.block, args.top_k, args.offset)
    return *list_launch.forward(q, k, v, args.list_args("forward", q, k, chosen)), chosen


@custom_op("phasor::top_block_attention_backward")
def top_block_attention_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, args: TopBlockArgs
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values; none through the choice."""
    from phasor.ops.sparse_attention import list_launch

    return list_launch.backward(grad, out, lse, q, k, v, args.list_args("dq", q, k, chosen))


@key_block_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, args: KeyBlockArgs) -> tuple[Tensor, Tensor]:
    return empty_dense(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


@top_block_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, args: TopBlockArgs) -> tuple[Tensor, Tensor, Tensor]:
    shape = q.shape[0], q.shape[2], q.shape[1]
    chosen = q.new_empty((*shape, args.top_k), dtype=torch.int32)
    return empty_dense(q), q.new_empty(shape, dtype=torch.float32), chosen


def _fake_backward(grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Any, ...]:
    return tuple(empty_dense(x) for x in (q, k, v))


key_block_attention_backward.register_fake(_fake_backward)
top_block_attention_backward.register_fake(_fake_backward)


def _setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    out, lse, *chosen = output
    save_record(ctx, inputs.args, out, lse, inputs.q, inputs.k, inputs.v, *chosen)
    ctx.mark_non_differentiable(lse, *chosen)


def _key_blocks_backward(ctx: Any, grad: Tensor, *_: Tensor) -> dict[str, Tensor | None]:
    args, *saved = saved_record(ctx)
    dq, dk, dv = key_block_attention_backward(grad, *saved, args)
    return {"q": dq, "k": dk, "v": dv}


def _top_blocks_backward(ctx: Any, grad: Tensor, *_: Tensor) -> dict[str, Tensor | None]:
    args, *saved = saved_record(ctx)
    dq, dk, dv = top_block_attention_backward(grad, *saved, args)
    return {"q": dq, "k": dk, "v": dv}


key_block_attention.register_autograd(_key_blocks_backward, setup_context=_setup_context)
top_block_attention.register_autograd(_top_blocks_backward, setup_context=_setup_context)
