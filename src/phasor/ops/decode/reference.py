"""The operations of a decoding step as plain formulas, in the dtype of their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from phasor.ops.decode.arguments import ExpertsArgs, NormArgs, QKNormArgs, RotaryArgs
from phasor.ops.quantized import Matrix, dequantize

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
}


def small_gemm_ref(x: Tensor, matrix: Matrix, norm: NormArgs | None = None) -> Tensor:
    """`norm(x) W^T` of rows `x [rows, inputs]` and a weight matrix `[outputs, inputs]`.

    >>> small_gemm_ref(torch.tensor([[1.0, 7.0]]), torch.eye(2), NormArgs(torch.zeros(2), 5.0, 0.0)).tolist()
    [[1.0, 7.0]]
    """
    if norm is not None:
        x = _rms_norm_ref(x, norm.weight, norm.offset, norm.eps)
    return x @ dequantize(matrix, x.dtype).mT


def project_ref(
    x: Tensor,
    matrix: Matrix,
    *,
    norm: NormArgs | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    multiplier: float = 1.0,
) -> Tensor:
    """`residual + multiplier * (norm(x) W^T + bias)`; without a residual, there is no multiplier either.

    >>> x = torch.tensor([[1.0, 2.0]])
    >>> project_ref(x, torch.eye(2), residual=x, multiplier=0.5).tolist()
    [[1.5, 3.0]]
    """
    y = small_gemm_ref(x, matrix, norm)
    y = y if bias is None else y + bias
    return y if residual is None else residual + multiplier * y


def activate_ref(x: Tensor, activation: str, *, glu: bool) -> Tensor:
    """`act(x)`; with `glu`, `act(gate) * up` of the first and the second half of `x`.

    >>> activate_ref(torch.tensor([[-1.0, 2.0, 3.0, 4.0]]), "relu", glu=True).tolist()
    [[0.0, 8.0]]
    """
    if not glu:
        return ACTIVATIONS[activation](x)
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def project_activate_ref(
    x: Tensor,
    matrix: Matrix,
    activation: str,
    *,
    glu: bool,
    norm: NormArgs | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`act(norm(x) W^T + bias)`; with `glu`, `act(gate) * up` of the first and the second half of the outputs.

    >>> project_activate_ref(torch.tensor([[3.0, 4.0]]), torch.eye(2), "relu", glu=True).tolist()
    [[12.0]]
    """
    return activate_ref(project_ref(x, matrix, norm=norm, bias=bias), activation, glu=glu)


