"""Attention: multi-head, grouped-query or multi-query, self or cross. Positions come in through hooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from phasor.config import (
    ChunkedConfig,
    DilatedConfig,
    ModelConfig,
    SparseConfig,
    StridedConfig,
    TopKConfig,
)
from phasor.nn.attention.base import (
    AttendShapes,
    Attention,
    AttentionContext,
    CalledOperation,
    Rows,
    StandIn,
    attend,
)
from phasor.nn.attention.fused import DecodingStep
from phasor.nn.attention.softmax.config import SoftmaxAttentionConfig
from phasor.nn.attention.softmax.fused import FusedSoftmax
from phasor.nn.layer_step import CrossStep
from phasor.nn.norm import RowNorm, build_norm
from phasor.nn.positions.base import Position
from phasor.ops.attention import Mask, SinkQueries
from phasor.ops.dispatch import Dispatch, Path
from phasor.ops.norm import NORM
from phasor.ops.rope import split_qkv
from phasor.ops.sparse_attention import Dilated, KeyBlocks, Pattern, TopBlocks, prepare_sparse_mask

QKVSinkQueries = tuple[Tensor, Tensor, Tensor, SinkQueries | None]


class SoftmaxAttention(Attention, config=SoftmaxAttentionConfig):
    """`softmax(q k^T * scale) v`, with every option of the literature.

    Queries, keys and values come out of one projection whose rows are ordered by key/value head (its queries, its
    key, its value), so that tensor parallelism can split between key/value heads. Cross-attention projects queries
    from its input, and keys and values from the encoder's output.
    """

    def __init__(self, config: SoftmaxAttentionConfig, model: ModelConfig, *, cross: bool = False) -> None:
        super().__init__()
        self.config, self.cross = config, cross
        self.num_heads, (self.head_dim, self.num_kv_heads) = model.num_heads, config.heads_of(model)
        self.queries_per_kv = self.num_heads // self.num_kv_heads  # query heads that share a key/value head
        # Heads that are projected for each key/value head: its queries, their gates, its key and its value.
        self.group_sizes = [self.queries_per_kv] * (1 + config.output_gate) + [1] * (len(config.projected) - 1)
        self.group_size = sum(self.group_sizes)
        self.scale = self.head_dim**-0.5 if config.scale is None else config.scale
        self.dropout = model.dropout.attention
        self.pattern = None if config.sparse is None or cross else build_pattern(config.sparse)
        kv_dim = self.num_kv_heads * self.head_dim
        if cross:
            self.q = nn.Linear(model.dim, self.num_heads * self.head_dim, bias="q" in config.bias)
            kv = config.projected[1:]
            self.kv = nn.Linear(model.for_side("encoder").dim, len(kv) * kv_dim, bias=set(kv) <= set(config.bias))
        else:
            self.qkv = nn.Linear(model.dim, self.group_size * kv_dim, bias=set(config.projected) <= set(config.bias))
        self.out = nn.Linear(self.num_heads * self.head_dim, model.dim, bias="out" in config.bias)
        self.has_qk_norm = config.qk_norm != "none"
        self.norms_rotated = config.qk_norm_after_positions and not cross
        self.q_norm = self._qk_norm(model, self.num_heads)
        self.k_norm = nn.Identity() if config.shared_kv else self._qk_norm(model, self.num_kv_heads)
        self.v_norm = build_norm(model.norm.without_weights(), self.head_dim) if config.v_norm else nn.Identity()
        self.sinks = nn.Parameter(torch.zeros(self.num_heads)) if config.sink_logits else None
        self.partial_qkv_bias = self._partial_qkv_bias()
        self.partly_biased = frozenset(self.partial_qkv_bias.keys())
        self.unfusable_reason = self._unfusable_reason()

    def _unfusable_reason(self) -> str | None:
        """Why positions cannot be applied to the projection's output in one kernel; None where they can."""
        if self.partly_biased:
            return "some of queries, keys and values have a bias and others not"
        if self.config.clip is not None:
            return "queries, keys and values are clipped"
        if self.config.cap_sinks:
            return "the distance to sink tokens is capped"
        if self.config.value_is_key or self.config.v_norm:
            return "values are keys or normalized"
        if self.config.output_gate:
            return "gates are projected along with queries, keys and values"
        return "queries and keys are normalized" if self.has_qk_norm else None

    def rows_by_role(self) -> Iterator[tuple[nn.Linear, list[Rows]]]:
        projected = self.config.projected
        for linear, parts in [(self.q, "q"), (self.kv, projected[1:])] if self.cross else [(self.qkv, projected)]:
            yield linear, self.split_rows(linear.weight, parts)
        yield self.out, [(self.out.weight, "out", self.out.out_features)]

    def split_rows(self, weight: Tensor, parts: str) -> list[Rows]:
        """A projection's rows by the part they compute: views `[K, heads, D, ...]`, the part, the number of rows."""
        sizes = {part: self.queries_per_kv if part == "q" else 1 for part in parts}
        if self.config.output_gate and not self.cross:
            sizes = {"q": self.queries_per_kv, "gate": self.queries_per_kv, **sizes}
        by_kv_head = weight.unflatten(0, (self.num_kv_heads, sum(sizes.values()), self.head_dim))
        views = by_kv_head.split(list(sizes.values()), dim=1)
        return [(v, part, v.shape[:3].numel()) for part, v in zip(sizes, views, strict=True)]

    def prepare_mask(self, mask: Mask, x: Tensor, keys: int, positions: tuple[Tensor, Tensor] | None = None) -> Mask:
        config = self.config
        if not self.cross:
            mask = mask.with_window(config.window, config.sink_tokens).with_pattern(self.pattern)
        plain = config.softcap is None and self.sinks is None and not config.cap_sinks and positions is None
        shape = x.shape[1], keys, self.head_dim
        return prepare_sparse_mask(mask, x, shape, plain_scores=plain, positions=positions)

    def attend_shapes(self, queries: int, keys: int) -> AttendShapes:
        return AttendShapes(self.num_heads, self.head_dim, self.num_kv_heads, self.head_dim)

    def score_options(self) -> dict[str, Any]:
        dropout = self.dropout if self.training else 0.0
        return {"scale": self.scale, "softcap": self.config.softcap, "sink_logits": self.sinks, "dropout": dropout}

    def operations(self, tokens: int, tensor: StandIn, ctx: AttentionContext) -> Iterator[CalledOperation]:
        if "keys" in ctx.position.config.acts_on:
            projected = tensor(1, tokens, self.num_kv_heads, self.group_size, self.head_dim)
            yield CalledOperation("rotation", APPLY_POSITIONS, (self, projected, ctx))
        if self.has_qk_norm:
            queries = tensor(1, tokens, self.num_heads, self.head_dim)
            yield CalledOperation("query and key norm", NORM, cast(RowNorm, self.q_norm).operation_args(queries))

    def reset_parameters(self) -> None:
        for bias in (self.sinks, *self.partial_qkv_bias.values()):
            if bias is not None:
                nn.init.zeros_(bias)

    def keep_part(self, index: int, count: int) -> None:
        self.num_heads, self.num_kv_heads = self.num_heads // count, self.num_kv_heads // count

    def decode_kernel_why_not(self) -> str | None:
        config = self.config
        biased = {"q", "k", "v"} & set(config.bias)
        if config.head_dim is not None or config.num_kv_heads is not None:
            return "the heads of some layers are not the model's"
        if config.softcap or config.clip is not None or config.cap_sinks:
            return "attention has a softcap, a clip or capped sinks"
        if config.sparse is not None:
            return "attention is sparse"
        if config.qk_norm == "whole":
            return "queries and keys are normalized over all heads together"
        if config.qk_norm_after_positions or not config.qk_norm_weight:
            return "queries and keys are normalized after positions or without a weight"
        if config.value_is_key or config.v_norm or config.shared_kv:
            return "values are keys or normalized, or those of another layer"
        if config.output_gate:
            return "the results of attention are gated"
        return "only some of queries, keys and values have a bias" if 0 < len(biased) < 3 else None

    def fused_attention(self, step: DecodingStep, scheme: Position, index: int) -> FusedSoftmax:
        return FusedSoftmax(self, step, scheme, index)

    def decode_projections(self) -> Iterator[nn.Module]:
        yield from (self.qkv, self.out)

    def decode_norms(self) -> Iterator[nn.Module]:
        yield from (self.q_norm, self.k_norm) if self.has_qk_norm else ()

    def _qk_norm(self, model: ModelConfig, heads: int) -> nn.Module:
        shapes = {"head": (self.head_dim,), "heads": (heads, self.head_dim), "whole": (heads * self.head_dim,)}
        if self.config.qk_norm == "none":
            return nn.Identity()
        return build_norm(self.config.norm_of_heads(model), *shapes[self.config.qk_norm])

    def _partial_qkv_bias(self) -> nn.ParameterDict:
        """Biases of parts whose neighbors in the same projection have none."""
        projected = self.config.projected
        projections = [projected[:1], projected[1:]] if self.cross else [projected]
        heads = {"q": self.num_heads, "k": self.num_kv_heads, "v": self.num_kv_heads}
        bias = set(self.config.bias)
        partial = [p for parts in projections if not set(parts) <= bias for p in parts if p in bias]
        return nn.ParameterDict({p: nn.Parameter(torch.zeros(heads[p], self.head_dim)) for p in partial})

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values of self-attention, `[B, T, K, H/K + 2, D]`; one less where values are keys.

        With an output gate queries are followed by as many gates.
        """
        return self.qkv(x).view(*x.shape[:-1], self.num_kv_heads, self.group_size, self.head_dim)

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries by group `[B, T, K, H/K, D]`, keys and values `[B, T, K, D]`."""
        if not self.config.value_is_key and not self.config.output_gate:
            return split_qkv(projected)
        q, *_, v = projected.split(self.group_sizes, dim=-2)
        return q, projected.select(-2, -1 if self.config.value_is_key else -2), v.squeeze(-2)

    def gate(self, projected: Tensor) -> Tensor:
        """What results of heads are multiplied with, `[B, T, H, D]`."""
        return projected.split(self.group_sizes, dim=-2)[1].flatten(-3, -2).sigmoid()

    def project_heads(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Queries `[rows, H, D]` and keys `[rows, K, D]` of vectors `[rows, dim]`, before positions."""
        q, k, _ = self.split(self.project(vectors))
        return self._bias_clip_norm("q", q.flatten(-3, -2)), self._bias_clip_norm("k", k)

    def project_kv(self, hidden: Tensor) -> dict[str, Tensor]:
        """Keys and values `[B, S, K, D]` of cross-attention, from the encoder's output `[B, S, dim]`."""
        kv = self.kv(hidden).unflatten(-1, (self.num_kv_heads, -1, self.head_dim)).unbind(-2)  # [B, S, K, D]
        return {"keys": self._bias_clip_norm("k", kv[0]), "values": self._bias_clip_norm("v", kv[-1])}

    def _bias_clip_norm(self, part: str, x: Tensor) -> Tensor:
        """What happens to projected queries, keys or values before positions: own bias, clipping, perhaps the norm."""
        biased = "k" if part == "v" and self.config.value_is_key else part
        if biased in self.partly_biased:
            x = x + self.partial_qkv_bias[biased]
        if self.config.clip is not None:
            x = x.clamp(-self.config.clip, self.config.clip)
        if part == "v":
            return self.v_norm(x)
        return x if self.norms_rotated else self._norm(part, x)

    def _norm(self, part: str, x: Tensor) -> Tensor:
        """Normalized queries or keys."""
        if not self.has_qk_norm:
            return x
        norm = self.q_norm if part == "q" else self.k_norm
        return norm(x.flatten(-2)).view(x.shape) if self.config.qk_norm == "whole" else norm(x)

    def positions_on_projection(self, projected: Tensor, ctx: AttentionContext) -> QKVSinkQueries:
        """Positions applied to the projection's output, which nothing else acts on."""
        return *ctx.position.on_projection(projected, ctx.prepared), None

    def positions_on_heads(self, projected: Tensor, ctx: AttentionContext) -> QKVSinkQueries:
        """Positions applied to queries, keys and values, after their biases, clipping and norms."""
        q, k, v = self.split(projected)  # [B, T, K, H/K, D], then [B, T, K, D]
        q, sink_queries = q.flatten(-3, -2), None  # [B, T, H, D]
        if self.unfusable_reason is not None:
            q, k, v = (self._bias_clip_norm(part, x) for part, x in (("q", q), ("k", k), ("v", v)))
            if ctx.capped_sinks is not None:
                prepared, positions = ctx.capped_sinks
                sink_queries = SinkQueries(self.place_query(q, ctx, prepared), positions)
        q, k, v = ctx.position.on_heads(q, k, v, ctx.prepared)
        if self.norms_rotated:
            q, k = self._norm("q", q), self._norm("k", k)
        return q, k, v, sink_queries

    def place_query(self, q: Tensor, ctx: AttentionContext, prepared: Any) -> Tensor:
        """Queries `[B, T, H, D]` with positions in them, normalized where they are so after that."""
        q = ctx.position.on_query(q, prepared)
        return self._norm("q", q) if self.norms_rotated else q

    def forward(self, x: Tensor, ctx: AttentionContext) -> Tensor:
        sink_queries: SinkQueries | None = None
        gate: Tensor | None = None
        if self.config.shared_kv:
            ctx = ctx.for_layer(x)
            q = self._bias_clip_norm("q", self.project(x).flatten(-3, -2))  # [B, T, H, D]
            assert ctx.step.shared is not None
            q, (k, v) = self.place_query(q, ctx, ctx.prepared), ctx.step.shared  # [B, S, K, D]
        elif not self.cross:
            ctx = ctx.for_layer(x, self.project_heads)
            projected = self.project(x)  # [B, T, K, H/K + 2, D]
            gate = self.gate(projected) if self.config.output_gate else None
            q, k, v, sink_queries = APPLY_POSITIONS(self, projected, ctx)  # [B, T, H, D], then [B, T, K, D]
            k, v = ctx.step.update(keys=k, values=v)  # [B, S, K, D]
            if ctx.step.shared is not None:
                ctx.step.shared[:] = k, v
        else:
            assert isinstance(ctx.step, CrossStep)
            q = self.q(x).unflatten(-1, (self.num_heads, self.head_dim))  # [B, T, H, D]
            q, kv = self._bias_clip_norm("q", q), ctx.step.project(self.project_kv)
            k, v = kv["keys"], kv["values"]  # [B, S, K, D]
        y = attend(q, k, v, ctx, ctx.score_mod(sink_queries=sink_queries, **self.score_options()))  # [B, T, H, D]
        return self.out((y if gate is None else y * gate).flatten(-2))  # [B, T, dim]


def build_pattern(config: SparseConfig) -> Pattern:
    """The rule of a pattern of sparse attention.

    >>> build_pattern(ChunkedConfig(chunk=4))
    Dilated(dilation=1, segment=4)
    """
    if isinstance(config, ChunkedConfig):
        return Dilated(segment=config.chunk)
    if isinstance(config, DilatedConfig):
        return Dilated(config.dilation, config.segment)
    if isinstance(config, StridedConfig):
        return KeyBlocks(config.block, config.local, config.stride, config.global_blocks)
    assert isinstance(config, TopKConfig)
    return TopBlocks(config.block, config.top_k)


def kernel_why_not(attention: SoftmaxAttention, projected: Tensor, ctx: AttentionContext) -> str | None:
    return ctx.position.kernel_why_not(ctx.prepared)


def projection_kernel_why_not(attention: SoftmaxAttention, projected: Tensor, ctx: AttentionContext) -> str | None:
    return ctx.position.kernel_why_not(ctx.prepared) or attention.unfusable_reason


# How positions act on queries and keys, asked with the module, the projection's output and the context.
APPLY_POSITIONS = Dispatch(
    Path("Triton kernel on the projection", SoftmaxAttention.positions_on_projection, projection_kernel_why_not),
    Path("Triton kernel on queries and keys", SoftmaxAttention.positions_on_heads, kernel_why_not),
    Path("torch, one pass per half", SoftmaxAttention.positions_on_heads),
)
