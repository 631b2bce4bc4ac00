"""The backward kernels of linear attention, in the order of their launches.

With `z` what the tokens wrote (for retention the values), `S` the state before a chunk and `dS` the gradient of the
state after it, a chunk's outputs are `from_state q S + p z` with `p = (q k^T) decay`, and its state becomes
`kept S + k^T (to_end z)`. The delta rule's `z` are `X (strength (v - from_state k S))`, `X = (I + a)^-1`,
`a = strength (k k^T) decay` below the diagonal.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from phasor.ops.linear_attention.chunk_tiles import load_gate, load_tile, pair_decay, running_decay, store_tile


@triton.jit(do_not_specialize=["num_tokens"])
def dz_kernel(q_ptr, k_ptr, do_ptr, g_ptr, beta_ptr, starts_ptr, inverse_ptr, dz_ptr, w_ptr,
              num_tokens, num_heads, group_size, stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
              stride_dob, stride_doh, stride_dot,
              KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
              CHUNK: tl.constexpr, PRECISION: tl.constexpr, HAS_STARTS: tl.constexpr,
              IS_DELTA: tl.constexpr):  # fmt: skip
    """The gradient of `z` by the outputs of its own chunk, `p^T do`; for the delta rule `w`, as in the forward pass."""
    row, first = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * CHUNK
    batch, head = row // num_heads, row % num_heads
    tokens, token = num_tokens - first, row * num_tokens + first
    offs_m, offs_k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    if HAS_STARTS:
        starts_ptr += batch * num_tokens + first
    high, low, documents, from_state, _, _ = running_decay(g_ptr + token, starts_ptr, offs_m, tokens, HAS_STARTS)
    q_ptr += batch * stride_qb + (head // group_size) * stride_qh + first * stride_qt
    k_ptr += batch * stride_kb + (head // group_size) * stride_kh + first * stride_kt
    do_ptr += batch * stride_dob + head * stride_doh + first * stride_dot
    k = load_tile(k_ptr, stride_kt, tokens, KEY_DIM, offs_m, offs_k)
    if IS_DELTA:
        inverse = load_tile(inverse_ptr + token * CHUNK, CHUNK, tokens, CHUNK, offs_m, offs_m).to(tl.float32)
        inverse *= (load_gate(beta_ptr + token, offs_m, tokens) * from_state)[None, :]
        w = tl.dot(inverse.to(k.dtype), k, input_precision=PRECISION)
        store_tile(w_ptr + token * KEY_DIM, KEY_DIM, tokens, KEY_DIM, offs_m, offs_k, w)
    q = load_tile(q_ptr, stride_qt, tokens, KEY_DIM, offs_m, offs_k)
    decay = tl.trans(pair_decay(high, low, documents, offs_m, HAS_STARTS))
    p = (tl.dot(k, tl.trans(q), input_precision=PRECISION) * decay).to(k.dtype)
    for start in range(0, VALUE_DIM, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V)
        do = load_tile(do_ptr, stride_dot, tokens, VALUE_DIM, offs_m, offs_v)
        dz = tl.dot(p, do, input_precision=PRECISION)
        store_tile(dz_ptr + token * VALUE_DIM, VALUE_DIM, tokens, VALUE_DIM, offs_m, offs_v, dz)


@triton.jit(do_not_specialize=["num_tokens", "segment_chunks"])
def dstate_kernel(q_ptr, k_ptr, do_ptr, w_ptr, from_state_ptr, to_end_ptr, kept_ptr, dfinal_ptr, dz_ptr, dstates_ptr,
                  dstate_ptr,
                  num_tokens, num_heads, group_size, segment_chunks, stride_qb, stride_qh, stride_qt,
                  stride_kb, stride_kh, stride_kt, stride_dob, stride_doh, stride_dot,
                  KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
                  CHUNK: tl.constexpr, PRECISION: tl.constexpr, HAS_DFINAL: tl.constexpr, HAS_STATES: tl.constexpr,
                  IS_DELTA: tl.constexpr):  # fmt: skip
    """The gradient of the state before each segment of chunks, from the one after it on.

    With HAS_STATES that of the state after each chunk is stored, and `dz` gets its share of it.
    """
    row = tl.program_id(1).to(tl.int64)
    batch, head = row // num_heads, row % num_heads
    offs_m, offs_k = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    segment = row * tl.num_programs(2) + tl.program_id(2)
    dstate = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if HAS_DFINAL:
        dstate = load_tile(dfinal_ptr + segment * KEY_DIM * VALUE_DIM, VALUE_DIM, KEY_DIM, VALUE_DIM, offs_k, offs_v)
    num_chunks = tl.cdiv(num_tokens, CHUNK)
    first_chunk = tl.program_id(2).to(tl.int64) * segment_chunks
    chunks = tl.minimum(segment_chunks, num_chunks - first_chunk)
    last_chunk = first_chunk + chunks - 1
    first = last_chunk * CHUNK
    q_ptr += batch * stride_qb + (head // group_size) * stride_qh + first * stride_qt
    k_ptr += batch * stride_kb + (head // group_size) * stride_kh + first * stride_kt
    do_ptr += batch * stride_dob + head * stride_doh + first * stride_dot
    if IS_DELTA:
        w_ptr += (row * num_tokens + first) * KEY_DIM
    dz_ptr += (row * num_tokens + first) * VALUE_DIM
    from_state_ptr += row * num_tokens + first
    to_end_ptr += row * num_tokens + first
    kept_ptr += row * num_chunks + last_chunk
    if HAS_STATES:
        dstates_ptr += (row * num_chunks + last_chunk) * KEY_DIM * VALUE_DIM
    tokens = num_tokens - first
    for _ in range(chunks):
        if HAS_STATES:
            store_tile(dstates_ptr, VALUE_DIM, KEY_DIM, VALUE_DIM, offs_k, offs_v, dstate)
            dstates_ptr -= KEY_DIM * VALUE_DIM
        from_state, to_end = load_gate(from_state_ptr, offs_m, tokens), load_gate(to_end_ptr, offs_m, tokens)
        kept = tl.load(kept_ptr)
        k = load_tile(k_ptr, stride_kt, tokens, KEY_DIM, offs_m, offs_k)
        dz = load_tile(dz_ptr, VALUE_DIM, tokens, VALUE_DIM, offs_m, offs_v).to(tl.float32)
        dz += tl.dot(k, dstate.to(k.dtype), input_precision=PRECISION) * to_end[:, None]
        if HAS_STATES:
            store_tile(dz_ptr, VALUE_DIM, tokens, VALUE_DIM, offs_m, offs_v, dz)
        q = load_tile(q_ptr, stride_qt, tokens, KEY_DIM, offs_m, offs_k)
        do = load_tile(do_ptr, stride_dot, tokens, VALUE_DIM, offs_m, offs_v)
        do = (do.to(tl.float32) * from_state[:, None]).to(q.dtype)
        dstate = tl.dot(tl.trans(q), do, acc=dstate * kept, input_precision=PRECISION)
        if IS_DELTA:
            w = load_tile(w_ptr, KEY_DIM, tokens, KEY_DIM, offs_m, offs_k)
            dstate -= tl.dot(tl.trans(w), dz.to(w.dtype), input_precision=PRECISION)
            w_ptr -= CHUNK * KEY_DIM
        q_ptr -= CHUNK * stride_qt
        k_ptr -= CHUNK * stride_kt
        do_ptr -= CHUNK * stride_dot
        dz_ptr -= CHUNK * VALUE_DIM
        from_state_ptr -= CHUNK
        to_end_ptr -= CHUNK
        kept_ptr -= 1
        tokens += CHUNK
    store_tile(dstate_ptr + segment * KEY_DIM * VALUE_DIM, VALUE_DIM, KEY_DIM, VALUE_DIM, offs_k, offs_v, dstate)


@triton.jit(do_not_specialize=["num_tokens"])
def gradient_kernel(q_ptr, k_ptr, v_ptr, z_ptr, do_ptr, dz_ptr, g_ptr, beta_ptr, starts_ptr, inverse_ptr, states_ptr,
                    dstates_ptr, dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr,
                    num_tokens, num_heads, group_size, stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
                    stride_vb, stride_vh, stride_vt, stride_zb, stride_zh, stride_zt,
                    stride_dob, stride_doh, stride_dot, stride_part,
                    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
                    CHUNK: tl.constexpr, PRECISION: tl.constexpr, HAS_STARTS: tl.constexpr,
                    IS_DELTA: tl.constexpr):  # fmt: skip
    """Gradients of a chunk's queries and keys, for some of their features; of the gates the share of these features.

    With `G` the running sum of log decays, a token's row of `(q k^T) decay` and of `a` grows with its `G`, its column
    falls with it: the gradient of `G` is what `q` and `k` have in common with their gradients, by these signs.
    """
    row, first = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64) * CHUNK
    batch, head = row // num_heads, row % num_heads
    tokens, token = num_tokens - first, row * num_tokens + first
    offs_m, offs_k = tl.arange(0, CHUNK), tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    if HAS_STARTS:
        starts_ptr += batch * num_tokens + first
    high, low, documents, from_state, to_end, kept = running_decay(
        g_ptr + token, starts_ptr, offs_m, tokens, HAS_STARTS
    )
    q_ptr += batch * stride_qb + (head // group_size) * stride_qh + first * stride_qt
    k_ptr += batch * stride_kb + (head // group_size) * stride_kh + first * stride_kt
    v_ptr += batch * stride_vb + head * stride_vh + first * stride_vt
    z_ptr += batch * stride_zb + head * stride_zh + first * stride_zt
    do_ptr += batch * stride_dob + head * stride_doh + first * stride_dot
    states_ptr += (row * tl.num_programs(1) + tl.program_id(1)) * KEY_DIM * VALUE_DIM
    dstates_ptr += (row * tl.num_programs(1) + tl.program_id(1)) * KEY_DIM * VALUE_DIM
    dp = tl.zeros([CHUNK, CHUNK], tl.float32)
    dq = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    dk = tl.zeros([CHUNK, BLOCK_K], tl.float32)
    kept_grad = tl.zeros([BLOCK_K], tl.float32)
    if IS_DELTA:
        da = tl.zeros([CHUNK, CHUNK], tl.float32)
        dread = tl.zeros([CHUNK, BLOCK_K], tl.float32)
        dbeta = tl.zeros([CHUNK], tl.float32)
        beta = load_gate(beta_ptr + token, offs_m, tokens)
        inverse = load_tile(inverse_ptr + token * CHUNK, CHUNK, tokens, CHUNK, offs_m, offs_m)
    for start in range(0, VALUE_DIM, BLOCK_V):
        offs_v = start + tl.arange(0, BLOCK_V)
        do = load_tile(do_ptr, stride_dot, tokens, VALUE_DIM, offs_m, offs_v)
        z = load_tile(z_ptr, stride_zt, tokens, VALUE_DIM, offs_m, offs_v)
        state = load_tile(states_ptr, VALUE_DIM, KEY_DIM, VALUE_DIM, offs_k, offs_v)
        dstate = load_tile(dstates_ptr, VALUE_DIM, KEY_DIM, VALUE_DIM, offs_k, offs_v)
        dp = tl.dot(do, tl.trans(z), acc=dp, input_precision=PRECISION)
        dq = tl.dot(do, tl.trans(state), acc=dq, input_precision=PRECISION)
        dk = tl.dot(z, tl.trans(dstate), acc=dk, input_precision=PRECISION)
        kept_grad += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
        if IS_DELTA:
            dz = load_tile(dz_ptr + token * VALUE_DIM, VALUE_DIM, tokens, VALUE_DIM, offs_m, offs_v)
            dr = tl.dot(tl.trans(inverse), dz, input_precision=PRECISION)  # of strength (v - from_state k S)
            if tl.program_id(0) == 0:
                dv_ptrs = dv_ptr + token * VALUE_DIM
                store_tile(dv_ptrs, VALUE_DIM, tokens, VALUE_DIM, offs_m, offs_v, dr * beta[:, None])
                v = load_tile(v_ptr, stride_vt, tokens, VALUE_DIM, offs_m, offs_v)
                dbeta += tl.sum(dr * v.to(tl.float32), 1)
            dr = dr.to(z.dtype)
            da = tl.dot(dr, tl.trans(z), acc=da, input_precision=PRECISION)
            dread = tl.dot(dr, tl.trans(state), acc=dread, input_precision=PRECISION)
    q = load_tile(q_ptr, stride_qt, tokens, KEY_DIM, offs_m, offs_k)
    k = load_tile(k_ptr, stride_kt, tokens, KEY_DIM, offs_m, offs_k)
    decay = pair_decay(high, low, documents, offs_m, HAS_STARTS)
    dp *= decay
    # What a token reads of its own writing has no decay: left out of sums that are gradients of decays, it need not
    # cancel there.
    own = tl.sum(tl.where(offs_m[:, None] == offs_m[None, :], dp, 0.0), 1)
    dp = tl.where(offs_m[:, None] > offs_m[None, :], dp, 0.0).to(k.dtype)
    dq = tl.dot(dp, k, acc=dq * from_state[:, None], input_precision=PRECISION)
    dk *= to_end[:, None]
    # The decay to the end of the chunk, and that of the state over all of it, grow with the last sum.
    dlast = tl.sum(tl.sum(dk * k.to(tl.float32), 1), 0) + kept * tl.sum(kept_grad, 0)
    dk = tl.dot(tl.trans(dp), q, acc=dk, input_precision=PRECISION)
    dsum = tl.sum(dq * q.to(tl.float32), 1)
    if IS_DELTA:
        da = tl.where(offs_m[:, None] > offs_m[None, :], -da * decay, 0.0)
        dk = tl.dot(tl.trans((da * beta[:, None]).to(k.dtype)), k, acc=dk, input_precision=PRECISION)
        dsum -= tl.sum(dk * k.to(tl.float32), 1)
        dread = tl.dot(da.to(k.dtype), k, input_precision=PRECISION) - dread * from_state[:, None]
        dread_k = tl.sum(dread * k.to(tl.float32), 1)
        dsum += beta * dread_k
        dk += dread * beta[:, None]
        dbeta += dread_k
        tl.store(dbeta_ptr + tl.program_id(0) * stride_part + token + offs_m, dbeta, mask=offs_m < tokens)
    else:
        dsum -= tl.sum(dk * k.to(tl.float32), 1)
    dq += own[:, None] * k.to(tl.float32)
    dk += own[:, None] * q.to(tl.float32)
    store_tile(dq_ptr + token * KEY_DIM, KEY_DIM, tokens, KEY_DIM, offs_m, offs_k, dq)
    store_tile(dk_ptr + token * KEY_DIM, KEY_DIM, tokens, KEY_DIM, offs_m, offs_k, dk)
    dg = dlast + tl.cumsum(dsum, 0, reverse=True)
    if HAS_STARTS:  # no sum goes across the beginning of a document
        dg = tl.where(tl.load(starts_ptr + offs_m, mask=offs_m < tokens, other=0) != 0, 0.0, dg)
    tl.store(dg_ptr + tl.program_id(0) * stride_part + token + offs_m, dg, mask=offs_m < tokens)
