"""Pages: which are free, how many rows hold each, and which prefix of a text each has."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

NULL_PAGE = 0  # of zeros: it stands where a table has no page


class PagePool:
    """The pages of layers that keep the same tokens, by number; the first is `NULL_PAGE`.

    A page that no row holds is free, or idle where it has a prefix, which other rows may ask for. Idle pages are taken
    where no other is free, the one that was idle for longest first.

    >>> pool = PagePool(3)
    >>> page = pool.take()
    >>> pool.remember(page, b"prefix")
    >>> pool.release(page)
    >>> pool.find(b"prefix") == page, pool.available
    (True, 2)
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = list(range(count - 1, NULL_PAGE, -1))
        self.references = [0] * count
        self.idle: dict[int, None] = {}  # in the order in which they became idle
        self.pages: dict[bytes, int] = {}  # by the prefix that they end
        self.keys: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """How many pages can be taken."""
        return len(self.free) + len(self.idle)

    @property
    def held(self) -> int:
        """How many pages rows hold."""
        return self.count - 1 - self.available

    def take(self) -> int:
        """A page for one row; there has to be one."""
        if not self.free:
            self.forget(next(iter(self.idle)))
        page = self.free.pop()
        self.references[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Count another row that has the page."""
        self.idle.pop(page, None)
        self.references[page] += 1

    def release(self, page: int) -> None:
        """Count one row less."""
        self.references[page] -= 1
        if self.references[page] == 0:
            if page in self.keys:
                self.idle[page] = None
            else:
                self.free.append(page)

    def is_shared(self, page: int) -> bool:
        """Whether several rows hold the page."""
        return self.references[page] > 1

    def remember(self, page: int, key: bytes) -> None:
        """Say which prefix the page ends, unless another page does."""
        if key not in self.pages:
            self.pages[key], self.keys[page] = page, key

    def forget(self, page: int) -> None:
        """Let no other row find the page."""
        key = self.keys.pop(page, None)
        if key is not None:
            del self.pages[key]
        if page in self.idle:
            del self.idle[page]
            self.free.append(page)

    def find(self, key: bytes) -> int | None:
        """The page that ends a prefix."""
        return self.pages.get(key)


def prefix_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a prefix: that of what comes before its last page, and the tokens of that page.

    >>> prefix_key(b"", [1, 2]) == prefix_key(b"", [1, 2]) != prefix_key(b"", [2, 1])
    True
    """
    return hashlib.sha256(before + array("q", tokens).tobytes()).digest()
