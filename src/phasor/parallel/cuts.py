"""How a mesh cuts every weight: by heads, hidden features and experts over the tensor axis, by rows over the others.

Weights of blocks are cut over the tensor axis where a part of a module is a smaller one of its kind. What is left is
cut along its first dimension over the processes of the shard and context axes (FSDP); experts that these cannot share
evenly are cut along their second. Weights outside of blocks are cut over the tensor axis as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from phasor.config.parameters import sides_of, stack_blocks
from phasor.config.weights import shard_dim
from phasor.nn.block import Block
from phasor.nn.lora import ExpertsLowRank
from phasor.nn.lora_hook import adapters_of
from phasor.nn.quantized import QuantizedLinear
from phasor.transformer import Transformer

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Cut:
    """A cut over the tensor axis along a dimension; where it consists of `pieces`, each of them is cut apart."""

    dim: int
    pieces: int = 1

    def part(self, whole: Tensor, index: int, count: int) -> Tensor:
        """One of `count` parts.

        >>> Cut(0, pieces=2).part(torch.arange(8), 1, 2).tolist()
        [2, 3, 6, 7]
        """
        chunks = [piece.chunk(count, self.dim)[index] for piece in whole.chunk(self.pieces, self.dim)]
        return chunks[0] if self.pieces == 1 else torch.cat(chunks, self.dim)

    def join(self, parts: list[Tensor]) -> Tensor:
        """The whole of all parts.

        >>> Cut(0, pieces=2).join([torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])]).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
        """
        pieces = [part.chunk(self.pieces, self.dim) for part in parts]
        return torch.cat([part[piece] for piece in range(self.pieces) for part in pieces], self.dim)


def tensor_cuts(model: Transformer) -> dict[str, Cut]:
    """The weights of a model that are cut over the tensor axis, by name, as their configurations declare them.

    >>> from phasor import preset
    >>> with torch.device("meta"):
    ...     model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, vocab_size=50))
    >>> tensor_cuts(model)["decoder.blocks.0.feedforward.up.weight"]
    Cut(dim=0, pieces=2)
    """
    cuts = {
        f"{side}.blocks.{index}.{name}": Cut(weight.cut, weight.pieces)
        for side in sides_of(model.config)
        for index, block in enumerate(stack_blocks(model.config, side))
        for name, weight in block.items()
        if weight.cut is not None
    }
    return cuts | dict(adapter_cuts(model, cuts))


def adapter_cuts(model: Transformer, cuts: Mapping[str, Cut]) -> Iterator[tuple[str, Cut]]:
    """How the weights of adapters are cut, by the cuts of the layers.

    Of `W + s B A` with the rows of W those of B are cut, and with its columns those of A.
    """
    for path, layer in model.named_modules():
        for name, lora in adapters_of(layer).items():
            for key, part in lora.items():
                stacked = isinstance(part, ExpertsLowRank)
                cut = cuts.get(f"{path}.{key if stacked else 'weight'}")
                if cut is None:
                    continue
                if stacked:
                    own = {"A": cut, "B": cut}
                elif cut.dim == 0:
                    of_rows = cut if part.rows is None else Cut(0)  # each process has as many rows of a part
                    own = {"B": of_rows, "magnitude": of_rows}
                else:
                    own = {"A": cut}
                held = {leaf for leaf, _ in part.named_parameters()}
                yield from ((f"{path}.lora.{name}.{key}.{leaf}", own[leaf]) for leaf in own if leaf in held)


def check_parts(model: Transformer, rows: Mapping[str, Mapping[str, Tensor]], count: int) -> None:
    """Refuse fused layers, by the rows that each of their parts has, if processes would not share the parts in order.

    >>> from phasor import preset
    >>> with torch.device("meta"):
    ...     model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, hidden_dim=2, vocab_size=50))
    >>> check_parts(model, {"decoder.blocks.0.feedforward.up": {"gate": torch.tensor([1, 0])}}, 2)
    Traceback (most recent call last):
    ValueError: parallel.tensor cannot be 2: it does not cut gate of decoder.blocks.0.feedforward.up in its order
    """
    cuts = tensor_cuts(model)
    for path, parts in rows.items():
        cut = cuts.get(f"{path}.weight")
        if cut is None:
            continue
        piece = cast(nn.Linear | QuantizedLinear, model.get_submodule(path)).out_features // cut.pieces
        for name, own in parts.items():
            if not torch.equal(own % piece // (piece // count), torch.arange(len(own)) * count // len(own)):
                raise ValueError(f"parallel.tensor cannot be {count}: it does not cut {name} of {path} in its order")


class Place(NamedTuple):
    """A process's index and the number of processes along each axis over which weights are cut."""

    shard: tuple[int, int] = (0, 1)
    context: tuple[int, int] = (0, 1)
    tensor: tuple[int, int] = (0, 1)

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Place:
        """The place of this process in a mesh."""
        return cls(*((mesh[axis].get_local_rank(), mesh[axis].size()) for axis in cls._fields))


