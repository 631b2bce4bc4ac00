"""What kernels need of a mask besides its rule, computed once for all layers that the mask serves."""

from __future__ import annotations

import torch
from torch import Tensor

from phasor.ops import dispatch
from phasor.ops.attention import intervals
from phasor.ops.attention.mask import Mask, PreparedMask
from phasor.ops.dispatch import compute_dtype, needs_grad


def prepare_mask(
    mask: Mask,
    like: Tensor,
    shape: tuple[int, int, int],
    *,
    plain_scores: bool = True,
    positions: tuple[Tensor, Tensor] | None = None,
) -> Mask:
    """The mask with what kernels will need of it, for activations `[B, T, ...]` of the dtype and device of `like`.

    `shape` is the number of queries, of keys, and of features in a head. `plain_scores` says that nothing but a scale
    acts on scores; `positions`, of queries and of keys, are given where a bias may be a table by distance.

    >>> mask = prepare_mask(Mask(causal=True, window=2, offset=3), torch.zeros(1), (1, 4, 8))
    >>> mask.prepared.row.tolist()
    [[[[False, False, True, True]]]]
    """
    queries, keys, head_dim = shape
    if queries == 1:
        if mask.sees_all(keys) or mask.hides_only_padding(keys):
            return mask
        return mask.attach(PreparedMask(row=mask.find_row(keys, like.device)))
    if dispatch.triton_why_not(like) is not None or compute_dtype(like) not in dispatch.KERNEL_DTYPES:
        return mask
    if intervals.intervals_unsupported_reason(mask) is not None:
        return mask
    if plain_scores and mask.sees_all(keys) and mask.offset == 0:
        return mask
    bounds = intervals.intervals(mask, queries, keys, like.device)
    shifts = None if positions is None else intervals.shifts(mask, *positions)
    ranges = None
    if needs_grad(like) and not torch.compiler.is_compiling():  # the compiler does not trace what imports Triton
        from phasor.ops.attention.flash_launch import key_block_ranges

        ranges = key_block_ranges(bounds, keys, like.new_empty((0, head_dim), dtype=compute_dtype(like)))
    return mask.attach(PreparedMask(bounds, ranges, shifts))
