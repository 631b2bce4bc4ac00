"""Attention over key intervals by the kernels for Hopper GPUs: which calls they take, and their launches.

They read tiles by TMA, which wants descriptors of tensors instead of addresses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from phasor.ops.attention.flash_args import BiasNeeds, FlashArgs, FlashGradients, FlashLayout, output_dtype
from phasor.ops.attention.flash_tiles import LINES, LOG, POWER
from phasor.ops.dispatch import forced_path, must_be_deterministic
from phasor.ops.launch import KernelLauncher, cdiv, empty_dense

BLOCK_M = 128  # queries of a program of the forward pass; two warpgroups have half of them each
BLOCK_N = 128  # keys of a tile of the forward pass, and of a program of the backward pass
ROWS = 64  # queries of a tile of the backward pass
NUM_STAGES = 2
LOG2E = math.log2(math.e)
MIN_PAIRS = 2**28  # of queries and keys of all heads: fewer are done before their descriptors are made
HEAD_DIMS = (64, 128)
BACKWARD_HEAD_DIMS = (128,)
CURVES = (LINES.value, LOG.value, POWER.value)


@functools.cache
def is_available(device: torch.device) -> bool:
    """Whether the kernels can be compiled for a device, by this version of Triton."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        from phasor.ops.attention import flash_hopper_backward, flash_hopper_forward  # noqa: F401
    except (ImportError, AttributeError):  # Gluon is new, and changes
        return False
    return True


def takes(args: FlashArgs, layout: FlashLayout) -> bool:
    """Whether the forward kernel takes these arguments, as kernels read them."""
    q, k, v = args.q, args.k, args.v
    by_index = args.positions_count or args.query_positions is None or layout.head_strides[0] > 0
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] in HEAD_DIMS
        and (q.shape[0] * q.shape[1] * q.shape[2] * k.shape[1] >= MIN_PAIRS or forced_path() == "triton")
        and is_available(q.device)
        and args.scale > 0
        and not (args.softcap > 0 and layout.bias in CURVES)  # which products of queries and keys include
        and by_index
        and args.sink_queries is None
        and (args.knots is None or args.shifts is not None)
        and not (layout.two_intervals or layout.use_rows or layout.sum_weights)
        and (layout.one_sided or layout.head_strides[0] == 0)
        and all(map(suits_tma, (q, k, v)))
    )


def takes_backward(args: FlashArgs, layout: FlashLayout, grad: Tensor, needs: BiasNeeds) -> bool:
    """Whether the backward kernel takes these arguments. It adds up gradients of queries in any order."""
    return (
        takes(args, layout)
        and not (layout.softcap > 0 and any(needs))  # gradients of scores before and after the cap
        and args.q.shape[-1] in BACKWARD_HEAD_DIMS
        and suits_tma(grad)
        and not must_be_deterministic()
    )


def suits_tma(x: Tensor) -> bool:
    """Whether a descriptor can be made of a tensor: its rows begin at multiples of 16 bytes."""
    multiple = 16 // x.element_size()
    strides = [stride for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size > 1]
    return x.data_ptr() % 16 == 0 and all(stride > 0 and stride % multiple == 0 for stride in strides)


def describe(x: Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]) -> Any:
    """A descriptor of a tensor's tiles, whose last dimension is contiguous."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    strides = [stride if size > 1 else max(16, stride) // 16 * 16 for size, stride in zip(shape, strides, strict=True)]
    return TensorDescriptor(x, list(shape), [*strides[:-1], 1], list(block), tile_layout(x.dtype, tuple(block)))


@functools.cache
def tile_layout(dtype: torch.dtype, block: tuple[int, ...]) -> Any:
    """How a tile lies in shared memory: swizzled, but for single rows."""
    from triton.experimental.gluon import language as gl

    if len(block) == 2:
        return gl.NVMMASharedLayout(0, dtype.itemsize * 8, rank=2)
    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, str(dtype)[6:]))


def describe_tokens(x: Tensor, tokens: int, features: int | None = None) -> Any:
    """A descriptor of `[B, T, H, D]` by tiles of one head's tokens; heads begin at columns."""
    rows, length, heads, head_dim = x.shape
    row, token, head, _ = x.stride()
    width = (heads - 1) * head + head_dim
    return describe(x, (rows, length, width), (row, token, 1), (1, tokens, features or head_dim))


def scalars(layout: FlashLayout) -> dict[str, Any]:
    """The arguments that both kernels share."""
    _, queries, heads, head_dim = layout.q_shape
    _, keys, kv_heads, _ = layout.k_shape
    stride_bounds, stride_q_pos, stride_k_pos, stride_shifts, stride_spans = layout.row_strides
    return {
        "num_queries": queries, "num_keys": keys, "num_heads": heads, "group_size": heads // kv_heads,
        "min_distance": layout.min_distance, "num_distances": layout.num_distances, "scale": float(layout.scale),
        "softcap": float(layout.softcap), "stride_qh": layout.q_strides[2], "stride_kh": layout.k_strides[2],
        "stride_vh": layout.v_strides[2], "stride_boundsb": stride_bounds, "stride_qposb": stride_q_pos,
        "stride_kposb": stride_k_pos, "stride_qposh": layout.head_strides[0], "stride_kposh": layout.head_strides[1],
        "stride_shiftsb": stride_shifts, "stride_spansb": stride_spans, "HEAD_DIM": head_dim,
        "NUM_STAGES": NUM_STAGES, "BIAS": layout.bias, "NUM_KNOTS": layout.num_knots,
        "ONE_SIDED": layout.one_sided, "HAS_SOFTCAP": layout.softcap > 0, "HAS_KEY_MASK": layout.has_key_mask,
        "num_warps": 4,
    }  # fmt: skip