class WeightSlices:
    """The part of every weight that a process holds, as slices of the whole weight.

    The model may be on the meta device, and must not be cut yet.

    >>> from phasor import preset
    >>> with torch.device("meta"):
    ...     model = Transformer(preset("llama-2", dim=32, num_heads=2, num_layers=1, hidden_dim=8, vocab_size=50))
    >>> slices = WeightSlices(model, Place(shard=(1, 3), tensor=(1, 2)))
    >>> slices.slices_of("decoder.blocks.0.feedforward.up.weight")
    [(slice(7, 8, None),), (slice(12, 14, None),)]
    >>> slices.slices_of("decoder.blocks.0.attention.out.weight"), slices.slices_of("tokens.weight")
    ([(slice(11, 22, None), slice(16, 32, None))], [(slice(27, 36, None),)])
    """

    def __init__(self, model: Transformer, place: Place) -> None:
        self.place = place
        self.shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        self.cuts = tensor_cuts(model) if place.tensor[1] > 1 else {}
        blocks = [f"{name}." for name, part in model.named_modules() if isinstance(part, Block)]
        self.in_blocks = {name for name in self.shapes if name.startswith(tuple(blocks))}

    def rows(self, name: str) -> tuple[int, int]:
        """Which of how many parts this process holds, of what the tensor axis leaves it."""
        axes = (self.place.shard, self.place.context, self.place.tensor)
        index, count = 0, 1
        for i, n in axes[:2] if name in self.in_blocks else axes:
            index, count = index * n + i, count * n
        return index, count

    def is_copied(self, name: str) -> bool:
        """Whether every process of the tensor axis holds the same of a weight."""
        return name in self.in_blocks and name not in self.cuts

    def slices_of(self, name: str) -> list[Slices]:
        """Slices of the whole weight, which one after the other along the first dimension are this process's part."""
        first, *_ = shape = self.shapes[name]
        cut, (index, count) = self.cuts.get(name), self.place.tensor
        if len(shape) > 2 and shard_dim((first if cut is None else first // count, *shape[1:]), self.rows(name)[1]):
            experts = slice(None) if cut is None else slice(index * first // count, (index + 1) * first // count)
            return [(experts, slice(*chunk_bounds(shape[1], *self.rows(name))))]
        if cut is None or cut.dim != 0:
            rows = slice(*chunk_bounds(first, *self.rows(name)))
            if cut is None:
                return [(rows,)]
            width = shape[cut.dim] // count
            return [(rows, *[slice(None)] * (cut.dim - 1), slice(index * width, (index + 1) * width))]
        piece, width = first // cut.pieces, first // cut.pieces // count
        start, stop = chunk_bounds(first // count, *self.rows(name))
        return [(slice(a, b),) for a, b in piece_bounds(start, stop, width, piece, index * width)] or [(slice(0, 0),)]

    def take(self, name: str, whole: Tensor) -> Tensor:
        """This process's part of a weight, or of something of its shape; empty where nothing is left for it."""
        parts = [whole[slices] for slices in self.slices_of(name)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def chunk_bounds(length: int, index: int, count: int) -> tuple[int, int]:
    """From where to where one of `count` chunks reaches, as torch cuts them: the last ones may be shorter or empty.

    >>> [chunk_bounds(10, index, 4) for index in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    size = -(-length // count)
    return min(index * size, length), min((index + 1) * size, length)


def piece_bounds(start: int, stop: int, width: int, piece: int, offset: int) -> Iterator[tuple[int, int]]:
    """Rows `start` to `stop` of parts `width` wide, each taken at `offset` from a piece of the whole."""
    while start < stop:
        number, inside = divmod(start, width)
        end = min(stop, (number + 1) * width)
        yield number * piece + offset + inside, number * piece + offset + inside + end - start
        start = end
