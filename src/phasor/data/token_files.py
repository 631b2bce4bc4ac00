"""Files of tokens: written one example after another, then mapped into memory."""

from __future__ import annotations

import copy
import hashlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


class TokenStore:
    """The examples of one split, mapped: `store[i]` is the tokens of an example, an array for each of its sides.

    Documents have one side, pairs two. `lengths` is `[examples, sides]`; `text_bytes` is how many bytes of UTF-8 the
    texts of the last side had, for metrics that do not depend on a tokenizer. `sha256` is that of all examples, and
    `sources` are the numbers of examples of one source after another.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with TokenWriter(Path(folder), "train", sides=1, vocab_size=300) as writer:
    ...         writer.add((np.array([5, 6, 7]),), text_bytes=3)
    ...     store = TokenStore(Path(folder), "train", writer.describe())
    >>> len(store), store[0][0].tolist(), store.lengths.tolist()
    (1, [5, 6, 7], [[3]])
    """

    def __init__(self, folder: Path, name: str, description: dict[str, Any]) -> None:
        sizes: list[int] = description["tokens"]
        self.count, self.text_bytes = int(description["examples"]), int(description["text_bytes"])
        self.sha256 = str(description["sha256"])
        self.sources: list[int] = description["sources"]
        self.tokens = [
            map_file(file_of(folder, name, s, "tokens"), description["dtype"], n) for s, n in enumerate(sizes)
        ]
        self.ends = [map_file(file_of(folder, name, s, "ends"), "<i8", self.count + 1) for s in range(len(sizes))]
        self.lengths: NDArray[np.int64] = np.stack([np.diff(ends) for ends in self.ends], axis=1)
        self.every = self.ends[0]  # where all examples of the files begin and end
        reach = [(int(ends[0]), int(ends[-1])) for ends in self.ends]
        if reach != [(0, n) for n in sizes] or (self.lengths < 0).any():
            raise ValueError(f"the examples of {name} do not end where its tokens do")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[NDArray[np.integer], ...]:
        if not 0 <= index < self.count:
            raise IndexError(f"the example {index} is not one of {self.count}")
        sides = zip(self.tokens, self.ends, self.lengths[index], strict=True)
        return tuple(tokens[ends[index] : ends[index] + length] for tokens, ends, length in sides)

    def select(self, examples: NDArray[np.int64]) -> Self:
        """A store of these examples of this one, in this order; one may come more than once."""
        other = copy.copy(self)
        other.count, other.lengths = len(examples), self.lengths[examples]
        other.ends = [ends[examples] for ends in self.ends]
        return other


class TokenWriter:
    """Writes what a `TokenStore` reads: for every side its tokens, and where each example ends."""

    def __init__(self, folder: Path, name: str, sides: int, vocab_size: int) -> None:
        self.dtype = "<u2" if vocab_size <= 1 << 16 else "<u4"
        self.examples = self.text_bytes = 0
        self.sources: list[int] = []
        self.tokens = [0] * sides
        self.digest = hashlib.sha256()
        self.stack = ExitStack()
        kinds = ((side, kind) for side in range(sides) for kind in ("tokens", "ends"))
        self.files = {(s, k): self.stack.enter_context(file_of(folder, name, s, k).open("wb")) for s, k in kinds}
        for side in range(sides):
            self.files[side, "ends"].write(np.zeros(1, "<i8").tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def add(self, example: tuple[NDArray[Any], ...], text_bytes: int) -> None:
        """One example, an array for each side."""
        for side, tokens in enumerate(example):
            self.tokens[side] += len(tokens)
            written = tokens.astype(self.dtype).tobytes(), np.array(self.tokens[side], "<i8").tobytes()
            for kind, data in zip(("tokens", "ends"), written, strict=True):
                self.files[side, kind].write(data)
                self.digest.update(data)
        self.examples += 1
        self.text_bytes += text_bytes

    def end_source(self) -> None:
        """The examples since the last call are those of a source."""
        self.sources.append(self.examples - sum(self.sources))

    def describe(self) -> dict[str, Any]:
        """What has to be known to read the files."""
        sizes = {"examples": self.examples, "tokens": self.tokens, "text_bytes": self.text_bytes}
        return {**sizes, "sources": self.sources, "dtype": self.dtype, "sha256": self.digest.hexdigest()}


def file_of(folder: Path, name: str, side: int, kind: str) -> Path:
    return folder / f"{name}.{side}.{kind}"


def map_file(file: Path, dtype: str, count: int) -> NDArray[Any]:
    """A file as an array that is read where it is used."""
    if not file.is_file() or file.stat().st_size != count * np.dtype(dtype).itemsize:
        raise ValueError(f"{file} is missing or not as long as it was")
    return np.memmap(file, dtype=dtype, mode="r").view(np.ndarray) if count else np.zeros(0, dtype)