def prepare_forward(layout: FlashLayout, has_sinks: bool) -> tuple[tuple[int, ...], dict[str, Any]]:
    rows, queries, heads, _ = layout.q_shape
    return (cdiv(queries, BLOCK_M) * heads, rows), scalars(layout) | {"BLOCK_N": BLOCK_N, "HAS_SINKS": has_sinks}


def prepare_backward(
    layout: FlashLayout, stride_doh: int, stride_rangesb: int, needs: BiasNeeds
) -> tuple[tuple[int, ...], dict[str, Any]]:
    rows, keys, kv_heads, _ = layout.k_shape
    own = {"stride_doh": stride_doh, "stride_rangesb": stride_rangesb}
    flags = {"HAS_TABLE_GRAD": needs.table, "HAS_CURVE_GRAD": needs.curve, "HAS_SUM_GRAD": needs.sums}
    return (cdiv(keys, BLOCK_N), kv_heads, rows), scalars(layout) | own | flags


@functools.cache
def launchers() -> tuple[KernelLauncher, KernelLauncher]:
    """The launchers of the forward and of the backward kernel, whose language is imported with them."""
    from phasor.ops.attention.flash_hopper_backward import backward_kernel
    from phasor.ops.attention.flash_hopper_forward import forward_kernel

    return KernelLauncher(forward_kernel, prepare_forward), KernelLauncher(backward_kernel, prepare_backward)


def twice(table: Tensor) -> Tensor:
    """A table `[H, distances]`, then the same from its second entry on: `[H, 2, distances]`, an even number of them."""
    even = table.shape[1] + table.shape[1] % 2
    return pad(table, (0, even + 1 - table.shape[1])).unfold(1, even, 1).contiguous()


