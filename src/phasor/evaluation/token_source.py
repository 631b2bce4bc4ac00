"""The tokens of one long file, text or token ids, read in pieces."""

from __future__ import annotations

import hashlib
import threading
import weakref
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from codecs import getincrementaldecoder
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from phasor.checkpoints.sentencepiece import OUTSIDE, resolve_unknown
from phasor.checkpoints.tokenizer_errors import tokenizer_errors
from phasor.config.schema import quote
from phasor.config.text_files import check_regular, path_of
from phasor.data.encoding import encode_texts, pieces
from phasor.data.sources import MARK, is_binary, open_file, read_error
from phasor.data.tokenizers import SpecialIds
from phasor.generation.encode import without_limits
from phasor.transformer import Transformer

Ids = NDArray[np.int64]
TOKEN_FILES = (".bin", ".tokens", ".npy")
TOKEN_DTYPES = {"uint16": "<u2", "uint32": "<u4"}
BLOCK = 1 << 20  # bytes of a text that are encoded at a time
SAMPLES, SAMPLE = 64, 4096  # parts of a token file that are checked when it is opened, and their tokens
MARKS = 4096  # places of a text that are kept to return to


class TokenSource(ABC):
    """The tokens of a file. `count` is how many there are, None for a text that has not been read to its end."""

    file: BinaryIO

    def __init__(self, path: Path, vocab_size: int) -> None:
        self.path, self.vocab_size = path, vocab_size
        self.count: int | None = None
        self.lock = threading.Lock()

    def read(self, start: int, count: int) -> Ids:
        """The tokens from index `start` on, `count` of them; fewer where the file ends before."""
        if start < 0 or count < 0:
            raise ValueError(f"tokens are read from 0 on, not {count} from {start} on")
        with self.lock:
            ids = self._read(start, count)
        if len(ids) and (ids.min() < 0 or ids.max() >= self.vocab_size):
            index = int(((ids < 0) | (ids >= self.vocab_size)).argmax())
            raise ValueError(
                f"{self.path} is of another vocabulary: its token {start + index:,} is {ids[index]}, and "
                f"the model has the tokens 0 to {self.vocab_size - 1}"
            )
        return ids

    @abstractmethod
    def _read(self, start: int, count: int) -> Ids: ...

    def chunks(self, size: int, start: int = 0) -> Iterator[Ids]:
        """All tokens from index `start` on, `size` at a time; the last chunk may be shorter."""
        while len(ids := self.read(start, size)):
            yield ids
            start += len(ids)

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def estimate_count(self) -> int | None:
        """How many tokens there are, or about how many, by what was read; None where nothing is known."""
        return self.count

    def mark(self, token: int) -> tuple[int, int]:
        """A place at or before a token: how many tokens and bytes are before it. `add_mark` takes it in a later run."""
        return 0, 0

    def add_mark(self, token: int, place: int) -> None:  # noqa: B027  # any place of a token file is found at once
        """A place that `mark` named, so that tokens behind it are found without reading what is before it."""

    def fingerprint(self) -> str:
        """The SHA-256 of the file."""
        try:
            with self.path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise read_error(self.path, error) from None


