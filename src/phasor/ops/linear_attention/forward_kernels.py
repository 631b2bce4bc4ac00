"""The forward kernels of linear attention: chunks by themselves, the state from chunk to chunk, then the outputs.

What walks from chunk to chunk does little in each: the decays of all chunks are computed before it.

Internal tensors are contiguous: `[B * H, T, ...]` for tokens, `[B * H, chunks, key_dim, value_dim]` for states.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from phasor.ops.linear_attention.chunk_tiles import (
    invert_unit_lower,
    load_gate,
    load_tile,
    pair_decay,
    running_decay,
    store_tile,
)


@triton.jit(do_not_specialize=["num_tokens"])
def decay_kernel(g_ptr, starts_ptr, from_state_ptr, to_end_ptr, kept_ptr, num_tokens, num_heads,
                 CHUNK: tl.constexpr, HAS_STARTS: tl.constexpr):  # fmt: skip
    """The decays of a chunk: of the state before it until each token, of what each token wrote until the chunk's end
    `[B * H, T]`, and of the state over all of it `[B * H, chunks]`.
    """
    row, first = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * CHUNK
    tokens, token, offs_m = num_tokens - first, row * num_tokens + first, tl.arange(0, CHUNK)
    if HAS_STARTS:
        starts_ptr += row // num_heads * num_tokens + first
    _, _, _, from_state, to_end, kept = running_decay(g_ptr + token, starts_ptr, offs_m, tokens, HAS_STARTS)
    tl.store(from_state_ptr + token + offs_m, from_state, mask=offs_m < tokens)
    tl.store(to_end_ptr + token + offs_m, to_end, mask=offs_m < tokens)
    tl.store(kept_ptr + row * tl.num_programs(0) + tl.program_id(0), kept)


@triton.jit(do_not_specialize=["num_tokens"])
def solve_kernel(k_ptr, v_ptr, g_ptr, beta_ptr, starts_ptr, inverse_ptr, w_ptr, u_ptr,
                 num_tokens, num_heads, group_size, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
                 KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
                 CHUNK: tl.constexpr, LOG2_CHUNK: tl.constexpr, PRECISION: tl.constexpr,
                 HAS_STARTS: tl.constexpr):  # fmt: skip
    """What a chunk writes is `u - w S`, S being the state before it; and the inverse of the chunk's system."""
    row, first = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * CHUNK
    batch, head = row // num_heads, row % num_heads
    tokens, token = num_tokens - first, row * num_tokens + first
    offs_m, offs_k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    if HAS_STARTS:
        starts_ptr += batch * num_tokens + first
    high, low, documents, from_state, _, _ = running_decay(g_ptr + token, starts_ptr, offs_m, tokens, HAS_STARTS)
    beta = load_gate(beta_ptr + token, offs_m, tokens)
    k_ptr += batch * stride_kb + (head // group_size) * stride_kh + first * stride_kt
    k = load_tile(k_ptr, stride_kt, tokens, KEY_DIM, offs_m, offs_k)
    a = tl.dot(k, tl.trans(k), input_precision=PRECISION) * beta[:, None]
    a *= pair_decay(high, low, documents, offs_m, HAS_STARTS)
    a = tl.where(offs_m[:, None] > offs_m[None, :], a, 0.0)
    inverse = invert_unit_lower(a, offs_m, LOG2_CHUNK, PRECISION)
    store_tile(inverse_ptr + token * CHUNK, CHUNK, tokens, CHUNK, offs_m, offs_m, inverse)
    inverse *= beta[None, :]
    w = tl.dot((inverse * from_state[None, :]).to(k.dtype), k, input_precision=PRECISION)
    store_tile(w_ptr + token * KEY_DIM, KEY_DIM, tokens, KEY_DIM, offs_m, offs_k, w)
    inverse = inverse.to(k.dtype)
    v_ptr += batch * stride_vb + head * stride_vh + first * stride_vt
    for start in range(0, VALUE_DIM, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V)
        v = load_tile(v_ptr, stride_vt, tokens, VALUE_DIM, offs_m, offs_v)
        u = tl.dot(inverse, v, input_precision=PRECISION)
        store_tile(u_ptr + token * VALUE_DIM, VALUE_DIM, tokens, VALUE_DIM, offs_m, offs_v, u)


@triton.jit(do_not_specialize=["num_tokens", "segment_chunks"])
def state_kernel(k_ptr, z_ptr, w_ptr, to_end_ptr, kept_ptr, state_ptr, states_ptr, final_ptr,
                 num_tokens, num_heads, group_size, segment_chunks,
                 stride_kb, stride_kh, stride_kt, stride_zb, stride_zh, stride_zt,
                 KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
                 CHUNK: tl.constexpr, PRECISION: tl.constexpr, HAS_STATE: tl.constexpr, HAS_STATES: tl.constexpr,
                 IS_DELTA: tl.constexpr, IS_TRANSITION: tl.constexpr):  # fmt: skip
    """The state after each segment of chunks, from the one before it on.

    With HAS_STATES the state before each chunk is stored, and `z`, for the delta rule `u`, is replaced by what tokens
    write. With IS_TRANSITION nothing but the old state is written: from the identity comes the matrix that takes the
    state before a segment to its share of the one after it.
    """
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // num_heads, row % num_heads
    offs_m, offs_k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    segment = row * tl.num_programs(2) + tl.program_id(2)
    state = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if IS_TRANSITION:
        state = tl.where(offs_k[:, None] == offs_v[None, :], 1.0, state)
    if HAS_STATE:
        state = load_tile(state_ptr + segment * KEY_DIM * VALUE_DIM, VALUE_DIM, KEY_DIM, VALUE_DIM, offs_k, offs_v)
    num_chunks = tl.cdiv(num_tokens, CHUNK)
    first_chunk = tl.program_id(2).to(tl.int64) * segment_chunks
    first = first_chunk * CHUNK
    k_ptr += batch * stride_kb + (head // group_size) * stride_kh + first * stride_kt
    to_end_ptr += row * num_tokens + first
    kept_ptr += row * num_chunks + first_chunk
    if not IS_TRANSITION:
        z_ptr += batch * stride_zb + head * stride_zh + first * stride_zt
    if IS_DELTA:
        w_ptr += (row * num_tokens + first) * KEY_DIM
    if HAS_STATES:
        states_ptr += (row * num_chunks + first_chunk) * KEY_DIM * VALUE_DIM
    tokens = num_tokens - first
    for _ in range(tl.minimum(segment_chunks, num_chunks - first_chunk)):
        if HAS_STATES:
            store_tile(states_ptr, VALUE_DIM, KEY_DIM, VALUE_DIM, offs_k, offs_v, state)
            states_ptr += KEY_DIM * VALUE_DIM
        to_end, kept = load_gate(to_end_ptr, offs_m, tokens), tl.load(kept_ptr)
        k = load_tile(k_ptr, stride_kt, tokens, KEY_DIM, offs_m, offs_k)
        z = tl.zeros([CHUNK, BLOCK_V], tl.float32)
        if not IS_TRANSITION:
            z = load_tile(z_ptr, stride_zt, tokens, VALUE_DIM, offs_m, offs_v).to(tl.float32)
        if IS_DELTA:
            w = load_tile(w_ptr, KEY_DIM, tokens, KEY_DIM, offs_m, offs_k)
            z -= tl.dot(w, state.to(w.dtype), input_precision=PRECISION)
            w_ptr += CHUNK * KEY_DIM
            if HAS_STATES:
                store_tile(z_ptr, stride_zt, tokens, VALUE_DIM, offs_m, offs_v, z)
        if not IS_TRANSITION:
            z_ptr += CHUNK * stride_zt
        z = (z * to_end[:, None]).to(k.dtype)
        state = tl.dot(tl.trans(k), z, acc=state * kept, input_precision=PRECISION)
        k_ptr += CHUNK * stride_kt
        to_end_ptr += CHUNK
        kept_ptr += 1
        tokens -= CHUNK
    store_tile(final_ptr + segment * KEY_DIM * VALUE_DIM, VALUE_DIM, KEY_DIM, VALUE_DIM, offs_k, offs_v, state)


@triton.jit(do_not_specialize=["num_tokens"])
def output_kernel(q_ptr, k_ptr, z_ptr, g_ptr, starts_ptr, states_ptr, out_ptr,
                  num_tokens, num_heads, group_size, stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
                  stride_zb, stride_zh, stride_zt,
                  KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
                  CHUNK: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
                  HAS_STARTS: tl.constexpr):  # fmt: skip
    """Outputs of a chunk: what its queries read in the state before it, and in what its tokens up to theirs wrote.

    There is a state for every PARTS chunks: to later ones of them it is that state and what the earlier ones wrote.
    """
    row, first = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64) * CHUNK
    batch, head = row // num_heads, row % num_heads
    tokens, token = num_tokens - first, row * num_tokens + first
    offs_m, offs_k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    if HAS_STARTS:
        starts_ptr += batch * num_tokens + first
    high, low, documents, from_state, to_end, kept = running_decay(
        g_ptr + token, starts_ptr, offs_m, tokens, HAS_STARTS
    )
    q_ptr += batch * stride_qb + (head // group_size) * stride_qh + first * stride_qt
    k_ptr += batch * stride_kb + (head // group_size) * stride_kh + first * stride_kt
    z_ptr += batch * stride_zb + head * stride_zh + first * stride_zt
    part, num_states = tl.program_id(1) % PARTS, tl.cdiv(tl.num_programs(1), PARTS)
    states_ptr += (row * num_states + tl.program_id(1) // PARTS) * KEY_DIM * VALUE_DIM
    q = load_tile(q_ptr, stride_qt, tokens, KEY_DIM, offs_m, offs_k)
    state = load_tile(states_ptr, VALUE_DIM, KEY_DIM, VALUE_DIM, offs_k, offs_v)
    acc = tl.dot(q, state, input_precision=PRECISION)
    if PARTS > 1:
        g_ptr += token
        for back in range(part * CHUNK, 0, -CHUNK):
            earlier_starts_ptr = starts_ptr
            if HAS_STARTS:
                earlier_starts_ptr = starts_ptr - back
            _, _, _, _, to_end, kept = running_decay(g_ptr - back, earlier_starts_ptr, offs_m, CHUNK, HAS_STARTS)
            k = load_tile(k_ptr - back * stride_kt, stride_kt, CHUNK, KEY_DIM, offs_m, offs_k)
            z = load_tile(z_ptr - back * stride_zt, stride_zt, CHUNK, VALUE_DIM, offs_m, offs_v)
            p = tl.dot(q, tl.trans(k), input_precision=PRECISION) * to_end[None, :]
            acc = tl.dot(p.to(z.dtype), z, acc=acc * kept, input_precision=PRECISION)
    acc *= from_state[:, None]
    k = load_tile(k_ptr, stride_kt, tokens, KEY_DIM, offs_m, offs_k)
    p = tl.dot(q, tl.trans(k), input_precision=PRECISION) * pair_decay(high, low, documents, offs_m, HAS_STARTS)
    z = load_tile(z_ptr, stride_zt, tokens, VALUE_DIM, offs_m, offs_v)
    acc = tl.dot(p.to(z.dtype), z, acc=acc, input_precision=PRECISION)
    store_tile(out_ptr + token * VALUE_DIM, VALUE_DIM, tokens, VALUE_DIM, offs_m, offs_v, acc)
