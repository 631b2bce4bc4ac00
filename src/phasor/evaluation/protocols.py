"""Protocols of loss by length: which tokens a model reads, and which of their targets count.

Texts are cut into rows of the largest length, M targets each: a document of `size` tokens has `(size - 1) // M` rows,
and what remains after its last whole row is left out. Token 0 of a document is only read. Under every protocol the
targets are the same at every length, so that lengths and models are compared on the same tokens.

- `last`: of each row, the last `targets` tokens. At length L the model reads the L tokens before the row's last one, so
  that each target has between `L - targets + 1` and L tokens before it.
- `sliding`: every token of every row. Windows of L tokens move by `stride` along the document. The first window of a
  document counts in full, every further one only its last `stride` targets, those that no window before it had: each
  target has between `L - stride + 1` and L tokens before it, fewer at the beginning of the document.
- `truncated`: every token of every row. The document is cut into windows of L tokens that do not overlap, so that
  targets have from 1 to L tokens before them, L / 2 on average. The last window of a document is shorter where L does
  not divide the document's rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

PROTOCOLS = {
    "last": "the last tokens of each row, the same ones at every length",
    "sliding": "every token, with windows that overlap but for a stride",
    "truncated": "every token, in windows that do not overlap",
}


class Window(NamedTuple):
    """Tokens `start` to `end - 1` of a document are read; their targets are one further each.

    The targets from token `first` to token `end` count. `whole` says that the losses of all targets of the window are
    part of the curve of loss by position.
    """

    start: int
    end: int
    first: int
    whole: bool


def windows(protocol: str, rows: int, largest: int, length: int, targets: int, stride: int) -> list[Window]:
    """The windows of one document of `rows` rows, at a length.

    >>> windows("last", 2, 8, 4, 2, 1)
    [Window(start=4, end=8, first=7, whole=False), Window(start=12, end=16, first=15, whole=False)]
    >>> [window[:3] for window in windows("sliding", 1, 8, 4, 2, 3)]
    [(0, 4, 1), (3, 7, 5), (4, 8, 8)]
    >>> [window[:3] for window in windows("truncated", 1, 8, 4, 2, 3)]
    [(0, 4, 1), (4, 8, 5)]
    """
    if protocol == "last":
        return list(last_windows(rows, largest, length, targets))
    if protocol == "sliding":
        return list(sliding_windows(rows * largest, largest, length, stride))
    return list(truncated_windows(rows * largest, largest, length))


def last_windows(rows: int, largest: int, length: int, targets: int) -> Iterator[Window]:
    for end in range(largest, rows * largest + 1, largest):
        yield Window(end - length, end, end - targets + 1, length == largest)


def sliding_windows(size: int, largest: int, length: int, stride: int) -> Iterator[Window]:
    yield Window(0, length, 1, length == largest)
    for before in range(length, size, stride):
        end = min(before + stride, size)
        yield Window(end - length, end, before + 1, whole=False)


def truncated_windows(size: int, largest: int, length: int) -> Iterator[Window]:
    for start in range(0, size, length):
        yield Window(start, min(start + length, size), start + 1, length == largest)
