"""How the tensors of a Hugging Face file map to phasor's: one description for both directions.

A layout gives views of one of our tensors. Loading copies their tensor into the views, saving reads it out of
them, so a rule cannot be right in one direction and wrong in the other, and no element is touched twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from phasor.config import ModelConfig
from phasor.config.model import Side
from phasor.config.schema import name_some
from phasor.nn.attention.softmax.config import SoftmaxAttentionConfig


class Piece(NamedTuple):
    """Part of our tensor in the order of theirs, and the shape it has there."""

    view: Tensor
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Their tensor is ours, as it is."""

    def pieces(self, ours: Tensor, model: ModelConfig) -> list[Piece]:
        """Views of ours that lie side by side in theirs, along `axis`."""
        return [Piece(ours, tuple(ours.shape))]

    def axis(self, ours: Tensor) -> int:
        return 0

    def for_layer(self, model: ModelConfig, index: int) -> Layout | None:
        """The layout in one layer of a model, where it depends on the layer; None where the layer has no such part."""
        return self

    def for_shape(self, shape: tuple[int, ...], ours: Tensor) -> Layout:
        """The layout of a file whose tensor has this shape, where there are several."""
        return self

    def shape(self, ours: Tensor, model: ModelConfig) -> tuple[int, ...]:
        """The shape of their tensor."""
        pieces, axis = self.pieces(ours, model), self.axis(ours)
        if len(pieces) == 1:
            return pieces[0].shape
        shape = list(pieces[0].shape)
        shape[axis] = sum(piece.shape[axis] for piece in pieces)
        return tuple(shape)

    def load(self, ours: Tensor, theirs: Tensor, model: ModelConfig) -> None:
        """Copy their tensor into its place in ours."""
        pieces, axis = self.pieces(ours, model), self.axis(ours)
        parts = (theirs,) if len(pieces) == 1 else theirs.split([piece.shape[axis] for piece in pieces], axis)
        for piece, part in zip(pieces, parts, strict=True):
            piece.view.copy_(part.reshape(piece.view.shape))

    def save(self, ours: Tensor, model: ModelConfig) -> Tensor:
        """Their tensor out of ours; ours itself where nothing has to move."""
        parts = [piece.view.reshape(piece.shape) for piece in self.pieces(ours, model)]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, self.axis(ours))


SAME = Layout()


@dataclass(frozen=True)
class OfKind(Layout):
    """Theirs is ours in layers with one kind of attention; in others ours has another name."""

    kind: str

    def for_layer(self, model: ModelConfig, index: int) -> Layout | None:
        return SAME if model.layer(index).attention.kind == self.kind else None


@dataclass(frozen=True)
class Transposed(Layout):
    """Matrices stored `[in, out]`; vectors stay."""

    inner: Layout = SAME

    def pieces(self, ours: Tensor, model: ModelConfig) -> list[Piece]:
        pieces = self.inner.pieces(ours, model)
        if len(pieces[0].shape) == 1:
            return pieces
        return [Piece(view.movedim(-1, 0), (shape[1], shape[0])) for view, shape in pieces]

    def axis(self, ours: Tensor) -> int:
        return self.inner.axis(ours) if ours.dim() == 1 else 1 - self.inner.axis(ours)

    def for_layer(self, model: ModelConfig, index: int) -> Layout | None:
        inner = self.inner.for_layer(model, index)
        return None if inner is None else replace(self, inner=inner)


@dataclass(frozen=True)
class StackedTransposed(Layout):
    """Matrices of all experts, stored `[experts, out, in]`."""

    def pieces(self, ours: Tensor, model: ModelConfig) -> list[Piece]:
        return [Piece(ours.mT, tuple(ours.mT.shape))]


@dataclass(frozen=True)
class StackedEitherWay(StackedTransposed):
    """The same, which files as published have as `[experts, in, out]`: where both fit, it is as they are saved now.

    >>> ours = torch.empty(3, 4, 5)
    >>> StackedEitherWay().for_shape((3, 4, 5), ours) == SAME, StackedEitherWay().for_shape((3, 5, 4), ours) == SAME
    (True, False)
    """

    def for_shape(self, shape: tuple[int, ...], ours: Tensor) -> Layout:
        return SAME if shape == tuple(ours.shape) != tuple(ours.mT.shape) else self


