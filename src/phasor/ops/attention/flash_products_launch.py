"""Launches of the kernels of attention with products by distance, for some queries at a time.

The products of queries are matrix products with all rows of a table, which are held for as many queries as fit in
`MAX_ENTRIES`; the kernels read the entry of each pair. In the backward pass they write the gradients of entries, from
which two more matrix products give those of queries and of the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phasor.ops.attention.flash_launch import (
    Launch,
    contiguous_features,
    key_block_ranges,
    output_dot_gradient,
    row_stride,
    token_strides,
)
from phasor.ops.attention.flash_products_args import ProductArgs, ProductLayout
from phasor.ops.attention.flash_products_dkdv_kernel import products_dkdv_kernel
from phasor.ops.attention.flash_products_kernels import products_dq_kernel, products_forward_kernel
from phasor.ops.attention.flash_tiles import LOG2E, Tiling, block_d, tiling
from phasor.ops.launch import KernelLauncher, cdiv, empty_dense

MAX_ENTRIES = 2**29  # of the rows of queries in one launch: 1 GiB in half precision
PART = 128  # queries, of which a launch takes a multiple
ALIGNED = 64  # entries, of which the stride of rows is a multiple


class Part(NamedTuple):
    """The queries `start` to `stop` of a launch, and the rows of tables for the distances that they may see."""

    start: int
    stop: int
    first_row: int
    last_row: int

    @property
    def num_rows(self) -> int:
        return self.last_row - self.first_row + 1


def parts(args: ProductArgs) -> Iterator[Part]:
    """Queries in turn, with few enough entries, and without the rows of distances that lie outside of a call's keys."""
    rows, queries, heads, _ = args.q.shape
    table = args.key_table if args.query_table is None else args.query_table
    assert table is not None
    size = queries
    if args.query_table is not None:
        size = max(PART, MAX_ENTRIES // (rows * heads * stride_of_rows(len(table))) // PART * PART)
    for start in range(0, queries, size):
        stop, first, last = min(start + size, queries), 0, len(table) - 1
        if args.first_index >= 0 and args.key_table is None:  # rows of keys are those of all distances
            highest, lowest = args.first_index + stop - 1, args.first_index + start - args.k.shape[1] + 1
            last = max(0, min(last, highest - args.first_distance))
            first = min(last, max(0, lowest - args.first_distance))
        yield Part(start, stop, first, last)


def stride_of_rows(distances: int) -> int:
    return cdiv(distances, ALIGNED) * ALIGNED


def launch_scalars(layout: ProductLayout, tiles: Tiling) -> dict[str, Any]:
    """The arguments that all kernels share, and the options of a launch."""
    batches, queries, heads, head_dim = layout.q_shape
    _, keys, kv_heads, _ = layout.k_shape
    names = "stride_boundsb", "stride_qposb", "stride_kposb", "stride_shiftsb"
    return {
        "from_query": layout.from_query, "to_query": layout.to_query, "num_queries": queries, "num_keys": keys,
        "num_heads": heads, "group_size": heads // kv_heads, "batches": batches,
        "first_distance": layout.first_distance, "num_distances": layout.num_distances,
        "stride_row": layout.stride_row, "scale": float(layout.scale), "softcap": float(layout.softcap),
        **token_strides("q", layout.q_strides), **token_strides("k", layout.k_strides),
        **token_strides("v", layout.v_strides), **dict(zip(names, layout.row_strides, strict=True)),
        "HEAD_DIM": head_dim, "BLOCK_D": block_d(head_dim), "HAS_ROWS": layout.has_rows,
        "HAS_KEY_ROWS": layout.has_key_rows, "HAS_ENDS": layout.clipped, "HAS_SOFTCAP": layout.softcap > 0,
        "TWO_INTERVALS": layout.two_intervals, "HAS_KEY_MASK": layout.has_key_mask,
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }  # fmt: skip


def query_programs(layout: ProductLayout, tiles: Tiling) -> tuple[int]:
    return (cdiv(layout.to_query - layout.from_query, tiles.block_m) * layout.q_shape[0] * layout.q_shape[2],)


def prepare_forward(layout: ProductLayout, tiles: Tiling, has_sinks: bool) -> Launch:
    return query_programs(layout, tiles), launch_scalars(layout, tiles) | {"HAS_SINKS": has_sinks}


def prepare_dq(layout: ProductLayout, tiles: Tiling, grad_strides: Sequence[int]) -> Launch:
    return query_programs(layout, tiles), launch_scalars(layout, tiles) | token_strides("do", grad_strides)


def prepare_dkdv(
    layout: ProductLayout, tiles: Tiling, grad_strides: Sequence[int], stride_rangesb: int, shared: bool, adds: bool
) -> Launch:
    rows, keys, kv_heads, _ = layout.k_shape
    own = {"stride_rangesb": stride_rangesb, "HAS_SHARED": shared, "USE_SUMS": adds}
    scalars = launch_scalars(layout, tiles) | token_strides("do", grad_strides) | own
    return (cdiv(keys, tiles.block_n) * kv_heads * rows,), scalars


launch_forward = KernelLauncher(products_forward_kernel, prepare_forward)
launch_dq = KernelLauncher(products_dq_kernel, prepare_dq)
launch_dkdv = KernelLauncher(products_dkdv_kernel, prepare_dkdv)


def for_kernels(args: ProductArgs) -> ProductArgs:
    """The arguments as kernels read them."""
    return args._replace(
        q=contiguous_features(args.q),
        k=contiguous_features(args.k),
        v=contiguous_features(args.v),
        query_positions=args.query_positions.contiguous(),
        key_positions=args.key_positions.contiguous(),
        key_mask=None if args.key_mask is None else args.key_mask.contiguous().view(torch.uint8),
    )


def layout_of(args: ProductArgs, part: Part) -> ProductLayout:
    q, k, v = args.q, args.k, args.v
    return ProductLayout(
        part.start, part.stop, q.shape, q.stride(), k.shape, k.stride(), v.stride(),
        tuple(map(row_stride, (args.bounds, args.query_positions, args.key_positions, args.shifts))),
        args.first_distance + part.first_row, part.num_rows, stride_of_rows(part.num_rows),
        args.scale, args.softcap, args.query_table is not None, args.key_table is not None, args.clipped,
        args.bounds.shape[1] == 4, args.key_mask is not None,
    )  # fmt: skip


def mask_and_positions(args: ProductArgs) -> dict[str, Tensor | None]:
    """The tensors that all kernels read beside queries, keys, values and rows."""
    return {
        "bounds_ptr": args.bounds, "key_mask_ptr": args.key_mask, "q_pos_ptr": args.query_positions,
        "k_pos_ptr": args.key_positions, "shifts_ptr": args.shifts if args.clipped else None,
    }  # fmt: skip


def by_heads(x: Tensor, heads: int, table: Tensor) -> Tensor:
    """Vectors `[B, T, heads or fewer, D]` of all heads, as a matrix for each head of a table, `[n, heads/n B T, D]`."""
    x = x.repeat_interleave(heads // x.shape[2], dim=2) if x.shape[2] < heads else x
    return x.permute(2, 0, 1, 3).reshape(table.shape[1], -1, x.shape[-1])


def empty_entries(args: ProductArgs, vectors: int, distances: int) -> Tensor:
    """Space for the entries of rows. Kernels may read before and after it, for pairs that they then hide."""
    margin = stride_of_rows(2 * (args.q.shape[1] + args.k.shape[1]))
    return args.q.new_empty(vectors * stride_of_rows(distances) + 2 * margin)[margin:-margin]


def entries_of(x: Tensor, table: Tensor, scale: float, space: Tensor) -> Tensor:
    """The products of `by_heads` vectors with the rows of a table to base 2, `[n, vectors, stride of rows]`."""
    size = len(x), x.shape[1], stride_of_rows(len(table))
    entries = space[: size[0] * size[1] * size[2]].view(size)
    found = entries[..., : len(table)]
    torch.baddbmm(found, x, table.permute(1, 2, 0), beta=0, alpha=scale * LOG2E.value, out=found)
    return entries


def ends_of(key_rows: Tensor, distances: int, args: ProductArgs) -> Tensor:
    """The first and the last entries of keys, float32 `[2, H, B, Tk]`."""
    shape = args.q.shape[2], args.q.shape[0], args.k.shape[1]
    ends = torch.stack((key_rows[..., 0], key_rows[..., distances - 1]))
    return ends.view(2, *shape).float()


class KeyRows(NamedTuple):
    """The entries of keys and their ends, and the vectors that they are products of; empty without products of keys."""

    vectors: Tensor
    entries: Tensor
    ends: Tensor


def key_rows_of(args: ProductArgs) -> KeyRows | None:
    if args.key_table is None:
        return None
    vectors = by_heads(args.bias_k, args.q.shape[2], args.key_table)
    space = empty_entries(args, vectors.shape[0] * vectors.shape[1], len(args.key_table))
    entries = entries_of(vectors, args.key_table, args.bias_scale, space)
    return KeyRows(vectors, entries, ends_of(entries, len(args.key_table), args))


def space_for_queries(args: ProductArgs, runs: Sequence[Part]) -> Tensor | None:
    """Space for the entries of the queries of any part."""
    if args.query_table is None:
        return None
    rows, _, heads, _ = args.q.shape
    queries, distances = max(x.stop - x.start for x in runs), max(x.num_rows for x in runs)
    return empty_entries(args, rows * heads * queries, distances)


def forward(args: ProductArgs) -> tuple[Tensor, Tensor]:
    """Outputs `[B, Tq, H, D]`, and the logsumexp of the scores to base 2, float32 `[B, H, Tq]`."""
    with torch.autocast(args.q.device.type, enabled=False):
        args = for_kernels(args)
        rows, queries, heads, _ = args.q.shape
        out, lse = empty_dense(args.q), args.q.new_empty((rows, heads, queries), dtype=torch.float32)
        key_rows, runs = key_rows_of(args), list(parts(args))
        space = space_for_queries(args, runs)
        for part in runs:
            tensors: dict[str, Tensor | None] = {"q_ptr": args.q, "k_ptr": args.k, "v_ptr": args.v}
            tensors |= {"out_ptr": out, "lse_ptr": lse, **entries_for(args, part, key_rows, space)[0]}
            tensors |= {**mask_and_positions(args), "sink_logits_ptr": args.sink_logits}
            layout = layout_of(args, part)
            launch_forward(args.q, tensors, layout, tiling("forward", args.q), args.sink_logits is not None)
        return out, lse


def entries_for(
    args: ProductArgs, part: Part, key_rows: KeyRows | None, space: Tensor | None
) -> tuple[dict[str, Tensor | None], Tensor | None]:
    """What kernels read of rows, and the vectors that those of queries are products of."""
    rows, vectors = None, None
    if args.query_table is not None and space is not None:
        table = args.query_table[part.first_row : part.last_row + 1]
        vectors = by_heads(args.bias_q[:, part.start : part.stop], args.q.shape[2], table)
        rows = entries_of(vectors, table, args.bias_scale, space)
    of_keys = (None, None) if key_rows is None else (key_rows.entries, key_rows.ends)
    return {"rows_ptr": rows, "key_rows_ptr": of_keys[0], "key_ends_ptr": of_keys[1]}, vectors


def backward(
    grad: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, args: ProductArgs
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys, values, `bias_q`, `bias_k`, both tables and sink logits; empty ones of none."""
    with torch.autocast(args.q.device.type, enabled=False):
        args = for_kernels(args)
        grad = contiguous_features(grad.to(args.q.dtype))
        delta = output_dot_gradient(out, grad, lse)
        if grad_lse is not None:  # a score's share of the logsumexp is its weight, as of the output
            delta = delta - grad_lse * LOG2E.value
        dsinks = lse.new_empty(0)
        if args.sink_logits is not None:
            p = torch.exp2(args.sink_logits.float()[:, None] * LOG2E.value - lse)
            dsinks = -(p * delta).sum((0, 2))
        return *backward_in_parts(args, grad, lse, delta), dsinks


def backward_in_parts(
    args: ProductArgs, grad: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v = args.q, args.k, args.v
    heads, none = q.shape[2], q.new_empty(0)
    ranges = key_block_ranges(args.bounds, k.shape[1], q) if args.ranges is None else args.ranges
    key_rows, runs = key_rows_of(args), list(parts(args))
    space, gradient_space = space_for_queries(args, runs), space_for_queries(args, runs)
    adds = len(runs) > 1
    dq = empty_dense(q)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) if adds else empty_dense(x) for x in (k, v))
    dbias_q, dquery_table, dbias_k, dkey_table, dkey_rows, dkey_ends = none, none, none, none, None, None
    if args.query_table is not None:
        dbias_q = torch.empty_like(args.bias_q)
        dquery_table = torch.zeros_like(args.query_table, dtype=torch.float32)
    if key_rows is not None:
        by = torch.float32 if args.shares_entries else q.dtype
        dkey_rows, dkey_ends = torch.zeros_like(key_rows.entries, dtype=by), torch.zeros_like(key_rows.ends)
    read: dict[str, Tensor | None] = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "do_ptr": grad, "lse_ptr": lse}
    read |= {"delta_ptr": delta}
    for part in runs:
        entries, vectors = entries_for(args, part, key_rows, space)
        layout, drows = layout_of(args, part), None
        if entries["rows_ptr"] is not None and gradient_space is not None:
            drows = gradient_space[: entries["rows_ptr"].numel()].view_as(entries["rows_ptr"]).zero_()
        tensors = {**read, "dq_ptr": dq, "drows_ptr": drows, **entries, **mask_and_positions(args)}
        launch_dq(q, tensors, layout, tiling("dq", q), grad.stride())
        own_ranges = ranges.clamp(part.start, part.stop) if adds else ranges
        tensors = {**read, "dk_ptr": dk, "dv_ptr": dv, "dkey_rows_ptr": dkey_rows, "dkey_ends_ptr": dkey_ends}
        tensors |= {**entries, "ranges_ptr": own_ranges, **mask_and_positions(args)}
        flags = row_stride(ranges), args.shares_entries, adds
        launch_dkdv(q, tensors, layout, tiling("dkdv", q), grad.stride(), *flags)
        if args.query_table is not None and drows is not None and vectors is not None:
            own = slice(part.first_row, part.last_row + 1)
            found, dtable = product_gradients(drows, vectors, args.query_table[own], args.bias_scale)
            dbias_q[:, part.start : part.stop] = tokens_of(found, heads, q.shape[0])
            dquery_table[own] += dtable
    if args.key_table is not None and key_rows is not None and dkey_rows is not None and dkey_ends is not None:
        if args.clipped:
            for end, found in zip((0, len(args.key_table) - 1), dkey_ends.flatten(1), strict=True):
                dkey_rows[..., end] = found.view(dkey_rows.shape[:-1])
        found, dkey_table = product_gradients(dkey_rows.to(q.dtype), key_rows.vectors, args.key_table, args.bias_scale)
        dbias_k = tokens_of(found, heads, q.shape[0]).unflatten(2, (args.bias_k.shape[2], -1)).sum(3)
    return dq, dk.to(k.dtype), dv.to(v.dtype), dbias_q, dbias_k, dquery_table, dkey_table


def product_gradients(drows: Tensor, vectors: Tensor, table: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The gradients of vectors `[n, vectors, D]` and of a table `[distances, n, D]`, from those of the entries."""
    drows, rows = drows[..., : len(table)], table.transpose(0, 1)
    dvectors = torch.baddbmm(vectors, drows, rows, beta=0, alpha=scale)
    return dvectors, torch.baddbmm(rows, drows.mT, vectors, beta=0, alpha=scale).transpose(0, 1)


def tokens_of(by_head: Tensor, heads: int, batch: int) -> Tensor:
    """What `by_heads` made of `[B, T, heads, D]`."""
    return by_head.reshape(heads, batch, -1, by_head.shape[-1]).permute(1, 2, 0, 3)
