"""The operations of a decoding step of heads with a state as plain formulas, in the dtype of their arguments."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.ops.decode.arguments import ConvolutionArgs, HeadNormArgs, NormArgs, RecurrentArgs
from phasor.ops.decode.reference import project_ref, rotate_ref
from phasor.ops.linear_attention.reference import gated_delta_ref, retention_ref
from phasor.ops.quantized import Matrix


def convolve_ref(x: Tensor, conv: ConvolutionArgs) -> Tensor:
    """The columns `x [rows, groups * group]`, the first of each group convolved and activated; `state` moves on by one.

    >>> state = torch.tensor([[[1.0], [2.0]]])
    >>> conv = ConvolutionArgs(torch.tensor([[0.0, 0.0, 1.0]]), None, state, None, group=2, convolved=1)
    >>> convolve_ref(torch.tensor([[0.0, 5.0]]), conv).tolist(), state.tolist()
    ([[0.0, 5.0]], [[[2.0], [0.0]]])
    """
    by_group = x.unflatten(-1, (-1, conv.group)).clone()
    inputs = by_group[..., : conv.convolved].flatten(1)  # [rows, C]
    slots = torch.arange(len(x), device=x.device) if conv.slots is None else conv.slots
    window = torch.cat((conv.state[slots].to(x.dtype), inputs[:, None]), dim=1)  # [rows, W, C]
    conv.state[slots] = window[:, 1:].to(conv.state.dtype)
    y = torch.einsum("rwc,cw->rc", window, conv.weight)
    y = F.silu(y if conv.bias is None else y + conv.bias)
    by_group[..., : conv.convolved] = y.unflatten(-1, (-1, conv.convolved))
    return by_group.flatten(1)


def project_convolve_ref(
    x: Tensor, matrix: Matrix, conv: ConvolutionArgs, *, norm: NormArgs | None = None, bias: Tensor | None = None
) -> Tensor:
    """`convolve(norm(x) W^T + bias)`.

    >>> conv = ConvolutionArgs(torch.ones(1, 1), None, torch.zeros(1, 0, 1), None, group=1, convolved=1)
    >>> project_convolve_ref(torch.tensor([[0.0]]), torch.ones(1, 1), conv).tolist()
    [[0.0]]
    """
    return convolve_ref(project_ref(x, matrix, norm=norm, bias=bias), conv)


def recurrent_step_ref(
    x: Tensor,
    gates: Tensor | None,
    state: Tensor,
    args: RecurrentArgs,
    *,
    slots: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """The gated results of heads for a token of each row, as `recurrent_step.recurrent_step` gives them.

    >>> x, state = torch.tensor([[2.0, 1.0, 3.0, 20.0]]), torch.full((1, 1, 1, 1), 4.0)
    >>> args = RecurrentArgs(key_heads=1, is_delta=False, scaled=False, log_decay=torch.tensor([0.5]).log())
    >>> recurrent_step_ref(x, None, state, args).tolist(), state.flatten().tolist()
    ([[200.0]], [5.0])
    """
    heads, key_dim, value_dim = state.shape[1:]
    group_size = heads // args.key_heads
    widths = [key_dim, key_dim, group_size * value_dim, group_size * value_dim]
    by_key_head = x.unflatten(-1, (args.key_heads, -1))  # [rows, K, ...]
    q, k, v, z, times = by_key_head.split([*widths, by_key_head.shape[-1] - sum(widths)], dim=-1)
    v, z = (part.flatten(1).unflatten(-1, (heads, value_dim)) for part in (v, z))  # [rows, H, value_dim]
    strength, written, log_decay = None, v, args.log_decay
    if gates is not None:
        strength, times = gates.unflatten(-1, (args.key_heads, 2, -1)).unbind(-2)
        strength = strength.flatten(1).sigmoid()
    if log_decay is None and args.log_rate is not None and args.time_bias is not None:
        time = F.softplus(times.flatten(1) + args.time_bias)
        log_decay = -args.log_rate.exp() * time
        written = v if args.is_delta else time[..., None] * v
    if args.rope is not None and positions is not None:
        q, k = (rotate_ref(part, positions[:, None], args.rope) for part in (q, k))
    if args.is_delta:
        q, k = (part / (part.square().sum(-1, keepdim=True) + args.key_eps).sqrt() for part in (q, k))
    q = q * key_dim**-0.5 if args.scaled else q
    slots = torch.arange(len(x), device=x.device) if slots is None else slots
    log_decay = torch.as_tensor(log_decay).expand(len(x), heads)
    q, k, written, log_decay = (part[:, :, None] for part in (q, k, written, log_decay))
    before = state[slots].to(x.dtype)
    if strength is None:
        y, after = retention_ref(q, k, written, log_decay, before)
    else:
        y, after = gated_delta_ref(q, k, written, log_decay, strength[:, :, None], before)
    state[slots] = after.to(state.dtype)
    y = y[:, :, 0] if args.skip is None else y[:, :, 0] + args.skip[:, None] * v
    return ((y if args.norm is None else _head_norm_ref(y, args.norm)) * F.silu(z)).flatten(1)


def _head_norm_ref(x: Tensor, norm: HeadNormArgs) -> Tensor:
    x = x - x.mean(-1, keepdim=True) if norm.centered else x
    x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    x = x if norm.weight is None else x * (norm.offset + norm.weight)
    return x if norm.bias is None else x + norm.bias