@dataclass(frozen=True)
class Parts(Layout):
    """Some of the queries, keys and values of a fused projection, one after the other.

    Ours are ordered by key/value group: `makes` says what one group of ours consists of, where "g" are gates of the
    output. Theirs has the gate of a head behind its query, as twice as many queries. `heads` are the width and the
    number of key/value heads and of queries where they are not the model's.

    >>> config = ModelConfig(vocab_size=9, dim=2, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=1)
    >>> ours = torch.arange(8)  # two groups of two queries, a key and a value
    >>> Parts("q").save(ours, config).tolist(), Parts("qkv").save(ours, config).tolist()
    ([0, 1, 4, 5], [0, 1, 4, 5, 2, 6, 3, 7])
    """

    parts: str
    makes: str = "qkv"
    heads: tuple[int, int, int] | None = None

    def for_layer(self, model: ModelConfig, index: int) -> Layout | None:
        attention = model.layer(index).attention
        assert isinstance(attention, SoftmaxAttentionConfig)
        parts, makes = ("".join(x for x in given if x in attention.projected) for given in (self.parts, self.makes))
        if attention.output_gate:
            makes = makes.replace("q", "qg")
        return Parts(parts, makes, (*attention.heads_of(model), model.num_heads)) if parts else None

    def pieces(self, ours: Tensor, model: ModelConfig) -> list[Piece]:
        width, groups, queries = self.heads or (model.head_dim, model.num_kv_heads, model.num_heads)
        sizes = [queries // groups if part in "qg" else 1 for part in self.makes]
        by_group = ours.unflatten(0, (groups, sum(sizes), width))
        views = dict(zip(self.makes, by_group.split(sizes, dim=1), strict=True))
        if "g" in self.makes:
            views["q"] = by_group[:, : 2 * sizes[0]].unflatten(1, (2, -1)).transpose(1, 2)
        rows = {part: view.numel() // ours[0].numel() for part, view in views.items()}
        return [Piece(views[part], (rows[part], *ours.shape[1:])) for part in self.parts]


@dataclass(frozen=True)
class Half(Layout):
    """The gate (0) or the up projection (1), which are one tensor in ours; `along` is the dimension."""

    which: int
    along: int = 0

    def pieces(self, ours: Tensor, model: ModelConfig) -> list[Piece]:
        view = ours.chunk(2, dim=self.along)[self.which]
        return [Piece(view, tuple(view.shape))]


@dataclass(frozen=True)
class UpFirst(Layout):
    """Up and gate projection, which are one tensor in theirs too, but in the other order."""

    def pieces(self, ours: Tensor, model: ModelConfig) -> list[Piece]:
        gate, up = ours.chunk(2)
        return [Piece(half, tuple(half.shape)) for half in (up, gate)]


@dataclass(frozen=True)
class Interleaved(Layout):
    """Gate and up alternate along the last dimension of theirs, where ours has one after the other."""

    def pieces(self, ours: Tensor, model: ModelConfig) -> list[Piece]:
        return [Piece(ours.unflatten(-1, (2, -1)).transpose(-1, -2), tuple(ours.shape))]


@dataclass(frozen=True)
class AsRow(Layout):
    """A vector stored as a matrix of one row."""

    def pieces(self, ours: Tensor, model: ModelConfig) -> list[Piece]:
        return [Piece(ours[None], (1, *ours.shape))]


@dataclass(frozen=True)
class Flat(Layout):
    """A tensor stored as a vector."""

    def pieces(self, ours: Tensor, model: ModelConfig) -> list[Piece]:
        return [Piece(ours, (ours.numel(),))]


@dataclass(frozen=True)
class Rule:
    """One of their tensors and where it lies in ours.

    `{i}` stands for a layer. `{e}` in their name stands for an expert, whose slice of our tensor the layout sees.
    A rule whose tensor the model does not have is skipped, and one whose part a layer does not have. A file that lacks
    its tensor has those of the rules `otherwise` in its place, where they are given.
    """

    ours: str
    theirs: str
    layout: Layout = SAME
    otherwise: tuple[Rule, ...] | None = None

    def expand(self, i: int, model: ModelConfig, ours: dict[str, Tensor], stored: Collection[str]) -> list[Assignment]:
        """The rule's tensors for one layer, of a model with the tensors `ours`; `stored` are those of a file."""
        name, theirs = self.ours.replace("{i}", str(i)), self.theirs.replace("{i}", str(i))
        layout = self.layout.for_layer(model, i) if name in ours else None
        if layout is None:
            return []
        if stored and self.otherwise is not None and theirs.replace("{e}", "0") not in stored:
            return [found for rule in self.otherwise for found in rule.expand(i, model, ours, stored)]
        experts = range(len(ours[name])) if "{e}" in theirs else [None]
        return [Assignment(name, theirs.replace("{e}", str(e)), layout, e) for e in experts]


class Assignment(NamedTuple):
    """A rule's tensor for one layer and expert."""

    ours: str
    theirs: str
    layout: Layout
    expert: int | None

    def slice(self, ours: Tensor) -> Tensor:
        return ours if self.expert is None else ours[self.expert]

    def for_shape(self, shape: tuple[int, ...], ours: Tensor) -> Assignment:
        """The same, where their tensor has this shape."""
        return self._replace(layout=self.layout.for_shape(shape, self.slice(ours)))


def expand_rules(
    rules: Iterator[Rule], model: ModelConfig, ours: dict[str, Tensor], stored: Collection[str] = ()
) -> list[Assignment]:
    """Expand rules over layers and experts, and check that they cover all of our tensors exactly once.

    `stored` are the names in a file, where one is read.
    """
    found = []
    for rule in rules:
        side: Side = "encoder" if rule.ours.startswith("encoder.") else "decoder"
        for i in range(model.depth(side) if "{i}" in rule.ours + rule.theirs else 1):
            found += rule.expand(i, model.for_side(side), ours, stored)
    given = dict.fromkeys(ours, 0)
    for assignment in found:
        mine = assignment.slice(ours[assignment.ours])
        given[assignment.ours] += sum(piece.view.numel() for piece in assignment.layout.pieces(mine, model))
    lacking = [name for name, count in given.items() if count == 0]
    if lacking:
        raise ValueError(f"it has no tensors for {name_some(lacking)}")
    wrong = [
        f"{name} ({count} of {ours[name].numel()})" for name, count in given.items() if count != ours[name].numel()
    ]
    if wrong:
        raise ValueError(f"the family's rules do not give these tensors exactly once: {name_some(wrong)}")
    return found


def in_memory_order(assignments: list[Assignment], ours: Tensor, model: ModelConfig) -> bool:
    """Whether their tensors, one after another, are in the memory order of ours.

    >>> config = ModelConfig(vocab_size=9, dim=2, num_layers=1, num_heads=2)
    >>> gate, up = (Assignment("up", name, Half(which), None) for which, name in enumerate(("gate", "up")))
    >>> in_memory_order([gate, up], torch.empty(6, 2), config), in_memory_order([up, gate], torch.empty(6, 2), config)
    (True, False)
    """
    reached = ours.storage_offset()
    for assignment in assignments:
        mine = assignment.slice(ours)
        pieces = assignment.layout.pieces(mine, model)
        if len(pieces) > 1 and assignment.layout.axis(mine) != 0:
            return False
        for view, _ in pieces:
            if view.storage_offset() != reached or not view.is_contiguous():
                return False
            reached += view.numel()
    return True


def linear(ours: str, theirs: str, layout: Layout = SAME) -> Iterator[Rule]:
    """A weight and, where the model has one, its bias."""
    yield Rule(f"{ours}.weight", f"{theirs}.weight", layout)
    yield Rule(f"{ours}.bias", f"{theirs}.bias", layout)


def projections(ours: str, theirs: str, names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")) -> Iterator[Rule]:
    """Queries, keys and values that they project one by one; biases of some of them alone are ours on their own."""
    for part, name in zip("qkv", names, strict=True):
        yield from linear(f"{ours}.qkv", f"{theirs}.{name}", Parts(part))
        yield Rule(f"{ours}.partial_qkv_bias.{part}", f"{theirs}.{name}.bias", Flat())


def cross_projections(
    ours: str, theirs: str, names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
) -> Iterator[Rule]:
    """The same for cross-attention, whose queries have a separate projection."""
    yield from linear(f"{ours}.q", f"{theirs}.{names[0]}")
    for part, name in zip("kv", names[1:], strict=True):
        yield from linear(f"{ours}.kv", f"{theirs}.{name}", Parts(part, "kv"))
        yield Rule(f"{ours}.partial_qkv_bias.{part}", f"{theirs}.{name}.bias", Flat())


def glu(ours: str, gate: str, up: str) -> Iterator[Rule]:
    """Gate and up projections, one after the other in ours."""
    yield from linear(ours, gate, Half(0))
    yield from linear(ours, up, Half(1))


def experts(ours: str, gate: str, up: str, down: str) -> Iterator[Rule]:
    """Experts stored one by one, each with three matrices."""
    yield Rule(f"{ours}.up", gate, Transposed(Half(0, along=-1)))
    yield Rule(f"{ours}.up", up, Transposed(Half(1, along=-1)))
    yield Rule(f"{ours}.down", down, Transposed())
