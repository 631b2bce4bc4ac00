"""Linear attention as its recurrence: one token after another, in at least float32."""

from __future__ import annotations

import torch
from torch import Tensor


def gated_delta_ref(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    state: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule: the decayed state is corrected where it answers a key with another value.

    >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
    >>> y, state = gated_delta_ref(q, k, v, torch.zeros(1, 2, 5), torch.ones(1, 2, 5))
    >>> y.shape, state.shape
    (torch.Size([1, 2, 5, 4]), torch.Size([1, 2, 4, 4]))
    """
    q, k, v, g, state = prepare(query, key, value, log_decay, state)
    outputs = []
    for t in range(v.shape[2]):
        q_t, k_t, v_t, beta = q[:, :, t], k[:, :, t], v[:, :, t], strength[:, :, t, None].to(v.dtype)
        state = decay_state(state, g, starts, t)
        state = state + torch.einsum("bhk,bhv->bhkv", k_t, beta * (v_t - torch.einsum("bhkv,bhk->bhv", state, k_t)))
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q_t))
    return stack_tokens(outputs, value), state


def retention_ref(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    state: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Retention: what is in the state decays, and the outer product of key and value is added.

    >>> q, k, v = torch.ones(3, 1, 1, 3, 1)
    >>> retention_ref(q, k, v, torch.full((1, 1, 3), 0.5).log())[0].flatten().tolist()
    [1.0, 1.5, 1.75]
    """
    q, k, v, g, state = prepare(query, key, value, log_decay, state)
    outputs = []
    for t in range(v.shape[2]):
        state = decay_state(state, g, starts, t) + torch.einsum("bhk,bhv->bhkv", k[:, :, t], v[:, :, t])
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]))
    return stack_tokens(outputs, value), state


def causal_convolution_ref(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Every channel's weighted sum of its last inputs, `[B, T, C]` with weights `[C, W]`, and the last `W - 1` inputs.

    >>> x, weight = torch.arange(1.0, 5.0).view(1, 4, 1), torch.tensor([[10.0, 1.0]])
    >>> y, state = causal_convolution_ref(x, weight, starts=torch.tensor([[False, False, True, False]]))
    >>> y.flatten().tolist(), state.tolist()
    ([1.0, 12.0, 3.0, 34.0], [[[4.0]]])
    """
    batch, length, channels = inputs.shape
    width = weight.shape[1]
    before = inputs.new_zeros(batch, width - 1, channels) if state is None else state.to(inputs.dtype)
    x = torch.cat([before, inputs], 1)  # [B, W - 1 + T, C]
    windows, last = x.unfold(1, width, 1), x[:, length:]  # [B, T, C, W], [B, W - 1, C]
    if starts is not None:
        # The number of the document each input belongs to; 0 is the one that goes on from the state.
        documents = torch.cat([starts.new_zeros(batch, width - 1), starts], 1).cumsum(1)
        same = documents.unfold(1, width, 1) == documents[:, width - 1 :, None]  # [B, T, W]
        windows = windows * same[:, :, None]
        last = last * (documents[:, length:] == documents[:, -1:])[..., None] if width > 1 else last
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    y = torch.einsum("btcw,cw->btc", windows.to(dtype), weight.to(dtype))
    return (y if bias is None else y + bias.to(dtype)).to(inputs.dtype), last


def prepare(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values of every head, log decays and the state, in at least float32."""
    dtype, group_size = state_dtype(value), value.shape[1] // key.shape[1]
    q, k = (x.to(dtype).repeat_interleave(group_size, 1) for x in (query, key))
    if state is None:
        state = value.new_zeros(*value.shape[:2], key.shape[-1], value.shape[-1], dtype=dtype)
    return q, k, value.to(dtype), log_decay.to(dtype), state.to(dtype)


def state_dtype(value: Tensor) -> torch.dtype:
    """The dtype of the state: float32, or float64 for values in float64.

    >>> state_dtype(torch.zeros(1, dtype=torch.bfloat16))
    torch.float32
    """
    return torch.promote_types(value.dtype, torch.float32)


def decay_state(state: Tensor, log_decay: Tensor, starts: Tensor | None, t: int) -> Tensor:
    """The state before token `t`: zero where the token begins a document."""
    state = log_decay[:, :, t, None, None].exp() * state
    return state if starts is None else state.masked_fill(starts[:, t, None, None, None], 0.0)


def stack_tokens(outputs: list[Tensor], value: Tensor) -> Tensor:
    return torch.stack(outputs, 2).to(value.dtype) if outputs else torch.zeros_like(value)
