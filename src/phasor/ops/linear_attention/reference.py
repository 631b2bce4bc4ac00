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
    x, last, documents = join_windows(inputs, weight, state, starts)
    length, width, dtype = inputs.shape[1], weight.shape[1], torch.promote_types(inputs.dtype, torch.float32)
    y = torch.zeros_like(inputs, dtype=dtype) if bias is None else bias.to(dtype).expand_as(inputs)
    for i in range(width):
        term = weight[:, i].to(dtype) * x[:, i : i + length]
        if documents is not None:
            term = term * (documents[:, i : i + length] == documents[:, width - 1 :])[..., None]
        y = y + term
    return y.to(inputs.dtype), last


def join_windows(
    inputs: Tensor, weight: Tensor, state: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """State and inputs in a row `[B, W - 1 + T, C]`, the last `W - 1` of them, and the number of each one's document.

    0 is the document that goes on from the state. Of the last inputs, those of earlier documents are zero.
    """
    (batch, length, channels), width = inputs.shape, weight.shape[1]
    before = inputs.new_zeros(batch, width - 1, channels) if state is None else state.to(inputs.dtype)
    x = torch.cat([before, inputs], 1)
    if starts is None:
        return x, x[:, length:], None
    documents = torch.cat([starts.new_zeros(batch, width - 1), starts], 1).cumsum(1)
    last = x[:, length:] * (documents[:, length:] == starts.sum(1, keepdim=True))[..., None]
    return x, last, documents


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
