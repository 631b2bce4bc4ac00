"""What a layer keeps in a cache."""

from __future__ import annotations

from typing import NamedTuple


class CachedTensor(NamedTuple):
    """A tensor that a layer keeps in a cache: the shape of one token's part of it, and its dtype.

    None stands for the dtype of the model's activations.

    >>> CachedTensor((8, 128)).dtype is None
    True
    """

    shape: tuple[int, ...]
    dtype: str | None = None
