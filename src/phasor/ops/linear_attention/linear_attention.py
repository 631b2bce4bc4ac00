"""Linear attention with a state of constant size: the public functions, and the tables of their paths.

Queries and keys are `[B, K, T, key_dim]`, values `[B, H, T, value_dim]`; `H / K` heads in a row share the queries and
keys of one. `log_decay <= 0` and `strength` are `[B, H, T]`. The state is `[B, H, key_dim, value_dim]` in float32, in
float64 for values in float64. `starts [B, T]` is True where a document begins: the state before that token is zero.

A token with a key of zero and `log_decay` 0 leaves the state as it was, and one with `strength` 0 and `log_decay` 0.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from phasor.ops.dispatch import Dispatch, Path
from phasor.ops.linear_attention.arguments import LinearAttentionArgs
from phasor.ops.linear_attention.chunked import gated_delta_in_chunks
from phasor.ops.linear_attention.kernel_op import (
    gated_delta_kernel,
    kernel_why_not,
    step_in_place,
    step_why_not,
)
from phasor.ops.linear_attention.reference import causal_convolution_ref, join_windows


def gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    state: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule (Gated DeltaNet), `[B, H, T, value_dim]`, and the state after the last token.

    `S_t = exp(g_t) S_{t-1}`, then `S_t += strength_t k_t (v_t - S_t^T k_t)^T`, and the output is `S_t^T q_t`. Queries
    are scaled and keys normalized by the caller.

    >>> import torch
    >>> k = torch.eye(2)[None, None]
    >>> y, state = gated_delta(k, k, torch.tensor([[[[3.0], [4.0]]]]), torch.zeros(1, 1, 2), torch.ones(1, 1, 2))
    >>> y.flatten().tolist(), state.flatten().tolist()
    ([3.0, 4.0], [3.0, 4.0])
    """
    check_shapes(query, key, value, state, starts, log_decay=log_decay, strength=strength)
    args = LinearAttentionArgs(query, key, value, log_decay, strength, state, starts)
    result: tuple[Tensor, Tensor] = GATED_DELTA(args)
    return result


def retention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    state: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Retention (RetNet, Mamba-2), `[B, H, T, value_dim]`, and the state after the last token.

    `S_t = exp(g_t) S_{t-1} + k_t v_t^T`, and the output is `S_t^T q_t`.

    >>> import torch
    >>> q, k, v = torch.ones(3, 1, 1, 3, 1)
    >>> y, state = retention(q, k, v, torch.full((1, 1, 3), 0.5).log(), starts=torch.tensor([[False, False, True]]))
    >>> y.flatten().tolist(), state.flatten().tolist()
    ([1.0, 1.5, 1.0], [1.0])
    """
    check_shapes(query, key, value, state, starts, log_decay=log_decay)
    args = LinearAttentionArgs(query, key, value, log_decay, None, state, starts)
    result: tuple[Tensor, Tensor] = GATED_DELTA(args)
    return result


def linear_attention_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    strength: Tensor | None,
    state: Tensor,
    starts: Tensor | None = None,
) -> Tensor:
    """The output of one token `[B, H, 1, value_dim]` by the gated delta rule; by retention, without `strength`.

    The state is updated in place, as a static cache and CUDA graphs need it.

    >>> import torch
    >>> one, state = torch.ones(1, 1, 1, 1), torch.full((1, 1, 1, 1), 4.0)
    >>> linear_attention_step(one, one, one, torch.full((1, 1, 1), 0.5).log(), None, state).item(), state.item()
    (3.0, 3.0)
    """
    gates = {"log_decay": log_decay} if strength is None else {"log_decay": log_decay, "strength": strength}
    check_shapes(query, key, value, state, starts, **gates)
    if value.shape[2] != 1:
        raise ValueError(f"linear attention: a step takes one token, not {value.shape[2]}")
    y: Tensor = LINEAR_ATTENTION_STEP(LinearAttentionArgs(query, key, value, log_decay, strength, state, starts))
    return y


def causal_convolution(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The depthwise convolution of `inputs [B, T, C]` with `weight [C, W]`, and the last inputs `[B, W - 1, C]`.

    The last column of the weight is the current token's. Windows begin in the state, and do not reach across a start.

    >>> import torch
    >>> y, state = causal_convolution(torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[10.0, 1.0]]))
    >>> y.flatten().tolist(), state.flatten().tolist()
    ([1.0, 12.0, 23.0], [3.0])
    """
    (batch, length, channels), width = inputs.shape, weight.shape[-1]
    expected = {
        "weight": (weight, [channels, width]),
        "bias": (bias, [channels]),
        "state": (state, [batch, width - 1, channels]),
        "starts": (starts, [batch, length]),
    }
    raise_wrong_shape("causal convolution", expected, "inputs and weight")
    result: tuple[Tensor, Tensor] = CAUSAL_CONVOLUTION(inputs, weight, bias, state, starts)
    return result


