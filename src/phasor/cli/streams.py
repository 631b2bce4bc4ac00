"""Standard input, output and error as they may be: closed, a terminal, in another encoding than UTF-8."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO, Any

# What moves a terminal's cursor, changes its state or reverses its text: control characters and directional overrides.
CONTROLS = (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
ESCAPES = {code: ascii(chr(code))[1:-1] for code in CONTROLS if chr(code) not in "\t\n"}


def prepare_streams() -> None:
    """Make standard output and error write everything: characters their encoding does not have as escapes.

    A closed standard error writes nowhere.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        set_errors(stream)


def check_output(prints: bool) -> None:
    """Refuse a closed standard output where a command prints its result; others write nowhere."""
    if sys.stdout is None:
        if prints:
            raise ValueError("standard output is closed, and the result would be printed there")
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def set_errors(stream: Any) -> None:
    if hasattr(stream, "reconfigure") and getattr(stream, "errors", None) != "backslashreplace":
        stream.reconfigure(errors="backslashreplace")


def escape_controls(text: str) -> str:
    """A text with its control characters as escapes, but for tabs and line ends.

    >>> print(escape_controls("a b\\x1b[2J"))
    a b\\x1b[2J
    """
    return text.translate(ESCAPES)


def print_text(text: str, end: str = "\n", file: IO[str] | None = None) -> None:
    """Print a text that others wrote, or a name: to a terminal without control characters, else as it is."""
    file = sys.stdout if file is None else file
    print(escape_controls(text) if file.isatty() else text, end=end, file=file, flush=True)


def read_stdin(what: str) -> str:
    """All of standard input as UTF-8; on a terminal a line says that `what` is expected there."""
    if sys.stdin is None:
        raise ValueError(f"standard input is closed, and {what} would be read from there")
    if sys.stdin.isatty():
        print(f"phasor: type {what}, then Ctrl-D", file=sys.stderr, flush=True)
    binary = getattr(sys.stdin, "buffer", None)
    if binary is None:
        return sys.stdin.read()
    return decode_text(binary.read(), "standard input")


def read_file(name: str) -> str:
    """The text of a file, gzipped or not."""
    from phasor.data.sources import read_bytes

    return decode_text(read_bytes(Path(name)), name)


def read_lines(name: str, what: str) -> list[str]:
    """The lines of a file, gzipped or not, or of standard input under the name "-"."""
    text = read_stdin(what) if name == "-" else read_file(name)
    lines = text.removesuffix("\n").split("\n") if text else []
    return [line.removesuffix("\r") for line in lines]


def decode_text(data: bytes, where: str) -> str:
    """Bytes as UTF-8 text, without a byte order mark; an error names the line."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{where}, line {line}: the byte {error.start} is not UTF-8") from None


def check_argument(text: str, option: str) -> str:
    """A text from the command line, refused where its bytes were not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{option} is not UTF-8 text: see its character {error.start}") from None
    return text
