"""Small text files that a user gives: regular files of bounded size, in UTF-8; and JSON without duplicate keys."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from phasor.config.schema import quote, shorten, unique_keys

TEXT_BYTES = 64 << 20  # of a configuration, an index or the like


def path_of(path: str | Path, what: str = "a folder") -> Path:
    """The path that a user gave for a file or a folder."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise ValueError(f"{what} must be given by its path, not as {quote(path)}")
    try:
        valid = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        valid = False
    if not valid:
        raise ValueError(f"{what} cannot have the name {quote(str(path))}")
    if path == "":
        raise ValueError(f"{what} must be given by its path, not by empty text")
    return Path(path)


def read_text(path: str | Path, what: str = "", limit: int = TEXT_BYTES) -> str:
    """The text of a file. Pipes and devices are refused, since reading them may never end.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
    ...     read_text(file.name)
    ''
    """
    path = path_of(path, what or "a file")
    named = f"{what} {path}".strip()
    with open_regular(path, named) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{named} has more than {limit >> 10} KiB, which is too much for such a file")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{named} is not UTF-8 at byte {error.start}") from None


@contextmanager
def open_regular(path: Path, named: str) -> Iterator[BinaryIO]:
    """A regular file, opened; anything else is refused, and what cannot be read with the reason."""
    try:
        # Without O_NONBLOCK, opening a pipe waits for its writer.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(handle, "rb") as file:
            check_regular(os.fstat(handle), named)
            yield file
    except OSError as error:
        raise ValueError(f"{named} cannot be read: {error.strerror or error}") from None


def check_regular(status: os.stat_result, named: str) -> None:
    """Refuse what is not a regular file."""
    if stat.S_ISDIR(status.st_mode):
        raise ValueError(f"{named} is a folder, where a file is expected")
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{named} is a pipe or a device, where a regular file is expected")


def from_json(text: str, where: str | Path) -> Any:
    """The value of a JSON text, or a ValueError; a key that stands twice is refused, as in YAML.

    >>> from_json('{"dim": 8}', "config.json")
    {'dim': 8}
    """
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}, line {error.lineno}: this is not JSON: {error.msg}") from None
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {shorten(str(error), 300)}") from None
    except RecursionError:
        raise ValueError(f"{where} is not JSON: it is nested too deep") from None