def lm_head_argmax_ref(
    x: Tensor,
    matrix: Matrix,
    *,
    norm: NormArgs | None = None,
    bias: Tensor | None = None,
    multiplier: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Logits `[rows, vocab]`, and the token of the largest in each row, among equal ones the first.

    >>> logits, tokens = lm_head_argmax_ref(torch.tensor([[3.0, 4.0]]), torch.eye(2), multiplier=0.5)
    >>> logits.tolist(), tokens.tolist()
    ([[1.5, 2.0]], [1])
    """
    logits = multiplier * project_ref(x, matrix, norm=norm, bias=bias)
    largest = logits == logits.amax(-1, keepdim=True)
    return logits, largest.int().argmax(-1)


def experts_ref(
    x: Tensor,
    logits: Tensor,
    experts: ExpertsArgs,
    *,
    norm: NormArgs | None = None,
    residual: Tensor | None = None,
    multiplier: float = 1.0,
) -> Tensor:
    """`residual + multiplier * sum_e weight_e expert_e(norm(x))` over the `top_k` experts with the highest logits.

    >>> eye = torch.eye(2).expand(3, 2, 2) * torch.tensor([1.0, 2.0, 3.0])[:, None, None]
    >>> experts = ExpertsArgs(eye, eye, None, None, "relu", False, top_k=1, normalize=True)
    >>> experts_ref(torch.tensor([[1.0, 5.0]]), torch.tensor([[0.0, 0.0, 9.0]]), experts).tolist()
    [[9.0, 45.0]]
    """
    if norm is not None:
        x = _rms_norm_ref(x, norm.weight, norm.offset, norm.eps)
    weights, chosen = logits.softmax(-1).topk(experts.top_k, dim=-1)  # [rows, k]
    weights = weights / weights.sum(-1, keepdim=True) if experts.normalize else weights
    hidden = torch.einsum("rd,rkdh->rkh", x, experts.up[chosen])
    hidden = hidden if experts.up_bias is None else hidden + experts.up_bias[chosen]
    if experts.activation == "swiglu-clamped":
        gate, up = hidden.chunk(2, dim=-1)
        gate = gate.clamp(max=experts.limit)
        hidden = gate * torch.sigmoid(experts.gain * gate) * (up.clamp(-experts.limit, experts.limit) + 1)
    else:
        hidden = activate_ref(hidden, experts.activation, glu=experts.glu)
    out = torch.einsum("rkh,rkhd->rkd", hidden, experts.down[chosen])
    out = out if experts.down_bias is None else out + experts.down_bias[chosen]
    y = (weights[..., None].to(out.dtype) * out).sum(1)
    return y if residual is None else residual + multiplier * y


def embed_tokens_ref(tokens: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    """`scale * table[tokens]`; see `embedding.embed_tokens`.

    >>> embed_tokens_ref(torch.tensor([2, 0]), torch.arange(6.0).view(3, 2), scale=0.5).tolist()
    [[2.0, 2.5], [0.0, 0.5]]
    """
    return scale * table[tokens]


def advance_step_ref(
    next_tokens: Tensor, tokens: Tensor, history: Tensor, step: Tensor, lengths: Tensor, positions: Tensor
) -> None:
    """Make `next_tokens` the `tokens` of the next step and advance the counters; `history [steps, rows]` is a ring.

    >>> tokens, history, step = torch.tensor([0]), torch.zeros(3, 1).long(), torch.tensor([4])
    >>> advance_step_ref(torch.tensor([9]), tokens, history, step, torch.tensor([4]), torch.tensor([4]))
    >>> tokens.tolist(), history.tolist(), step.tolist()
    ([9], [[0], [9], [0]], [5])
    """
    tokens.copy_(next_tokens)
    history[int(step) % len(history)] = next_tokens
    for counter in (step, lengths, positions):
        counter += 1


def decode_attention_ref(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    positions: Tensor,
    *,
    scale: float,
    rope: RotaryArgs | None = None,
    qk_norm: QKNormArgs | None = None,
    sink_logits: Tensor | None = None,
    bias: Tensor | None = None,
    sink_tokens: int = 0,
    pages: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of one new token per row, `[B, H * D]`; its key and value are written to the cache.

    `qkv [B, K * (G + 2) * D]` has the G queries, the key and the value of each of the K groups, one after the other.
    The cache is `[B, slots, K, D]`: its first `sink_tokens` slots keep their tokens, and the others are a ring buffer.
    `sink_logits [H]` are scores that take part in the softmax and have no value. `bias [B or 1, H, slots]` is added to
    the scores.

    With `pages [B, n]` the slots of a row are those of its pages in a cache `[pages, page_size, K, D]`. Whole pages
    have the sinks, the ring has room for more than the `window` tokens that are visible, and what falls into page 0 is
    not kept.

    >>> qkv, cache = torch.tensor([[1.0, 0.0, 0.0, 0.0, 5.0, 7.0]]), torch.zeros(1, 4, 1, 2)  # all scores are equal
    >>> decode_attention_ref(qkv, cache, cache.clone(), torch.tensor([1]), torch.tensor([1]), scale=1.0).tolist()
    [[2.5, 3.5]]
    """
    batch, page_size, num_kv_heads, head_dim = len(qkv), *k_cache.shape[1:]
    rows, last, sink_slots = torch.arange(batch, device=qkv.device), lengths[:, None], sink_tokens
    table = rows[:, None] if pages is None else pages
    if pages is not None:
        sink_slots = -(-sink_tokens // page_size) * page_size
    num_slots = table.shape[1] * page_size
    ring_size = num_slots - sink_slots
    new = qkv.view(batch, num_kv_heads, -1, head_dim)
    q, k, v = new[:, :, :-2], new[:, :, -2], new[:, :, -1]  # [B, K, G, D], [B, K, D], [B, K, D]
    if qk_norm is not None:
        q_weight = qk_norm.q_weight.expand(q.shape[1] * q.shape[2], head_dim).view(q.shape[1:])
        q = _rms_norm_ref(q, q_weight, qk_norm.offset, qk_norm.eps)
        k = _rms_norm_ref(k, qk_norm.k_weight, qk_norm.offset, qk_norm.eps)
    if rope is not None:
        q = rotate_ref(q, positions[:, None, None], rope)
        k = rotate_ref(k, positions[:, None], rope)
    slot = torch.where(lengths < sink_slots, lengths, sink_slots + (lengths - sink_slots) % ring_size)
    slots = torch.arange(num_slots, device=qkv.device)
    token = torch.where(slots < sink_slots, slots, last - (last - slots) % ring_size)  # the last one of each slot
    held = (token >= slots.clamp(max=sink_slots)) & (token <= last)  # [B, slots]
    if window is not None:
        held &= (last - token < window) | (token < sink_tokens)
    page, offset = table[rows, slot // page_size], slot % page_size
    kept = rows if pages is None else page.nonzero()[:, 0]
    given = []
    for cache, x in ((k_cache, k), (v_cache, v)):
        cache[page[kept], offset[kept]] = x[kept].to(cache.dtype)
        found = cache[table].flatten(1, 2)  # [B, slots, K, D]
        found[rows, slot] = x.to(cache.dtype)
        given.append(torch.where(held[..., None, None], found, 0.0).to(q.dtype))
    keys, values = given
    scores = scale * torch.einsum("bkgd,bskd->bkgs", q, keys)
    scores = scores if bias is None else scores + bias.unflatten(1, scores.shape[1:3])
    scores = scores.masked_fill(~held[:, None, None], -math.inf)
    if sink_logits is not None:
        sinks = sink_logits.view(1, *scores.shape[1:3], 1).expand(batch, -1, -1, -1)
        scores = torch.cat((scores, sinks.to(scores.dtype)), dim=-1)
    weights = scores.softmax(-1)[..., :num_slots]
    return torch.einsum("bkgs,bskd->bkgd", weights, values).reshape(batch, -1)


def reorder_cache_ref(tensors: Sequence[Tensor], order: Tensor, counts: Tensor, beams: int) -> None:
    """Let row `i` of tensors of a cache, `[B, slots, ...]`, continue from row `order[i]`, one of the same `beams` rows.

    >>> keys = torch.tensor([1.0, 2.0]).view(2, 1, 1, 1)
    >>> reorder_cache_ref([keys], torch.tensor([1, 1]), torch.tensor([1, 1]), beams=2)
    >>> keys.flatten().tolist()
    [2.0, 2.0]
    """
    for x in tensors:
        x.copy_(x.index_select(0, order))


def _rms_norm_ref(x: Tensor, weight: Tensor, offset: float, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (offset + weight)


def rotate_ref(x: Tensor, positions: Tensor, rope: RotaryArgs) -> Tensor:
    """Rotate pairs of features by `position * increment`, a phase in units of 2^-64 of a full rotation that wraps."""
    phase = (positions[..., None] * rope.increments).double() * (2 * math.pi / 2**64)
    cos, sin = ((rope.factor * t).to(x.dtype) for t in (phase.cos(), phase.sin()))
    rotary, rest = x[..., : rope.rotary_dim], x[..., rope.rotary_dim :]
    a, b = rotary.unflatten(-1, (-1, 2)).unbind(-1) if rope.adjacent else rotary.chunk(2, dim=-1)
    pairs = a * cos - b * sin, a * sin + b * cos
    rotary = torch.stack(pairs, dim=-1).flatten(-2) if rope.adjacent else torch.cat(pairs, dim=-1)
    return torch.cat((rotary, rest), dim=-1)
