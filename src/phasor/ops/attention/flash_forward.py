"""Attention over intervals of keys in Triton: one program a block of queries of one head.

Tiles that all queries of the block see whole need no mask, and with a table of biases those that are far enough away
add one number. They are gone over the quick way, all others carefully.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.attention.flash_tiles import (
    LOG2E,
    NONE,
    SLOPES,
    TABLE,
    careful_start,
    key_segments,
    load_positions,
    load_tile,
    quick_start,
    scores,
    seen_keys,
    settings,
    width_of,
)
from phasor.ops.launch import on_device
from phasor.ops.online_softmax import online_softmax


@triton.jit
def forward_kernel(q, k, v, out, logsumexp, bounds, real, query_at, key_at, shifts, slopes, table, sinks,
                   queries, keys, heads, shared, lowest, entries, scale, softcap,
                   q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
                   bounds_row, query_at_row, key_at_row, shifts_row,
                   WIDTH: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr,
                   SOFTCAP: tl.constexpr, SINKS: tl.constexpr, BESIDE: tl.constexpr, PADDED: tl.constexpr):  # fmt: skip
    """Outputs `[B, Tq, H, D]`, and the logarithms to base 2 of the sums, `[B, H, Tq]`."""
    blocks = tl.cdiv(queries, M)
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks  # the last blocks have most to do
    head = program // blocks % heads
    b = (program // blocks // heads).to(tl.int64)
    row = block * M + tl.arange(0, M)
    there = row < queries
    shift, origin, position, slope, behind, ahead = 0, 0, row, 0.0, 0.0, 0.0
    if BIAS != NONE:
        query_at += b * query_at_row
        key_at += b * key_at_row
        origin = tl.load(query_at + block * M)
        position = load_positions(query_at, block * M, queries, origin, M, BIAS)
    if BIAS == SLOPES:
        slope = tl.load(slopes + head)
    if BIAS == TABLE:
        shift = tl.load(shifts + b * shifts_row)
        table += head * entries
        ahead, behind = tl.load(table), tl.load(table + entries - 1)
    first, last, begin, end, quick, careful = key_segments(
        bounds + b * bounds_row, row, there, queries, keys, shift, lowest, entries, N, BIAS, BESIDE
    )
    first, last, begin, end = first[:, None], last[:, None], begin[:, None], end[:, None]
    k += b * k_row + (head // shared) * k_head
    v += b * v_row + (head // shared) * v_head
    if PADDED:
        real += b * keys
    asked = load_tile(q + b * q_row + head * q_head, block * M, q_token, queries, M, D, WIDTH, False)
    mixed = tl.zeros([M, D], tl.float32)
    total = tl.zeros([M], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    if SINKS:  # as if a key with that score and no value had been seen
        total += 1.0
        top = tl.zeros([M], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2E
    for t in range(quick[1] + quick[3]):
        start = quick_start(t, quick, N, BIAS)
        found = load_tile(k, start, k_token, keys, N, D, WIDTH, True)
        products = tl.dot(asked, tl.trans(found), input_precision="ieee")
        distance, far = 0.0, 0.0
        if BIAS == SLOPES:
            distance = position[:, None] - load_positions(key_at, start, keys, origin, N, BIAS)[None, :]
        if BIAS == TABLE:
            far = tl.where(t < quick[1], behind, ahead)
        score, _, _ = scores(
            products, distance, slope, table, lowest, entries, far, scale, softcap, BIAS, SOFTCAP, False
        )
        if PADDED:
            score = tl.where(tl.load(real + start + tl.arange(0, N))[None, :] != 0, score, float("-inf"))
        values = load_tile(v, start, v_token, keys, N, D, WIDTH, True)
        mixed, total, top = online_softmax(score, values, mixed, total, top, PADDED)
    for t in range(careful[1] + careful[3] + careful[5] + careful[7]):
        start = careful_start(t, careful, N)
        column = (start + tl.arange(0, N))[None, :]
        found = load_tile(k, start, k_token, keys, N, D, WIDTH, False)
        products = tl.dot(asked, tl.trans(found), input_precision="ieee")
        distance = 0.0
        if BIAS != NONE:
            distance = position[:, None] - load_positions(key_at, start, keys, origin, N, BIAS)[None, :]
        score, _, _ = scores(
            products, distance, slope, table, lowest, entries, 0.0, scale, softcap, BIAS, SOFTCAP, True
        )
        seen = seen_keys(column, keys, first, last, begin, end, real, BESIDE, PADDED)
        values = load_tile(v, start, v_token, keys, N, D, WIDTH, False)
        mixed, total, top = online_softmax(tl.where(seen, score, float("-inf")), values, mixed, total, top, True)
    none = total == 0.0
    mixed = mixed / tl.where(none, 1.0, total)[:, None]
    column = tl.arange(0, D)
    at = ((b * queries + row)[:, None] * heads + head) * WIDTH + column[None, :]
    tl.store(out + at, mixed.to(out.dtype.element_ty), mask=there[:, None] & (column < WIDTH)[None, :])
    # Infinite for a query that sees nothing, so that its weights come out as zeros again.
    sums = tl.where(none, float("inf"), top + tl.log2(tl.where(none, 1.0, total)))
    tl.store(logsumexp + (b * heads + head) * queries + row, sums, mask=there)


def arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    real: Tensor | None,
    query_at: Tensor | None,
    key_at: Tensor | None,
    shifts: Tensor | None,
    slopes: Tensor | None,
    table: Tensor | None,
    lowest: int,
    scale: float,
    softcap: float,
) -> dict[str, Any]:
    """What every kernel here is told, as the arguments of a launch. Slopes and tables go in as powers of two."""
    keeps = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)]
    by_head = None if table is None else (table.t().float() * LOG2E.value).contiguous()
    told: dict[str, Any] = dict(zip("qkv", keeps, strict=True))
    told |= {"bounds": bounds, "query_at": query_at, "key_at": key_at, "shifts": shifts, "table": by_head}
    told["real"] = None if real is None else real.contiguous().view(torch.uint8)
    told["slopes"] = None if slopes is None else slopes.float() * LOG2E.value
    told |= {"queries": q.shape[1], "keys": k.shape[1], "heads": q.shape[2], "shared": q.shape[2] // k.shape[2]}
    told |= {"lowest": lowest, "entries": 0 if table is None else len(table), "scale": scale, "softcap": softcap}
    for name, x in zip("qkv", keeps, strict=True):
        told |= {f"{name}_row": x.stride(0), f"{name}_token": x.stride(1), f"{name}_head": x.stride(2)}
    for name in ("bounds", "query_at", "key_at", "shifts"):
        told[f"{name}_row"] = 0 if told[name] is None or len(told[name]) == 1 else told[name].stride(0)
    told |= {"WIDTH": q.shape[-1], "D": width_of(q), "SOFTCAP": softcap > 0}
    told |= {"BIAS": (1 if table is None else 2) if query_at is not None else 0}
    told |= {"BESIDE": bounds.shape[1] == 4, "PADDED": real is not None}
    return told


def forward(sinks: Tensor | None, told: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Outputs `[B, Tq, H, D]`, and the logarithms to base 2 of the softmax's sums, float32 `[B, H, Tq]`."""
    q = told["q"]
    rows, queries, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    logsumexp = torch.empty(rows, heads, queries, dtype=torch.float32, device=q.device)
    chosen = settings("forward", q)
    with on_device(q):
        forward_kernel[(triton.cdiv(queries, chosen["M"]) * heads * rows,)](
            out=out, logsumexp=logsumexp, sinks=sinks, SINKS=sinks is not None, **told, **chosen
        )
    return out, logsumexp
