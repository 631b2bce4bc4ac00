"""Linear attention in chunks of tokens, in torch: matrix products within a chunk, a state from chunk to chunk.

Within a chunk, with `decay[i, j]` what is left at token `i` of what was written at token `j`, the delta rule writes

    z_i = strength_i (v_i - from_state_i S^T k_i - sum_{j < i} decay[i, j] (k_i . k_j) z_j)

in place of the values. These are the unknowns of a unit lower triangular system, which is solved for all chunks at
once; each `z` is then one affine function of the state that its chunk begins with.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.ops.linear_attention.arguments import LinearAttentionArgs
from phasor.ops.linear_attention.reference import prepare

CHUNK = 64  # tokens: work grows with a chunk's square, the number of steps falls with its length


def gated_delta_in_chunks(args: LinearAttentionArgs) -> tuple[Tensor, Tensor]:
    """The gated delta rule, or without `strength` retention, as matrix products; memory grows with the tokens.

    >>> from phasor.ops.linear_attention.reference import retention_ref
    >>> q, k, v = torch.randn(3, 1, 2, 70, 4, dtype=torch.float64)
    >>> g = -torch.rand(1, 2, 70)
    >>> y, _ = gated_delta_in_chunks(LinearAttentionArgs(q, k, v, g, None))
    >>> torch.allclose(y, retention_ref(q, k, v, g)[0])
    True
    """
    strength = args.strength
    q, k, v, g, state = prepare(args.q, args.k, args.v, args.log_decay, args.state)
    length = v.shape[2]
    if length == 0:
        return torch.zeros_like(args.v), state
    chunk = min(CHUNK, length)
    # Tokens of zeros are added to the last chunk: they write nothing, and nothing decays.
    q, k, v = (F.pad(x, (0, 0, 0, -length % chunk)).unflatten(2, (-1, chunk)) for x in (q, k, v))  # [B, H, N, C, D]
    g = F.pad(g, (0, -length % chunk)).unflatten(2, (-1, chunk))  # [B, H, N, C]
    decay, from_state = chunk_decay(g, args.starts)
    scores = q @ k.mT * decay  # [B, H, N, C, C]
    k_read = from_state * k
    if strength is not None:
        beta = F.pad(strength.to(v.dtype), (0, -length % chunk)).unflatten(2, (-1, chunk))[..., None]
        system = (beta * (k @ k.mT) * decay).tril(-1)
        solved = torch.linalg.solve_triangular(
            system, beta * torch.cat([v, k_read], -1), upper=False, unitriangular=True
        )
        v, k_read = solved.split([v.shape[-1], k.shape[-1]], -1)
    q_read, k_write, kept = from_state * q, decay[..., -1, :, None] * k, from_state[..., -1:, :]
    outputs = []
    for n in range(v.shape[2]):
        z = v[:, :, n] if strength is None else v[:, :, n] - k_read[:, :, n] @ state
        outputs.append(q_read[:, :, n] @ state + scores[:, :, n] @ z)
        state = kept[:, :, n] * state + k_write[:, :, n].mT @ z
    return torch.cat(outputs, 2)[:, :, :length].to(args.v.dtype), state


def chunk_decay(log_decay: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """What is left at each token of a chunk: of every token's writing `[..., C, C]`, of the state before `[..., C, 1]`.

    The logarithms are summed from one token to the other. A difference of sums from the chunk's beginning would lose
    the digits of a small decay behind a large one.

    >>> decay, from_state = chunk_decay(torch.full((1, 1, 1, 3), 0.5).log(), None)
    >>> decay.squeeze().tolist(), from_state.flatten().tolist()
    ([[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.25, 0.5, 1.0]], [0.5, 0.25, 0.125])
    """
    chunk = log_decay.shape[-1]
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=log_decay.device).tril(-1)
    sums = torch.where(later, log_decay[..., None], 0.0).cumsum(-2)
    hidden = later.mT  # [C, C]
    from_state = log_decay.cumsum(-1)[..., None].exp()
    if starts is not None:
        documents = F.pad(starts, (0, -starts.shape[1] % chunk)).unflatten(1, (-1, chunk)).cumsum(-1)[:, None]
        hidden = hidden | (documents[..., None] != documents[..., None, :])
        from_state = from_state.masked_fill(documents[..., None] > 0, 0.0)
    return sums.masked_fill(hidden, float("-inf")).exp(), from_state
