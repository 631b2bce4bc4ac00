"""What a layer keeps in a cache."""

from __future__ import annotations

from typing import NamedTuple


class CachedTensor(NamedTuple):
    """A tensor that a layer keeps in a cache: the shape of what one token or one sequence has of it, and its dtype.

    None stands for the dtype of the model's activations. A floating dtype is the least: activations in float64 have
    theirs.

    >>> CachedTensor((8, 128)).dtype is None
    True
    """

    shape: tuple[int, ...]
    dtype: str | None = None


def merge_by_name(*parts: dict[str, CachedTensor]) -> dict[str, CachedTensor]:
    """What several parts of one layer keep, by name.

    >>> merge_by_name({"keys": CachedTensor((8, 128))}, {"gate_sums": CachedTensor((8,), "int64")})["gate_sums"].shape
    (8,)
    """
    merged: dict[str, CachedTensor] = {}
    for part in parts:
        for name in merged.keys() & part.keys():
            raise ValueError(f"two parts of a layer keep {name!r} for each token: one of them needs another name")
        merged |= part
    return merged