def check_shapes(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor | None, starts: Tensor | None, **gates: Tensor
) -> None:
    """Raise a ValueError that names the first argument whose shape does not fit the others."""
    if key.dim() != 4 or value.dim() != 4:
        raise ValueError(
            f"linear attention: keys and values are [batch, heads, tokens, features], "
            f"not {list(key.shape)} and {list(value.shape)}"
        )
    (batch, key_heads, length, key_dim), (heads, value_dim) = key.shape, value.shape[1::2]
    if heads % key_heads:
        raise ValueError(f"linear attention: {heads} heads are not a multiple of {key_heads} key heads")
    expected = {
        "query": (query, [batch, key_heads, length, key_dim]),
        "value": (value, [batch, heads, length, value_dim]),
        **{name: (gate, [batch, heads, length]) for name, gate in gates.items()},
        "state": (state, [batch, heads, key_dim, value_dim]),
        "starts": (starts, [batch, length]),
    }
    raise_wrong_shape("linear attention", expected, "keys and values")


def raise_wrong_shape(operation: str, expected: dict[str, tuple[Tensor | None, list[int]]], given: str) -> None:
    """Raise a ValueError for the first tensor that has another shape than the one beside it, which fits what is given.

    >>> import torch
    >>> raise_wrong_shape("convolution", {"bias": (torch.zeros(3), [4])}, "inputs")
    Traceback (most recent call last):
    ...
    ValueError: convolution: bias has the shape [3], but [4] fits the inputs
    """
    for name, (x, shape) in expected.items():
        if x is not None and list(x.shape) != shape:
            raise ValueError(f"{operation}: {name} has the shape {list(x.shape)}, but {shape} fits the {given}")


def update_in_place(args: LinearAttentionArgs) -> Tensor:
    """The output of one token, whose state replaces the one given."""
    y, after = gated_delta_in_chunks(args)
    assert args.state is not None
    args.state.copy_(after)
    return y


def conv1d_why_not(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    starts: Tensor | None = None,
) -> str | None:
    """Why torch's own convolution does not compute this; None where it does."""
    if starts is not None:
        return "torch's own convolution reaches across the beginnings of documents"
    if any(x is not None and x.dtype != inputs.dtype for x in (weight, bias)):
        return "torch's own convolution takes inputs and weights of one dtype"
    return "there are no tokens" if inputs.numel() == 0 else None


def causal_convolution_conv1d(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The convolution of state and inputs in a row."""
    x, last, _ = join_windows(inputs, weight, state, starts)
    return F.conv1d(x.mT, weight[:, None], bias, groups=weight.shape[0]).mT, last


# Without strength this is retention.
GATED_DELTA = Dispatch(
    Path("Triton kernels, in chunks", gated_delta_kernel, kernel_why_not),
    Path("torch, in chunks", gated_delta_in_chunks),
)
LINEAR_ATTENTION_STEP = Dispatch(
    Path("Triton kernel of one token", step_in_place, step_why_not), Path("torch, in chunks", update_in_place)
)
CAUSAL_CONVOLUTION = Dispatch(
    Path("convolution of torch", causal_convolution_conv1d, conv1d_why_not),
    Path("torch, a product for each column of the weight", causal_convolution_ref),
)