def mask_and_bias(args: FlashArgs, table: Tensor | None, spans: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The tensors that both kernels read beside those with descriptors, with a table and spans as each reads them."""
    return {
        "bounds_ptr": args.bounds, "key_mask_ptr": args.key_mask, "q_pos_ptr": args.query_positions,
        "k_pos_ptr": args.key_positions, "shifts_ptr": args.shifts, "slopes_ptr": args.slopes,
        "curve_params_ptr": args.powers if args.rates is None else args.rates, "table_ptr": table, **spans,
        "knots_ptr": args.knots,
    }  # fmt: skip


def forward(args: FlashArgs, layout: FlashLayout) -> tuple[Tensor, Tensor]:
    """Outputs `[B, Tq, H, D]`, and the logsumexp of the scores to base 2, float32 `[B, H, Tq]`."""
    q = args.q
    rows, queries, heads, _ = q.shape
    out, lse = empty_dense(q, output_dtype(args)), q.new_empty((rows, heads, queries), dtype=torch.float32)
    descs = {"q_desc": describe_tokens(q, BLOCK_M)}
    descs |= {"k_desc": describe_tokens(args.k, BLOCK_N), "v_desc": describe_tokens(args.v, BLOCK_N)}
    has_sums = layout.head_strides[1] > 0
    descs["sums_desc"] = describe_rows(tile_sums(args.key_positions, BLOCK_N), BLOCK_N) if has_sums else None
    table = args.table
    table = table if table is None or args.knots is not None else twice(table.flip(1))
    tensors = {"out_ptr": out, "lse_ptr": lse, **mask_and_bias(args, table, {"spans_ptr": args.inverse_spans})}
    tensors["sink_logits_ptr"] = args.sink_logits
    launchers()[0](q, descs | tensors, layout, args.sink_logits is not None)
    return out, lse


def backward(
    args: FlashArgs,
    layout: FlashLayout,
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    ranges: Tensor,
    needs: BiasNeeds,
    grad_lse: Tensor | None,
) -> FlashGradients:
    """The gradients by one kernel, which adds up those of queries in float32."""
    q, k = args.q, args.k
    rows, queries, heads, head_dim = q.shape
    keys, blocks = k.shape[1], cdiv(k.shape[1], BLOCK_N)
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dk, dv = empty_dense(k), empty_dense(args.v)
    dtable = dq.new_zeros(rows, blocks, heads, layout.num_distances) if needs.table else dq.new_empty(0, heads)
    of_lines = needs.table and args.knots is not None
    curve_shape = (rows, heads, 2 * blocks, 1 if of_lines else 2)
    dcurve = dq.new_zeros(curve_shape) if needs.curve or of_lines else dq.new_empty(0, heads)
    dq_sums = dq.new_zeros(rows, heads if of_lines else 0, queries)
    dq_sums = query_sums(lse, delta, grad_lse, args.sink_logits) if needs.sums else dq_sums
    dk_sums = dq.new_zeros(rows, heads if needs.sums else 0, keys)
    descs = {"q_desc": describe_tokens(q, ROWS), "k_desc": describe_tokens(k, BLOCK_N)}
    descs |= {"v_desc": describe_tokens(args.v, BLOCK_N), "do_desc": describe_tokens(grad, ROWS)}
    descs |= {"dq_desc": describe_tokens(dq, ROWS, head_dim // 2)}
    if layout.one_sided:
        assert args.slopes is not None
        of_sums = layout.head_strides[0] > 0
        apart = tile_sums(args.query_positions, ROWS) if of_sums else -(torch.arange(queries, device=q.device) % ROWS)
        lse = lse - args.slopes[:, None] * LOG2E * apart
    descs |= {"lse_desc": describe_rows(lse, ROWS), "delta_desc": describe_rows(delta, ROWS)}
    tensors: dict[str, Any] = {"dk_ptr": dk, "dv_ptr": dv, "dtable_ptr": dtable, "dcurve_ptr": dcurve}
    tensors |= {"dk_sums_ptr": dk_sums, "dspans_ptr": dq_sums, "ranges_ptr": ranges}
    table, spans = args.table, args.inverse_spans
    table = table if table is None or spans is not None else twice(table)
    span_ranges_read = None if spans is None else pad(span_ranges(spans).flatten(), (0, 2))  # past the last tile too
    tensors |= mask_and_bias(args, table, {"span_ranges_ptr": span_ranges_read})
    descs["spans_desc"] = None if spans is None else describe_rows(spans[:, None], ROWS)
    powers = None if spans is None else powers_of_spans(spans, q.dtype)
    descs["powers_desc"] = None if powers is None else describe(powers, powers.shape, powers.stride(), (1, 16, ROWS))
    stride_ranges = 0 if len(ranges) == 1 else ranges.stride(0)
    launchers()[1](q, descs | tensors, layout, grad.stride(2), stride_ranges, needs)
    if needs.table:
        dtable = dtable.transpose(1, 2)
    scaled = torch.mul(dq, args.scale, out=empty_dense(q))  # in one pass
    return FlashGradients(scaled, dk, dv, dtable, dcurve, dq_sums, dk_sums)


def query_sums(lse: Tensor, delta: Tensor, grad_lse: Tensor | None, sink_logits: Tensor | None) -> Tensor:
    """The gradients of scores summed over the keys of each query, `[B, H, Tq]`.

    They are `p (dp - delta)`, and the sum of `p dp` is `delta` plus what the logsumexp adds. So nothing but that is
    left where weights add up to 1; with sinks those are less by the weight of the sink.
    """
    total = torch.zeros_like(lse) if grad_lse is None else grad_lse * LOG2E
    if sink_logits is not None:
        total = total + delta * torch.exp2(sink_logits.float()[:, None] * LOG2E - lse)
    return total


def powers_of_spans(inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse spans `[B or 1, Tq]` times what `column_powers` gives for a tile, tile by tile: `[B tiles, 16, ROWS]`.

    All that is rounded has its rest in another row, but for cubes; and one row is of ones.
    """
    tiles = pad(inverse, (0, -inverse.shape[1] % ROWS)).view(-1, 1, ROWS)
    columns = torch.arange(ROWS, device=inverse.device) * (2 / ROWS) - 1
    values = tiles * columns ** torch.arange(4, device=inverse.device)[:, None]
    rounded = values.to(dtype)
    rest, ones = (values - rounded).to(dtype), torch.ones_like(rounded[:, :1])
    rows = torch.cat((rounded, rest, ones, torch.zeros_like(ones)), dim=1)
    return rows[:, [0, 1, 2, 6, 3, 8, 5, 4, 1, 2, *[9] * 6]].contiguous()


def span_ranges(inverse: Tensor) -> Tensor:
    """The least and the greatest inverse span of each tile of queries, `[B or 1, tiles, 2]`."""
    padded = pad(inverse[:, None], (0, -inverse.shape[1] % ROWS), mode="replicate")
    return torch.stack(padded.view(len(inverse), -1, ROWS).aminmax(dim=-1), dim=-1)


def describe_rows(x: Tensor, tokens: int) -> Any:
    """A descriptor of `[B, H, T]` by a tile's tokens of one head; copied where rows do not begin as TMA wants."""
    x = pad(x.flatten(0, 1), (0, -x.shape[-1] % 4))
    return describe(x, x.shape, x.stride(), (1, tokens))


def tile_sums(pairs: Tensor | None, tokens: int) -> Tensor:
    """The sums of `[B, H, 2, T]`, pairs of floats, counted from the first token of a tile: `[B, H, T]`."""
    assert pairs is not None
    first = pairs[..., ::tokens].repeat_interleave(tokens, dim=-1)[..., : pairs.shape[-1]]
    high, low = (pairs - first).unbind(2)
    return high + low
