"""Rotary positions (RoPE): pairs of features rotated by exact angles."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.config.schema import quote
from phasor.nn.checks import check_positions, describe_tensor
from phasor.nn.positions.base import Position
from phasor.nn.positions.phase import cos_sin_of, increments
from phasor.nn.positions.rotary.config import RotaryConfig
from phasor.nn.sequence import SequenceInfo, at_least, check_length_type
from phasor.ops.constants import constant
from phasor.ops.decode.arguments import RotaryArgs
from phasor.ops.rope import (
    PhaseArgs,
    RopeArgs,
    expand_cos_sin,
    rope_kernel,
    rope_kernel_why_not,
    rope_qkv_kernel,
    rotate_halves,
    rotate_pairs,
    split_pairs,
)


class Decay(NamedTuple):
    """Factors `[B or 1, T, 1, D]` on queries, on all keys, and on queries that attend to sink tokens."""

    query: Tensor
    key: Tensor
    sink_query: Tensor | None


class Angles(NamedTuple):
    """The rotations of one forward: cosines and sines with their factors, `[B or 1, T, 1, pairs]`."""

    query: tuple[Tensor, Tensor]
    key: tuple[Tensor, Tensor]
    value: tuple[Tensor, Tensor] | None = None  # without factors, where values are rotated
    whole: bool = False  # whether queries' and keys' are those of `expand_cos_sin`
    why_not: str | None = None  # why the kernel that computes its own angles does not apply
    decay: Decay | None = None  # what queries and keys are multiplied by after the cache


KERNEL_ARGS = RopeArgs, PhaseArgs  # what a kernel rotates queries and keys by
Prepared = Angles | RopeArgs | PhaseArgs


class Table(NamedTuple):
    """Frequencies as fractions of a full rotation, and the attention factor: what may depend on the length."""

    increments: tuple[int, ...]
    factor: float


class Rotary(Position, config=RotaryConfig):
    """Rotary positions, alone on your own queries and keys or inside a model.

    The keyword arguments are those of `RotaryConfig`; a configuration of xPos, axial or multi-section rotary makes
    the module of that scheme. Nothing is stored but the configuration: angles are computed from the positions at each
    call, exact at any position. Subclasses override `positions_by_pair`, `angles` and `why_not`.

    >>> rope = Rotary(head_dim=64, base=10000.0, pairing="half")
    >>> q, k = torch.randn(2, 8, 5, 64), torch.randn(2, 2, 5, 64)
    >>> positions = torch.arange(5)
    >>> near, far = rope.rotate(q, k, positions), rope.rotate(q, k, positions + 2**30)
    >>> scores = [a[:, ::4] @ b.mT for a, b in (near, far)]
    >>> torch.allclose(*scores, atol=1e-4)
    True
    """

    config: RotaryConfig

    def __new__(cls, config: RotaryConfig | None = None, **fields: Any) -> Self:
        chosen = Position.class_for(type(config)) if isinstance(config, RotaryConfig) else cls
        return super().__new__(chosen if issubclass(chosen, cls) else cls)

    def __init__(self, config: RotaryConfig | None = None, *, head_dim: int, **fields: Any) -> None:
        super().__init__()
        if not isinstance(config, RotaryConfig | None):
            raise ValueError(f"Rotary takes a RotaryConfig or its fields, not {quote(config)}")
        self.config = RotaryConfig(**fields) if config is None else config.replace(**fields)
        self.head_dim = head_dim
        self.rotary_dim = self.config.rotary_dim_of(head_dim)
        # Fixed frequencies are computed here, so that a compiled forward finds constants.
        self.fixed = None if self.config.depends_on_length else table_of(self.config, self.rotary_dim, None)

    @classmethod
    def build(cls, config: RotaryConfig, model: ModelConfig, side: Side) -> Self:
        if model.rotated_width(config) != model.head_dim:
            config = config.replace(rotary_dim=config.rotary_dim_of(model.rotated_width(config)))
        return cls(config, head_dim=model.head_dim)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, {self.config}"

    def frequencies(self, length: int | None = None) -> list[Decimal]:
        """Radians per position for each pair, in high precision.

        >>> [float(f) for f in Rotary(head_dim=4).frequencies()]
        [1.0, 0.01]
        """
        return self.config.frequencies(self.rotary_dim, length)

    def attention_factor(self, length: int | None = None) -> float:
        """What `rotate` multiplies queries and keys by."""
        return self.config.attention_factor(length)

    def cos_sin(
        self, positions: Tensor, length: int | Sequence[int] | None = None, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[..., pairs]` on the unit circle for int64 positions, exact at any of them.

        Schemes of several axes take `[axes, B, T]`, or `[T]` and `[B, T]` for the same position on each axis.
        `length` (one integer, or one per row of `[B, T]` positions) matters to extensions that depend on it.

        >>> cos, sin = Rotary(head_dim=64).cos_sin(torch.tensor([0, 2**36]))
        >>> cos.shape, cos.dtype
        (torch.Size([2, 32]), torch.float32)
        """
        check_positions(positions, self.config.axes)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"cosines and sines have a floating-point dtype, not {quote(dtype)}")
        return self._cos_sin(positions, self._host_lengths(positions, length, present=1), dtype)

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor, length: int | Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Queries `[B, H, T, D]` and keys `[B, K, T, D]` rotated by their positions, the attention factor applied."""
        for name, x in (("q", q), ("k", k)):
            floating = isinstance(x, Tensor) and x.is_floating_point()
            if not floating or x.dim() != 4 or x.shape[-1] != self.head_dim:
                raise ValueError(
                    f"{name} must be a floating-point tensor [batch, heads, tokens, {self.head_dim}], "
                    f"not {describe_tensor(x)}"
                )
        if k.shape[0] != q.shape[0]:
            raise ValueError(f"q has {q.shape[0]} rows and k {k.shape[0]}")
        rows, count = q.shape[0], check_positions(positions, self.config.axes).shape[-1]
        if count != q.shape[-2] or count != k.shape[-2]:
            raise ValueError(f"there are {count} positions for {q.shape[-2]} queries and {k.shape[-2]} keys")
        if positions.dim() > 1 and positions.shape[-2] not in (1, rows):
            raise ValueError(f"positions have {positions.shape[-2]} rows for a batch of {rows}")
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        prepared = self.prepare(SequenceInfo(positions, self._host_lengths(positions, length, present=count)), q)
        q, k, _ = self.on_heads(q, k, k, prepared)
        return q.transpose(1, 2), k.transpose(1, 2)

    def why_not(self, seq: SequenceInfo, like: Tensor) -> str | None:
        """Why the kernel that computes its own angles does not apply to heads with the dtype of `like`, or None."""
        if self.config.rotate_values:
            return "values are rotated as well"
        if self.fixed is None and isinstance(seq.length, Tensor):
            return "lengths, and so frequencies, differ from row to row"
        return rope_kernel_why_not(seq.positions, like)

    def prepare(self, seq: SequenceInfo, like: Tensor) -> Prepared:
        reason = self.why_not(seq, like)
        if reason is None:
            table = self.fixed or table_of(self.config, self.rotary_dim, cast("int | None", seq.length))
            device = seq.positions.device
            return RopeArgs(
                seq.positions,
                constant(table.increments, device, torch.int64),
                constant((table.factor,), device, torch.float32),
            )
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        cos, sin = self._cos_sin(seq.positions, seq.length, dtype)
        value = (headwise(cos), headwise(sin)) if self.config.rotate_values else None
        if self.config.extension is not None:
            factor = self._factors(seq.length, cos)
            cos, sin = cos * factor, sin * factor
        angles = self.angles(cos, sin, seq, like)
        return angles._replace(value=value, why_not=reason)

    def angles(self, cos: Tensor, sin: Tensor, seq: SequenceInfo, like: Tensor) -> Angles:
        """Cosines and sines for queries and keys, from those of the positions with the attention factor applied."""
        both = headwise(cos), headwise(sin)
        if like.shape[1] == 1 and self.config.pairing == "half" and self.rotary_dim == self.head_dim:
            both = expand_cos_sin(*both)
            return Angles(both, both, whole=True)
        return Angles(both, both)

    def kernel_why_not(self, prepared: Prepared) -> str | None:
        return None if isinstance(prepared, KERNEL_ARGS) else prepared.why_not

    def on_heads(self, q: Tensor, k: Tensor, v: Tensor, prepared: Prepared) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(prepared, KERNEL_ARGS):
            return *rope_kernel(q, k, prepared, self.config.pairing), v
        return super().on_heads(q, k, v, prepared)

    def on_projection(self, projected: Tensor, prepared: Prepared) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(prepared, KERNEL_ARGS):
            return rope_qkv_kernel(projected, prepared, self.config.pairing)
        return super().on_projection(projected, prepared)

    def on_query(self, q: Tensor, prepared: Prepared) -> Tensor:
        if isinstance(prepared, KERNEL_ARGS):
            return rope_kernel(q, q[:, :, :0], prepared, self.config.pairing)[0]
        if prepared.whole:
            return rotate_halves(q, *prepared.query)
        return rotate_pairs(q, *prepared.query, self.config.pairing)

    def on_key(self, k: Tensor, prepared: Prepared) -> Tensor:
        if isinstance(prepared, KERNEL_ARGS):
            return rope_kernel(k, k[:, :, :0], prepared, self.config.pairing)[0]
        if prepared.whole:
            return rotate_halves(k, *prepared.key)
        return rotate_pairs(k, *prepared.key, self.config.pairing)

    def on_value(self, v: Tensor, prepared: Prepared) -> Tensor:
        return (
            v
            if isinstance(prepared, KERNEL_ARGS) or prepared.value is None
            else rotate_pairs(v, *prepared.value, self.config.pairing)
        )

    def on_output(self, y: Tensor, prepared: Prepared) -> Tensor:
        if not self.config.rotate_output or isinstance(prepared, KERNEL_ARGS) or prepared.value is None:
            return y
        cos, sin = prepared.value
        return rotate_pairs(y, cos, -sin, self.config.pairing)

    def pair_increments(self) -> tuple[int, ...]:
        return self.fixed.increments if self.fixed is not None and self.axes == 1 else ()

    def code_pairs(self, code: Tensor) -> tuple[Tensor, Tensor]:
        return split_pairs(code[..., : self.rotary_dim], self.config.pairing)

    def length_key(self, length: int) -> Hashable:
        return table_of(self.config, self.rotary_dim, length) if self.config.depends_on_length else None

    def rotary_args(self, length: int | None, device: torch.device) -> RotaryArgs:
        table = self.fixed or table_of(self.config, self.rotary_dim, length)
        increments = constant(table.increments, device, torch.int64)
        return RotaryArgs(increments, table.factor, self.rotary_dim, self.config.pairing == "adjacent")

    def _cos_sin(self, positions: Tensor, length: int | Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        inc = self._increments(length, positions.device)
        return cos_sin_of(self.positions_by_pair(positions), inc, dtype)

    def positions_by_pair(self, positions: Tensor) -> Tensor:
        """Positions that broadcast against the pairs in the last dimension: here the same one for all."""
        return positions[..., None]

    def _increments(self, length: int | Tensor | None, device: torch.device) -> Tensor:
        """Increments `[pairs]`, or one set per token where lengths differ, `[B, T, pairs]`."""
        if self.fixed is not None or not isinstance(length, Tensor):
            table = self.fixed or table_of(self.config, self.rotary_dim, length)
            return constant(table.increments, device, torch.int64)
        distinct, which = length.unique(return_inverse=True)
        tables = torch.tensor([table_of(self.config, self.rotary_dim, n).increments for n in distinct.tolist()])
        return tables.to(which.device)[which].to(device)

    def _factors(self, length: int | Tensor | None, like: Tensor) -> float | Tensor:
        if self.fixed is not None or not isinstance(length, Tensor):
            return (self.fixed or table_of(self.config, self.rotary_dim, length)).factor
        distinct, which = length.unique(return_inverse=True)
        factors = [table_of(self.config, self.rotary_dim, n).factor for n in distinct.tolist()]
        by_token = torch.tensor(factors, dtype=torch.float64, device=which.device)[which]
        return by_token.to(like.device, like.dtype)[..., None]

    def _host_lengths(self, positions: Tensor, length: int | Sequence[int] | None, present: int) -> int | Tensor | None:
        """One length of at least the tokens present, or one per token; a row of a list may be shorter (padded)."""
        if length is None:
            return None
        check_length_type(length)
        if isinstance(length, int):
            return at_least(present, length, "the sequence")
        if positions.dim() < 2 or len(length) != positions.shape[-2]:
            raise ValueError(
                f"length lists {len(length)} rows, which needs positions [{len(length)}, tokens], "
                f"not {list(positions.shape)}"
            )
        each = [at_least(1, own, f"row {row}") for row, own in enumerate(length)]
        return torch.tensor(each, device="cpu")[:, None].expand(positions.shape[-2:])


def headwise(x: Tensor) -> Tensor:
    """`[T, pairs]` or `[B, T, pairs]` with a dimension for the heads, `[B or 1, T, 1, pairs]`."""
    return (x[None] if x.dim() == 2 else x)[:, :, None]


@functools.lru_cache(maxsize=4096)
def table_of(config: RotaryConfig, rotary_dim: int, length: int | None) -> Table:
    """The table of a configuration for a sequence of `length`."""
    return Table(increments(config.frequencies(rotary_dim, length)), config.attention_factor(length))
