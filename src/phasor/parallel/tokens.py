"""Which tokens of every row a process computes: chunks along the context axis, and of those a slice along tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from phasor.parallel.cuts import Place


def chunk_order(length: int, size: int, device: torch.device | None = None) -> Tensor:
    """The tokens of a row by the process that takes them: a chunk from the front and one from the back each.

    >>> chunk_order(8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    front, back = torch.arange(length, device=device).view(2, size, -1)
    return torch.stack((front, back.flip(0)), dim=1).flatten()


def own_chunks(x: Tensor, index: int, size: int) -> Tensor:
    """The tokens of `[B, T, ...]` that one of the processes along the context axis takes."""
    return x[:, chunk_order(x.shape[1], size, x.device).chunk(size)[index]]


def own_slice(x: Tensor, index: int, size: int) -> Tensor:
    """The tokens of `[B, T, ...]` that one of the processes along the tensor axis has between the parts of blocks."""
    return x.chunk(size, dim=1)[index]


@dataclass(frozen=True)
class TokenShare:
    """The tokens of a process by its place along both axes.

    >>> share = TokenShare(Place(context=(0, 2), tensor=(1, 2)))
    >>> share.multiple, share.take(torch.arange(16).view(1, 16)).tolist()
    (8, [[12, 13, 14, 15]])
    """

    place: Place

    @property
    def multiple(self) -> int:
        """What the number of tokens of a row has to be divisible by."""
        cut = self.place.context[1] * self.place.tensor[1]
        return 1 if cut == 1 else 2 * cut

    def take(self, x: Tensor) -> Tensor:
        """This process's tokens of whole rows `[B, T, ...]`."""
        return self.slice(x if self.place.context[1] == 1 else own_chunks(x, *self.place.context))

    def slice(self, x: Tensor) -> Tensor:
        """The same of what all processes along the tensor axis have."""
        return x if self.place.tensor[1] == 1 else own_slice(x, *self.place.tensor)


ALL_TOKENS = TokenShare(Place())
