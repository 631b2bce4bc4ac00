"""Weights as configurations declare them: their shapes, and how tensor parallelism cuts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod


def shard_dim(shape: Sequence[int], shards: int) -> int:
    """The dimension along which FSDP cuts a weight: the first; the second of experts that shards cannot share evenly.

    >>> shard_dim((8, 4096, 14336), 8), shard_dim((8, 4096, 14336), 64), shard_dim((32000, 4096), 64)
    (0, 1, 0)
    """
    return 1 if len(shape) > 2 and shape[0] % shards and not shape[1] % shards else 0


@dataclass(frozen=True)
class Weight:
    """A weight's shape and the dimension that tensor parallelism cuts; None where each process has all of it.

    Where that dimension consists of `pieces`, such as gate and up, each of them is cut apart. `experts` is how many
    experts the weight is stacked of, where a token passes through a few of them.
    """

    shape: tuple[int, ...]
    cut: int | None = None
    pieces: int = 1
    experts: int = 0

    @property
    def size(self) -> int:
        return prod(self.shape)

    def local_shape(self, tensor: int) -> tuple[int, ...]:
        """The shape after the cut over the tensor axis."""
        return tuple(n // tensor if dim == self.cut else n for dim, n in enumerate(self.shape))

    def local_size(self, tensor: int, shards: int) -> int:
        """Elements on the first process: FSDP2 cuts a dimension into `shards` pieces, rounded up.

        >>> Weight((10, 4)).local_size(1, 8), Weight((16, 4), cut=0).local_size(2, 4)
        (8, 8)
        """
        shape = self.local_shape(tensor)
        length = shape[shard_dim(shape, shards)]
        return -(-length // shards) * (prod(shape) // length)


Weights = dict[str, Weight]


def linear(rows: int, columns: int, *, bias: bool = False, cut: int | None = None, pieces: int = 1) -> Weights:
    """The weights of a projection; where its rows are cut the bias is too.

    >>> linear(6, 4, bias=True, cut=0)["bias"]
    Weight(shape=(6,), cut=0, pieces=1, experts=0)
    """
    found = {"weight": Weight((rows, columns), cut, pieces)}
    return found | {"bias": Weight((rows,), 0, pieces) if cut == 0 else Weight((rows,))} if bias else found


def with_prefixes(modules: Mapping[str, Weights]) -> Weights:
    """The weights of a module's parts, under their names in the module.

    >>> list(with_prefixes({"up": linear(6, 4), "down": linear(4, 6, bias=True)}))
    ['up.weight', 'down.weight', 'down.bias']
    """
    return {f"{part}.{name}": weight for part, weights in modules.items() for name, weight in weights.items()}