class TokenFile(TokenSource):
    """Token ids one after another, from byte `offset` on."""

    def __init__(self, path: Path, vocab_size: int, dtype: np.dtype[Any], offset: int, count: int) -> None:
        super().__init__(path, vocab_size)
        self.dtype, self.offset, self.count, self.file = dtype, offset, count, path.open("rb")
        weakref.finalize(self, self.file.close)
        step = max(SAMPLE, count // SAMPLES)
        for start in (*range(0, count, step), max(0, count - SAMPLE)):
            self.read(start, SAMPLE)

    def _read(self, start: int, count: int) -> Ids:
        assert self.count is not None
        count = max(0, min(count, self.count - start))
        try:
            self.file.seek(self.offset + start * self.dtype.itemsize)
            data = self.file.read(count * self.dtype.itemsize)
        except OSError as error:
            raise read_error(self.path, error) from None
        if len(data) < count * self.dtype.itemsize:
            raise ValueError(f"{self.path} has become shorter while it was read")
        ids = np.frombuffer(data, self.dtype)
        if ids.dtype == np.uint64:
            ids = np.minimum(ids, np.uint64(1 << 62))  # none of them is in a vocabulary
        return ids.astype(np.int64)


class TextFile(TokenSource):
    """A text in UTF-8, encoded in pieces of whole lines, as training encodes long documents.

    `first` are tokens to stand before those of the text.
    """

    def __init__(self, path: Path, vocab_size: int, tokenizer: Tokenizer, first: list[int]) -> None:
        super().__init__(path, vocab_size)
        self.tokenizer = tokenizer
        try:
            self.file = open_file(path)
            weakref.finalize(self, self.file.close)
            self.skipped = len(MARK) if self.file.read(len(MARK)) == MARK else 0
        except (OSError, EOFError, zlib.error) as error:
            raise read_error(path, error) from None
        self.marks = [(len(first), self.skipped)]  # tokens and bytes before pieces, in order
        self.gap = BLOCK  # bytes between two marks, at least
        self.first = np.array(first, np.int64)
        self._return_to(0)

    def estimate_count(self) -> int | None:
        with self.lock:
            if self.count is not None or self.path.suffix == ".gz" or self.end == len(self.first):
                return self.count
            return self.end * self.path.stat().st_size // self.place

    def mark(self, token: int) -> tuple[int, int]:
        with self.lock:
            return self._mark(token)

    def add_mark(self, token: int, place: int) -> None:
        with self.lock:
            if token > self.marks[-1][0] and place > self.marks[-1][1]:
                self.marks.append((token, place))

    def _mark(self, token: int) -> tuple[int, int]:
        return self.marks[max(0, bisect_right(self.marks, token, key=lambda mark: mark[0]) - 1)]

    def _return_to(self, token: int) -> None:
        """Read on from the last mark before a token."""
        self.start, self.place = self._mark(token)
        self.ids: list[Ids] = []
        if token < self.start:  # only the tokens before the text are before its first mark
            self.start, self.ids = 0, [self.first]
        self.end = self.start + sum(map(len, self.ids))
        self.rest, self.at_end = b"", False
        try:
            self.file.seek(self.place)
        except (OSError, EOFError, zlib.error) as error:
            raise read_error(self.path, error) from None

    def _read(self, start: int, count: int) -> Ids:
        if start < self.start or self.end < self._mark(start)[0]:
            self._return_to(start)
        while self.end < start + count and not self.at_end:
            new = self._next()
            self.ids.append(new)
            self.end += len(new)
            while self.ids and self.start + len(self.ids[0]) <= start:
                self.start += len(self.ids.pop(0))
        if self.end <= start:
            return np.zeros(0, np.int64)
        if len(self.ids) > 1:
            self.ids = [np.concatenate(self.ids)]
        return self.ids[0][start - self.start : start - self.start + count].copy()

    def _next(self) -> Ids:
        """The tokens of the next pieces."""
        try:
            data = self.file.read(BLOCK)
        except (OSError, EOFError, zlib.error) as error:
            raise read_error(self.path, error) from None
        self.at_end = len(data) < BLOCK
        whole = self.rest + data
        decoder = getincrementaldecoder("utf-8")()
        try:
            text = decoder.decode(whole, self.at_end)
        except UnicodeDecodeError as error:
            place = self.place + error.start
            raise ValueError(f"{self.path}: the byte {place} (0x{whole[error.start]:02x}) is not UTF-8") from None
        texts = pieces(text)
        texts, last = (texts, "") if self.at_end else (texts[:-1], texts[-1])
        self.rest = last.encode() + decoder.getstate()[0]
        self._add_mark()
        self.place += len(whole) - len(self.rest)
        encoded = self._encode([text for text in texts if text])
        if self.at_end:
            self.count = self.end + len(encoded)
        return encoded

    def _add_mark(self) -> None:
        """Note where the next piece begins; where there are many marks, every other is let go."""
        if self.place >= self.marks[-1][1] + self.gap:
            self.marks.append((self.end, self.place))
            if len(self.marks) > MARKS:
                self.marks, self.gap = self.marks[::2], 2 * self.gap

    def _encode(self, texts: list[str]) -> Ids:
        """The tokens of pieces of a text, without special ones."""
        if not texts:
            return np.zeros(0, np.int64)
        if self.tokenizer.token_to_id(OUTSIDE) is None:
            ids = encode_texts(texts, self.tokenizer, False, SpecialIds())
            return np.concatenate(ids).astype(np.int64)
        with tokenizer_errors(f"the tokenizer cannot encode {self.path}"):
            encodings = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        known = [resolve_unknown(self.tokenizer, encoding.ids, encoding.tokens) for encoding in encodings]
        return np.concatenate([np.array(ids, np.int64) for ids in known])


def open_tokens(
    path: str | Path, model: Transformer, *, token_dtype: str | None = None, special: bool = False
) -> TokenSource:
    """The tokens of a file for a model: of a text, or of a file of token ids, in constant memory.

    Token files are named `.bin` or `.tokens` (little-endian integers without a header, as prepared data are) or `.npy`
    (one dimension, integers). Those without a header are uint16 where the vocabulary has at most 65,536 tokens and
    uint32 otherwise, or as `token_dtype` says. Everything else is a text in UTF-8, packed as `.gz` or not, and is
    encoded with the model's tokenizer; `special` puts before it what the tokenizer begins texts with.

    A token that the model does not have is an error, where it is read; samples of a token file are checked at once.

    >>> import tempfile
    >>> from phasor import preset
    >>> model = Transformer(preset("llama-2", dim=16, num_heads=2, num_layers=1, vocab_size=300))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.arange(300, dtype="<u2").tofile(f"{folder}/ids.bin")
    ...     source = open_tokens(f"{folder}/ids.bin", model)
    ...     source.count, source.read(298, 9).tolist()
    (300, [298, 299])
    """
    file = path_of(path, "a file of tokens or text")
    if token_dtype is not None and token_dtype not in TOKEN_DTYPES:
        raise ValueError(f"token_dtype must be one of {', '.join(TOKEN_DTYPES)}, not {quote(token_dtype)}")
    try:
        status = file.stat()
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist") from None
    except OSError as error:
        raise read_error(file, error) from None
    check_regular(status, f"{file} (a file is read more than once)")
    if token_dtype is not None and file.suffix not in TOKEN_FILES[:2]:
        raise ValueError(f"token_dtype is for files of token ids without a header, .bin or .tokens, and not for {file}")
    vocab_size = model.config.vocab_size
    try:
        if file.suffix == ".npy":
            return open_npy(file, vocab_size)
        if file.suffix in TOKEN_FILES:
            return open_raw(file, vocab_size, status.st_size, token_dtype)
    except OSError as error:
        raise read_error(file, error) from None
    if is_binary(file):
        raise ValueError(f"{file} is not a text; files of token ids are named {', '.join(TOKEN_FILES)}")
    if model.tokenizer is None:
        raise ValueError(
            f"the model has no tokenizer to read the text {file} with; give a file of token ids "
            f"({', '.join(TOKEN_FILES)})"
        )
    tokenizer = without_limits(model.tokenizer)
    return TextFile(file, vocab_size, tokenizer, first_tokens(tokenizer) if special else [])


def open_raw(file: Path, vocab_size: int, size: int, token_dtype: str | None) -> TokenFile:
    """Token ids without a header."""
    dtype = np.dtype(TOKEN_DTYPES[token_dtype or ("uint16" if vocab_size <= 1 << 16 else "uint32")])
    if token_dtype is None and dtype.itemsize == 2 and size and size % 4 == 0:
        halves = np.fromfile(file, dtype, 2 * SAMPLE)
        if not halves[1::2].any() and halves.any():  # the upper halves of uint32, all 0
            dtype = np.dtype("<u4")
    if size % dtype.itemsize:
        raise ValueError(f"{file} has {size:,} bytes, which is not a number of {dtype.name} tokens")
    return TokenFile(file, vocab_size, dtype, 0, size // dtype.itemsize)


def open_npy(file: Path, vocab_size: int) -> TokenFile:
    """Token ids in a file of numpy."""
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.memmap):
            raise ValueError("it holds no array")
    except (ValueError, EOFError, SyntaxError) as error:
        raise ValueError(f"{file} is not a .npy file that can be read: {error}") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{file} holds an array of {array.dtype} {list(array.shape)}, where integers of one dimension are expected"
        )
    return TokenFile(file, vocab_size, array.dtype, array.offset, len(array))


def first_tokens(tokenizer: Tokenizer) -> list[int]:
    """What a tokenizer begins texts with.

    >>> from phasor.data.tokenizers import byte_tokenizer
    >>> first_tokens(byte_tokenizer())
    [1]
    """
    with tokenizer_errors("the tokenizer cannot encode a text"):
        marks = tokenizer.encode("a").special_tokens_mask
        ids = tokenizer.encode("a").ids
    return ids[: marks.index(0)] if 0 in marks else []
