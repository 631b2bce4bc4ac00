"""Attention: multi-head, grouped-query or multi-query, self or cross. Positions come in through hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from phasor.config import AttentionConfig, LayerNormConfig, ModelConfig
from phasor.nn.norm import build_norm
from phasor.nn.positions import Position
from phasor.ops.attention.attention import ScoreMod, SinkQueries, attention, attention_ref
from phasor.ops.attention.mask import Mask
from phasor.ops.rope.rope import split_qkv


class Extends(Protocol):
    """A cache as one layer's attention knows it: takes the call's keys and values, gives all there are to see."""

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(slots=True)
class AttentionContext:
    """What one layer's attention may look at: the rule, and the positions as its scheme prepared them.

    `positions` and `key_positions`, `[B or 1, T]`, are for schemes that act on scores; `memory` holds the keys and
    values of cross-attention; attention weights are put into `weights` when somebody asked for them.
    """

    mask: Mask
    position: Position
    prepared: Any = None
    positions: Tensor | None = None
    key_positions: Tensor | None = None
    memory: tuple[Tensor, Tensor] | None = None
    cache: Extends | None = None
    capped: tuple[Any, Tensor] | None = None  # as prepared, and the positions, for queries that meet sink tokens
    weights: list[Tensor] | None = None


class Attention(nn.Module):
    """`softmax(q k^T * scale) v`, with every extra the literature names.

    Queries, keys and values come out of one projection whose rows are ordered by key/value group (the
    group's queries, its key, its value), so that tensor parallelism can cut between groups. Cross-attention
    projects queries alone, and keys with values.
    """

    def __init__(self, config: AttentionConfig, model: ModelConfig, *, cross: bool = False) -> None:
        super().__init__()
        self.config, self.cross = config, cross
        self.heads, self.groups, self.width = model.num_heads, model.num_kv_heads, model.head_dim
        self.shared = self.heads // self.groups  # query heads that share a key/value head
        self.scale = self.width**-0.5 if config.scale is None else config.scale
        self.dropout = model.dropout.attention
        together = {"q", "k", "v"} <= set(config.bias)
        if cross:
            self.q = nn.Linear(model.dim, self.heads * self.width, bias="q" in config.bias)
            self.kv = nn.Linear(model.dim, 2 * self.groups * self.width, bias={"k", "v"} <= set(config.bias))
        else:
            self.qkv = nn.Linear(model.dim, (self.shared + 2) * self.groups * self.width, bias=together)
        self.out = nn.Linear(self.heads * self.width, model.dim, bias="out" in config.bias)
        self.normed = config.qk_norm != "none"
        self.q_norm = self._head_norm(model, self.heads)
        self.k_norm = self._head_norm(model, self.groups)
        self.sinks = nn.Parameter(torch.zeros(self.heads)) if config.sink_logits else None
        self.lone_bias = self._lone_biases()
        self.lone = frozenset(self.lone_bias.keys())
        self.between = self._between()

    def _between(self) -> str | None:
        """What stands between the projection and positions, so that they cannot be taken in one; None for nothing."""
        if self.lone:
            return "some of queries, keys and values have a bias and others not"
        if self.config.clip is not None:
            return "queries, keys and values are clipped"
        return "queries and keys are normed" if self.normed else None

    def fused(self) -> list[tuple[nn.Linear, str]]:
        """The projections that make several things at once, with what they make."""
        return [(self.q, "q"), (self.kv, "kv")] if self.cross else [(self.qkv, "qkv")]

    def rows(self, weight: Tensor, makes: str) -> list[tuple[Tensor, str, int]]:
        """A projection's rows by what they make: views, with their number."""
        sizes = [self.shared if part == "q" else 1 for part in makes]
        by_group = weight.unflatten(0, (self.groups, sum(sizes), self.width))
        views = by_group.split(sizes, dim=1)
        return [(v, part, v.shape[:3].numel()) for part, v in zip(makes, views, strict=True)]

    def _head_norm(self, model: ModelConfig, heads: int) -> nn.Module:
        shapes = {"head": (self.width,), "heads": (heads, self.width), "whole": (heads * self.width,)}
        if self.config.qk_norm == "none":
            return nn.Identity()
        norm = model.norm
        if isinstance(norm, LayerNormConfig) and not self.config.qk_norm_bias:
            norm = norm.replace(bias=False)
        return build_norm(norm, *shapes[self.config.qk_norm])

    def _lone_biases(self) -> nn.ParameterDict:
        """Biases of projections whose neighbors in the same matrix have none."""
        fused = [["q"], ["k", "v"]] if self.cross else [["q", "k", "v"]]
        heads = {"q": self.heads, "k": self.groups, "v": self.groups}
        lone = [p for part in fused if not set(part) <= set(self.config.bias) for p in part if p in self.config.bias]
        return nn.ParameterDict({p: nn.Parameter(torch.zeros(heads[p], self.width)) for p in lone})

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values of a self-attention, `[B, T, K, H/K + 2, D]`."""
        return self.qkv(x).view(*x.shape[:-1], self.groups, self.shared + 2, self.width)

    def remember(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, S, K, D]` of a cross-attention, of an encoder's output `[B, S, dim]`."""
        k, v = self.kv(memory).unflatten(-1, (self.groups, 2, self.width)).unbind(-2)
        return self._made("k", k), self._made("v", v)

    def _made(self, part: str, x: Tensor) -> Tensor:
        """Queries, keys or values as projected: with a bias of their own, clipped, and normed."""
        if part in self.lone:
            x = x + self.lone_bias[part]
        if self.config.clip is not None:
            x = x.clamp(-self.config.clip, self.config.clip)
        if part == "v" or not self.normed:
            return x
        norm = self.q_norm if part == "q" else self.k_norm
        return norm(x.flatten(-2)).view(x.shape) if self.config.qk_norm == "whole" else norm(x)

    def forward(self, x: Tensor, view: AttentionContext) -> Tensor:
        capped = None
        if view.memory is None:
            projected = self.project(x)
            if self.between is None and view.capped is None:
                q, k, v = view.position.on_projection(projected, view.prepared)
            else:
                q, k, v = split_qkv(projected)
                q, k, v = self._made("q", q.flatten(-3, -2)), self._made("k", k), self._made("v", v)
                if view.capped is not None:
                    capped = SinkQueries(view.position.on_query(q, view.capped[0]), view.capped[1])
                q, k, v = view.position.on_heads(q, k, v, view.prepared)
            k, v = (k, v) if view.cache is None else view.cache.extend(k, v)
        else:
            q, (k, v) = self._made("q", self.q(x).unflatten(-1, (self.heads, self.width))), view.memory
        scoring = ScoreMod(
            scale=self.scale,
            softcap=self.config.softcap,
            sinks=self.sinks,
            bias=view.position.on_scores(view.prepared),
            query_positions=view.positions,
            key_positions=view.key_positions,
            capped=capped,
            dropout=self.dropout if self.training else 0.0,
        )
        if view.weights is None:
            y = attention(q, k, v, view.mask, scoring)
        else:
            y, weights = attention_ref(q, k, v, view.mask, scoring)
            view.weights.append(weights)
        return self.out(y.flatten(-2))
