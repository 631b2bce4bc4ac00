"""One token of heads with a state: gates, norms and positions of linear attention, around the state's only reading.

A program has a head of a row. It loads the whole state, if there are few programs while the projections before it
still run, and as it has all value features of the result it normalizes and gates them too.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from phasor.ops.decode.arguments import HeadNormArgs, RecurrentArgs
from phasor.ops.launch import next_power_of_2
from phasor.ops.pdl import compute_early, pdl_launch, pdl_start_next, pdl_wait_alone
from phasor.ops.rope.kernels import cos_sin

ELEMENTS_PER_WARP = 4096  # of a state: 128 registers of a thread, so that a processor has two programs of four warps
MAX_WARPS = 16
FEW_PROGRAMS = 128  # about as many as a GPU has processors: each has one for itself, and no other hides its loads


@triton.jit
def softplus(x):
    """`log(1 + exp(x))`, by `log(1 + e) = 2 atanh(e / (2 + e))`: to the last digits where it is small, too."""
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    t = s * s
    series = 1.0 + t * (1 / 3 + t * (1 / 5 + t * (1 / 7 + t * (1 / 9 + t * (1 / 11 + t * (1 / 13 + t / 15))))))
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def load_vector(ptr, offs, mask):
    return tl.load(ptr + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def recurrent_step_kernel(
    x_ptr, gates_ptr, state_ptr, slots_ptr, log_rate_ptr, time_bias_ptr, log_decay_ptr, skip_ptr,
    norm_ptr, norm_bias_ptr, stride_n, norm_offset, eps, positions_ptr, increments_ptr, rotary_factor,
    key_scale, key_eps, out_ptr, stride_x, stride_g,
    GROUP_SIZE: tl.constexpr, GROUP: tl.constexpr, GATES: tl.constexpr, TIME: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    ROTARY_DIM: tl.constexpr, ADJACENT: tl.constexpr, IS_DELTA: tl.constexpr, CENTERED: tl.constexpr,
    PREFETCH: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """See `recurrent_step`. Of a key head are GROUP columns of `x` and GATES of the gates, times from TIME on."""
    pdl_start_next(USE_PDL)
    head, row, num_heads = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    key_head, own = head // GROUP_SIZE, head % GROUP_SIZE
    offs_k, offs_v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    mask_k, mask_v = offs_k < KEY_DIM, offs_v < VALUE_DIM

    # What is read before the wait is written by steps alone, and by this kernel alone within one.
    slot = row
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + row)
    state_ptr += (slot * num_heads + head) * (KEY_DIM * VALUE_DIM)
    offsets, mask = offs_k[:, None] * VALUE_DIM + offs_v[None, :], mask_k[:, None] & mask_v[None, :]
    if PREFETCH:
        state = tl.load(state_ptr + offsets, mask=mask, other=0.0)
    if log_decay_ptr is not None:
        log_decay = tl.load(log_decay_ptr + head).to(tl.float32)
    else:
        rate = tl.exp(tl.load(log_rate_ptr + head).to(tl.float32))
        time_bias = tl.load(time_bias_ptr + head).to(tl.float32)
    if norm_ptr is not None:
        norm_weight = norm_offset + load_vector(norm_ptr + head * stride_n, offs_v, mask_v)
    if ROTARY_DIM > 0:
        rotary = offs_k < ROTARY_DIM
        if ADJACENT:
            pair, partner, second = offs_k // 2, offs_k ^ 1, offs_k % 2 == 1
        else:
            second = offs_k >= ROTARY_DIM // 2
            pair = offs_k % (ROTARY_DIM // 2)
            partner = tl.where(second, offs_k - ROTARY_DIM // 2, offs_k + ROTARY_DIM // 2)
        cos, sin = cos_sin(tl.load(positions_ptr + row), tl.load(increments_ptr + pair, mask=rotary, other=0))
        factor = tl.where(rotary, rotary_factor, 1.0)
        cos = compute_early(cos * factor, USE_PDL)
        sin = compute_early(tl.where(second, sin, -sin) * factor, USE_PDL)
    pdl_wait_alone(USE_PDL)

    x_ptr += row * stride_x + key_head * GROUP
    v_ptr = x_ptr + 2 * KEY_DIM + own * VALUE_DIM
    q, k = load_vector(x_ptr, offs_k, mask_k), load_vector(x_ptr + KEY_DIM, offs_k, mask_k)
    v, z = load_vector(v_ptr, offs_v, mask_v), load_vector(v_ptr + GROUP_SIZE * VALUE_DIM, offs_v, mask_v)
    gates_ptr += row * stride_g + key_head * GATES + own
    written = v
    if log_decay_ptr is None:
        time = softplus(tl.load(gates_ptr + TIME).to(tl.float32) + time_bias)
        log_decay = -rate * time
        if not IS_DELTA:
            written = time * v
    if ROTARY_DIM > 0:
        partner_mask = mask_k & rotary
        q = q * cos + load_vector(x_ptr, partner, partner_mask) * sin
        k = k * cos + load_vector(x_ptr + KEY_DIM, partner, partner_mask) * sin
    q *= key_scale
    if IS_DELTA:
        q *= tl.rsqrt(tl.sum(q * q, 0) / (key_scale * key_scale) + key_eps)
        k *= tl.rsqrt(tl.sum(k * k, 0) + key_eps)
    decay = tl.exp(log_decay)
    if not PREFETCH:
        state = tl.load(state_ptr + offsets, mask=mask, other=0.0)
    # `S'^T q` of the next state `S' = decay S + k written^T`, which is not waited for.
    acc = tl.sum(state * q[:, None], 0) * decay
    if IS_DELTA:
        strength = tl.sigmoid(tl.load(gates_ptr).to(tl.float32))
        written = strength * (v - decay * tl.sum(state * k[:, None], 0))
    acc += tl.sum(q * k, 0) * written
    state = state * decay + k[:, None] * written[None, :]
    tl.store(state_ptr + offsets, state, mask=mask)

    if skip_ptr is not None:
        acc += tl.load(skip_ptr + head).to(tl.float32) * v
    if norm_ptr is not None:
        if CENTERED:
            acc = tl.where(mask_v, acc - tl.sum(acc, 0) / VALUE_DIM, 0.0)
        acc *= tl.rsqrt(tl.sum(acc * acc, 0) / VALUE_DIM + eps) * norm_weight
        if norm_bias_ptr is not None:
            acc += load_vector(norm_bias_ptr + head * stride_n, offs_v, mask_v)
    acc *= z * tl.sigmoid(z)
    out_ptr += (row * num_heads + head) * VALUE_DIM
    tl.store(out_ptr + offs_v, acc.to(out_ptr.dtype.element_ty), mask=mask_v)


def recurrent_step(
    x: Tensor,
    gates: Tensor | None,
    state: Tensor,
    out: Tensor,
    args: RecurrentArgs,
    *,
    slots: Tensor | None = None,
    positions: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """The gated results of heads `[B, H * value_dim]` for a token of each row, whose states are updated in place.

    `x [B, K * group]` has for each of `K` key heads its query and key, the values of its heads and the gates of their
    results, and for Mamba-2 the times. `gates [B, K * 2 * H / K]` of the delta rule are strengths and times. `state` is
    `[slots, H, key_dim, value_dim]`, of which row `i` has the slot `slots[i]`, or `i`; `positions [B]` are rotated by.
    """
    rows, per_key_head = len(x), x.shape[1] // args.key_heads
    heads, key_dim, value_dim = state.shape[1:]
    group_size = heads // args.key_heads
    if gates is None:
        gates, width, time = x, per_key_head, 2 * (key_dim + group_size * value_dim)
    else:
        width, time = 2 * group_size, group_size
    norm = args.norm or HeadNormArgs(None, None, 0.0, 0.0, False)
    stride_n = value_dim if norm.weight is not None and norm.weight.dim() == 2 else 0
    increments, factor, rotary_dim, adjacent = args.rope or (None, 1.0, 0, False)
    block_k, block_v = next_power_of_2(key_dim), next_power_of_2(value_dim)
    num_warps = min(MAX_WARPS, max(1, block_k * block_v // ELEMENTS_PER_WARP))
    recurrent_step_kernel[(heads, rows)](
        x, gates, state, slots, args.log_rate, args.time_bias, args.log_decay, args.skip,
        norm.weight, norm.bias, stride_n, norm.offset, norm.eps, positions, increments, factor,
        key_dim**-0.5 if args.scaled else 1.0, args.key_eps, out, x.shape[1], gates.shape[1],
        GROUP_SIZE=group_size, GROUP=per_key_head, GATES=width, TIME=time, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        BLOCK_K=block_k, BLOCK_V=block_v, ROTARY_DIM=rotary_dim, ADJACENT=adjacent, IS_DELTA=args.is_delta,
        CENTERED=norm.centered, PREFETCH=rows * heads <= FEW_PROGRAMS, USE_PDL=pdl,
        num_warps=num_warps, **pdl_launch(pdl),
    )  # fmt: skip
    return out
