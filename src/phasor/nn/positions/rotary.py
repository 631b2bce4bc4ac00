"""Rotary positions and every relative of them: extensions, xPos, axial and multi-section."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor

from phasor.config import ModelConfig, RotaryConfig
from phasor.config.model import Side
from phasor.config.schema import shown
from phasor.nn.checks import checked_positions, checks_values, described
from phasor.nn.positions.base import Position
from phasor.nn.positions.phase import cos_sin_of, increments
from phasor.nn.sequence import SequenceInfo, at_least, check_length_type
from phasor.ops import dispatch
from phasor.ops.constants import constant
from phasor.ops.rope.rope import RopeArgs, expand_cos_sin, rope, rope_qkv, rotate_halves, rotate_pairs


class Angles(NamedTuple):
    """How queries and keys turn in one forward: cosines and sines with their factors, `[B or 1, T, 1, pairs]`."""

    query: tuple[Tensor, Tensor]
    key: tuple[Tensor, Tensor]
    value: tuple[Tensor, Tensor] | None = None  # without factors, where values turn
    whole: bool = False  # whether queries' and keys' are those of `expand_cos_sin`


class Table(NamedTuple):
    """Frequencies as fractions of a turn, and the attention factor: what a length settles."""

    increments: tuple[int, ...]
    factor: float


class Rotary(Position):
    """Rotary positions, alone on your own queries and keys or inside a model.

    The keyword arguments are those of `RotaryConfig`. Nothing is stored but the configuration: angles are
    made from the positions at each call, exact at any position.

    >>> rope = Rotary(head_dim=64, base=10000.0, pairing="half")
    >>> q, k = torch.randn(2, 8, 5, 64), torch.randn(2, 2, 5, 64)
    >>> at = torch.arange(5)
    >>> near, far = rope.rotate(q, k, at), rope.rotate(q, k, at + 2**30)
    >>> scores = [a[:, ::4] @ b.mT for a, b in (near, far)]
    >>> torch.allclose(*scores, atol=1e-4)
    True
    """

    config: RotaryConfig

    def __init__(self, config: RotaryConfig | None = None, *, head_dim: int, **fields: Any) -> None:
        super().__init__()
        if not isinstance(config, RotaryConfig | None):
            raise ValueError(f"Rotary takes a RotaryConfig or its fields, not {shown(config)}")
        self.config = RotaryConfig(**fields) if config is None else config.replace(**fields)
        self.head_dim = head_dim
        self.width = self.config.rotated_width(head_dim)
        # Fixed frequencies are worked out here, so that a compiled forward finds plain numbers.
        self.fixed = None if self.config.depends_on_length else table_of(self.config, self.width, None)

    @classmethod
    def build(cls, config: RotaryConfig, model: ModelConfig, side: Side) -> Self:
        return cls(config, head_dim=model.head_dim)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, {self.config}"

    def frequencies(self, length: int | None = None) -> list[Decimal]:
        """Radians per position for each pair, in high precision.

        >>> [float(f) for f in Rotary(head_dim=4).frequencies()]
        [1.0, 0.01]
        """
        return self.config.frequencies(self.width, length)

    def attention_factor(self, length: int | None = None) -> float:
        """What `rotate` multiplies queries and keys by, beside turning them."""
        return self.config.attention_factor(length)

    def cos_sin(
        self, positions: Tensor, length: int | Sequence[int] | None = None, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[..., pairs]` on the unit circle for int64 positions, exact at any of them.

        Schemes of several axes take `[axes, B, T]`, or `[T]` and `[B, T]` for the same position on each axis.
        `length` (one number, or one a row of `[B, T]` positions) matters to extensions that depend on it.

        >>> cos, sin = Rotary(head_dim=64).cos_sin(torch.tensor([0, 2**36]))
        >>> cos.shape, cos.dtype
        (torch.Size([2, 32]), torch.float32)
        """
        checked_positions(positions, self.config.axes)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"cosines and sines are floating-point numbers, not {shown(dtype)}")
        return self._cos_sin(positions, self._host_lengths(positions, length, present=1), dtype)

    def rotate(
        self, q: Tensor, k: Tensor, positions: Tensor, length: int | Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Queries `[B, H, T, D]` and keys `[B, K, T, D]` turned by their positions, the attention factor applied."""
        for name, x in (("q", q), ("k", k)):
            floating = isinstance(x, Tensor) and x.is_floating_point()
            if not floating or x.dim() != 4 or x.shape[-1] != self.head_dim:
                raise ValueError(
                    f"{name} must be a floating-point tensor [batch, heads, tokens, {self.head_dim}], "
                    f"not {described(x)}"
                )
        if k.shape[0] != q.shape[0]:
            raise ValueError(f"q has {q.shape[0]} rows and k {k.shape[0]}")
        rows, count = q.shape[0], checked_positions(positions, self.config.axes).shape[-1]
        if count != q.shape[-2] or count != k.shape[-2]:
            raise ValueError(f"there are {count} positions for {q.shape[-2]} queries and {k.shape[-2]} keys")
        if positions.dim() > 1 and positions.shape[-2] not in (1, rows):
            raise ValueError(f"positions have {positions.shape[-2]} rows for a batch of {rows}")
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        turn = self.prepare(SequenceInfo(positions, self._host_lengths(positions, length, present=count)), q)
        q, k, _ = self.on_heads(q, k, k, turn)
        return q.transpose(1, 2), k.transpose(1, 2)

    def why_not(self, places: SequenceInfo, like: Tensor) -> str | None:
        """Why the kernel that makes its own angles is not taken for heads of the type of `like`; None where it is."""
        if self.config.axes > 1:
            return "positions have several axes"
        if self.config.decay is not None:
            return "xPos scales queries and keys apart"
        if self.config.values:
            return "values turn as well"
        if self.fixed is None and isinstance(places.length, Tensor):
            return "lengths, and so frequencies, differ from row to row"
        if like.dtype == torch.float64:
            return "the kernel computes in float32, and float64 was asked for"
        return dispatch.triton_why_not(places.positions, like)

    def prepare(self, places: SequenceInfo, like: Tensor) -> Angles | RopeArgs:
        if self.why_not(places, like) is None:
            table = self.fixed or table_of(self.config, self.width, cast("int | None", places.length))
            device = places.positions.device
            return RopeArgs(
                places.positions,
                constant(table.increments, device, torch.int64),
                constant((table.factor,), device, torch.float32),
            )
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        cos, sin = self._cos_sin(places.positions, places.length, dtype)
        value = (headwise(cos), headwise(sin)) if self.config.values else None
        if self.config.extension is not None:
            factor = self._factors(places.length, cos)
            cos, sin = cos * factor, sin * factor
        if self.config.decay is None:
            turned = headwise(cos), headwise(sin)
            if like.shape[1] == 1 and self.config.pairing == "half" and self.width == self.head_dim:
                turned = expand_cos_sin(*turned)
                return Angles(turned, turned, value, whole=True)
            return Angles(turned, turned, value)
        grow = self._decay(places, dtype, like.dtype)
        return Angles(
            (headwise(cos * grow), headwise(sin * grow)),
            (headwise(cos / grow), headwise(sin / grow)),
            value,
        )

    def on_heads(self, q: Tensor, k: Tensor, v: Tensor, prepared: Angles | RopeArgs) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(prepared, RopeArgs):
            return *rope(q, k, prepared, self.config.pairing), v
        return super().on_heads(q, k, v, prepared)

    def on_projection(self, projected: Tensor, prepared: Angles | RopeArgs) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(prepared, RopeArgs):
            return rope_qkv(projected, prepared, self.config.pairing)
        return super().on_projection(projected, prepared)

    def on_query(self, q: Tensor, prepared: Angles | RopeArgs) -> Tensor:
        if isinstance(prepared, RopeArgs):
            return rope(q, q[:, :, :0], prepared, self.config.pairing)[0]
        if prepared.whole:
            return rotate_halves(q, *prepared.query)
        return rotate_pairs(q, *prepared.query, self.config.pairing)

    def on_key(self, k: Tensor, prepared: Angles | RopeArgs) -> Tensor:
        if isinstance(prepared, RopeArgs):
            return rope(k, k[:, :, :0], prepared, self.config.pairing)[0]
        if prepared.whole:
            return rotate_halves(k, *prepared.key)
        return rotate_pairs(k, *prepared.key, self.config.pairing)

    def on_value(self, v: Tensor, prepared: Angles | RopeArgs) -> Tensor:
        return (
            v
            if isinstance(prepared, RopeArgs) or prepared.value is None
            else rotate_pairs(v, *prepared.value, self.config.pairing)
        )

    def _cos_sin(self, positions: Tensor, length: int | Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        inc = self._increments(length, positions.device)
        if self.config.axes == 1:
            return cos_sin_of(positions[..., None], inc, dtype)
        sections = self.config.section_sizes(self.width)
        rows = positions.unbind(0) if positions.dim() == 3 else [positions] * len(sections)
        by_pair = [row[..., None].expand(*row.shape, size) for row, size in zip(rows, sections, strict=True)]
        return cos_sin_of(torch.cat(by_pair, dim=-1), inc, dtype)

    def _increments(self, length: int | Tensor | None, device: torch.device) -> Tensor:
        """Increments `[pairs]`, or one set for every token where lengths differ, `[B, T, pairs]`."""
        if self.fixed is not None or not isinstance(length, Tensor):
            table = self.fixed or table_of(self.config, self.width, length)
            return constant(table.increments, device, torch.int64)
        distinct, which = length.unique(return_inverse=True)
        tables = torch.tensor([table_of(self.config, self.width, n).increments for n in distinct.tolist()])
        return tables[which].to(device)

    def _factors(self, length: int | Tensor | None, like: Tensor) -> float | Tensor:
        if self.fixed is not None or not isinstance(length, Tensor):
            return (self.fixed or table_of(self.config, self.width, length)).factor
        distinct, which = length.unique(return_inverse=True)
        factors = [table_of(self.config, self.width, n).factor for n in distinct.tolist()]
        return torch.tensor(factors, dtype=torch.float64)[which].to(like.device, like.dtype)[..., None]

    def _decay(self, places: SequenceInfo, dtype: torch.dtype, of: torch.dtype) -> Tensor:
        """xPos: `zeta_i^((m - c) / decay)` with `c` the first position of the row or document."""
        decay, span, pairs = self.config.decay, self.config.max_positions, self.width // 2
        assert decay is not None
        assert span is not None
        if of == torch.float16:  # it reaches 2^16 where float32 reaches 2^127
            span = span // 8
        since = (places.positions - places.origin())[..., None]
        if checks_values(since) and since.numel() and since.abs().max() >= span:
            raise ValueError(f"xPos spans at most {span} positions of one sequence: beyond it {str(of)[6:]} overflows")
        zeta = (torch.arange(pairs, device=since.device, dtype=torch.float64) / pairs + 0.4) / 1.4
        return torch.exp2(torch.log2(zeta) * (since.to(torch.float64) / decay)).to(dtype)

    def _host_lengths(self, positions: Tensor, length: int | Sequence[int] | None, present: int) -> int | Tensor | None:
        """One length of at least the tokens present, or one a token; a row of a list may be padded, and so shorter."""
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
        return torch.tensor(each)[:, None].expand(positions.shape[-2:])


def headwise(x: Tensor) -> Tensor:
    """`[T, pairs]` or `[B, T, pairs]` with a place for the heads, `[B or 1, T, 1, pairs]`."""
    return (x[None] if x.dim() == 2 else x)[:, :, None]


@functools.lru_cache(maxsize=4096)
def table_of(config: RotaryConfig, width: int, length: int | None) -> Table:
    return Table(increments(config.frequencies(width, length)), config.attention_factor(length))
